"""Tensors of Hugging Face checkpoints as blocks of our parameters, by the tables of `models/families/`.

HF stores a linear layer as [out, in] (GPT-2 as [in, out]) with flattened heads, one tensor per layer.
Our parameters keep every letter and stack the layers: q_proj[N·H, D] of layers 0..L-1 <-> wq[L, D, N, H].
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from meshwright.errors import ModelError
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Tensor
from meshwright.models.families.tensors import LAYER
from meshwright.models.layer_kinds import DRAFT_LAYERS
from meshwright.models.parameters import (
    DRAFT_EMBED_NORM,
    DRAFT_HIDDEN_NORM,
    DRAFT_IN,
    DRAFT_NORM,
    dimensions,
    parameters,
)

UNEMBED = "lm_head.weight"
# Frequencies, causal masks, the constants of xIELU, and decays of lightning attention.
_COMPUTED = (
    *("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".act_fn.beta", ".act_fn.eps"),
    *(".self_attn.slope_rate", ".self_attn.query_decay", ".self_attn.key_decay", ".self_attn.diagonal_decay"),
)
# Prefixes in files of vision models: of the language model's tensors, and of others, which are not read.
_LANGUAGE = "language_model."
_VISION = (
    *("vision_model.", "vision_tower.", "visual."),
    *("multi_modal_projector.", "mm_projector.", "patch_merge_mlp."),
)


def hf_tensors(config: ModelConfig, family: Family, stored: Collection[str] = ()) -> dict[str, Tensor]:
    """The tensor of each parameter, by path, in a checkpoint of the family.

    stored: the names in the checkpoint, which may lack the family's prefix or have another.
    """
    old, new = _prefixes(family, stored)
    tables, sizes = {**family.tensors, **family.variants(config)}, dimensions(config)
    tables |= _draft_tensors(config, family, tables)
    tensors = {
        path: _with_letters(tables.get(path) or tables[path.rpartition("/")[2]], sizes)
        for path in parameters(config)
    }
    return {path: _named(tensor, old, new, stored) for path, tensor in tensors.items()}


def _named(tensor: Tensor, old: str, new: str, stored: Collection[str]) -> Tensor:
    """The tensor with its name in the checkpoint: the prefix `new` in place of `old`.

    The name is `also` if only that one is among the stored names.
    """
    name, also = (
        new + each.removeprefix(old) if each.startswith(old) else each for each in (tensor.name, tensor.also)
    )
    is_stored, is_other_stored = (each.format(tensor.first, 0) in stored for each in (name, also))
    has_other_name = tensor.also and not is_stored and is_other_stored
    return replace(tensor, name=also if has_other_name else name)


def _draft_tensors(config: ModelConfig, family: Family, tables: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a draft head by path; its layer is stored as the model's layers are."""
    if config.draft_head is None:
        return {}
    names = family.drafts
    if names is None:
        raise ModelError(f"{config.name}: files of {family.title} have no draft head that is read here")
    before, first = names.of_head or names.layer, 0 if names.counted_apart else config.num_layers
    named = {DRAFT_EMBED_NORM: names.embed_norm, DRAFT_HIDDEN_NORM: names.hidden_norm, DRAFT_NORM: names.norm}
    tensors = {path: Tensor(f"{before}.{name}.weight", ("D",), first=first) for path, name in named.items()}
    swapped = "h" if names.hidden_first else ""
    tensors[DRAFT_IN] = Tensor(f"{before}.{names.proj}.weight", ("D", "h"), swapped=swapped, first=first)
    stack = "layers" if config.draft_has_experts or config.moe is None else "dense_layers"
    for path in parameters(config):
        group, _, name = path.rpartition("/")
        if group == DRAFT_LAYERS:
            like = tables.get(f"{stack}/{name}") or tables[name]
            tensors[path] = replace(like, name=like.name.replace(LAYER, names.layer), first=first)
    return tensors


def _with_letters(tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
    """The tensor without letters of groups that the model lacks: heads of one group have no letter for it."""
    if "g" in sizes or not any("g" in dim for dim in (*tensor.dims, *tensor.parts)):
        return tensor
    dims, parts = (tuple(dim.replace("g", "") for dim in each) for each in (tensor.dims, tensor.parts))
    return replace(tensor, dims=dims, parts=parts)


def _prefixes(family: Family, stored: Collection[str]) -> tuple[str, str]:
    """The beginning of the family's tensor names, and the beginning that replaces it in this checkpoint."""
    if any(name.startswith(f"model.{_LANGUAGE}") for name in stored):
        return "model.", f"model.{_LANGUAGE}"
    if any(name.startswith(_LANGUAGE) for name in stored):
        return "", _LANGUAGE
    if family.prefix and stored and not any(name.startswith(family.prefix) for name in stored):
        return family.prefix, ""
    return "", ""


def passed_over(name: str, config: ModelConfig, family: Family) -> bool:
    """Whether a tensor of a checkpoint is ignored: rotary frequencies, causal masks, vision towers.

    Modules that predict further tokens are too: layers after the last, or with names of their own; and
    `unread` tensors of the family.
    """
    if family.unread and name.startswith(family.unread):
        return True
    if config.draft_head == "alone" or (family.drafts and name.startswith(family.drafts.prefixes)):
        return True
    if name.endswith(_COMPUTED) or name.removeprefix("model.").startswith(_VISION):
        return True
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return family.more_layers and layer is not None and int(layer[1]) >= config.num_layers


def is_by_expert(tensor: Tensor) -> bool:
    """Whether each expert has a tensor of its own."""
    return tensor.name.count("{}") > 1


def stored_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the whole tensor, with the parts of other parameters."""
    shape = [_flat(dim, sizes) for dim in tensor.dims]
    if tensor.parts:
        shape[tensor.axis] = sum(_flat(part, sizes) for part in tensor.parts)
    return tuple(shape)


def window(tensor: Tensor, spans: Mapping[str, range], sizes: Mapping[str, int]) -> tuple[slice, ...]:
    """The slices of the tensor that hold these spans of the letters."""
    return tuple(_slice(tensor, axis, spans, sizes) for axis in range(len(tensor.dims)))


def _slice(tensor: Tensor, axis: int, spans: Mapping[str, range], sizes: Mapping[str, int]) -> slice:
    """The rows of a flattened dimension such as N·H that hold a span of its first letter."""
    dim = tensor.dims[axis]
    if not dim:  # the only element of a number
        return slice(0, 1)
    outer, inner = dim[0], dim[1:]
    start, stride = 0, _flat(inner, sizes)
    if axis == tensor.axis and tensor.parts:
        if tensor.arranged == "after":
            start = sum(_flat(part, sizes) for part in tensor.parts[: tensor.index])
        elif tensor.arranged == "within":
            stride = sum(_widths(tensor, sizes))
            groups = _groups_of(tensor, spans[outer], sizes[outer], sizes)
            return slice(groups.start * stride, groups.stop * stride)
        else:
            stride = len(tensor.parts)
    return slice(start + spans[outer].start * stride, start + spans[outer].stop * stride)


def taken(
    tensor: Tensor, block: np.ndarray, spans: Mapping[str, range], sizes: Mapping[str, int]
) -> np.ndarray:
    """One parameter's elements of the block in `window`, a dimension for each letter."""
    axis = tensor.axis
    if tensor.arranged == "within":
        widths = _widths(tensor, sizes)
        start, width = sum(widths[: tensor.index]), widths[tensor.index]
        outer = tensor.dims[axis][0]
        span, groups = spans[outer], _groups_of(tensor, spans[outer], sizes[outer], sizes)
        before, after = block.shape[:axis], block.shape[axis + 1 :]
        block = np.reshape(block, (*before, len(groups), sum(widths), *after))
        block = np.take(block, range(start, start + width), axis=axis + 1)
        # A span may begin and end inside of a group.
        block = np.reshape(block, (*before, len(groups) * width, *after))
        of_entry = width * _num_groups(tensor, sizes) // sizes[outer]
        skipped = span.start * of_entry - groups.start * width
        block = np.take(block, range(skipped, skipped + len(span) * of_entry), axis=axis)
    if tensor.arranged == "alternate":
        block = np.take(block, range(tensor.index, block.shape[axis], len(tensor.parts)), axis=axis)
    letters = "".join(tensor.dims)
    first = {dim[0] for dim in tensor.dims if dim}
    block = np.reshape(block, [len(spans[one]) if one in first else sizes[one] for one in letters])
    whole = slice(None)
    slices = [whole if one in first else slice(spans[one].start, spans[one].stop) for one in letters]
    block = block[tuple(slices)]
    if tensor.pairs:
        block = np.take(block, _halves_of(tensor, sizes), axis=letters.index(tensor.pairs))
    if tensor.swapped:
        block = np.roll(block, sizes[tensor.swapped] // 2, axis=letters.index(tensor.swapped))
    if tensor.centred:
        return block.astype(np.int32) - sizes[tensor.centred] // 2
    return _times(block, tensor.factor)


def given(tensor: Tensor, block: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """The inverse of `taken`: one parameter as its part of the tensor."""
    if tensor.centred:
        block = np.rint(block.astype(np.float32)).astype(np.int64) + sizes[tensor.centred] // 2
    block = _times(block, 1 / tensor.factor)
    if tensor.swapped:
        axis = "".join(tensor.dims).index(tensor.swapped)
        block = np.roll(block, sizes[tensor.swapped] // 2, axis=axis)
    if tensor.pairs:
        axis = "".join(tensor.dims).index(tensor.pairs)
        block = np.take(block, np.argsort(_halves_of(tensor, sizes)), axis=axis)
    return np.ascontiguousarray(block).reshape([_flat(dim, sizes) for dim in tensor.dims])


def _times(block: np.ndarray, factor: float) -> np.ndarray:
    """The block times a number, rounded once."""
    return block if factor == 1 else (block.astype(np.float32) * np.float32(factor)).astype(block.dtype)


def stored_tensor(parts: Sequence[tuple[Tensor, np.ndarray]], sizes: Mapping[str, int]) -> np.ndarray:
    """The tensor that these parameters, as `given`, share; a parameter with its own tensor is that tensor."""
    parts = sorted(parts, key=lambda part: part[0].index)
    tensor, first = parts[0]
    if len(parts) == 1:
        return first
    arrays, axis = [array for _, array in parts], tensor.axis
    if tensor.arranged == "after":
        return np.concatenate(arrays, axis=axis)
    if tensor.arranged == "alternate":
        return np.stack(arrays, axis=axis + 1).reshape(stored_shape(tensor, sizes))
    rows = _num_groups(tensor, sizes)
    split = [np.reshape(a, (*a.shape[:axis], rows, -1, *a.shape[axis + 1 :])) for a in arrays]
    return np.concatenate(split, axis=axis + 1).reshape(stored_shape(tensor, sizes))


def _num_groups(tensor: Tensor, sizes: Mapping[str, int]) -> int:
    """The groups of heads within which parts follow each other: KV heads, or a number that the file has."""
    return tensor.groups or sizes[tensor.parts[tensor.index][0]]


def _widths(tensor: Tensor, sizes: Mapping[str, int]) -> list[int]:
    """The elements of each part in one of its groups."""
    num_groups = _num_groups(tensor, sizes)
    return [_flat(part, sizes) // num_groups for part in tensor.parts]


def _groups_of(tensor: Tensor, span: range, size: int, sizes: Mapping[str, int]) -> range:
    """The groups that hold a span of the first letter, which has `size` entries."""
    entries = size // _num_groups(tensor, sizes)
    return range(span.start // entries, -(-span.stop // entries))


def _halves_of(tensor: Tensor, sizes: Mapping[str, int]) -> list[int]:
    size = sizes[tensor.pairs]
    turned = sizes.get("A", size)
    if tensor.pairs_last:
        return [*range(size - turned, size, 2), *range(size - turned + 1, size, 2), *range(size - turned)]
    return _halves(size, turned, size - turned if "J" in sizes and tensor.pairs != "y" else 0)


def _halves(size: int, num_turned: int, start: int) -> list[int]:
    """Places in the file of a head's elements; `num_turned` of them from `start` on are rotated in pairs.

    >>> _halves(6, 4, 2), _halves(6, 4, 0)
    ([0, 1, 2, 4, 3, 5], [0, 2, 1, 3, 4, 5])
    """
    end = start + num_turned
    return [*range(start), *range(start, end, 2), *range(start + 1, end, 2), *range(end, size)]


def _flat(dim: str, sizes: Mapping[str, int]) -> int:
    return prod(sizes[letter] for letter in dim)

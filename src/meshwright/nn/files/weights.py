"""Weights of Hugging Face checkpoints, read onto our shards and written back."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from reprlib import repr as brief
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from meshwright.dtypes import NUMBER_TYPES
from meshwright.errors import CheckpointError
from meshwright.files import parse_json, read_text
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.models.config import ModelConfig
from meshwright.models.families.family import Family, Key, Tensor
from meshwright.models.hf import to_hf, written_family
from meshwright.models.model_files import read_family
from meshwright.models.parameters import DRAFT_IN, OF_STACKS, Param, dimensions, parameters
from meshwright.nn.files.hf_tensors import (
    UNEMBED,
    given,
    hf_tensors,
    is_by_expert,
    passed_over,
    stored_shape,
    stored_tensor,
    taken,
    window,
)
from meshwright.nn.files.quantised_files import dequantised, slice_of
from meshwright.nn.params import abstract_params, build, flatten

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The key of config.json that counts draft heads.
_NUM_HEADS = "num_nextn_predict_layers"
_FILE_BYTES = 5_000_000_000
# (name of HF's tensor, tensor) -> the tensors to write.
Store = Callable[[str, np.ndarray], Mapping[str, np.ndarray]]
_WHOLE_NUMBERS = ("I32", "I64")  # of tables of experts
# HF's names of the types of weights that are read. Quantised types need scales too, and types without uses
# are those of scales.
_READABLE = tuple(
    record.safetensors
    for record in NUMBER_TYPES.values()
    if record.safetensors and record.uses and not record.scales
)


def load_hf(
    folder: Path,
    config: ModelConfig,
    layout: Layout,
    mesh: Mesh,
    *,
    kept: Callable[[str, jax.Array], Any] = lambda path, weight: weight,
) -> dict[str, Any]:
    """The parameters of the HF checkpoint in `folder`, on their shards, in the layout's weights_dtype.

    kept: given a path and its array, the value to keep in its place.

    Each device's block is read from disk by itself, so host memory holds one block of one parameter. A
    quantised checkpoint is dequantised. Raises CheckpointError for a tensor that is missing, left over, of
    another shape or without the scales that its type needs, and for a file that is missing or cut short. All
    of this is checked before anything is read.
    """
    check_fits(layout, config)
    abstract = flatten(abstract_params(config, layout, mesh))
    with _opened(folder) as files:
        stored = dequantised(folder, files)
        family = read_family(folder) or written_family(config)
        tensors = hf_tensors(config, family, stored)
        _check(folder, stored, config, family, tensors)
        return build(
            config,
            lambda path, param: kept(path, _load(stored, tensors[path], path, param, config, abstract[path])),
        )


def has_draft_head(folder: Path, config: ModelConfig) -> bool:
    """Whether an HF checkpoint of this model holds a draft head that `load_hf` reads."""
    family = read_family(folder)
    if family is None or family.drafts is None or config.planned_only:
        return False
    tensors = hf_tensors(replace(config, draft_head="alone"), family)
    with _opened(folder) as files:
        return tensors[DRAFT_IN].name.format(tensors[DRAFT_IN].first) in files


def save_hf(
    params: Mapping[str, Any],
    config: ModelConfig,
    folder: Path,
    *,
    file_bytes: int = _FILE_BYTES,
    store: Store = lambda name, tensor: {name: tensor},
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes `params` as the HF model that computes the same, in safetensors of at most `file_bytes`.

    A draft head has the family's names; ModelError if the family has none. store: replaces one
    tensor by others. more: further keys of config.json. Host memory holds one file. For one process, which
    must see every shard. Raises CheckpointError if `folder` holds weights already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if present := next(folder.glob("*.safetensors*"), None):
        raise CheckpointError(f"checkpoint {folder}: holds {present.name} already; name another folder")
    flat, letters = flatten(params), parameters(config)
    dtype = np.dtype(flat["embed"].dtype)
    # Without null, transformers would end every answer at LLaMA's token 2, and pad with Phi-3's 32000.
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    family = written_family(config.base)
    counted = isinstance(family.keys.get(_NUM_HEADS), Key) and config.draft_head
    written = to_hf(config.base) | tokens | {"torch_dtype": dtype.name} | dict(more)
    written |= {_NUM_HEADS: 1} if counted else {}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    tensors, sizes = hf_tensors(config, family), dimensions(config)
    files = _split(config, tensors, dtype.itemsize, file_bytes)
    constants = {
        name.format(number): np.asarray(value, dtype)
        for name, value in family.constants.items()
        for number in range(config.num_layers)
    }
    held: dict[str, list[str]] = {}
    for file, names in files.items():
        content, constants = constants, {}
        for name, place in names.items():
            parts = [
                (tensors[path], _to_hf(flat[path], letters[path].letters, tensors[path], place, sizes))
                for path in place.paths
            ]
            content |= store(name, stored_tensor(parts, sizes))
        save_file(
            {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in content.items()},
            folder / file,
            {"format": "pt"},
        )
        held[file] = list(content)
    if len(files) > 1:
        _write_index(folder, held, sum(param.nbytes for param in flat.values()))


class _Place(NamedTuple):
    """The parameters in one tensor of HF's, the row of their stack and the expert (0 if all experts)."""

    paths: list[str]
    row: int
    expert: int


def _names(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, _Place]:
    """Every HF tensor of the model, by name."""
    names: dict[str, _Place] = {}
    for path, tensor in tensors.items():
        for number, row in _rows(config, path, tensor):
            for expert in range(config.moe.num_experts if config.moe and is_by_expert(tensor) else 1):
                place = names.setdefault(tensor.name.format(number, expert), _Place([], row, expert))
                place.paths.append(path)
    return names


def _rows(config: ModelConfig, path: str, tensor: Tensor) -> list[tuple[int, int]]:
    """(number in the names, row of its stack) of every layer that a parameter is stacked over."""
    stack, layers = path.rpartition("/")[0], enumerate(config.layers, tensor.first)
    rows = [(number, layer.row) for number, layer in layers if layer.kind.stack == stack]
    return rows or [(tensor.first, 0)]


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Every tensor of the checkpoint by name, as a safetensors slice: nothing is read until indexed."""
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in _files(folder):
            if file.exists() and not file.is_file():  # a pipe would never end
                raise CheckpointError(f"checkpoint {folder}: {file.name} is not a regular file")
            try:
                handle = stack.enter_context(safe_open(file, "numpy"))
            except (SafetensorError, OSError) as error:
                reason = f"{file.name} is missing" if not file.exists() else f"{file.name}: {error}"
                raise CheckpointError(
                    f"checkpoint {folder}: does not load: {reason}; copy or download it again"
                ) from error
            tensors |= {name: slice_of(file, handle, name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        yield tensors


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return [folder / SINGLE_FILE]
    try:
        weight_map: dict[str, str] = parse_json(read_text(index, CheckpointError))["weight_map"]
        names = sorted(set(weight_map.values()))
        if outside := next((name for name in names if name != Path(name).name), None):
            raise CheckpointError(
                f"checkpoint {folder}: {INDEX} names {brief(outside)}, which is not a file of the folder"
            )
        return [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder}: {INDEX} has no whole weight_map; copy or download it again"
        ) from error


def _check(
    folder: Path,
    stored: Mapping[str, Any],
    config: ModelConfig,
    family: Family,
    tensors: Mapping[str, Tensor],
) -> None:
    """CheckpointError at the first tensor that differs from the model's."""
    names = _names(config, tensors)
    for name, place in names.items():
        tensor = tensors[place.paths[0]]
        shape = list(stored_shape(tensor, dimensions(config, place.paths[0])))
        if name not in stored:
            raise CheckpointError(f"checkpoint {folder}: has no {name}{shape}, which {config.name} needs")
        found_shape, dtype = stored[name].get_shape(), stored[name].get_dtype()
        if found_shape != shape:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is {found_shape} there and {shape} in {config.name}"
            )
        readable = _WHOLE_NUMBERS if tensor.centred else _READABLE
        if dtype not in readable:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is stored as {dtype}; fits: {', '.join(readable)}"
            )
    # A tied model may store its table twice.
    known = {*names, UNEMBED} if config.tied_embeddings else set(names)
    for name in sorted(set(stored) - known):
        if not passed_over(name, config, family):
            raise CheckpointError(f"checkpoint {folder}: holds {name}, which {config.name} has not")


def _load(
    stored: Mapping[str, Any],
    tensor: Tensor,
    path: str,
    param: Param,
    config: ModelConfig,
    abstract: jax.ShapeDtypeStruct,
) -> jax.Array:
    """One parameter, read block by block; jax.make_array_from_callback would hold all blocks at once."""
    assert abstract.sharding is not None
    blocks = [
        jax.device_put(_read(stored, tensor, path, param, config, index, abstract.dtype), device)
        for device, index in abstract.sharding.addressable_devices_indices_map(abstract.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(abstract.shape, abstract.sharding, blocks)


def _read(
    stored: Mapping[str, Any],
    tensor: Tensor,
    path: str,
    param: Param,
    config: ModelConfig,
    index: Any,
    dtype: np.dtype,
) -> np.ndarray:
    """The block `index` (a slice for each letter) of a parameter, tensor by tensor."""
    sizes = dimensions(config, path)
    spans = {
        letter: range(*part.indices(sizes[letter])) for letter, part in zip(param.letters, index, strict=True)
    }
    block = np.empty([len(span) for span in spans.values()], dtype)
    stacked = [letter for letter in OF_STACKS if letter in spans]
    apart = [*stacked, *("E" if is_by_expert(tensor) else "")]
    letters = [letter for letter in param.letters if letter not in apart]
    axes = ["".join(tensor.dims).index(letter) for letter in letters]
    slices = window(tensor, spans, sizes)
    numbers = {row: number for number, row in _rows(config, path, tensor)}
    for place in np.ndindex(*(len(spans[letter]) for letter in apart)):
        at = {letter: spans[letter][i] for letter, i in zip(apart, place, strict=True)}
        number = numbers[at[stacked[0]]] if stacked else tensor.first
        name = tensor.name.format(number, at.get("E", 0))
        block[place] = taken(tensor, stored[name][slices], spans, sizes).transpose(axes)
    return block


def _to_hf(
    array: jax.Array, letters: str, tensor: Tensor, place: _Place, sizes: Mapping[str, int]
) -> np.ndarray:
    """One parameter of one layer and expert as HF stores it, whole on the host."""
    assert isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh)
    with jax.set_mesh(array.sharding.mesh):
        if letters[0] in OF_STACKS:
            array, letters = _one_of(array, place.row), letters[1:]
        if is_by_expert(tensor):
            array, letters = _one_of(array, place.expert), letters[1:]
        whole = np.asarray(array)
    turned = whole.transpose([letters.index(letter) for dim in tensor.dims for letter in dim])
    return given(tensor, turned, sizes)


def _one_of(array: jax.Array, index: int) -> jax.Array:
    """array[index], gathered first if the array is split over its first dimension."""
    spec = array.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]
    if spec[:1] != (None,) and spec:
        array = reshard(array, PartitionSpec(None, *spec[1:]))
    return lax.dynamic_index_in_dim(array, index, keepdims=False)


def _split(
    config: ModelConfig, tensors: Mapping[str, Tensor], itemsize: int, file_bytes: int
) -> dict[str, dict[str, _Place]]:
    """The tensors of every file, in order; a file takes the next tensors that fit."""
    sizes = dimensions(config)
    groups: list[dict[str, _Place]] = [{}]
    filled_bytes = 0
    for name, place in _names(config, tensors).items():
        tensor_bytes = prod(stored_shape(tensors[place.paths[0]], sizes)) * itemsize
        if groups[-1] and filled_bytes + tensor_bytes > file_bytes:
            groups.append({})
            filled_bytes = 0
        groups[-1][name] = place
        filled_bytes += tensor_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _write_index(folder: Path, files: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

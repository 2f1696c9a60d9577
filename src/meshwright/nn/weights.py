"""Weights of Hugging Face LLaMA checkpoints, read onto our shards and written back.

HF stores a linear layer as [out, in] with its heads flattened, one tensor a layer; ours keep every
letter and stack the layers: q_proj[N·H, D] of layers 0..L-1 <-> wq[L, D, N, H].
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from meshwright.errors import CheckpointError
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.hf import to_hf
from meshwright.models.transformer import Param, dimensions, parameters
from meshwright.nn.params import abstract_params, build, flatten

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FILE_BYTES = 5_000_000_000
# HF's names of the types we can read; the quantised ones need scales that the model has not.
_READABLE = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class HfTensor:
    """An HF tensor's name, `{}` standing for its layer, and the letters along each of its dimensions."""

    name: str
    dims: tuple[str, ...]

    @property
    def letters(self) -> str:
        return "".join(self.dims)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(prod(sizes[letter] for letter in dim) for dim in self.dims)


_LAYER = "model.layers.{}"
_TENSORS = {
    "embed": HfTensor("model.embed_tokens.weight", ("V", "D")),
    "layers/attention_norm": HfTensor(f"{_LAYER}.input_layernorm.weight", ("D",)),
    "layers/wq": HfTensor(f"{_LAYER}.self_attn.q_proj.weight", ("NH", "D")),
    "layers/wk": HfTensor(f"{_LAYER}.self_attn.k_proj.weight", ("KH", "D")),
    "layers/wv": HfTensor(f"{_LAYER}.self_attn.v_proj.weight", ("KH", "D")),
    "layers/wo": HfTensor(f"{_LAYER}.self_attn.o_proj.weight", ("D", "NH")),
    "layers/mlp_norm": HfTensor(f"{_LAYER}.post_attention_layernorm.weight", ("D",)),
    "layers/w_gate": HfTensor(f"{_LAYER}.mlp.gate_proj.weight", ("F", "D")),
    "layers/w_in": HfTensor(f"{_LAYER}.mlp.up_proj.weight", ("F", "D")),
    "layers/w_out": HfTensor(f"{_LAYER}.mlp.down_proj.weight", ("D", "F")),
    "final_norm": HfTensor("model.norm.weight", ("D",)),
    "unembed": HfTensor("lm_head.weight", ("V", "D")),
}


def load_hf(folder: Path, config: ModelConfig, layout: Layout, mesh: Mesh) -> dict[str, Any]:
    """The parameters of the HF checkpoint in `folder`, on their shards, in the layout's weights_dtype.

    Each device's block is read from disk by itself, so host memory holds one block of one parameter.
    Raises CheckpointError for a tensor that is missing, left over, of another shape or of a quantised
    type, and for a file that is missing or cut short; nothing is read before all of that is checked.
    """
    layout.check(config)
    abstract = flatten(abstract_params(config, layout, mesh))
    with _opened(folder) as stored:
        _check(folder, stored, config)
        return build(config, lambda path, param: _load(stored, path, param, config, abstract[path]))


def save_hf(
    params: Mapping[str, Any], config: ModelConfig, folder: Path, *, file_bytes: int = _FILE_BYTES
) -> None:
    """Writes `params` as an HF LlamaForCausalLM: config.json and safetensors of at most `file_bytes`.

    Host memory holds one file. For one process, which must see every shard. Raises CheckpointError
    where `folder` holds weights already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if there := next(folder.glob("*.safetensors*"), None):
        raise CheckpointError(f"checkpoint {folder}: holds {there.name} already; name another folder")
    flat, letters = flatten(params), parameters(config)
    dtype = np.dtype(flat["embed"].dtype)
    # Without null, transformers would end every answer at LLaMA's token 2; the tokenizer knows better.
    tokens = {"bos_token_id": None, "eos_token_id": None}
    written = to_hf(config) | tokens | {"torch_dtype": dtype.name}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    files = _split(config, dtype.itemsize, file_bytes)
    for file, names in files.items():
        tensors = {
            name: _to_hf(flat[path], letters[path].letters, _TENSORS[path], layer)
            for name, (path, layer) in names.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        _write_index(folder, files, sum(param.nbytes for param in flat.values()))


def _names(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Every HF tensor of the model by its name: our path and the layer (0 for those outside layers)."""
    return {
        _TENSORS[path].name.format(layer): (path, layer)
        for path in parameters(config)
        for layer in range(config.num_layers if path.startswith("layers/") else 1)
    }


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Every tensor of the checkpoint by name, as a safetensors slice: nothing is read until indexed."""
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in _files(folder):
            try:
                handle = stack.enter_context(safe_open(file, "numpy"))
            except (SafetensorError, OSError) as error:
                reason = f"{file.name} is missing" if not file.exists() else f"{file.name}: {error}"
                raise CheckpointError(
                    f"checkpoint {folder}: is cut short: {reason}; copy or download it again"
                ) from error
            tensors |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
        yield tensors


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return [folder / SINGLE_FILE]
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder}: {INDEX} has no whole weight_map; copy or download it again"
        ) from error


def _check(folder: Path, stored: Mapping[str, Any], config: ModelConfig) -> None:
    """CheckpointError at the first tensor that differs from what `config` asks for."""
    sizes = dimensions(config)
    names = _names(config)
    for name, (path, _) in names.items():
        shape = list(_TENSORS[path].shape(sizes))
        if name not in stored:
            raise CheckpointError(f"checkpoint {folder}: has no {name}{shape}, which {config.name} needs")
        there, dtype = stored[name].get_shape(), stored[name].get_dtype()
        if there != shape:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is {there} there and {shape} in {config.name}"
            )
        if dtype not in _READABLE:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is stored as {dtype}; fits: {', '.join(_READABLE)}"
            )
    # A tied model may store its table twice, and old exports hold the rotary frequencies.
    known = {*names, _TENSORS["unembed"].name} if config.tied_embeddings else set(names)
    for name in sorted(set(stored) - known):
        if not name.endswith("rotary_emb.inv_freq"):
            raise CheckpointError(f"checkpoint {folder}: holds {name}, which {config.name} has not")


def _load(
    stored: Mapping[str, Any], path: str, param: Param, config: ModelConfig, abstract: jax.ShapeDtypeStruct
) -> jax.Array:
    """One parameter, read block by block; jax.make_array_from_callback would hold all blocks at once."""
    assert abstract.sharding is not None
    blocks = [
        jax.device_put(_read(stored, path, param, config, index, abstract.dtype), device)
        for device, index in abstract.sharding.addressable_devices_indices_map(abstract.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(abstract.shape, abstract.sharding, blocks)


def _read(
    stored: Mapping[str, Any], path: str, param: Param, config: ModelConfig, index: Any, dtype: np.dtype
) -> np.ndarray:
    """The block `index` (a slice for each letter) of a parameter, layer by layer."""
    sizes = dimensions(config)
    tensor = _TENSORS[path]
    spans = {
        letter: range(*part.indices(sizes[letter])) for letter, part in zip(param.letters, index, strict=True)
    }
    letters = param.letters.removeprefix("L")
    window = tuple(_flat_slice(dim, spans, sizes) for dim in tensor.dims)
    axes = [tensor.letters.index(letter) for letter in letters]
    block = np.empty([len(span) for span in spans.values()], dtype)
    for number, layer in enumerate(spans.get("L", range(1))):
        part = stored[tensor.name.format(layer)][window]
        part = part.reshape([len(spans[letter]) for letter in tensor.letters]).transpose(axes)
        block[number if "L" in spans else ...] = part
    return block


def _flat_slice(dim: str, spans: Mapping[str, range], sizes: Mapping[str, int]) -> slice:
    """The rows of a flattened dimension such as N·H that hold a span of its first letter."""
    outer, inner = dim[0], dim[1:]
    assert all(len(spans[letter]) == sizes[letter] for letter in inner), f"{inner} of {dim} is split"
    stride = prod(sizes[letter] for letter in inner)
    return slice(spans[outer].start * stride, spans[outer].stop * stride)


def _to_hf(array: jax.Array, letters: str, tensor: HfTensor, layer: int) -> np.ndarray:
    """One tensor as HF stores it, whole on the host."""
    if letters.startswith("L"):
        assert isinstance(array.sharding, NamedSharding) and isinstance(array.sharding.mesh, Mesh)
        with jax.set_mesh(array.sharding.mesh):
            array = lax.dynamic_index_in_dim(array, layer, keepdims=False)
    letters = letters.removeprefix("L")
    sizes = dict(zip(letters, array.shape, strict=True))
    turned = np.asarray(array).transpose([letters.index(letter) for letter in tensor.letters])
    return np.ascontiguousarray(turned).reshape(tensor.shape(sizes))


def _split(config: ModelConfig, itemsize: int, file_bytes: int) -> dict[str, dict[str, tuple[str, int]]]:
    """The tensors of every file, in order, as many in each as fit."""
    sizes = dimensions(config)
    groups: list[dict[str, tuple[str, int]]] = [{}]
    filled_bytes = 0
    for name, place in _names(config).items():
        tensor_bytes = prod(_TENSORS[place[0]].shape(sizes)) * itemsize
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


def _write_index(folder: Path, files: Mapping[str, Mapping[str, Any]], total_bytes: int) -> None:
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

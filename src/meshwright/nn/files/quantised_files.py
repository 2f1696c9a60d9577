"""Quantised Hugging Face checkpoints, read as float32 tensors.

    GPTQ                 qweight, qzeros, scales, g_idx    Frantar et al., 2022; zeros are one less
    AWQ                  qweight, qzeros, scales           Lin et al., 2023; columns of an int32 out of order
    compressed-tensors   weight or weight_packed, with weight_scale, weight_zero_point, weight_shape
    fp8 in blocks        weight, weight_scale_inv          DeepSeek-V3, 2024
    fp8 and mxfp4        weight, scale                     DeepSeek-V4, 2026; matrices of experts in mxfp4
    mxfp4                <weight>_blocks, <weight>_scales  gpt-oss, 2025; OCP Microscaling Formats 1.0, 2023

Each replaces `<layer>.weight`, or in mxfp4 the weight of all experts, by tensors of its own. `dequantised`
returns the weights under their names.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.dtypes import NUMBER_TYPES, NumberType
from meshwright.errors import CheckpointError, ModelError
from meshwright.files import parse_json, read_text
from meshwright.models.model_files import with_quantisation
from meshwright.models.stored import declared_quantisation

_BY_METHOD = {record.quant_method: record for record in NUMBER_TYPES.values() if record.quant_method}
_FOUR_BITS = next(record for record in _BY_METHOD.values() if record.bits == 4)
METHODS = ("gptq", "awq", "compressed-tensors", *_BY_METHOD)
# Types of JAX by their names in safetensors, which does not return them as numpy arrays.
_EIGHT_BITS = {
    record.safetensors: record.jax
    for record in NUMBER_TYPES.values()
    if record.bits == 8 and record.safetensors
}
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which column each nibble of an int32 holds


@dataclass(frozen=True)
class _Weight:
    """A float32 weight with the methods of a safetensors slice. read: computes the numbers of an index."""

    shape: tuple[int, ...]
    read: Callable[[Any], np.ndarray]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self.read(index)


@dataclass(frozen=True)
class _EightBitSlice:
    """A tensor of 8-bit floating point. dtype: its type's name in safetensors."""

    file: Path
    shape: tuple[int, ...]
    name: str
    dtype: str

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        with self.file.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, _ = json.loads(file.read(length))[self.name]["data_offsets"]
        kind = np.dtype(_EIGHT_BITS[self.dtype])
        return np.memmap(self.file, kind, "r", 8 + length + begin, self.shape)[index]


def slice_of(file: Path, handle: Any, name: str) -> Any:
    """A tensor of an open safetensors file; an index reads its part."""
    stored = handle.get_slice(name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    return _EightBitSlice(file, shape, name, dtype) if dtype in _EIGHT_BITS else stored


def dequantised(folder: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """`stored`, tensors by name, with quantised weights, by config.json, as float32.

    Raises CheckpointError for a method or form that is not read, and for tensors that do not fit each other.
    """
    config = _quantization_config(folder)
    if config is None:
        return stored
    method = str(config.get("quant_method", ""))
    if method not in METHODS:
        raise CheckpointError(
            f"checkpoint {folder}: quantised by {method!r}; fits: {', '.join(METHODS)}, or no quantisation"
        )
    reader = _Reader(folder, config, stored)
    if method in _BY_METHOD and _BY_METHOD[method].is_blocked:
        return reader.blocked(_BY_METHOD[method])
    read = {"gptq": reader.gptq, "awq": reader.awq}.get(method, reader.compressed)
    marks = {"gptq": (".qweight",), "awq": (".qweight",)}.get(
        method, (".weight_packed", ".weight_scale", ".weight_scale_inv", _SCALE)
    )
    unpacked = dict(stored)
    layers = {
        name.removesuffix(mark)
        for name in stored
        for mark in marks
        if name.endswith(mark) and (mark != _SCALE or f"{name.removesuffix(mark)}.weight" in stored)
    }
    for layer in sorted(layers):
        for part in _PARTS:
            unpacked.pop(f"{layer}.{part}", None)
        unpacked[f"{layer}.weight"] = read(layer)
    return {name: value for name, value in unpacked.items() if not name.endswith(_PASSED_OVER)}


_PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point",
    "weight_shape",    "weight_scale_inv", "weight_g_idx", "input_scale", "scale",
)  # fmt: skip
_SCALE = ".scale"
_PASSED_OVER = (".k_scale", ".v_scale", ".input_scale", ".output_scale")  # of activations and caches


def _quantization_config(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = parse_json(read_text(path, CheckpointError))
    try:
        return declared_quantisation(with_quantisation(config, folder))
    except ModelError as error:
        raise CheckpointError(str(error)) from error


class _Reader:
    def __init__(self, folder: Path, config: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        self._folder, self._config, self._stored = folder, config, stored

    def blocked(self, record: NumberType) -> dict[str, Any]:
        """Every tensor by name; `<weight>_blocks` and `<weight>_scales` as the weight."""
        assert record.scales is not None and record.scales.block is not None, "the type has blocks"
        block, unpacked = record.scales.block, dict(self._stored)
        block_bytes = block * record.bits // 8
        for blocks in (name for name in self._stored if name.endswith("_blocks")):
            weight = blocks.removesuffix("_blocks")
            scales = f"{weight}_scales"
            of_blocks, of_scales = self._shape(blocks), self._shape(scales)
            if len(of_blocks) != 4 or of_blocks[3] != block_bytes or of_blocks[:3] != of_scales:
                raise CheckpointError(
                    f"checkpoint {self._folder}: {blocks} is {of_blocks} and {scales} {of_scales}; "
                    f"fits: [E, out, in / {block}, {block_bytes}] and [E, out, in / {block}]"
                )
            experts, num_out, groups = of_scales
            read = partial(_of_blocks, record.jax, unpacked.pop(blocks), unpacked.pop(scales))
            unpacked[weight] = _Weight((experts, block * groups, num_out), read)
        return unpacked

    def gptq(self, layer: str) -> _Weight:
        """w[in, out] = scales[g, out] * (q[in, out] - zeros[g, out]), eight inputs of an int32 each."""
        bits = self._bits(self._config.get("bits"), (2, 4, 8))
        packed, scales = self._shape(f"{layer}.qweight"), self._shape(f"{layer}.scales")
        num_in, num_out = packed[0] * 32 // bits, packed[1]
        plus = 0 if self._config.get("checkpoint_format") == "gptq_v2" else 1

        def read(index: tuple[slice, ...]) -> np.ndarray:
            q = _unpacked(self._read(f"{layer}.qweight"), bits, axis=0)
            zeros = _unpacked(self._read(f"{layer}.qzeros"), bits, axis=1)[:, :num_out] + plus
            groups = self._groups(layer, "g_idx", num_in, scales[0])
            scale = self._read(f"{layer}.scales").astype(np.float32)
            return ((q - zeros[groups]) * scale[groups]).T[index]

        return _Weight((num_out, num_in), read)

    def awq(self, layer: str) -> _Weight:
        """w[in, out] = scales[g, out] * (q[in, out] - zeros[g, out]), eight outputs of an int32 each."""
        bits = self._bits(self._config.get("bits", self._config.get("w_bit")), (4,))
        packed, scales = self._shape(f"{layer}.qweight"), self._shape(f"{layer}.scales")
        num_in, num_out = packed[0], packed[1] * 32 // bits

        def read(index: tuple[slice, ...]) -> np.ndarray:
            q, zeros = (_awq(self._read(f"{layer}.{part}")) for part in ("qweight", "qzeros"))
            groups = np.arange(num_in) // (num_in // scales[0])
            scale = self._read(f"{layer}.scales").astype(np.float32)
            return ((q - zeros[groups]) * scale[groups]).T[index]

        return _Weight((num_out, num_in), read)

    def compressed(self, layer: str) -> _Weight:
        """w[out, in] = scale * (q - zero); a scale for the tensor, each output, group or block."""
        if f"{layer}.weight_packed" in self._stored:
            return self._packed(layer)
        of_blocks = (f"{layer}.weight_scale_inv", layer + _SCALE)
        scale = next((name for name in of_blocks if name in self._stored), None)
        if scale == layer + _SCALE and self._stored[f"{layer}.weight"].get_dtype() == "I8":
            return self._in_pairs(layer)
        shape = self._shape(f"{layer}.weight")

        def read(index: tuple[slice, ...]) -> np.ndarray:
            q = self._read(f"{layer}.weight").astype(np.float32)
            zero = f"{layer}.weight_zero_point"
            if zero in self._stored:
                q = q - _spread(self._read(zero).astype(np.float32), shape, self._block(scale))
            scales = self._read(scale or f"{layer}.weight_scale").astype(np.float32)
            return (q * _spread(scales, shape, self._block(scale)))[index]

        return _Weight((shape[0], shape[1]), read)

    def _packed(self, layer: str) -> _Weight:
        """Integers of 2, 4 or 8 bits in the int32s of an output's row, moved up by half of their range."""
        bits = self._bits(_num_bits(self._config), (2, 4, 8))
        num_out, num_in = (int(size) for size in self._read(f"{layer}.weight_shape"))
        half = 1 << (bits - 1)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            q = _unpacked(self._read(f"{layer}.weight_packed"), bits, axis=1)[:, :num_in] - half
            scales = self._read(f"{layer}.weight_scale").astype(np.float32)
            groups = self._groups(layer, "weight_g_idx", num_in, scales.shape[1])
            if f"{layer}.weight_zero_point" in self._stored:
                zeros = _unpacked(self._read(f"{layer}.weight_zero_point"), bits, axis=0)[:num_out] - half
                q = q - zeros[:, groups]
            return (q * scales[:, groups])[index]

        return _Weight((num_out, num_in), read)

    def _in_pairs(self, layer: str) -> _Weight:
        """w[out, in] of 4-bit numbers, two inputs in a byte, with a scale for each block of inputs."""
        record = _FOUR_BITS
        assert record.scales is not None and record.scales.block is not None, "the type has blocks"
        weight, scale, block = f"{layer}.weight", layer + _SCALE, record.scales.block
        (num_out, num_bytes), of_scales = self._shape(weight), self._shape(scale)
        if of_scales != [num_out, 2 * num_bytes // block] or 2 * num_bytes % block:
            raise CheckpointError(
                f"checkpoint {self._folder}: {weight} is {[num_out, num_bytes]} and {scale} {of_scales}; "
                f"fits: [out, in / 2] and [out, in / {block}]"
            )

        def read(index: tuple[slice, ...]) -> np.ndarray:
            scales = self._read(scale).astype(np.float32)
            return _scaled_pairs(record.jax, self._read(weight).view(np.uint8), scales)[index]

        return _Weight((num_out, 2 * num_bytes), read)

    def _groups(self, layer: str, name: str, num_in: int, num_groups: int) -> np.ndarray:
        """The group of each input: as listed, otherwise in order."""
        if f"{layer}.{name}" in self._stored:
            listed = self._read(f"{layer}.{name}")
            if listed.size == num_in and (listed >= 0).all():
                return listed
        return np.arange(num_in) // -(-num_in // num_groups)

    def _block(self, scale: str | None) -> tuple[int, int] | None:
        size = self._config.get("weight_block_size") if scale else None
        return (int(size[0]), int(size[1])) if size else None

    def _bits(self, bits: Any, fits: tuple[int, ...]) -> int:
        if bits not in fits:
            raise CheckpointError(
                f"checkpoint {self._folder}: weights of {bits} bits by {self._config.get('quant_method')}; "
                f"fits: {', '.join(map(str, fits))} bits"
            )
        return int(bits)

    def _shape(self, name: str) -> list[int]:
        if name not in self._stored:
            raise CheckpointError(f"checkpoint {self._folder}: has no {name}, which its quantisation needs")
        return list(self._stored[name].get_shape())

    def _read(self, name: str) -> np.ndarray:
        shape = self._shape(name)
        return np.asarray(self._stored[name][tuple(slice(size) for size in shape)])


def _of_blocks(kind: str, blocks: Any, scales: Any, index: tuple[slice, slice, slice]) -> np.ndarray:
    """The indexed part of a weight [E, in, out] in blocks of 4-bit numbers, without the other experts.

    kind: JAX's type of the numbers. blocks: u8[E, out, in / block, block / 2]; a byte holds two inputs, the
    first in its lower bits. scales: u8[E, out, in / block], powers of two with a bias of 127.
    """
    experts, inputs, outputs = index
    packed, exponents = blocks[experts, outputs], scales[experts, outputs].astype(np.int32) - 127
    packed = packed.reshape(*packed.shape[:2], -1)
    wide = _scaled_pairs(kind, packed, np.ldexp(np.float32(1), exponents))
    return wide.swapaxes(1, 2)[:, inputs]


def _scaled_pairs(kind: str, packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """f32[..., in] of pairs of 4-bit numbers u8[..., in / 2], the first in the lower bits.

    kind: JAX's type of the numbers. scales: f32[..., in / block].
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    wide = codes.view(kind).astype(np.float32).reshape(*scales.shape, -1) * scales[..., None]
    return wide.reshape(*packed.shape[:-1], -1)


def _num_bits(config: Mapping[str, Any]) -> Any:
    """Bits of the weights of compressed-tensors' first group of layers."""
    groups = config.get("config_groups")
    first = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
    return (first.get("weights") or {}).get("num_bits")


def _unpacked(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The unsigned numbers of `bits` bits in int32s, the lowest first, along `axis`.

    >>> _unpacked(np.array([[0x21]], np.int32), 4, axis=1)[0, :3]
    array([1, 2, 0], dtype=int32)
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = np.moveaxis(packed, axis, -1)[..., None].astype(np.uint32) >> shifts
    values = (parts & np.uint32((1 << bits) - 1)).astype(np.int32)
    return np.moveaxis(values.reshape(*values.shape[:-2], -1), -1, axis)


def _awq(packed: np.ndarray) -> np.ndarray:
    """The numbers of AWQ's int32s along their rows, in the order of the columns."""
    nibbles = _unpacked(packed, 4, axis=1).reshape(packed.shape[0], -1, 8)
    values = np.empty_like(nibbles)
    values[..., list(_AWQ_COLUMNS)] = nibbles
    return values.reshape(packed.shape[0], -1)


def _spread(scales: np.ndarray, shape: list[int], block: tuple[int, int] | None) -> np.ndarray:
    """Scales of the tensor, of outputs or of blocks as [out, in], with size 1 if they do not differ."""
    if scales.size == 1:
        return scales.reshape(1, 1)
    if scales.ndim == 1:
        return scales[:, None]
    height, width = block or (-(-shape[0] // scales.shape[0]), -(-shape[1] // scales.shape[1]))
    return np.repeat(np.repeat(scales, height, axis=0)[: shape[0]], width, axis=1)[:, : shape[1]]

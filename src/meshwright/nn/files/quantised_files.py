"""Quantised Hugging Face checkpoints, read as the float32 tensors that they stand for.

    GPTQ                 qweight, qzeros, scales, g_idx    Frantar et al., 2022; zeros are stored less one
    AWQ                  qweight, qzeros, scales           Lin et al., 2023; columns of an int32 out of order
    compressed-tensors   weight or weight_packed, with weight_scale, weight_zero_point, weight_shape
    fp8 in blocks        weight, weight_scale_inv          DeepSeek-V3, 2024
    mxfp4                <weight>_blocks, <weight>_scales  gpt-oss, 2025; OCP Microscaling Formats 1.0, 2023

Each replaces `<layer>.weight`, or of mxfp4 the weight of all experts, by tensors of its own. `dequantised`
gives the weights back under their names.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from meshwright.errors import CheckpointError
from meshwright.files import parse_json, read_text

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "mxfp4")
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which column each nibble of an int32 holds


@dataclass(frozen=True)
class _Weight:
    """A weight of float32, made when it is indexed, with the methods of a safetensors slice.

    read: what an index gives of it.
    """

    shape: tuple[int, ...]
    read: Callable[[Any], np.ndarray]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read(index)


@dataclass(frozen=True)
class _Fp8Slice:
    """A tensor of 8-bit floating point, which safetensors does not give to numpy."""

    file: Path
    shape: tuple[int, ...]
    name: str

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F8_E4M3"

    def __getitem__(self, index: Any) -> np.ndarray:
        with self.file.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            begin, _ = json.loads(file.read(length))[self.name]["data_offsets"]
        kind = ml_dtypes.float8_e4m3fn
        return np.memmap(self.file, kind, "r", 8 + length + begin, self.shape)[index]


def slice_of(file: Path, handle: Any, name: str) -> Any:
    """A tensor of an open safetensors file, read where it is indexed."""
    found = handle.get_slice(name)
    return _Fp8Slice(file, tuple(found.get_shape()), name) if found.get_dtype() == "F8_E4M3" else found


def dequantised(folder: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """`stored`, tensors by name, with the weights that config.json says are quantised as float32.

    Raises CheckpointError for a method or a form of one that is not read, and for tensors that do not fit
    each other.
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
    if method == "mxfp4":
        return reader.mxfp4()
    read = {"gptq": reader.gptq, "awq": reader.awq}.get(method, reader.compressed)
    marks = {"gptq": (".qweight",), "awq": (".qweight",)}.get(
        method, (".weight_packed", ".weight_scale", ".weight_scale_inv")
    )
    found = dict(stored)
    for layer in sorted(
        {name.removesuffix(mark) for name in stored for mark in marks if name.endswith(mark)}
    ):
        for part in _PARTS:
            found.pop(f"{layer}.{part}", None)
        found[f"{layer}.weight"] = read(layer)
    return {name: value for name, value in found.items() if not name.endswith(_PASSED_OVER)}


_PARTS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_zero_point",
    "weight_shape",    "weight_scale_inv", "weight_g_idx", "input_scale",
)  # fmt: skip
_PASSED_OVER = (".k_scale", ".v_scale", ".input_scale", ".output_scale")  # of activations and caches


def _quantization_config(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    config = parse_json(read_text(path, CheckpointError))
    found = config.get("quantization_config") or config.get("compression_config")
    return found if isinstance(found, Mapping) else None


class _Reader:
    def __init__(self, folder: Path, config: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        self._folder, self._config, self._stored = folder, config, stored

    def mxfp4(self) -> dict[str, Any]:
        """Every tensor by name; `<weight>_blocks` and `<weight>_scales` as the weight."""
        found = dict(self._stored)
        for blocks in (name for name in self._stored if name.endswith("_blocks")):
            weight = blocks.removesuffix("_blocks")
            scales = f"{weight}_scales"
            of_blocks, of_scales = self._shape(blocks), self._shape(scales)
            if len(of_blocks) != 4 or of_blocks[3] != 16 or of_blocks[:3] != of_scales:
                raise CheckpointError(
                    f"checkpoint {self._folder}: {blocks} is {of_blocks} and {scales} {of_scales}; "
                    "fits: [E, out, in / 32, 16] and [E, out, in / 32]"
                )
            experts, num_out, groups = of_scales
            read = partial(_of_blocks, found.pop(blocks), found.pop(scales))
            found[weight] = _Weight((experts, 32 * groups, num_out), read)
        return found

    def gptq(self, layer: str) -> _Weight:
        """w[in, out] = scales[g, out] * (q[in, out] - zeros[g, out]), eight inputs of an int32 each."""
        bits = self._bits(self._config.get("bits"), (2, 4, 8))
        packed, scales = self._shape(f"{layer}.qweight"), self._shape(f"{layer}.scales")
        num_in, num_out = packed[0] * 32 // bits, packed[1]
        plus = 0 if self._config.get("checkpoint_format") == "gptq_v2" else 1

        def read(index: Any) -> np.ndarray:
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

        def read(index: Any) -> np.ndarray:
            q, zeros = (_awq(self._read(f"{layer}.{part}")) for part in ("qweight", "qzeros"))
            groups = np.arange(num_in) // (num_in // scales[0])
            scale = self._read(f"{layer}.scales").astype(np.float32)
            return ((q - zeros[groups]) * scale[groups]).T[index]

        return _Weight((num_out, num_in), read)

    def compressed(self, layer: str) -> _Weight:
        """w[out, in] = scale * (q - zero) with scales of the tensor, of outputs, of groups or of blocks."""
        if f"{layer}.weight_packed" in self._stored:
            return self._packed(layer)
        scale = f"{layer}.weight_scale_inv" if f"{layer}.weight_scale_inv" in self._stored else None
        shape = self._shape(f"{layer}.weight")

        def read(index: Any) -> np.ndarray:
            q = self._read(f"{layer}.weight").astype(np.float32)
            zero = f"{layer}.weight_zero_point"
            if zero in self._stored:
                q = q - _spread(self._read(zero).astype(np.float32), shape, self._block(scale))
            scales = self._read(scale or f"{layer}.weight_scale").astype(np.float32)
            return (q * _spread(scales, shape, self._block(scale)))[index]

        return _Weight((shape[0], shape[1]), read)

    def _packed(self, layer: str) -> _Weight:
        """Integers of few bits, an output's in the int32s of its row, moved up by half of their range."""
        bits = self._bits(_num_bits(self._config), (2, 4, 8))
        num_out, num_in = (int(size) for size in self._read(f"{layer}.weight_shape"))
        half = 1 << (bits - 1)

        def read(index: Any) -> np.ndarray:
            q = _unpacked(self._read(f"{layer}.weight_packed"), bits, axis=1)[:, :num_in] - half
            scales = self._read(f"{layer}.weight_scale").astype(np.float32)
            groups = self._groups(layer, "weight_g_idx", num_in, scales.shape[1])
            if f"{layer}.weight_zero_point" in self._stored:
                zeros = _unpacked(self._read(f"{layer}.weight_zero_point"), bits, axis=0)[:num_out] - half
                q = q - zeros[:, groups]
            return (q * scales[:, groups])[index]

        return _Weight((num_out, num_in), read)

    def _groups(self, layer: str, name: str, num_in: int, num_groups: int) -> np.ndarray:
        """The group of each input: as listed, else one after another."""
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


def _of_blocks(blocks: Any, scales: Any, index: tuple[slice, slice, slice]) -> np.ndarray:
    """What is indexed of a weight [E, in, out] in mxfp4, made of these experts and outputs alone.

    blocks: u8[E, out, in / 32, 16], of which a byte holds two inputs in e2m1, the lower bits first. scales:
    u8[E, out, in / 32], powers of two with a bias of 127.
    """
    experts, inputs, outputs = index
    packed, exponents = blocks[experts, outputs], scales[experts, outputs].astype(np.int32) - 127
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    wide = np.ldexp(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32), exponents[..., None])
    return wide.reshape(*wide.shape[:2], -1).swapaxes(1, 2)[:, inputs]


def _num_bits(config: Mapping[str, Any]) -> Any:
    """Bits of the weights of the first group of layers of compressed-tensors."""
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
    """Scales [out, in], or of one input each: of a tensor, of outputs, or of blocks of both."""
    if scales.size == 1:
        return scales.reshape(1, 1)
    if scales.ndim == 1:
        return scales[:, None]
    height, width = block or (-(-shape[0] // scales.shape[0]), -(-shape[1] // scales.shape[1]))
    return np.repeat(np.repeat(scales, height, axis=0)[: shape[0]], width, axis=1)[:, : shape[1]]

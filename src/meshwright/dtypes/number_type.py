"""The record of a number type: its format, scales, names elsewhere, and uses."""

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

Use = Literal[
    "weights",
    "frozen weights",
    "activations",
    "operands",
    "saved activations",
    "gradients",
    "optimizer state",
    "cache",
    "indices",
]
Phase = Literal["train", "serve"]
# Numbers along each dimension of a tile, which has a scale (`matmul_scales=tiles`).
TILE = 128
# The scope in HLO of operations that widen the operands of a product that the chip cannot multiply.
EMULATED = "emulated"
# Scales of rows, tiles, groups and blocks of a moment are float32.
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Scales:
    """Scales that multiply the numbers of a type.

    block: numbers along the summed dimension that share a scale; None: a row, a tile or an output.
    dtype: the type of the scales of blocks. square: a weight's blocks are `block` by `block`.
    has_global: a power of two in float32 multiplies all scales of an operand.
    """

    block: int | None = None
    dtype: str = "f32"
    square: bool = False
    has_global: bool = False


@dataclass(frozen=True)
class NumberType:
    """A type of numbers, as each room of the package needs it.

    name: in layouts, on the command line and in documents. aliases: other names on the command line and in
    published sources. about: a phrase for tables. largest: the largest finite number, which scales bring the
    largest magnitude to.

    levels: the number of each code, in order; None if the elements are the numbers.

    jax: the name of its elements in JAX and ml_dtypes. hlo: their names in HLO text, first the name in
    programs of `jax`, then others that count as this type. safetensors: the name in a safetensors header.
    compressed_tensors: the format of weights that `mw quantize` writes. quant_method: the method in
    config.json that stores weights in it. of_experts: files quantise only the weights of experts to it.
    declared: other properties of its weights in a `quantization_config`, as `models/stored.py` joins them.

    trained_as, served_as: uses that run, in training and in inference; frozen weights have adapters that are
    trained. planned_as: more uses that can be planned. Any type of activations is also the type of operands
    and caches of its own layouts.

    emulated_on: kinds of chips whose programs round operands to the type and multiply them in a wider one,
    unless the chip has units for it. capability: the lowest NVIDIA compute capability of GPUs with units.
    priced_as: the type whose rate these units have. operands_on: kinds of chips that round activations next
    to weights of this type in inference, unless the layout says otherwise. operands: the type that they are
    rounded to; None: this type. tables: the type of embedding tables among weights of this type, if another.
    native_operands: types of activations that the C++ kernels for CPUs multiply by weights of this type.
    """

    name: str
    about: str
    bits: int
    largest: float
    jax: str
    hlo: tuple[str, ...] = ()
    is_integer: bool = False
    aliases: tuple[str, ...] = ()
    scales: Scales | None = None
    levels: tuple[float, ...] | None = None
    safetensors: str | None = None
    compressed_tensors: str | None = None
    quant_method: str | None = None
    of_experts: bool = False
    declared: tuple[str, ...] = ()
    trained_as: frozenset[Use] = frozenset()
    served_as: frozenset[Use] = frozenset()
    planned_as: frozenset[Use] = frozenset()
    emulated_on: frozenset[str] = frozenset()
    capability: float | None = None
    priced_as: str | None = None
    operands_on: frozenset[str] = frozenset()
    operands: str | None = None
    tables: str | None = None
    native_operands: frozenset[str] = frozenset()

    @property
    def bytes(self) -> float:
        """Bytes of an element, without its share of a scale."""
        return self.bits / 8 if self.bits % 8 else self.bits // 8

    @property
    def uses(self) -> frozenset[Use]:
        """All uses that can be planned."""
        return self.trained_as | self.served_as | self.planned_as

    def uses_in(self, phase: Phase | None) -> frozenset[Use]:
        """Uses in programs of a phase; None: in plans."""
        return {"train": self.trained_as, "serve": self.served_as, None: self.uses}[phase]

    @property
    def served_operands(self) -> str:
        """The type of rounded activations next to weights of this type, in inference."""
        return self.operands or self.name

    @property
    def has_line_scales(self) -> bool:
        """Whether operands have a float32 scale for each row or tile."""
        return self.scales is not None and self.scales.block is None

    @property
    def is_blocked(self) -> bool:
        """Whether operands of products have scales of blocks, narrower than float32."""
        return self.scales is not None and self.scales.dtype != "f32"

    @property
    def group(self) -> int | None:
        """Inputs of a stored weight that share a float32 scale; None: all inputs of an output."""
        return None if self.scales is None or self.is_blocked else self.scales.block

    def widens_to(self, wider: "NumberType") -> bool:
        """Whether products in this type can be computed in `wider`: fp8 in bf16, int4 in int8 or bf16.

        A number and the narrow scale of its block have more bits together than an 8-bit type.
        """
        if self.is_integer != wider.is_integer:
            return self.is_integer and wider.bits > self.bits
        return wider.bits >= (16 if self.is_blocked or self.levels else self.bits)

    def has_units(self, listed: Collection[str], capability: float | None) -> bool:
        """Whether a chip multiplies the type: it lists a rate, or is a GPU of a late enough generation."""
        since = inf if self.capability is None else self.capability
        return self.name in listed or (self.priced_as in listed and (capability or 0) >= since)

    def weight_bytes(self, inputs: Any) -> Any:
        """Bytes of a stored weight's number, with its share of a scale over `inputs` or a group of them."""
        if self.scales is None:
            return self.bytes
        if self.is_blocked:
            return self.bytes + 1 / (self.scales.block or inputs)  # scales of blocks have 8 bits
        return self.bytes + _SCALE_BYTES / (self.group or inputs)

    def saved_bytes(self, length: Any, scales: str | None) -> Any:
        """Bytes of a saved activation's number, with its share of a scale.

        length: numbers in a device's rows. scales: of "rows" (None), or of "tiles" along them.
        """
        num_scales = -(-length // TILE) if scales == "tiles" else 1
        return self.bytes + _SCALE_BYTES * num_scales / length

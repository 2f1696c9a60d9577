"""A record of an optimizer: its state of a weight, and the work and exchanges of an update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

from meshwright.dtypes import COMPUTED, dtype_bytes, number_type, types_for
from meshwright.errors import LayoutError
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import OF_STACKS, Param, dimensions, parameters
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.mesh import Degrees
from meshwright.units import Numeric

# Types of a state in 8 bits, whose blocks have float32 scales (nn/moments.py).
PACKED_DTYPES = tuple(name for name in types_for("optimizer state") if number_type(name).scales)
# Maximum numbers of a row in 8 bits that share a scale.
_BLOCK = 128
# Elementwise operations of AdamW for an element: clipping (a square for the norm, the quotient and the
# choice) 3; decay, rate and weight 4; m 3; v 4; both over 1 - b^t 2; square root; + eps; quotient.
ADAMW_OPERATIONS = 19


def num_scale_blocks(numbers: Numeric) -> Any:
    """Blocks of a device's share of a row in 8 bits.

    >>> num_scale_blocks(128), num_scale_blocks(192)
    (1, 2)
    """
    return -(-numbers // _BLOCK)


def state_bytes(dtype: str, elements: Numeric, blocks: Numeric) -> Any:
    """Bytes of an optimizer's state, with the scales of its blocks."""
    scales = blocks * dtype_bytes("f32") if dtype in PACKED_DTYPES else 0
    return elements * dtype_bytes(dtype) + scales


class Exchange(NamedTuple):
    """A collective of an update. elements: of a device's operand. times: runs in a row."""

    what: Literal["momentum", "mean squares"]
    op: Literal["all_to_all", "all_reduce"]
    axes: Axes
    elements: Any
    times: int = 1


@dataclass(frozen=True)
class WeightShard:
    """The largest shard of a weight that one device updates.

    array: the weight as it is updated. sizes: of dimensions. Figures are arrays if `mesh` is of many layouts.
    """

    path: str
    param: Param
    array: ShardedArray
    sizes: Mapping[str, Any]
    mesh: Degrees

    @property
    def shape(self) -> dict[str, Any]:
        """The size of the shard by letter."""
        letters = zip(self.param.letters, self.array.axes, strict=True)
        return {letter: -(-self.sizes[letter] // self.mesh.size(axes)) for letter, axes in letters}

    @property
    def elements(self) -> Any:
        return prod(self.shape.values())


@dataclass(frozen=True)
class Optimizer:
    """An optimizer whose state is moments of a weight's shape; others override `state`.

    words: a clause for help and docs. moments: names of the arrays that each weight has at least. operations:
    elementwise operations for an element in an update; None: not counted, taken as AdamW's. num_sums: sums
    over a weight in an update, one after another, the gradients' norm included.
    by_whole_sizes: whether an update depends on the mean squares of whole weights, layers included. unpacked:
    the reason that its state is not kept in 8 bits; None: it may be.
    """

    name: str
    words: str
    moments: tuple[str, ...]
    operations: int | None = None
    num_sums: int = 1
    by_whole_sizes: bool = False
    unpacked: str | None = None

    def state(self, path: str, param: Param, sizes: Mapping[str, Any]) -> dict[str, str]:
        """The letters of each array that is kept of a weight from one update to the next."""
        return dict.fromkeys(self.moments, param.letters)

    def averaged(self, param: Param, sizes: Mapping[str, Any]) -> Sequence[str]:
        """The letters of a weight that the state has means over."""
        return ()

    def product_flops(self, weight: WeightShard) -> Any:
        """FLOPs of matrix products in an update."""
        return 0

    def exchanges(self, weight: WeightShard) -> list[Exchange]:
        """The collectives of a weight's update, other than sums of its gradients."""
        return []

    def state_elements(self, weight: WeightShard) -> Any:
        """Elements of the state on the device."""
        shape = weight.shape
        arrays = self.state(weight.path, weight.param, weight.sizes).values()
        return sum(prod(shape[letter] for letter in letters) for letters in arrays)

    def state_blocks(self, weight: WeightShard) -> Any:
        """Blocks of the state on the device if it is in 8 bits."""
        shape = weight.shape
        arrays = self.state(weight.path, weight.param, weight.sizes).values()
        return sum(
            prod(shape[letter] for letter in letters[:-1]) * num_scale_blocks(shape[letters[-1]])
            for letters in arrays
        )

    def flops(self, weight: WeightShard) -> Any:
        """FLOPs of the update, products included."""
        operations = ADAMW_OPERATIONS if self.operations is None else self.operations
        return operations * weight.elements + self.product_flops(weight)

    def check_dtype(self, dtype: str) -> None:
        """Raises LayoutError if the state is not kept in `dtype`."""
        if self.unpacked and dtype in PACKED_DTYPES:
            raise LayoutError(
                f"layout: optimizer_dtype = {dtype} with optimizer = {self.name}, {self.unpacked}; "
                f"fits: optimizer_dtype in {{{', '.join(COMPUTED)}}}"
            )

    def check_stages(self, config: ModelConfig) -> None:
        """Raises LayoutError if stages with parts of the layers cannot update this model."""
        for path, param in parameters(config).items():
            sizes = dimensions(config, path)
            if param.trained and set(self.averaged(param, sizes)) & set(OF_STACKS):
                raise LayoutError(
                    f"{path}[{', '.join(param.letters)}]: optimizer = {self.name} averages over its "
                    f"{sizes[param.letters[0]]} layers, of which a stage has a part; fits: schedule = lanes, "
                    "or another optimizer"
                )

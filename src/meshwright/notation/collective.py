"""Collectives, and the sequence of them from one sharding of an array to another.

all_gather      A[I_X] -> A[I]           removes a subscript
reduce_scatter  A[I]{U_X} -> A[I_X]      turns a partial sum into a subscript
all_reduce      A[I]{U_X} -> A[I]        = reduce_scatter + all_gather
all_to_all      A[I_X, J] -> A[I, J_X]   moves a subscript
permute         A[I_X] -> A[I_Y]         sends each device the block of another device
slice           A[I] -> A[I_X]           each device keeps its part; no communication
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, takewhile
from math import prod
from typing import Literal

from meshwright.dtypes import dtype_bytes
from meshwright.errors import NotationError
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.mesh import Degrees
from meshwright.units import whole

ReshardOp = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "slice"]


@dataclass(frozen=True)
class Collective:
    """One collective over `axes`, from `operand` to `result`."""

    op: ReshardOp
    axes: Axes
    operand: ShardedArray
    result: ShardedArray

    def gathered_bytes(self, mesh: Degrees, sizes: Mapping[str, float], dtype: str) -> int:
        """V: bytes of a device's part of the array after a gather over `axes`."""
        dims = zip(self.operand.dims, self.operand.axes, strict=True)
        block = prod(sizes[dim] / mesh.size(axes) for dim, axes in dims) * dtype_bytes(dtype)
        return gathered_of_block(self.op, block, mesh.size(self.axes))

    @property
    def title(self) -> str:
        """The name in text: AllGather."""
        return TITLES[self.op]

    def __str__(self) -> str:
        return f"{self.title}_{{{','.join(self.axes)}}} {self.operand} -> {self.result}"


TITLES = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "permute": "Permute",
    "slice": "Slice",
}


def gathered_of_block(op: ReshardOp, block_bytes: float, num_devices: int) -> int:
    """V of a collective among n devices that each hold a block of the operand.

    all_gather, all_to_all, permute   n blocks, as after an all-gather
    reduce_scatter, all_reduce        one block, which is a partial sum of the whole
    slice                             one block, which is cut
    Source: How to Scale Your Model, "Sharded Matrices".
    """
    blocks = num_devices if op in ("all_gather", "all_to_all", "permute") else 1
    return whole(block_bytes * blocks)


def ring_bytes(op: ReshardOp, gathered_bytes: float, num_devices: int) -> float:
    """Bytes V of an all-gather that takes the same time on a ring: a price without hardware.

        all_gather, reduce_scatter V    all_reduce 2 V    all_to_all V/4    permute 2 V/n    slice 0

    A permute sends its block V/n in one direction, with half of the ring's bandwidth.
    """
    if op == "permute":
        return 2 * gathered_bytes / num_devices
    return _RING_WEIGHTS[op] * gathered_bytes


_RING_WEIGHTS: dict[ReshardOp, float] = {
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,
    "all_to_all": 0.25,
    "slice": 0.0,
}


def reshard(array: ShardedArray, target: ShardedArray) -> list[Collective]:
    """The collectives from `array` to `target`: shrink first, grow last.

    Slices and reduce-scatters make the block smaller, so they go first; all-gathers go last.
    Blocks are contiguous, so an axis can be added or removed only as the minor (last) axis of its dimension.
    If that is not enough, the dimension is gathered to the common prefix of both shardings. Steps that a
    gather makes possible follow before the next gather.

    The result does not depend on the mesh, sizes or prices: a contraction derives it once for all machines.
    For the reshards of layouts it is the cheapest (tests/cost/test_reshard_seconds.py).
    `notation.resharding.cheapest_reshard` searches for any two shardings on a given machine.
    """
    return list(_reshard(array, target))


@lru_cache(maxsize=4096)
def _reshard(array: ShardedArray, target: ShardedArray) -> tuple[Collective, ...]:
    assert array.dims == target.dims, f"{array} and {target} have different dimensions"
    if not set(target.unreduced) <= set(array.unreduced):
        raise NotationError(f"{array} -> {target}: a finished sum cannot become partial again")
    steps: list[Collective] = []
    if array.same_layout(target):
        return ()
    for stage in (_shrink, _all_reduce, _all_gather, _slice):
        for op, axes, result in stage(array, target):
            steps.append(Collective(op, axes, array, result))
            array = result
    assert array.same_layout(target), f"{array} is not {target}"
    return tuple(steps)


_Moves = Iterator[tuple[ReshardOp, Axes, ShardedArray]]


def _missing(array: ShardedArray, target: ShardedArray, dim: str) -> Axes:
    """The axes that `dim` still needs, if they can be appended to its present axes."""
    have, want = array.axes_of(dim), target.axes_of(dim)
    return want[len(have) :] if want[: len(have)] == have else ()


def _shrink(array: ShardedArray, target: ShardedArray) -> _Moves:
    """Steps that enlarge no block; each may make others possible, so repeat until there is none."""
    moves = True
    while moves:
        moves = False
        for stage in (_slice, _reduce_scatter, _all_to_all):
            for op, axes, result in stage(array, target):
                array, moves = result, True
                yield op, axes, result


def _slice(array: ShardedArray, target: ShardedArray) -> _Moves:
    for dim in array.dims:
        busy = set(array.sharded_axes) | set(array.unreduced)
        added = tuple(takewhile(lambda axis, busy=busy: axis not in busy, _missing(array, target, dim)))
        if added:
            array = array.replace(axes={dim: array.axes_of(dim) + added})
            yield "slice", added, array


def _reduce_scatter(array: ShardedArray, target: ShardedArray) -> _Moves:
    for dim in array.dims:
        partial = set(array.unreduced)
        added = tuple(takewhile(lambda axis, partial=partial: axis in partial, _missing(array, target, dim)))
        if added:
            rest = tuple(axis for axis in array.unreduced if axis not in added)
            array = array.replace(axes={dim: array.axes_of(dim) + added}, unreduced=rest)
            yield "reduce_scatter", added, array


def _all_to_all(array: ShardedArray, target: ShardedArray) -> _Moves:
    for source, dim in permutations(array.dims, 2):
        have, wanted = array.axes_of(source), _missing(array, target, dim)
        count = max((n for n in range(1, len(wanted) + 1) if have[-n:] == wanted[:n]), default=0)
        moved = have[len(have) - count :]
        if moved and not set(moved) & set(target.axes_of(source)):
            array = array.replace(axes={source: have[: len(have) - count], dim: array.axes_of(dim) + moved})
            yield "all_to_all", moved, array


def _all_reduce(array: ShardedArray, target: ShardedArray) -> _Moves:
    axes = tuple(axis for axis in array.unreduced if axis not in target.unreduced)
    if axes:
        yield "all_reduce", axes, array.replace(unreduced=target.unreduced)


def _all_gather(array: ShardedArray, target: ShardedArray) -> _Moves:
    for dim in array.dims:
        have, want = array.axes_of(dim), target.axes_of(dim)
        prefix = tuple(
            mine for mine, wanted in takewhile(lambda pair: pair[0] == pair[1], zip(have, want, strict=False))
        )
        if have != prefix:
            array = array.replace(axes={dim: prefix})
            yield "all_gather", have[len(prefix) :], array
            for op, axes, result in _shrink(array, target):
                array = result
                yield op, axes, result

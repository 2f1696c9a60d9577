"""Least seconds that each choice of roles can take, for all choices at once.

The product's time is exact. Of the collectives only what no route avoids is counted, at the best
rate of the axes involved:

    an operand, gathered over the axes that its roles take off it     V = its block in the end
    an array, exchanged along axes that change their dimension        V = its least block, n of them
    a partial product, reduced, and gathered again if not scattered   V = its block, sliced
    an output, gathered over the axes that its product has beyond it  V = its block in the end

So strategies can be priced in the order of these bounds until none left can be cheaper.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product as cartesian
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from meshwright.cost.collectives import collective_seconds
from meshwright.cost.strategy import Question
from meshwright.errors import NotationError
from meshwright.hardware.topology import Placement
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Einsum
from meshwright.units import dtype_bytes

MAX_CHOICES = 1 << 17
_LARGE = 10**12  # bytes: long enough that a collective runs at its full rate

Role = str | None


class RoleTable(NamedTuple):
    """Choices of a role for each axis.

    letters: positions in the einsum's letters, -1 for none, a row an axis. The others are bit masks:
    the axes that split each array, and those that split a contracted letter.
    """

    roles: list[tuple[Role, ...]]
    letters: np.ndarray
    lhs: np.ndarray
    rhs: np.ndarray
    out: np.ndarray
    partial: np.ndarray


@lru_cache(maxsize=1024)
def role_table(einsum: Einsum, choices: tuple[tuple[Role, ...], ...]) -> RoleTable:
    """All combinations of one role from each of `choices`."""
    roles = list(cartesian(*choices))
    place = {letter: position for position, letter in enumerate(einsum.letters)}
    rows = [[place.get(one[axis] or "", -1) for one in roles] for axis in range(len(choices))]
    letters = np.array(rows, dtype=np.int64).reshape(len(choices), len(roles))

    def mask(wanted: str) -> np.ndarray:
        positions = [einsum.letters.index(letter) for letter in wanted]
        bits = np.isin(letters, positions).astype(np.int64)
        return (bits << np.arange(len(choices))[:, None]).sum(axis=0)

    return RoleTable(
        roles, letters, mask(einsum.lhs), mask(einsum.rhs), mask(einsum.out), mask(einsum.contracted)
    )


class _Machine(NamedTuple):
    """For every set of axes, as a bit mask: devices along it, and least seconds a byte of V over it.

    The rate is the best of any of its subsets: a route may leave the larger part to those alone.
    """

    degrees: np.ndarray
    gather: np.ndarray
    all_to_all: np.ndarray


@lru_cache(maxsize=1024)
def _machine(placement: Placement, axes: Axes) -> _Machine:
    degrees = np.ones(1 << len(axes))
    for bits in range(1, 1 << len(axes)):
        lowest = axes[(bits & -bits).bit_length() - 1]
        degrees[bits] = degrees[bits & (bits - 1)] * placement.sizes[lowest]
    return _Machine(degrees, _rates("all_gather", placement, axes), _rates("all_to_all", placement, axes))


def _rates(op: Literal["all_gather", "all_to_all"], placement: Placement, axes: Axes) -> np.ndarray:
    rates = np.zeros(1 << len(axes))
    for bits in range(1, 1 << len(axes)):
        positions = [position for position in range(len(axes)) if bits >> position & 1]
        smaller = [rates[bits & ~(1 << position)] for position in positions] if len(positions) > 1 else []
        names = tuple(axes[position] for position in positions)
        rates[bits] = min([collective_seconds(op, _LARGE, names, placement).seconds / _LARGE, *smaller])
    return rates


class Bounds(NamedTuple):
    """Seconds of the product, and least seconds of the collectives of each array, a figure a choice."""

    product: np.ndarray
    lhs: np.ndarray
    rhs: np.ndarray
    out: np.ndarray


def lower_bounds(q: Question, axes: Axes, table: RoleTable) -> Bounds:
    """The bounds of each choice in `table`."""
    machine, chip = _machine(q.placement, axes), q.hardware.chip
    degrees = machine.degrees
    lhs, rhs, made = (
        prod([q.sizes[letter] for letter in letters]) * dtype_bytes(q.dtype) / degrees[mask]
        for letters, mask in ((q.einsum.lhs, table.lhs), (q.einsum.rhs, table.rhs), (q.einsum.out, table.out))
    )
    flops = q.einsum.flops(q.sizes) / degrees[table.lhs | table.rhs]
    product = np.maximum(
        flops / (chip.flops(q.dtype) * chip.matmul_efficiency), (lhs + rhs + made) / chip.hbm_bytes_per_second
    )
    to_lhs = _between(machine, lhs, *_given(q.einsum, axes, table, q.lhs), table.lhs)
    to_rhs = _between(machine, rhs, *_given(q.einsum, axes, table, q.rhs), table.rhs)
    return Bounds(product, to_lhs, to_rhs, _ending(q, axes, table, machine, made))


def _given(einsum: Einsum, axes: Axes, table: RoleTable, array: ShardedArray) -> tuple[int, np.ndarray]:
    """(the axes that split `array` as it is given, those of them that split another letter in a choice)."""
    given, elsewhere = 0, np.zeros(len(table.roles), dtype=np.int64)
    for position, axis in enumerate(axes):
        if dim := array.dim_of(axis):
            given |= 1 << position
            elsewhere |= (table.letters[position] != einsum.letters.index(dim)).astype(np.int64) << position
    return given, elsewhere


def _between(
    machine: _Machine, block: np.ndarray, given: int, elsewhere: np.ndarray, split: np.ndarray
) -> np.ndarray:
    """Least seconds from an array split by `given` to blocks of `block` bytes split by `split`.

    What is taken off must be gathered, into `block`. What changes its dimension must be exchanged, in
    blocks no smaller than those that all axes together cut.
    """
    exchanged = elsewhere & split
    smallest = block / machine.degrees[given & ~split]
    seconds = smallest * machine.degrees[exchanged] * machine.all_to_all[exchanged]
    return seconds + block * machine.gather[given & ~split]


def _ending(q: Question, axes: Axes, table: RoleTable, machine: _Machine, made: np.ndarray) -> np.ndarray:
    """Least seconds from the product to the wanted output; none where any will do."""
    if q.out is None:
        return np.zeros_like(made)
    wanted, elsewhere = _given(q.einsum, axes, table, q.out)
    deferred = sum(1 << position for position, axis in enumerate(axes) if axis in q.out.unreduced)
    summed = table.partial & ~deferred
    passes = np.where(summed & wanted, 1.0, 2.0)
    cut = made / machine.degrees[wanted & ~table.out & ~table.partial]
    lost = table.out & ~wanted
    whole = made * machine.degrees[table.out] / machine.degrees[wanted]  # the block of the output
    exchanged = elsewhere & table.out & wanted
    smallest = whole / machine.degrees[lost] * machine.degrees[exchanged]
    return (
        passes * cut * machine.gather[summed]
        + whole * machine.gather[lost]
        + smallest * machine.all_to_all[exchanged]
    )


def within_reason(choices: Sequence[tuple[Role, ...]]) -> bool:
    """Whether all combinations of `choices` can be listed."""
    total = 1
    for roles in choices:
        total *= len(roles)
    return total <= MAX_CHOICES


def too_many(axes: Axes) -> NotationError:
    return NotationError(
        f"the roles of {len(axes)} mesh axes have more than {MAX_CHOICES:,} combinations; "
        "merge axes that always split the same dimension"
    )

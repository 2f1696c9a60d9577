"""Least seconds that each choice of roles can take, for all choices at once.

The product's time is exact. Of the collectives what no route of `reshard` avoids is counted, at full
rate, from the first dimension to the last:

    an operand, gathered over the axes that its roles take off it     V = the block that this leaves
    an array, exchanged along axes that change their dimension        V = its least block, n of them
    a partial product, scattered over the dimensions that want it     V = the block that it has by then
    what is left of the sum, reduced: scattered and gathered          twice that
    an output, gathered over the axes that its product has beyond it  V = the block that this leaves

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
    """Choices of a role for each axis. Axes are bit masks, letters places in the einsum's, a column a choice.

    on: for each letter, the axes that split it. off: for each axis and letter, its bit unless it splits
    that letter. The others are the axes that split each array, and those that split a contracted letter.
    """

    roles: list[tuple[Role, ...]]
    on: np.ndarray
    off: np.ndarray
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
    letters = np.array(rows, dtype=np.int64).reshape(len(choices), 1, len(roles))
    bits = np.left_shift(1, np.arange(len(choices))).reshape(-1, 1, 1)
    splits = letters == np.arange(len(place)).reshape(1, -1, 1)  # axis, letter, choice
    on = (splits * bits).sum(axis=0)

    def mask(wanted: str) -> np.ndarray:
        return on[[place[letter] for letter in wanted]].sum(axis=0)

    masks = map(mask, (einsum.lhs, einsum.rhs, einsum.out, einsum.contracted))
    return RoleTable(roles, on, ~splits * bits, *masks)


class _Rates(NamedTuple):
    """Least seconds of a collective over every set of axes, as a bit mask: max(V . per_byte, floor)."""

    per_byte: np.ndarray
    floor: np.ndarray


class _Machine(NamedTuple):
    """Devices along every set of axes, as a bit mask, and what collectives over it take."""

    degrees: np.ndarray
    gather: _Rates
    reduce: _Rates
    exchange: _Rates


@lru_cache(maxsize=1024)
def _machine(placement: Placement, axes: Axes) -> _Machine:
    degrees = np.ones(1 << len(axes))
    for bits in range(1, 1 << len(axes)):
        lowest = axes[(bits & -bits).bit_length() - 1]
        degrees[bits] = degrees[bits & (bits - 1)] * placement.sizes[lowest]
    gather, reduce, exchange = (
        [_each_set(op, num_bytes, axes, placement) / num_bytes for num_bytes in (_LARGE, 1)]
        for op in ("all_gather", "all_reduce", "all_to_all")
    )
    return _Machine(degrees, _Rates(*gather), _Rates(*reduce), _Rates(*map(_best_part, exchange)))


def _each_set(
    op: Literal["all_gather", "all_reduce", "all_to_all"], num_bytes: int, axes: Axes, placement: Placement
) -> np.ndarray:
    """Seconds of one collective over every set of `axes`."""
    seconds = np.zeros(1 << len(axes))
    for bits in range(1, len(seconds)):
        names = tuple(axis for position, axis in enumerate(axes) if bits >> position & 1)
        seconds[bits] = collective_seconds(op, num_bytes, names, placement).seconds
    return seconds


def _best_part(seconds: np.ndarray) -> np.ndarray:
    """The least of every set's parts, since an exchange may be cut into several."""
    best = seconds.copy()
    for bits in range(1, len(best)):
        parts = [bits & ~(1 << position) for position in range(bits.bit_length()) if bits >> position & 1]
        best[bits] = min([best[bits], *(best[part] for part in parts if part)])
    return best


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
    to_lhs = _between(machine, lhs, _given(q.einsum, axes, table, q.lhs), table.lhs)
    to_rhs = _between(machine, rhs, _given(q.einsum, axes, table, q.rhs), table.rhs)
    return Bounds(product, to_lhs, to_rhs, _ending(q, axes, table, machine, made))


class _Given(NamedTuple):
    """Where the axes of an array are: a bit mask of each dimension, and of all.

    elsewhere: for each choice of roles, those of them that split another letter.
    """

    dims: list[int]
    every: int
    elsewhere: np.ndarray


def _given(einsum: Einsum, axes: Axes, table: RoleTable, array: ShardedArray) -> _Given:
    bits = {axis: 1 << position for position, axis in enumerate(axes)}
    dims = [sum(bits[axis] for axis in split) for split in array.axes]
    elsewhere = np.zeros(len(table.roles), dtype=np.int64)
    for position, axis in enumerate(axes):
        if dim := array.dim_of(axis):
            elsewhere |= table.off[position, einsum.letters.index(dim)]
    return _Given(dims, sum(dims), elsewhere)


def _between(machine: _Machine, block: np.ndarray, given: _Given, split: np.ndarray) -> np.ndarray:
    """Least seconds from an array as given to blocks of `block` bytes split by `split`."""
    lost = [dim & ~split for dim in given.dims if dim]
    return _moves(machine, block, given.elsewhere & split, lost)


def _moves(machine: _Machine, block: np.ndarray, exchanged: np.ndarray, lost: list[np.ndarray]) -> np.ndarray:
    """Least seconds to exchange axes and gather those lost of each dimension, leaving `block` bytes.

    Dimensions are gathered one by one, and their latencies add up. Not so with an exchange: one that
    is not possible joins a gather.
    """
    seconds, floor = np.zeros_like(block), np.zeros_like(block)
    for axes in reversed(lost):
        seconds += block * machine.gather.per_byte[axes]
        floor += machine.gather.floor[axes]
        block = block / machine.degrees[axes]
    seconds += block * machine.degrees[exchanged] * machine.exchange.per_byte[exchanged]
    return np.maximum(seconds, np.maximum(floor, machine.exchange.floor[exchanged]))


def _ending(q: Question, axes: Axes, table: RoleTable, machine: _Machine, made: np.ndarray) -> np.ndarray:
    """Least seconds from the product to the wanted output, or to any without a partial sum."""
    if q.out is None:
        scatter = made * machine.gather.per_byte[table.partial]
        return np.maximum(scatter, machine.gather.floor[table.partial])
    wanted = _given(q.einsum, axes, table, q.out)
    deferred = sum(1 << position for position, axis in enumerate(axes) if axis in q.out.unreduced)
    summed = table.partial & ~deferred
    block = made / machine.degrees[wanted.every & ~table.out & ~table.partial]
    seconds, floor = np.zeros_like(made), np.zeros_like(made)
    for dim in wanted.dims:
        if dim:
            seconds += block * machine.gather.per_byte[summed & dim]
            floor = np.maximum(floor, machine.gather.floor[summed & dim])
            block = block / machine.degrees[summed & dim]
    rest = summed & ~wanted.every
    seconds += block * machine.reduce.per_byte[rest]
    # Of latencies the largest alone, since a scatter that is not possible joins the reduction.
    seconds = np.maximum(seconds, np.maximum(floor, machine.reduce.floor[rest]))
    whole = made * machine.degrees[table.out] / machine.degrees[wanted.every]  # the block of the output
    lost = table.out & ~wanted.every
    exchanged = wanted.elsewhere & table.out & wanted.every
    by_letter = [table.on[q.einsum.letters.index(letter)] & lost for letter in q.einsum.out]
    return seconds + _moves(machine, whole, exchanged, by_letter)


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

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

    on: for each letter, the axes that split it. The others are the axes that split each array, and
    those that split a contracted letter.
    """

    roles: list[tuple[Role, ...]]
    on: np.ndarray
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
    return RoleTable(roles, on, *masks)


class _Rates(NamedTuple):
    """Least seconds of a collective over every set of axes, as a bit mask: max(V . per_byte, floor)."""

    per_byte: np.ndarray
    floor: np.ndarray


class _Machine(NamedTuple):
    """Devices along every set of axes, as a bit mask, and what collectives over it take.

    An exchange is priced by the byte of one block, of which V has as many as there are devices.
    """

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
    per_byte, floor = map(_best_part, exchange)
    return _Machine(degrees, _Rates(*gather), _Rates(*reduce), _Rates(per_byte * degrees, floor))


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


class Bound(NamedTuple):
    """Least seconds of one array's collectives, and how many of them may run under the product.

    Only what is next to the product may: the last gather of an operand, the first scatter of a sum.
    """

    seconds: np.ndarray
    hidden: np.ndarray


class Bounds(NamedTuple):
    """Seconds of the product, and least seconds of the collectives of each array, a figure a choice."""

    product: np.ndarray
    lhs: Bound
    rhs: Bound
    out: Bound


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
        flops / chip.matmul_flops_per_second(q.dtype),
        (lhs + rhs + made) / chip.memory_bytes_per_second(q.dtype),
    )
    to_lhs = _arriving(machine, lhs, q.lhs, table.lhs, table, q.einsum, axes)
    to_rhs = _arriving(machine, rhs, q.rhs, table.rhs, table, q.einsum, axes)
    return Bounds(product, to_lhs, to_rhs, _ending(q, axes, table, machine, made))


def _masks(array: ShardedArray, axes: Axes) -> list[int]:
    """The axes that split each dimension."""
    return [sum(1 << axes.index(axis) for axis in split) for split in array.axes]


def _arriving(
    machine: _Machine,
    block: np.ndarray,
    array: ShardedArray,
    split: np.ndarray,
    table: RoleTable,
    einsum: Einsum,
    axes: Axes,
) -> Bound:
    """From an operand as given to blocks of `block` bytes, split by its roles."""
    places = [einsum.letters.index(dim) for dim in array.dims]
    given = [(place, mask) for place, mask in zip(places, _masks(array, axes), strict=True) if mask]
    exchanged = [table.on[other] & mask for place, mask in given for other in places if other != place]
    seconds, exchange = _moves(machine, block, exchanged, [mask & ~split for _, mask in given])
    is_gathered = (sum(mask for _, mask in given) & ~split) != 0
    return Bound(seconds, np.where(is_gathered, seconds - exchange, 0.0))


def _moves(
    machine: _Machine, block: np.ndarray, exchanged: list[np.ndarray], lost: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Least seconds to exchange axes and then gather those lost of each dimension, leaving `block` bytes.

    The second figure is that of the exchanges alone. exchanged: the axes of each pair of dimensions
    between which they move. Dimensions are gathered one by one, and their latencies add up. Not so
    with an exchange: one that is not possible joins a gather.
    """
    seconds, floor = np.zeros_like(block), np.zeros_like(block)
    for axes in reversed(lost):
        seconds += block * machine.gather.per_byte[axes]
        floor += machine.gather.floor[axes]
        block = block / machine.degrees[axes]
    exchange = np.zeros_like(block)
    for axes in exchanged:
        exchange += block * machine.exchange.per_byte[axes]
        floor = np.maximum(floor, machine.exchange.floor[axes])
    return np.maximum(seconds + exchange, floor), exchange


def _ending(q: Question, axes: Axes, table: RoleTable, machine: _Machine, made: np.ndarray) -> Bound:
    """From the product to the wanted output, or to any without a partial sum."""
    if q.out is None:
        scatter = made * machine.gather.per_byte[table.partial]
        scatter = np.maximum(scatter, machine.gather.floor[table.partial])
        return Bound(scatter, scatter)
    wanted = _masks(q.out, axes)
    every = sum(wanted)
    deferred = sum(1 << axes.index(axis) for axis in q.out.unreduced)
    summed, lost = table.partial & ~deferred, table.out & ~every
    sliced = made / machine.degrees[every & ~table.out & ~table.partial]
    places = [q.einsum.letters.index(letter) for letter in q.einsum.out]
    aims = [(place, mask) for place, mask in zip(places, wanted, strict=True) if mask]
    exchanged = [table.on[other] & mask for place, mask in aims for other in places if other != place]
    reduced = _reductions(machine, sliced, [summed & mask for _, mask in aims], summed & ~every)
    whole = made * machine.degrees[table.out] / machine.degrees[every]  # the block of the output
    moved, _ = _moves(machine, whole, exchanged, [table.on[place] & lost for place in places])
    return Bound(reduced + moved, reduced)


def _reductions(
    machine: _Machine, block: np.ndarray, scattered: list[np.ndarray], rest: np.ndarray
) -> np.ndarray:
    """Least seconds to scatter partial sums over the dimensions in turn and to reduce the rest.

    Of latencies the largest alone, since a scatter that is not possible joins the reduction.
    """
    seconds, floor = np.zeros_like(block), np.zeros_like(block)
    for axes in scattered:
        seconds += block * machine.gather.per_byte[axes]
        floor = np.maximum(floor, machine.gather.floor[axes])
        block = block / machine.degrees[axes]
    seconds += block * machine.reduce.per_byte[rest]
    return np.maximum(seconds, np.maximum(floor, machine.reduce.floor[rest]))


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

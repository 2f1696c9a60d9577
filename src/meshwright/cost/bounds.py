"""Least seconds that each choice of roles can take, for all choices at once.

The product's time is exact. A collective's is a price of what splits, and of which axes are sharded;
so what an array's move takes at least follows from where each axis stands before and after it:

    before   right: it splits the dimension that it shall split; wrong: it splits another; partial; free
    after    it splits some dimension; a partial sum is wanted over it; neither

The cheapest paths between these (notation/lower_bound.py) are found twice for a machine, by bytes
alone and by latencies alone; no way of an array, searched or not, takes less than the longer of both. So
strategies can be priced in the order of these bounds until none that is left can be cheaper.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product as cartesian
from math import prod
from typing import NamedTuple

import numpy as np

from meshwright.cost.resharding import step_price
from meshwright.cost.routing import MAX_AXES
from meshwright.cost.strategy import Question
from meshwright.errors import NotationError
from meshwright.hardware.topology import Placement
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import gathered_bytes
from meshwright.notation.einsum import Einsum
from meshwright.notation.lower_bound import Kind, Summary, graph
from meshwright.units import dtype_bytes

MAX_CHOICES = 1 << 14
_LARGE = 10**12  # bytes: long enough that a collective runs at its full rate

Role = str | None


class RoleTable(NamedTuple):
    """Choices of a role for each axis: a column a choice.

    places: for each axis, the place of its role in the einsum's letters, -1 for none. The others are the
    axes that split each array, as bit masks.
    """

    roles: list[tuple[Role, ...]]
    places: np.ndarray
    lhs: np.ndarray
    rhs: np.ndarray
    out: np.ndarray


@lru_cache(maxsize=1024)
def role_table(einsum: Einsum, choices: tuple[tuple[Role, ...], ...]) -> RoleTable:
    """All combinations of one role from each of `choices`."""
    roles = list(cartesian(*choices))
    place = {letter: position for position, letter in enumerate(einsum.letters)}
    rows = [[place.get(one[axis] or "", -1) for one in roles] for axis in range(len(choices))]
    places = np.array(rows, dtype=np.int64).reshape(len(choices), len(roles))
    bits = np.left_shift(1, np.arange(len(choices))).reshape(-1, 1)

    def mask(wanted: str) -> np.ndarray:
        return (np.isin(places, [place[letter] for letter in wanted]) * bits).sum(axis=0)

    return RoleTable(roles, places, *map(mask, (einsum.lhs, einsum.rhs, einsum.out)))


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
    chip, degrees = q.hardware.chip, _degrees(q.placement, axes)
    lhs, rhs, made = (
        prod([q.sizes[letter] for letter in letters]) * dtype_bytes(q.dtype)
        for letters in (q.einsum.lhs, q.einsum.rhs, q.einsum.out)
    )
    flops = q.einsum.flops(q.sizes) / degrees[table.lhs | table.rhs]
    traffic = lhs / degrees[table.lhs] + rhs / degrees[table.rhs] + made / degrees[table.out]
    product = np.maximum(
        flops / chip.matmul_flops_per_second(q.dtype), traffic / chip.memory_bytes_per_second(q.dtype)
    )
    least = _least(q.placement, axes)
    if least is None:
        nothing = Bound(np.zeros_like(product), np.zeros_like(product))
        return Bounds(product, nothing, nothing, nothing)
    letters = q.einsum.letters
    return Bounds(
        product,
        least.bound(_arriving(q.lhs, letters, axes), table, lhs, least.unhidden_gather),
        least.bound(_arriving(q.rhs, letters, axes), table, rhs, least.unhidden_gather),
        least.bound(_ending(q, axes), table, made, least.unhidden_scatter),
    )


@lru_cache(maxsize=1024)
def _degrees(placement: Placement, axes: Axes) -> np.ndarray:
    """Devices along every set of axes, as a bit mask."""
    sets = cartesian(*[(1, placement.sizes[axis]) for axis in reversed(axes)])
    return np.array([prod(sizes) for sizes in sets], dtype=float)


# Where an axis stands before a move, and after it; a move is a number made of both for every axis.
_FREE, _RIGHT, _WRONG, _PARTIAL = range(4)
_NEITHER, _SPLITS, _IS_PARTIAL = range(3)
_CODES = 12


def _code(before: int, after: int) -> int:
    return 3 * before + after


def _arriving(array: ShardedArray, letters: str, axes: Axes) -> list[np.ndarray]:
    """For each axis the codes of an operand's move to every role, the last of which is none."""
    return [_operand_codes(_where(array, axis), array.dims, letters) for axis in axes]


def _ending(q: Question, axes: Axes) -> list[np.ndarray]:
    """The same from a product of every role to the wanted output, or to any with its sums finished."""
    letters, out = q.einsum.letters, q.einsum.out
    return [_product_codes(_ANY if q.out is None else _where(q.out, axis), out, letters) for axis in axes]


_PARTLY, _ANY = "partial", "any"


def _where(array: ShardedArray, axis: str) -> str | None:
    """The dimension that an axis splits, or that it holds partial sums."""
    return _PARTLY if axis in array.unreduced else array.dim_of(axis)


@lru_cache(maxsize=65536)
def _operand_codes(given: str | None, dims: Axes, letters: str) -> np.ndarray:
    found = []
    for role in (*letters, None):
        before = (
            _PARTIAL if given == _PARTLY else _FREE if given is None else _RIGHT if given == role else _WRONG
        )
        found.append(_code(before, _SPLITS if role in dims else _NEITHER))
    return np.array(found)


@lru_cache(maxsize=65536)
def _product_codes(wanted: str | None, dims: str, letters: str) -> np.ndarray:
    found = []
    for role in (*letters, None):
        made = _FREE if role is None else _PARTIAL if role not in dims else _WRONG
        if made == _WRONG and wanted in (role, _ANY):
            made = _RIGHT
        after = _IS_PARTIAL if wanted == _PARTLY else _NEITHER if wanted is None else _SPLITS
        found.append(_code(made, _NEITHER if role is None and wanted == _ANY else after))
    return np.array(found)


class _Rates(NamedTuple):
    """Least seconds of a move by the number of its codes: by the byte of the whole array, and of latency."""

    per_byte: np.ndarray
    floor: np.ndarray

    def seconds(self, moves: np.ndarray, num_bytes: float) -> np.ndarray:
        return np.maximum(num_bytes * self.per_byte[moves], self.floor[moves])


class _Least(NamedTuple):
    """What moves take at least, in all and beside a transfer next to the product that may be hidden."""

    axes: tuple[int, ...]  # places of those with several devices
    whole: _Rates
    unhidden_gather: _Rates
    unhidden_scatter: _Rates

    def bound(self, codes: list[np.ndarray], table: RoleTable, num_bytes: float, unhidden: _Rates) -> Bound:
        """The bound of moves of an array of so many bytes, whose codes by axis and role are given."""
        moves = np.zeros(len(table.roles), dtype=np.int64)
        for axis in self.axes:
            moves = moves * _CODES + codes[axis][table.places[axis]]
        seconds = self.whole.seconds(moves, num_bytes)
        return Bound(seconds, seconds - unhidden.seconds(moves, num_bytes))


@lru_cache(maxsize=1024)
def _least(placement: Placement, axes: Axes) -> _Least | None:
    """None where the axes are too many to search."""
    places = tuple([place for place, axis in enumerate(axes) if placement.sizes[axis] > 1])
    if len(places) > MAX_AXES:
        return None
    names = tuple([axes[place] for place in places])
    sizes = tuple([placement.sizes[name] for name in names])
    summaries = graph(sizes, (1 << len(names)) - 1)
    moves = [_ends(codes) for codes in cartesian(range(_CODES), repeat=len(names))]
    goals = list(dict.fromkeys(goal for _, goal in moves))
    column = {goal: number for number, goal in enumerate(goals)}
    at = [summaries.number[before] for before, _ in moves], [column[goal] for _, goal in moves]
    found: list[list[np.ndarray]] = []
    for num_bytes in (_LARGE, 0):
        prices = [_kind_seconds(kind, names, sizes, placement, num_bytes) for kind in summaries.kinds]
        prices = np.array(prices) / (num_bytes or 1)
        whole = summaries.seconds(prices, goals)
        unhidden = summaries.seconds(prices, goals, last_gather_is_free=True)
        found.append([seconds[at] for seconds in (whole, unhidden, summaries.after_a_scatter(whole))])
    return _Least(places, *map(_Rates, *found))


def _ends(codes: Sequence[int]) -> tuple[Summary, Summary]:
    """The summaries before and after a move of these codes."""
    before, after = [code // 3 for code in codes], [code % 3 for code in codes]
    return (
        (_mask(before, _RIGHT), _mask(before, _WRONG), _mask(before, _PARTIAL)),
        (_mask(after, _SPLITS), 0, _mask(after, _IS_PARTIAL)),
    )


def _mask(places: Sequence[int], wanted: int) -> int:
    return sum(1 << axis for axis, place in enumerate(places) if place == wanted)


def _kind_seconds(
    kind: Kind, names: Axes, sizes: tuple[int, ...], placement: Placement, num_bytes: int
) -> float:
    """The price of a collective on an array of so many bytes."""
    op, axes, sharded = kind
    over = [place for place in range(len(names)) if axes >> place & 1]
    block = num_bytes / prod([size for place, size in enumerate(sizes) if sharded >> place & 1])
    moved = gathered_bytes(op, block, prod([sizes[place] for place in over]))
    return step_price(placement)(op, tuple([names[place] for place in over]), moved)


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

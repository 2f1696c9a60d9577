"""Every way to multiply two sharded arrays, priced: time, FLOPs, bytes moved and memory.

A strategy is a choice of roles (notation/einsum.py), of what becomes of partial sums where the
output is left open, and of at most one transfer that runs under the product in steps:

    in sequence   t = sum of collectives + product
    windowed      t = the other collectives + max(product, transfer + product / n)

The ring of n devices hands on a block a step. A gathered block is multiplied while the next one
arrives; a scattered one is handed on while the next is multiplied. Of n block products, n - 1 run
beside the n - 1 transfers, so one is added where the transfer is the slower. Hardware that overlaps
in part saves that part of the difference.

    product       t = max(FLOPs / peak, HBM bytes / bandwidth)   operands read once, product written

All roles are ordered by a lower bound of their time (bounds.py) and priced until none that is left
can be cheaper, so the answer is that of pricing every one.
"""

from collections.abc import Iterator
from itertools import product as cartesian
from math import inf

import numpy as np

from meshwright.cost.bounds import lower_bounds, role_table, too_many, within_reason
from meshwright.cost.enumeration import Enumeration, Least, Roles
from meshwright.cost.strategy import Objective, Question, Strategy
from meshwright.errors import LayoutError, NotationError
from meshwright.notation.array import ShardedArray
from meshwright.notation.roles import role_choices
from meshwright.units import format_bytes

# strategies() lists what may take up to so many times as long as the cheapest.
REACH = 2.0


def strategies(
    question: Question, *, memory_limit_bytes: float | None = None, objective: Objective = "latency"
) -> list[Strategy]:
    """The strategies worth a look, the cheapest first; those over the memory limit come last.

    These are: all that take at most REACH times as long as the cheapest, but for those that another
    beats or equals in time, product, collectives and memory at once; and, beaten or not, the
    textbook's ways, in which an axis takes part in one collective at most.
    Where the output is left open, each end of a partial sum is a strategy, and one that leaves it
    partial sorts behind those that finish it: whoever reads it pays.
    objective: "latency" is one run on its own, "throughput" one of many that overlap.
    Raises NotationError where a dimension does not divide or a wanted partial sum cannot be.
    """
    return _listed(question, objective, memory_limit_bytes, REACH)


def _listed(
    question: Question, objective: Objective, memory_limit_bytes: float | None, reach: float
) -> list[Strategy]:
    _check(question)
    # Memory may be what the rules are better in.
    enumeration = Enumeration(question, "useful" if memory_limit_bytes is None else "both")
    listed = _Listed(question, objective, memory_limit_bytes, reach)
    by_rules = enumeration.by_rules()
    for roles in sorted(cartesian(*_textbook_roles(by_rules)), key=str):
        by_rules.price(roles, listed)
    listed.keeps_simple = False
    for bound, roles, least in _by_bound(enumeration, objective):
        if bound > listed.limit:
            break
        enumeration.price(roles, listed, least, listed.limit)
    found = listed.strategies()
    if not found:
        raise NotationError(f"{question.out}: no role of the mesh axes leads to it with blocks of equal size")
    return sorted(found, key=lambda s: _rank(s, objective, memory_limit_bytes))


def cheapest(
    question: Question, *, memory_limit_bytes: float | None = None, objective: Objective = "latency"
) -> Strategy:
    """The first of `strategies`, found without the others.

    Raises NotationError as there, and LayoutError where no strategy fits the memory.
    """
    _check(question)
    enumeration = Enumeration(question, "useful" if memory_limit_bytes is None else "both")
    best = _Best(question, objective, memory_limit_bytes)
    for bound, roles, least in _by_bound(enumeration, objective):
        if bound >= best.least:
            break
        enumeration.price(roles, best, least, best.least)
    if best.strategy is None:
        raise _none_fits(question, memory_limit_bytes)
    return best.strategy


def _none_fits(question: Question, memory_limit_bytes: float | None) -> LayoutError:
    found = _listed(question, "latency", None, inf)  # raises where there is none at all
    least = min(strategy.bytes_per_device for strategy in found)
    return LayoutError(
        f"no strategy fits {format_bytes(memory_limit_bytes or 0)} a device; the leanest needs "
        f"{format_bytes(least)}: shard an operand further or use more devices"
    )


def _rank(strategy: Strategy, objective: Objective, limit: float | None) -> tuple:
    return (
        not strategy.fits(limit),
        strategy.leaves_partial_sum,
        strategy.objective_seconds(objective),
        strategy.seconds,
        strategy.bytes_per_device,
    )


def _check(q: Question) -> None:
    arrays = ((q.lhs, q.einsum.lhs), (q.rhs, q.einsum.rhs), (q.out, q.einsum.out))
    for array, letters in arrays:
        if array is None:
            continue
        if array.dims != tuple(letters):
            raise NotationError(f"{array} does not have the dimensions {letters} of {str(q.einsum)!r}")
        q.mesh.size(array.unreduced)  # raises for an axis that the mesh does not have
        array.local_shape(q.mesh, q.sizes)  # raises where a size is missing or does not divide
    if q.out is not None and q.out.unreduced and not q.einsum.contracted:
        raise NotationError(f"{q.out}: {str(q.einsum)!r} contracts nothing, so it leaves no partial sum")


def _textbook_roles(enumeration: Enumeration) -> list[Roles]:
    q = enumeration.question
    return [role_choices(q.einsum, q.lhs, q.rhs, q.out, axis, q.sizes) for axis in enumeration.axes]


def _by_bound(enumeration: Enumeration, objective: Objective) -> Iterator[tuple[float, Roles, Least]]:
    """Every choice of roles with the least seconds it can take, in that order, and some of their parts.

    Where there are too many to list, the textbook's.
    """
    q, axes = enumeration.question, enumeration.axes
    partial = q.out.unreduced if q.out is not None else ()
    every: list[Roles] = [
        tuple(q.einsum.contracted) if axis in partial else (*q.einsum.letters, None) for axis in axes
    ]
    if not within_reason(every):
        every = _textbook_roles(enumeration)
    if not within_reason(every):
        raise too_many(axes)
    table = role_table(q.einsum, tuple(every))
    product, lhs, rhs, out = lower_bounds(q, axes, table)
    moved = lhs.seconds + rhs.seconds + out.seconds
    least = np.maximum(product, moved)
    if objective == "latency":
        # The product may hide one transfer next to it and waits for the others.
        hidden = np.maximum(np.maximum(lhs.hidden, rhs.hidden), out.hidden)
        least = np.maximum(
            least + (1 - enumeration.overlap) * np.minimum(product, moved), product + moved - hidden
        )
    else:
        product = np.zeros_like(product)
    figures = (product, rhs.seconds, rhs.hidden, out.seconds, out.hidden)
    for index in np.argsort(least, kind="stable").tolist():
        yield least.item(index), table.roles[index], Least(*[figure.item(index) for figure in figures])


class _Best:
    """Keeps the cheapest strategy that fits and finishes its sums; least: its seconds."""

    def __init__(self, question: Question, objective: Objective, limit: float | None) -> None:
        self.least = inf
        self.strategy: Strategy | None = None
        self._by_seconds, self._limit = objective == "latency", inf if limit is None else limit
        self._is_open = question.out is None
        self._figures = (inf, inf, inf)

    def wants(
        self, out: ShardedArray, compute: float, comms: float, seconds: float, peak: int, *, simple: bool
    ) -> bool:
        if peak > self._limit or (self._is_open and out.unreduced):
            return False
        time = seconds if self._by_seconds else max(compute, comms)
        if (time, seconds, peak) >= self._figures:
            return False
        self._figures, self.least = (time, seconds, peak), time
        return True

    def add(self, strategy: Strategy) -> None:
        self.strategy = strategy


Figures = tuple[float, float, float, int]  # compute, comms, seconds, peak


class _Listed:
    """Keeps all strategies but those that another beats or equals in every figure, or that take too long.

    Simple ones stay in any case while `keeps_simple`. limit: `reach` times the seconds of the cheapest.
    """

    def __init__(
        self, question: Question, objective: Objective, memory_limit: float | None, reach: float
    ) -> None:
        self.keeps_simple = True
        self._by_seconds, self._reach = objective == "latency", reach
        self._best = _Best(question, objective, memory_limit)
        self._kept: list[tuple[Strategy, bool]] = []  # and whether it stays in any case
        self._unbeaten: dict[tuple, list[Figures]] = {}  # by where it ends
        self._stays = False

    @property
    def limit(self) -> float:
        return self._reach * self._best.least

    def wants(
        self, out: ShardedArray, compute: float, comms: float, seconds: float, peak: int, *, simple: bool
    ) -> bool:
        self._best.wants(out, compute, comms, seconds, peak, simple=simple)
        self._stays = simple and self.keeps_simple
        if not self._stays and self._takes_too_long(compute, comms, seconds):
            return False
        return self._joins(out, (compute, comms, seconds, peak)) or self._stays

    def _takes_too_long(self, compute: float, comms: float, seconds: float) -> bool:
        return (seconds if self._by_seconds else max(compute, comms)) > self.limit

    def _joins(self, out: ShardedArray, mine: Figures) -> bool:
        """Whether it joins the unbeaten, which loses those that it beats."""
        rivals = self._unbeaten.setdefault((out.axes, out.unreduced), [])
        for rival in rivals:
            if _beats(rival, mine):
                return False
        rivals[:] = [rival for rival in rivals if not _beats(mine, rival)]
        rivals.append(mine)
        return True

    def add(self, strategy: Strategy) -> None:
        self._kept.append((strategy, self._stays))

    def strategies(self) -> list[Strategy]:
        """Those kept that nothing found later beats either, and that still do not take too long."""
        unbeaten = {ends: set(rivals) for ends, rivals in self._unbeaten.items()}
        found: list[Strategy] = []
        for one, stays in self._kept:
            mine = one.seconds_compute, one.seconds_comms, one.seconds, one.bytes_per_device
            is_best = mine in unbeaten[one.out.axes, one.out.unreduced]
            if stays or (is_best and not self._takes_too_long(*mine[:3])):
                found.append(one)
        return found


def _beats(rival: Figures, mine: Figures) -> bool:
    """Whether a strategy is no worse in any figure."""
    return rival[0] <= mine[0] and rival[1] <= mine[1] and rival[2] <= mine[2] and rival[3] <= mine[3]

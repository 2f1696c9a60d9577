"""Every way to multiply two sharded arrays, priced: time, FLOPs, bytes moved and memory.

A strategy is a choice of roles (notation/einsum.py), of the reshard of each array, of the treatment of
partial sums if the output is open, and of at most one transfer that runs in steps under the product:

    in sequence   t = sum of collectives + product
    windowed      t = the other collectives + max(product, transfer + product / n)

A ring of n devices passes one block a step. A gathered block is multiplied while the next one arrives; a
scattered block is sent while the next one is multiplied. n - 1 of the n block products overlap the n - 1
transfers, so one product is added if the transfer is slower. Hardware with partial overlap saves that share
of the difference.

    product       t = max(FLOPs / peak, HBM bytes / bandwidth)   operands read once, product written

Choices of roles are sorted by a lower bound of their time and priced until no other one can be listed. An
array is resharded along the shortest path (notation/resharding.py). Roles that a textbook would try are also
priced with reshards by the rules (`notation.collective.reshard`), which may leave more to a window.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from itertools import product as cartesian
from math import ceil, inf, prod
from typing import NamedTuple

from meshwright.cost.reshard_seconds import PricedReshard, priced_reshard, step_price
from meshwright.cost.strategy import ContractionQuestion, Objective, Strategy
from meshwright.dtypes import dtype_bytes
from meshwright.errors import NotationError
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.einsum import EinsumSide
from meshwright.notation.mesh import Mesh
from meshwright.notation.resharding import Reshards, is_searchable
from meshwright.notation.roles import axis_orders, textbook_roles

# strategies() lists strategies up to this many times as slow as the cheapest.
REACH = 1.5
MAX_COMBINATIONS = 1 << 14

AxisRoles = tuple[str | None, ...]  # a letter, or None, for each axis


def strategies(
    question: ContractionQuestion,
    *,
    memory_limit_bytes: float | None = None,
    objective: Objective = "latency",
) -> list[Strategy]:
    """The strategies worth considering, the cheapest first; any over the memory limit come last.

    These take at most REACH times the seconds of the cheapest, and no other strategy is as good or better in
    time, product, collectives and memory at once. The textbook's strategies, with at most one collective per
    axis, are always listed. If the output is open, each end of a partial sum is a strategy. A strategy that
    leaves the sum partial sorts after the others, since a reader of the result has to finish it.

    objective: "latency" is one run by itself, "throughput" one of many that overlap.

    Raises NotationError if a dimension does not divide or a wanted partial sum is impossible.
    """
    candidates = _Candidates(objective, memory_limit_bytes)
    _check(question)
    pricing = Pricing(question)
    textbook = set(_combinations(pricing, exhaustive=False))
    for bound, roles in sorted(_bounds(pricing, candidates.objective, textbook), key=lambda pair: pair[0]):
        in_textbook = roles in textbook
        if bound <= candidates.limit or in_textbook:
            candidates.add(pricing.strategies(roles, candidates.limit, textbook=in_textbook), in_textbook)
    listed = candidates.listed()
    if not listed:
        raise NotationError(f"{question.out}: no role of the mesh axes leads to it with blocks of equal size")
    return sorted(listed, key=candidates.rank)


def _check(q: ContractionQuestion) -> None:
    arrays = ((q.lhs, q.einsum.lhs), (q.rhs, q.einsum.rhs), (q.out, q.einsum.out))
    for array, letters in arrays:
        if array is None:
            continue
        if array.dims != tuple(letters):
            raise NotationError(f"{array} does not have the dimensions {letters} of {str(q.einsum)!r}")
        q.mesh.size(array.unreduced)  # raises for an axis that the mesh does not have
        array.local_shape(q.mesh, q.sizes)  # raises if a size is missing or does not divide
    if q.out is not None and q.out.unreduced and not q.einsum.contracted:
        raise NotationError(f"{q.out}: {str(q.einsum)!r} contracts nothing, so it leaves no partial sum")


def _combinations(pricing: "Pricing", *, exhaustive: bool) -> list[AxisRoles]:
    """Every choice of a role for each axis; only the textbook's if these are too many."""
    q = pricing.question
    partial = q.out.unreduced if q.out is not None else ()
    every = [tuple(q.einsum.contracted) if a in partial else (*q.einsum.letters, None) for a in pricing.axes]
    if not exhaustive or prod(map(len, every)) > MAX_COMBINATIONS:
        every = [textbook_roles(q.einsum, q.lhs, q.rhs, q.out, axis) for axis in pricing.axes]
    if prod(map(len, every)) > MAX_COMBINATIONS:
        raise NotationError(
            f"the roles of {len(pricing.axes)} mesh axes have more than {MAX_COMBINATIONS:,} combinations; "
            "merge axes that always split the same dimension"
        )
    return list(cartesian(*every))


def _bounds(
    pricing: "Pricing", objective: Objective, textbook: set[AxisRoles]
) -> Iterator[tuple[float, AxisRoles]]:
    """The choices of roles that divide, each with a lower bound of its seconds."""
    for roles in dict.fromkeys([*textbook, *_combinations(pricing, exhaustive=True)]):
        least = pricing.least_seconds(roles, objective)
        if least is not None:
            yield least, roles


class _Candidates:
    """The priced strategies for one objective and memory limit.

    limit: most seconds of a listed strategy, REACH times the cheapest's.
    """

    def __init__(self, objective: Objective, memory_limit: float | None) -> None:
        self.objective: Objective = objective
        self._memory_limit = memory_limit
        self._all: list[Strategy] = []
        self._textbook: list[Strategy] = []
        self.limit = inf

    def add(self, strategies: Iterator[Strategy], in_textbook: bool) -> None:
        for strategy in strategies:
            seconds = strategy.objective_seconds(self.objective)
            if in_textbook and strategy.window is None and _is_textbook(strategy):
                self._textbook.append(strategy)
            if seconds <= self.limit:
                self._all.append(strategy)
                if strategy.fits(self._memory_limit) and not strategy.leaves_partial_sum:
                    self.limit = min(self.limit, REACH * seconds)

    def listed(self) -> list[Strategy]:
        """Strategies on the Pareto front within the limit, plus the textbook's."""
        unbeaten: dict[tuple, list[Strategy]] = {}  # by the sharding of the result
        within_reach = (one for one in self._all if one.objective_seconds(self.objective) <= self.limit)
        for strategy in sorted(within_reach, key=_figures):  # so that none beats an earlier one
            rivals = unbeaten.setdefault((strategy.out.axes, strategy.out.unreduced), [])
            if not any(_beats(rival, strategy) for rival in rivals):
                rivals.append(strategy)
        best = [one for rivals in unbeaten.values() for one in rivals]
        return [*best, *(one for one in self._textbook if not any(one is other for other in best))]

    def rank(self, strategy: Strategy) -> tuple:
        fits, seconds = strategy.fits(self._memory_limit), strategy.objective_seconds(self.objective)
        return not fits, strategy.leaves_partial_sum, seconds, strategy.seconds, strategy.bytes_per_device


def _is_textbook(strategy: Strategy) -> bool:
    """Whether all reshards are by the rules, with at most one collective per axis."""
    axes = [axis for priced in strategy.reshards for axis in priced.busy_axes]
    return all(priced.by_rules for priced in strategy.reshards) and len(set(axes)) == len(axes)


def _figures(strategy: Strategy) -> tuple[float, float, float, int]:
    return strategy.seconds, strategy.seconds_compute, strategy.seconds_comms, strategy.bytes_per_device


def _beats(rival: Strategy, strategy: Strategy) -> bool:
    """Whether `rival` is no worse in any figure."""
    return all(theirs <= mine for theirs, mine in zip(_figures(rival), _figures(strategy), strict=True))


class _Placed(NamedTuple):
    """An array split by roles, and the bytes of its block."""

    array: ShardedArray
    block_bytes: float


class _Ending(NamedTuple):
    """The treatment of a product: its final sharding and the reshard to it.

    via: an intermediate sharding; None for none.
    """

    out: ShardedArray
    via: ShardedArray | None
    reshard: PricedReshard


class Pricing:
    """The strategies of one question by the roles of its `axes`; reshards are priced on demand."""

    def __init__(self, question: ContractionQuestion) -> None:
        self.question = q = question
        given = [array for array in (q.rhs, q.lhs, q.out) if array is not None]
        used = {axis for array in given for axis in (*array.sharded_axes, *array.unreduced)}
        self.axes = tuple(axis for axis, size in q.mesh.sizes.items() if size > 1 or axis in used)
        orders = axis_orders(q.einsum.letters, given, self.axes)
        self._lhs = _Array(q, q.lhs, self.axes, orders)
        self._rhs = _Array(q, q.rhs, self.axes, orders)
        dims = tuple(q.einsum.out)
        self._placed: dict[AxisRoles, tuple[_Placed, _Placed, _Placed] | None] = {}
        self._made = _Product(q, q.out or ShardedArray("C", dims, ((),) * len(dims)), self.axes, orders)

    def least_seconds(self, roles: AxisRoles, objective: Objective = "latency") -> float | None:
        """Lower bound of the seconds for `roles`; None if a dimension does not divide.

        The product may hide one transfer, so at most the reshard of one array. With objective "throughput" it
        hides all.
        """
        placed = self._place(roles)
        if placed is None:
            return None
        lhs, rhs, made = placed
        _, compute = self._multiply(roles, lhs, rhs, made)
        reshards = (
            self._lhs.least_seconds(lhs),
            self._rhs.least_seconds(rhs),
            self._made.least_seconds(made),
        )
        if objective == "throughput":
            return max(compute, sum(reshards))
        return compute + sum(reshards) - min(compute, max(reshards))

    def strategies(
        self, roles: AxisRoles, limit: float = inf, *, textbook: bool = False
    ) -> Iterator[Strategy]:
        """The strategies for `roles`, sequential and windowed, of at most `limit` seconds.

        textbook: also the sequential ones by the rules, regardless of `limit`.
        """
        placed = self._place(roles)
        assert placed is not None, f"{roles} do not divide"
        lhs, rhs, made = placed
        flops, compute = self._multiply(roles, lhs, rhs, made)
        q, named = self.question, tuple(zip(self.axes, roles, strict=True))
        reshards = self._lhs.reshards(lhs, textbook), self._rhs.reshards(rhs, textbook)
        for left, right, end in cartesian(*reshards, self._made.endings(made, textbook)):
            chosen = left, right, end.reshard
            comms = sum([priced.seconds for priced in chosen])
            for window, transfer, steps in _windows(chosen, q.mesh):
                if end.via is not None and window != "out":
                    continue  # the two halves in sequence are the AllReduce itself
                is_textbook = textbook and window is None and all(priced.by_rules for priced in chosen)
                if max(compute, comms) > limit and not is_textbook:
                    continue
                hidden = transfer + compute - max(compute, transfer + compute / steps)
                seconds = compute + comms - q.hardware.chip.overlap * hidden
                figures = flops, compute, comms, seconds, ceil(_peak_bytes(window, steps, chosen))
                yield Strategy(q, named, end.out, end.via, chosen, window, *figures)

    def _place(self, roles: AxisRoles) -> tuple[_Placed, _Placed, _Placed] | None:
        """The operands and the product for `roles`; None if a dimension does not divide."""
        if roles not in self._placed:
            lhs, rhs, made = (one.placed(roles) for one in (self._lhs, self._rhs, self._made))
            self._placed[roles] = (lhs, rhs, made) if lhs and rhs and made else None
        return self._placed[roles]

    def _multiply(self, roles: AxisRoles, *blocks: _Placed) -> tuple[float, float]:
        """FLOPs of a device and seconds of the product."""
        q, chip = self.question, self.question.hardware.chip
        split = tuple([axis for axis, role in zip(self.axes, roles, strict=True) if role])
        flops = q.einsum.flops(q.sizes) / q.mesh.size(split)
        traffic = sum([one.block_bytes for one in blocks])
        by_peak, by_hbm = chip.matmul_flops_per_second(q.dtype), chip.memory_bytes_per_second(q.dtype)
        return flops, max(flops / by_peak, traffic / by_hbm)


class _Array:
    """An operand of a contraction: its sharding by roles, and the reshards to it."""

    _is_product = False

    def __init__(
        self, question: ContractionQuestion, end: ShardedArray, axes: Axes, orders: Mapping[str, Axes]
    ) -> None:
        self._question, self._end, self._axes, self._orders = question, end, axes, orders
        self._num_bytes = prod([question.sizes[dim] for dim in end.dims]) * dtype_bytes(question.dtype)
        self._placed: dict[AxisRoles, _Placed | None] = {}
        self._reshards: dict[tuple[ShardedArray, bool], list[PricedReshard]] = {}

    def placed(self, roles: AxisRoles) -> _Placed | None:
        """The array for `roles`; None if a dimension does not divide.

        A product is partial over contracted axes.
        """
        dims, other = self._end.dims, "" if self._is_product else None
        key = tuple([role if role is None or role in dims else other for role in roles])
        if key not in self._placed:
            role_of = dict(zip(self._axes, key, strict=True))
            split = tuple([tuple([a for a in self._orders[dim] if role_of[a] == dim]) for dim in dims])
            partial = tuple([axis for axis, role in role_of.items() if role == ""])
            array = ShardedArray(self._end.name, dims, split, partial)
            divides = self._divides(array)
            self._placed[key] = _Placed(array, self._block_bytes(array)) if divides else None
        return self._placed[key]

    def _divides(self, array: ShardedArray) -> bool:
        sizes, mesh = self._question.sizes, self._question.mesh
        pairs = zip(array.dims, array.axes, strict=True)
        return all(sizes[dim] % mesh.size(axes) == 0 for dim, axes in pairs)

    def _block_bytes(self, array: ShardedArray) -> float:
        return self._num_bytes / self._question.mesh.size(array.sharded_axes)

    def least_seconds(self, placed: _Placed) -> float:
        """Seconds of the cheapest reshard."""
        if self._shortest is not None:
            return self._shortest.seconds(placed.array)
        return min([one.seconds for one in self.reshards(placed, textbook=False)])

    def reshards(self, placed: _Placed, textbook: bool) -> list[PricedReshard]:
        """The shortest path; for the textbook's roles also the reshard by the rules if it differs."""
        key = placed.array, textbook
        if key not in self._reshards:
            self._reshards[key] = list(self._find(placed.array, textbook))
        return self._reshards[key]

    def _find(self, array: ShardedArray, textbook: bool) -> Iterator[PricedReshard]:
        before, after = (array, self._end) if self._is_product else (self._end, array)
        by_rules = None
        if textbook or self._shortest is None:
            yield (by_rules := self._priced(before, reshard(before, after)))
        if self._shortest is not None:
            steps = tuple(self._shortest.steps(array))
            # Both are kept even if they take equal seconds: more of one may run under the product.
            if by_rules is None or steps != by_rules.steps:
                yield self._priced(before, steps, by_rules=False)

    def _priced(
        self, before: ShardedArray, steps: Iterable[Collective], *, by_rules: bool = True
    ) -> PricedReshard:
        block = self._block_bytes(before)
        return priced_reshard(steps, block, self._question.placement, by_rules=by_rules)

    @cached_property
    def _shortest(self) -> Reshards | None:
        """The shortest paths from an operand, or to the output; None if the mesh is too large."""
        q, partial = self._question, self._axes if self._is_product else self._end.unreduced
        if q.has_single_axes or not is_searchable(q.mesh, len(self._end.dims), partial):
            return None
        price, towards = step_price(q.placement), self._is_product
        return Reshards(self._end, q.mesh, q.sizes, self._num_bytes, price, partial=partial, towards=towards)


class _Product(_Array):
    """The product.

    It ends in the wanted output or, if that is open, in every completion of a partial sum.
    """

    _is_product = True

    def least_seconds(self, placed: _Placed) -> float:
        """Seconds of the cheapest reshard; 0 if a sum may stay partial."""
        return 0.0 if self._question.out is None else super().least_seconds(placed)

    def endings(self, placed: _Placed, textbook: bool) -> list[_Ending]:
        """Its possible ends.

        An AllReduce is also split in two steps; the first can run under the product.
        """
        product = placed.array
        if self._question.out is None:
            ends = [
                _Ending(target, None, self._priced(product, reshard(product, target)))
                for target in self._open_targets(product)
            ]
        else:
            ends = [_Ending(self._end, None, one) for one in self.reshards(placed, textbook)]
        for out, _, whole in list(ends):
            if [step.op for step in whole.steps] == ["all_reduce"]:
                for via in islice(self._scattered(product, out.unreduced), 1):
                    steps = (*reshard(product, via), *reshard(via, out))
                    ends.append(_Ending(out, via, self._priced(product, steps)))
        return ends

    def _open_targets(self, product: ShardedArray) -> list[ShardedArray]:
        if not product.unreduced:
            return [product]
        return [product, product.replace(unreduced=()), *self._scattered(product, ())]

    def _scattered(self, product: ShardedArray, left: Axes) -> Iterator[ShardedArray]:
        """The sum over all axes but `left`, scattered over each dimension that they divide."""
        summed = tuple([axis for axis in product.unreduced if axis not in left])
        for dim in product.dims:
            scattered = product.replace(axes={dim: product.axes_of(dim) + summed}, unreduced=left)
            if self._divides(scattered):
                yield scattered


Reshardings = tuple[PricedReshard, PricedReshard, PricedReshard]  # of the operands and the product


def _windows(reshards: Reshardings, mesh: Mesh) -> Iterator[tuple[EinsumSide | None, float, int]]:
    """(array, seconds, steps) of transfers that can run under the product; first without one."""
    lhs, rhs, end = reshards
    yield None, 0.0, 1
    if lhs.last_gather:
        yield "lhs", lhs.last_gather, mesh.size(lhs.steps[-1].axes)
    if rhs.last_gather:
        yield "rhs", rhs.last_gather, mesh.size(rhs.steps[-1].axes)
    if end.first_scatter:
        yield "out", end.first_scatter, mesh.size(end.steps[0].axes)


def _peak_bytes(window: EinsumSide | None, steps: int, reshards: Reshardings) -> float:
    """Most bytes at any time: while an operand moves, at the product, while the product moves.

    A windowed array has two blocks instead of the whole: the one in use and the one in transfer.
    """
    lhs, rhs, end = reshards
    lhs_held, rhs_held, product = lhs.result_bytes, rhs.result_bytes, end.block_bytes[0]
    if window == "lhs":
        lhs_held *= 2 / steps
    elif window == "rhs":
        rhs_held *= 2 / steps
    elif window == "out":
        product *= 2 / steps
    while_lhs = lhs.peak_bytes(last=-1 if window == "lhs" else None)
    while_rhs = lhs_held + rhs.peak_bytes(last=-1 if window == "rhs" else None)
    while_end = product + end.peak_bytes(first=1 if window == "out" else 0)
    held = max(while_lhs, while_rhs, lhs_held + rhs_held + product, while_end)
    return lhs.block_bytes[0] + rhs.block_bytes[0] + held

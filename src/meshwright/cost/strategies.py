"""Every way to multiply two sharded arrays, priced: time, FLOPs, bytes moved and memory.

A strategy is a choice of roles (notation/einsum.py), of how each array is resharded, of what becomes of
partial sums where the output is left open, and of at most one transfer that runs under the product in
steps:

    in sequence   t = sum of collectives + product
    windowed      t = the other collectives + max(product, transfer + product / n)

The ring of n devices hands on a block a step. A gathered block is multiplied while the next one
arrives; a scattered one is handed on while the next is multiplied. Of n block products, n - 1 run
beside the n - 1 transfers, so one is added where the transfer is the slower. Hardware that overlaps
in part saves that part of the difference.

    product       t = max(FLOPs / peak, HBM bytes / bandwidth)   operands read once, product written

All choices of roles are ordered by the least that they can take and priced until none that is left can be
listed. An array is resharded along the shortest path (notation/resharding.py); with the roles that a
textbook would try also by the rules (`notation.collective.reshard`), which may leave more to a window.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from itertools import product as cartesian
from math import ceil, inf, prod
from typing import NamedTuple

from meshwright.cost.reshard import PricedReshard, priced_reshard, step_price
from meshwright.cost.strategy import ContractionQuestion, Objective, Strategy
from meshwright.dtypes import dtype_bytes
from meshwright.errors import LayoutError, NotationError
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.einsum import EinsumSide
from meshwright.notation.mesh import Mesh
from meshwright.notation.resharding import Reshards, is_searchable
from meshwright.notation.roles import axis_orders, textbook_roles
from meshwright.units import format_bytes

# strategies() lists what may take up to so many times as long as the cheapest.
REACH = 1.5
MAX_COMBINATIONS = 1 << 14

AxisRoles = tuple[str | None, ...]  # a letter, or none, for each axis


def strategies(
    question: ContractionQuestion,
    *,
    memory_limit_bytes: float | None = None,
    objective: Objective = "latency",
) -> list[Strategy]:
    """The strategies worth a look, the cheapest first; those over the memory limit come last.

    These are: all that take at most REACH times as long as the cheapest, but for those that another
    beats or equals in time, product, collectives and memory at once; and, beaten or not, the
    textbook's, in which an axis takes part in one collective at most.
    Where the output is left open, each end of a partial sum is a strategy, and one that leaves it
    partial sorts behind those that finish it: whoever reads it pays.
    objective: "latency" is one run on its own, "throughput" one of many that overlap.
    Raises NotationError where a dimension does not divide or a wanted partial sum cannot be.
    """
    return _priced(question, _Found(objective, memory_limit_bytes, REACH))


def cheapest(
    question: ContractionQuestion,
    *,
    memory_limit_bytes: float | None = None,
    objective: Objective = "latency",
) -> Strategy:
    """The first of `strategies`, found without those that are slower.

    Raises NotationError as there, and LayoutError where no strategy fits the memory.
    """
    found = _priced(question, _Found(objective, memory_limit_bytes, 1.0))
    if not found[0].fits(memory_limit_bytes):
        raise LayoutError(
            f"no strategy fits {format_bytes(memory_limit_bytes or 0)} a device; the leanest needs "
            f"{format_bytes(min(one.bytes_per_device for one in found))}: shard an operand further or "
            "use more devices"
        )
    return found[0]


def _priced(question: ContractionQuestion, found: "_Found") -> list[Strategy]:
    """What is to be listed, in order."""
    _check(question)
    pricing = Pricing(question)
    textbook = set(_combinations(pricing, exhaustive=False))
    for bound, roles in sorted(_bounds(pricing, found.objective, textbook), key=lambda one: one[0]):
        if bound <= found.limit or (roles in textbook and found.keeps_textbook):
            found.add(pricing.strategies(roles, found.limit, textbook=roles in textbook), roles in textbook)
    listed = found.listed()
    if not listed:
        raise NotationError(f"{question.out}: no role of the mesh axes leads to it with blocks of equal size")
    return sorted(listed, key=found.rank)


def _check(q: ContractionQuestion) -> None:
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


def _combinations(pricing: "Pricing", *, exhaustive: bool) -> list[AxisRoles]:
    """Every choice of a role for each axis, or the textbook's alone where those are too many."""
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
    """The choices of roles that divide, each with the least seconds that it can take."""
    for roles in dict.fromkeys([*textbook, *_combinations(pricing, exhaustive=True)]):
        least = pricing.least_seconds(roles, objective)
        if least is not None:
            yield least, roles


class _Found:
    """The strategies so far, as those of one objective and memory limit.

    limit: seconds that a strategy may take to be listed, `reach` times those of the cheapest.
    """

    def __init__(self, objective: Objective, memory_limit: float | None, reach: float) -> None:
        self.objective: Objective = objective
        self._memory_limit, self._reach = memory_limit, reach
        self.keeps_textbook = reach > 1
        self._all: list[Strategy] = []
        self._textbook: list[Strategy] = []
        self.limit = inf

    def add(self, found: Iterator[Strategy], in_textbook: bool) -> None:
        for one in found:
            seconds = one.objective_seconds(self.objective)
            if self.keeps_textbook and in_textbook and one.window is None and _is_textbook(one):
                self._textbook.append(one)
            if seconds <= self.limit:
                self._all.append(one)
                if one.fits(self._memory_limit) and not one.leaves_partial_sum:
                    self.limit = min(self.limit, self._reach * seconds)

    def listed(self) -> list[Strategy]:
        """The unbeaten within reach and the textbook's."""
        unbeaten: dict[tuple, list[Strategy]] = {}  # by where they end
        within_reach = (one for one in self._all if one.objective_seconds(self.objective) <= self.limit)
        for one in sorted(within_reach, key=_figures):  # so that none beats an earlier one
            rivals = unbeaten.setdefault((one.out.axes, one.out.unreduced), [])
            if not any(_beats(rival, one) for rival in rivals):
                rivals.append(one)
        best = [one for rivals in unbeaten.values() for one in rivals]
        return [*best, *(one for one in self._textbook if not any(one is other for other in best))]

    def rank(self, one: Strategy) -> tuple:
        fits, seconds = one.fits(self._memory_limit), one.objective_seconds(self.objective)
        return not fits, one.leaves_partial_sum, seconds, one.seconds, one.bytes_per_device


def _is_textbook(one: Strategy) -> bool:
    """Whether all is by the rules and an axis takes part in one collective at most."""
    axes = [axis for priced in one.reshards for axis in priced.busy_axes]
    return all(priced.by_rules for priced in one.reshards) and len(set(axes)) == len(axes)


def _figures(one: Strategy) -> tuple[float, float, float, int]:
    return one.seconds, one.seconds_compute, one.seconds_comms, one.bytes_per_device


def _beats(rival: Strategy, one: Strategy) -> bool:
    """Whether `rival` is no worse in any figure."""
    return all(theirs <= mine for theirs, mine in zip(_figures(rival), _figures(one), strict=True))


class _Placed(NamedTuple):
    """An array split by roles, and the bytes of its block."""

    array: ShardedArray
    block_bytes: float


class _Ending(NamedTuple):
    """What becomes of a product: where it ends, what it passes through, how it is resharded."""

    out: ShardedArray
    via: ShardedArray | None
    reshard: PricedReshard


class Pricing:
    """The strategies of one question by the roles of its `axes`; reshards are found as roles ask for them."""

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
        """Least seconds with these roles; None where a dimension does not divide.

        The product may hide one transfer, so at most the reshard of one array. Of many runs all overlaps.
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
        """The strategies with these roles, sequential and windowed, that can take at most `limit` seconds.

        textbook: those in sequence by the rules too, however long they take.
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
        """The operands and the product with these roles."""
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
    """An operand of a contraction: where roles put it, and how it is resharded to there."""

    _is_product = False

    def __init__(
        self, question: ContractionQuestion, end: ShardedArray, axes: Axes, orders: Mapping[str, Axes]
    ) -> None:
        self._question, self._end, self._axes, self._orders = question, end, axes, orders
        self._num_bytes = prod([question.sizes[dim] for dim in end.dims]) * dtype_bytes(question.dtype)
        self._placed: dict[AxisRoles, _Placed | None] = {}
        self._reshards: dict[tuple[ShardedArray, bool], list[PricedReshard]] = {}

    def placed(self, roles: AxisRoles) -> _Placed | None:
        """The array with these roles, a product partial over contracted ones; None if it does not divide."""
        dims, other = self._end.dims, "" if self._is_product else None
        own = tuple([role if role is None or role in dims else other for role in roles])
        if own not in self._placed:
            role_of = dict(zip(self._axes, own, strict=True))
            split = tuple([tuple([a for a in self._orders[dim] if role_of[a] == dim]) for dim in dims])
            partial = tuple([axis for axis, role in role_of.items() if role == ""])
            array = ShardedArray(self._end.name, dims, split, partial)
            divides = self._divides(array)
            self._placed[own] = _Placed(array, self._block_bytes(array)) if divides else None
        return self._placed[own]

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
        """The shortest path; for the textbook's roles the reshard by the rules too, if it is another."""
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
            least = self._shortest.seconds(array)
            if by_rules is None or least < by_rules.seconds * (1 - 1e-9):
                yield self._priced(before, self._shortest.steps(array), by_rules=False)

    def _priced(
        self, before: ShardedArray, steps: Iterable[Collective], *, by_rules: bool = True
    ) -> PricedReshard:
        block = self._block_bytes(before)
        return priced_reshard(steps, block, self._question.placement, by_rules=by_rules)

    @cached_property
    def _shortest(self) -> Reshards | None:
        """The shortest paths from an operand, or to the output; None on meshes too large to search."""
        q, partial = self._question, self._axes if self._is_product else self._end.unreduced
        if q.has_single_axes or not is_searchable(q.mesh, len(self._end.dims), partial):
            return None
        price, towards = step_price(q.placement), self._is_product
        return Reshards(self._end, q.mesh, q.sizes, self._num_bytes, price, partial=partial, towards=towards)


class _Product(_Array):
    """The product: its ends, which are the wanted output or, where that is open, all of a partial sum."""

    _is_product = True

    def least_seconds(self, placed: _Placed) -> float:
        """Seconds of the cheapest reshard; nothing where a sum may stay partial."""
        return 0.0 if self._question.out is None else super().least_seconds(placed)

    def endings(self, placed: _Placed, textbook: bool) -> list[_Ending]:
        """Its ends; an AllReduce can be had in two, of which the first can run under the product."""
        product = placed.array
        if self._question.out is None:
            found = [
                _Ending(target, None, self._priced(product, reshard(product, target)))
                for target in self._open_targets(product)
            ]
        else:
            found = [_Ending(self._end, None, one) for one in self.reshards(placed, textbook)]
        for out, _, whole in list(found):
            if [step.op for step in whole.steps] == ["all_reduce"]:
                for via in islice(self._scattered(product, out.unreduced), 1):
                    steps = (*reshard(product, via), *reshard(via, out))
                    found.append(_Ending(out, via, self._priced(product, steps)))
        return found

    def _open_targets(self, product: ShardedArray) -> list[ShardedArray]:
        if not product.unreduced:
            return [product]
        return [product, product.replace(unreduced=()), *self._scattered(product, ())]

    def _scattered(self, product: ShardedArray, left: Axes) -> Iterator[ShardedArray]:
        """The sum over all axes but `left` scattered over each dimension that these divide further."""
        summed = tuple([axis for axis in product.unreduced if axis not in left])
        for dim in product.dims:
            found = product.replace(axes={dim: product.axes_of(dim) + summed}, unreduced=left)
            if self._divides(found):
                yield found


Reshardings = tuple[PricedReshard, PricedReshard, PricedReshard]  # of the operands and the product


def _windows(reshards: Reshardings, mesh: Mesh) -> Iterator[tuple[EinsumSide | None, float, int]]:
    """(array, seconds, steps) of the transfers that can run under the product; first, of none."""
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

    In steps, two blocks are held of what would be whole: the one in use and the one under way.
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

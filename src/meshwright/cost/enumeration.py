"""What one choice of roles makes of a contraction: its strategies, priced.

What an operand's move costs is worked out once for all the roles that ask for it, and figures are
compared before a Strategy is made of them: thousands of contractions are priced in a second.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from math import ceil, inf, prod
from typing import Literal, NamedTuple, Protocol

from meshwright.cost.moves import Move, Split, move, way
from meshwright.cost.routing import Ask, rooms_of, router
from meshwright.cost.strategy import Operand, Question, Strategy
from meshwright.hardware.topology import Placement
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.roles import axis_orders
from meshwright.units import dtype_bytes

Roles = tuple[str | None, ...]  # a letter, or none, for each axis


class Least(NamedTuple):
    """Least seconds of the product (0 where it overlaps all) and of the collectives of two arrays.

    hidden: how many of them may run under the product, as of one array at most they do.
    """

    product: float
    rhs: float
    rhs_hidden: float
    out: float
    out_hidden: float

    def after(self, lhs: Move) -> float:
        """Least seconds, once the left operand's move is known."""
        moved = lhs.seconds + self.rhs + self.out
        return max(moved, moved - max(lhs.last_gather, self.rhs_hidden, self.out_hidden) + self.product)

    def after_both(self, lhs: Move, rhs: Move) -> float:
        moved = lhs.seconds + rhs.seconds + self.out
        return max(moved, moved - max(lhs.last_gather, rhs.last_gather, self.out_hidden) + self.product)


class Collector(Protocol):
    """Where strategies go; it may refuse one by its figures."""

    def wants(
        self, out: ShardedArray, compute: float, comms: float, seconds: float, peak: int, *, simple: bool
    ) -> bool: ...

    def add(self, strategy: Strategy) -> None: ...


class _Ending(NamedTuple):
    """What becomes of a product: where it ends, what it passes through, the move, how that was found."""

    out: ShardedArray
    via: ShardedArray | None
    move: Move
    searched: bool


class _Product(NamedTuple):
    """The local product: bytes of its block, and the ways it may end."""

    block: float
    endings: list[_Ending]


class _Operand(NamedTuple):
    """An operand's move, the bytes of its block as given and as multiplied, how the move was found."""

    move: Move
    given: float
    block: float
    searched: bool


class _Side(NamedTuple):
    """An operand as given, the bytes of its block, and its moves so far by its roles."""

    array: ShardedArray
    block: float
    known: dict[Roles, list[_Operand]]


class Enumeration:
    """The strategies of one question, by the roles of its `axes`.

    by: how arrays move: by the rules, by the rules and as a search finds, or by what is useful of both,
    which leaves out the rules where the search is better in every strategy.
    """

    def __init__(self, question: Question, by: Literal["rules", "both", "useful"] = "both") -> None:
        q, chip = question, question.hardware.chip
        self.question, self.placement, self.by = question, question.placement, by
        self.router = router(question.placement)
        self.both: dict[tuple, tuple[Move, Move | None]] | None = None  # what is shared with by_rules()
        given = [array for array in (q.rhs, q.lhs, q.out) if array is not None]
        used = {axis for array in given for axis in (*array.sharded_axes, *array.unreduced)}
        self.axes = tuple(axis for axis, size in q.mesh.sizes.items() if size > 1 or axis in used)
        self.orders = axis_orders(q.einsum.letters, given, self.axes)
        self.flops = q.einsum.flops(q.sizes)
        self.flops_per_second = chip.matmul_flops_per_second(q.dtype)
        self.hbm_bytes_per_second, self.overlap = chip.memory_bytes_per_second(q.dtype), chip.overlap
        self.out_dims = tuple(q.einsum.out)
        self.rooms = {
            dims: rooms_of(dims, q.sizes, q.mesh.num_devices)
            for dims in (q.lhs.dims, q.rhs.dims, self.out_dims)
        }
        self.out_bytes = self._bytes(self.out_dims)
        self.lhs, self.rhs = (
            _Side(array, self._bytes(array.dims) / self._degree(array.sharded_axes), {})
            for array in (q.lhs, q.rhs)
        )

    def by_rules(self) -> "Enumeration":
        """The same by the rules alone; what one finds of moves the other knows."""
        other = Enumeration(self.question, "rules")
        self.both = other.both = {}
        return other

    def price(self, roles: Roles, found: Collector, least: "Least | None" = None, limit: float = inf) -> None:
        """Hands every end of the product with these roles to `found`, in sequence and windowed.

        Gives up once it will take `limit` seconds, by what the operands' moves take and `least`.
        """
        of_lhs = self._operand(self.lhs, roles)
        if least:
            of_lhs = [lhs for lhs in of_lhs if least.after(lhs.move) < limit]
        of_rhs = of_lhs and self._operand(self.rhs, roles)
        pairs = [(lhs, rhs) for lhs in of_lhs for rhs in of_rhs]
        if least:
            pairs = [(lhs, rhs) for lhs, rhs in pairs if least.after_both(lhs.move, rhs.move) < limit]
        made = self._product(roles) if pairs else None
        if made is None:
            return
        degree = self._degree([axis for axis, role in zip(self.axes, roles, strict=True) if role])
        flops, traffic = self.flops / degree, of_lhs[0].block + of_rhs[0].block + made.block
        compute = max(flops / self.flops_per_second, traffic / self.hbm_bytes_per_second)
        for lhs, rhs in pairs:
            self._price_pair(roles, lhs, rhs, made, flops, compute, found)

    def _price_pair(
        self,
        roles: Roles,
        lhs: _Operand,
        rhs: _Operand,
        made: _Product,
        flops: float,
        compute: float,
        found: Collector,
    ) -> None:
        """Hands the strategies with these moves of the operands to `found`."""
        for out, via, end, end_searched in made.endings:
            comms = lhs.move.seconds + rhs.move.seconds + end.seconds
            busy = lhs.move.busy + rhs.move.busy + end.busy
            searched = lhs.searched, rhs.searched, end_searched
            for window, transfer, steps in self._windows(lhs.move, rhs.move, end):
                if via is not None and window != "out":
                    continue  # the two halves in sequence are the AllReduce itself
                hidden = transfer + compute - max(compute, transfer + compute / steps)
                seconds = compute + comms - self.overlap * hidden
                peak = ceil(_peak(window, steps, lhs, rhs, made.block, end))
                simple = window is None and len(set(busy)) == len(busy) and not any(searched)
                if found.wants(out, compute, comms, seconds, peak, simple=simple):
                    named = tuple(zip(self.axes, roles, strict=True))
                    moved = ceil(lhs.move.moved_bytes + rhs.move.moved_bytes + end.moved_bytes)
                    figures = flops, compute, comms, seconds, moved, peak
                    found.add(Strategy(self.question, named, out, via, searched, window, *figures))

    def _operand(self, side: _Side, roles: Roles) -> list[_Operand]:
        """The moves of an operand to its roles; none where it does not divide."""
        key = _projection(roles, side.array.dims)
        if key not in side.known:
            split = self._split(side.array.dims, key)
            side.known[key] = [] if split is None else self._moved(side, split)
        return side.known[key]

    def _moved(self, side: _Side, split: Split) -> list[_Operand]:
        array = side.array
        moves = self._moves(array.dims, array.axes, array.unreduced, split, (), side.block)
        return [_Operand(moved, side.block, moved.held or side.block, searched) for moved, searched in moves]

    def _moves(
        self, dims: Axes, source: Split, partial: Axes, target: Split, target_partial: Axes, block: float
    ) -> list[tuple[Move, bool]]:
        """The move by the rules and, where it may be better, that of a search; whether it is searched."""
        rules, searched = self._both(Ask(source, partial, target, target_partial, self.rooms[dims]), block)
        if searched is None or self.by == "rules":
            return [(rules, False)]
        if self.by == "useful" and searched.replaces(rules):
            return [(searched, True)]
        return [(searched, True), (rules, False)]

    def _both(self, ask: Ask, block: float) -> tuple[Move, Move | None]:
        """The move by the rules, and that of a search where it takes less time."""
        if self.both is None:
            return self._found(ask, block)
        key = ask, block
        if key not in self.both:
            self.both[key] = self._found(ask, block)
        return self.both[key]

    def _found(self, ask: Ask, block: float) -> tuple[Move, Move | None]:
        rules = move(way(*ask[:4]), block, self.placement)
        legs = self.router.legs(ask, block) if rules.seconds else None
        if legs is None or legs == rules.legs:
            return rules, None
        searched = move(legs, block, self.placement)
        return rules, searched if searched.seconds < rules.seconds else None

    def _split(self, dims: Axes, roles: Roles) -> Split | None:
        """The axes of each dimension under these roles; None where one does not divide."""
        split, degrees, crowded = _assigned(self.axes, roles, dims, self.placement)
        for dim, degree in degrees:
            if self.question.sizes[dim] % degree:
                return None
        if not crowded:
            return split
        pairs = zip(dims, split, strict=True)
        return tuple([tuple([axis for axis in self.orders[dim] if axis in axes]) for dim, axes in pairs])

    def _bytes(self, dims: Axes) -> float:
        return prod([self.question.sizes[dim] for dim in dims]) * dtype_bytes(self.question.dtype)

    def _degree(self, axes: Iterable[str]) -> int:
        sizes = self.question.mesh.sizes
        return prod([sizes[axis] for axis in axes])

    def _product(self, roles: Roles) -> _Product | None:
        """The local product with these roles, and its ends."""
        split = self._split(self.out_dims, roles)
        if split is None:
            return None
        partial = tuple(
            [a for a, role in zip(self.axes, roles, strict=True) if role and role not in self.out_dims]
        )
        block = self.out_bytes / self._degree([axis for axes in split for axis in axes])
        endings = []
        for target in self._targets(split, partial):
            moves = self._moves(self.out_dims, split, partial, target.axes, target.unreduced, block)
            endings += [_Ending(target, None, moved, searched) for moved, searched in moves]
            legs = way(split, partial, target.axes, target.unreduced)
            if len(legs) == 1 and legs[0][0] == "all_reduce":
                endings += self._through_scatter(target, split, partial, block)
        return _Product(block, endings)

    def _targets(self, split: Split, partial: Axes) -> list[ShardedArray]:
        """The wanted sharding; where any will do, all ends of a partial sum, each axis alike."""
        if self.question.out is not None:
            return [self.question.out]
        if not partial:
            return [_out(self.out_dims, split, ())]
        whole = _out(self.out_dims, split, ())
        return [_out(self.out_dims, split, partial), whole, *self._scattered(split, partial, ())]

    def _scattered(self, split: Split, summed: Axes, partial: Axes) -> Iterator[ShardedArray]:
        """The sum over `summed` scattered over each dimension that these axes divide further."""
        q = self.question
        for i, (dim, axes) in enumerate(zip(self.out_dims, split, strict=True)):
            if q.sizes[dim] % self._degree(axes + summed) == 0:
                yield _out(self.out_dims, (*split[:i], axes + summed, *split[i + 1 :]), partial)

    def _through_scatter(
        self, target: ShardedArray, split: Split, partial: Axes, block: float
    ) -> Iterator[_Ending]:
        """An AllReduce in two: its first half can run under the product."""
        summed = tuple([axis for axis in partial if axis not in target.unreduced])
        for via in islice(self._scattered(split, summed, target.unreduced), 1):
            there = way(split, partial, via.axes, via.unreduced)
            back = way(via.axes, via.unreduced, target.axes, target.unreduced)
            yield _Ending(target, via, move(there + back, block, self.placement), False)

    def _windows(self, lhs: Move, rhs: Move, end: Move) -> list[tuple[Operand | None, float, int]]:
        """(array, seconds, steps) of the transfers that can run under the product; first, of none."""
        found: list[tuple[Operand | None, float, int]] = [(None, 0.0, 1)]
        if lhs.last_gather:
            found.append(("lhs", lhs.last_gather, self.question.mesh.size(lhs.legs[-1][1])))
        if rhs.last_gather:
            found.append(("rhs", rhs.last_gather, self.question.mesh.size(rhs.legs[-1][1])))
        if end.legs and end.legs[0][0] == "reduce_scatter":
            found.append(("out", end.times[0], self.question.mesh.size(end.legs[0][1])))
        return found


@lru_cache(maxsize=1 << 16)
def _assigned(
    axes: Axes, roles: Roles, dims: Axes, placement: Placement
) -> tuple[Split, tuple[tuple[str, int], ...], bool]:
    """(the axes of each dimension, devices along each that has any, whether one has several axes)."""
    split = tuple([
        tuple([axis for axis, role in zip(axes, roles, strict=True) if role == dim]) for dim in dims
    ])  # fmt: skip
    degrees = [
        (dim, prod([placement.sizes[axis] for axis in own]))
        for dim, own in zip(dims, split, strict=True)
        if own
    ]
    return split, tuple(degrees), any(len(own) > 1 for own in split)


@lru_cache(maxsize=1 << 16)
def _projection(roles: Roles, dims: Axes) -> Roles:
    """What the roles mean to an array of these dimensions."""
    return tuple([role if role in dims else None for role in roles])


@lru_cache(maxsize=1 << 16)
def _out(dims: Axes, split: Split, unreduced: Axes) -> ShardedArray:
    """The product C in a sharding; the same object each time, since many strategies end in it."""
    return ShardedArray("C", dims, split, unreduced)


def _peak(
    window: Operand | None, steps: int, lhs: _Operand, rhs: _Operand, product: float, end: Move
) -> float:
    """Most bytes at any time: while an operand moves, at the product, while the product moves.

    In steps, two blocks are held of what would be whole: the one in use and the one under way.
    """
    lhs_held, lhs_extra = lhs.move.held, lhs.move.extra
    rhs_held, rhs_extra = rhs.move.held, rhs.move.extra
    end_extra = end.extra
    if window == "lhs":
        lhs_held, lhs_extra = 2 * lhs_held / steps, lhs.move.extra_but_last
    elif window == "rhs":
        rhs_held, rhs_extra = 2 * rhs_held / steps, rhs.move.extra_but_last
    elif window == "out":
        product, end_extra = 2 * product / steps, end.extra_but_first
    held = lhs_held + rhs_held + product
    return lhs.given + rhs.given + max(lhs_extra, lhs_held + rhs_extra, held, product + end_extra)

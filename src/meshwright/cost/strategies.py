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

Thousands of contractions a second are priced, so what an operand's move costs is worked out once
for all the roles that ask for it, and a Strategy derives its steps only when it is asked.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from itertools import product as cartesian
from math import ceil, prod
from typing import NamedTuple

from meshwright.cost.moves import Move, Split, move, way
from meshwright.cost.strategy import Objective, Operand, Question, Strategy
from meshwright.errors import LayoutError, NotationError
from meshwright.hardware.topology import Hardware
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.einsum import Einsum
from meshwright.notation.mesh import Mesh
from meshwright.notation.roles import axis_orders, role_choices
from meshwright.units import dtype_bytes, format_bytes


def strategies(
    spec: str,
    lhs: ShardedArray,
    rhs: ShardedArray,
    out: ShardedArray | None,
    mesh: Mesh,
    sizes: Mapping[str, int],
    hardware: Hardware,
    *,
    dtype: str = "bf16",
    memory_limit_bytes: float | None = None,
    objective: Objective = "latency",
) -> list[Strategy]:
    """Every strategy worth a look, the cheapest first; those over the memory limit come last.

    out: the wanted sharding, `{U}` for a sum that stays partial; None leaves it open. Then each end
    of a partial sum is a strategy, and one that leaves it partial sorts behind those that finish it:
    whoever reads it pays.
    objective: "latency" is one run on its own, "throughput" one of many that overlap.
    Left out: what another strategy beats or equals in time, product, collectives and memory at once,
    unless each axis takes part in one collective at most (the textbook's ways stay to be compared).
    Raises NotationError where a dimension does not divide or a wanted partial sum cannot be.
    """
    einsum = Einsum.parse(spec)
    question = Question(einsum, lhs, rhs, out, mesh, sizes, hardware, dtype)
    _check(question)
    found = _Enumeration(question).found()
    if not found:
        raise NotationError(f"{out}: no role of the mesh axes leads to it with blocks of equal size")
    return sorted(found, key=lambda s: _rank(s, objective, memory_limit_bytes))


def cheapest(found: list[Strategy], memory_limit_bytes: float | None = None) -> Strategy:
    """The first of sorted strategies, if it fits; LayoutError says what the leanest would need."""
    if not found[0].fits(memory_limit_bytes):
        least = min(strategy.bytes_per_device for strategy in found)
        limit = format_bytes(memory_limit_bytes or 0)
        raise LayoutError(
            f"no strategy fits {limit} a device; the leanest needs {format_bytes(least)}: "
            "shard an operand further or use more devices"
        )
    return found[0]


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


class _Choice(NamedTuple):
    """A role of one axis, and what it means to each array: a letter that it splits, or None.

    out: for a contracted letter PARTIAL. degree: by how much it divides the work.
    """

    role: str | None
    lhs: str | None
    rhs: str | None
    out: str | None
    degree: int


class _Ending(NamedTuple):
    """What becomes of a product: the sharding it ends in, what it passes through, the move."""

    out: ShardedArray
    via: ShardedArray | None
    move: Move


class _Product(NamedTuple):
    """The local product: bytes of its block, and the ways it may end."""

    block: float
    endings: list[_Ending]


class _Kept:
    """The strategies found so far, but for those that another beats or equals in every figure.

    Figures: seconds, product, collectives, memory. A simple strategy stays, beaten or not: one in
    which each mesh axis takes part in one collective at most, and none is windowed.
    """

    def __init__(self) -> None:
        self._best: dict[int, list[Strategy]] = {}
        self._simple: list[Strategy] = []

    def beats(self, out: ShardedArray, compute: float, comms: float, seconds: float, peak: int) -> bool:
        """Whether one that ends in `out` is at least as good as these figures."""
        for rival in self._best.get(id(out), ()):
            if (
                rival.seconds <= seconds
                and rival.bytes_per_device <= peak
                and rival.seconds_comms <= comms
                and rival.seconds_compute <= compute
            ):
                return True
        return False

    def add(self, strategy: Strategy, *, is_simple: bool, is_beaten: bool) -> None:
        if is_simple:
            self._simple.append(strategy)
        if not is_beaten:
            self._best.setdefault(id(strategy.out), []).append(strategy)

    def strategies(self) -> list[Strategy]:
        """The simple ones, and the others that nothing found later beats."""
        found = list(self._simple)
        simple = {id(strategy) for strategy in found}
        for rivals in self._best.values():
            better: list[Strategy] = []
            for one in sorted(rivals, key=lambda strategy: strategy.seconds):
                if not any(
                    other.bytes_per_device <= one.bytes_per_device
                    and other.seconds_comms <= one.seconds_comms
                    and other.seconds_compute <= one.seconds_compute
                    for other in better
                ):
                    better.append(one)
            found += [one for one in better if id(one) not in simple]
        return found


PARTIAL = "+"
_Key = tuple[str | None, ...]  # what each axis splits


class _Enumeration:
    """All strategies of one question."""

    def __init__(self, question: Question) -> None:
        q, chip = question, question.hardware.chip
        self.question, self.placement = question, question.placement
        given = [array for array in (q.rhs, q.lhs, q.out) if array is not None]
        used = {axis for array in given for axis in (*array.sharded_axes, *array.unreduced)}
        self.axes = tuple(axis for axis, size in q.mesh.sizes.items() if size > 1 or axis in used)
        self.orders = axis_orders(q.einsum.letters, given, self.axes)
        self.flops = q.einsum.flops(q.sizes)
        self.flops_per_second = chip.flops(q.dtype) * chip.matmul_efficiency
        self.hbm_bytes_per_second, self.overlap = chip.hbm_bytes_per_second, chip.overlap
        self.out_dims = tuple(q.einsum.out)
        self.out_bytes = self._bytes(self.out_dims)

    def found(self) -> list[Strategy]:
        """What is worth a look of every choice of roles, of each end of its product, windowed or not."""
        q, kept = self.question, _Kept()
        choices = [self._choices(axis) for axis in self.axes]
        lhs_moves = self._operands(q.lhs, [[choice.lhs for choice in of_axis] for of_axis in choices])
        rhs_moves = self._operands(q.rhs, [[choice.rhs for choice in of_axis] for of_axis in choices])
        splits = self._splits(
            tuple(q.einsum.out), [[choice.out for choice in of_axis] for of_axis in choices]
        )
        products: dict[_Key, _Product] = {}
        for combination in cartesian(*choices):
            columns = zip(*combination, strict=True) if combination else ((),) * 5
            roles, lhs_key, rhs_key, out_key, degrees = columns
            if lhs_key in lhs_moves and rhs_key in rhs_moves and out_key in splits:
                if out_key not in products:
                    products[out_key] = self._product(out_key, splits[out_key])
                named = tuple(zip(self.axes, roles, strict=True))
                lhs, rhs, made = lhs_moves[lhs_key], rhs_moves[rhs_key], products[out_key]
                self._with_roles(kept, named, prod(degrees), lhs, rhs, made)
        return kept.strategies()

    def _choices(self, axis: str) -> list[_Choice]:
        q = self.question
        lhs, rhs, out = q.einsum.lhs, q.einsum.rhs, q.einsum.out
        found = []
        for role in role_choices(q.einsum, q.lhs, q.rhs, q.out, axis, q.sizes):
            if role is None:
                found.append(_Choice(None, None, None, None, 1))
            else:
                left, right = (role if role in letters else None for letters in (lhs, rhs))
                summed = role if role in out else PARTIAL
                found.append(_Choice(role, left, right, summed, q.mesh.sizes[axis]))
        return found

    def _splits(self, dims: Axes, letters: list[list[str | None]]) -> dict[_Key, Split]:
        """The axes of each dimension for every key of `letters`, where they divide it."""
        sizes, degrees = self.question.sizes, self.question.mesh.sizes
        found: dict[_Key, Split] = {(): ((),) * len(dims)}
        for axis, of_axis in zip(self.axes, letters, strict=True):
            longer: dict[_Key, Split] = {}
            places = [
                (letter, dims.index(letter) if letter in dims else -1) for letter in dict.fromkeys(of_axis)
            ]
            for key, split in found.items():
                for letter, place in places:
                    if place < 0:
                        longer[(*key, letter)] = split
                        continue
                    axes = (*split[place], axis)
                    degree = degrees[axis]
                    if len(axes) > 1:
                        axes = tuple([one for one in self.orders[dims[place]] if one in axes])
                        degree = prod([degrees[one] for one in axes])
                    if sizes[dims[place]] % degree == 0:
                        longer[(*key, letter)] = (*split[:place], axes, *split[place + 1 :])
            found = longer
        return found

    def _bytes(self, dims: Axes) -> float:
        return prod([self.question.sizes[dim] for dim in dims]) * dtype_bytes(self.question.dtype)

    def _degree(self, axes: Iterable[str]) -> int:
        sizes = self.question.mesh.sizes
        return prod([sizes[axis] for axis in axes])

    def _operands(self, array: ShardedArray, letters: list[list[str | None]]) -> dict[_Key, "_Operand"]:
        """The moves of `array` to all of its roles."""
        block = self._bytes(array.dims) / self._degree(array.sharded_axes)
        found: dict[_Key, _Operand] = {}
        for key, split in self._splits(array.dims, letters).items():
            moved = move(way(array.axes, array.unreduced, split, ()), block, self.placement)
            found[key] = _Operand(moved, block, moved.held or block)
        return found

    def _product(self, key: _Key, split: Split) -> _Product:
        """The local product with these axes, and its ends."""
        partial = tuple([axis for axis, role in zip(self.axes, key, strict=True) if role == PARTIAL])
        block = self.out_bytes / self._degree([axis for axes in split for axis in axes])
        endings = []
        for target in self._targets(split, partial):
            legs = way(split, partial, target.axes, target.unreduced)
            endings.append(_Ending(target, None, move(legs, block, self.placement)))
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
            yield _Ending(target, via, move(there + back, block, self.placement))

    def _with_roles(
        self, kept: _Kept, roles: tuple, degree: int, lhs: "_Operand", rhs: "_Operand", made: _Product
    ) -> None:
        """Adds every end of the product with these roles, in sequence and windowed."""
        flops = self.flops / degree
        traffic = lhs.block + rhs.block + made.block
        compute = max(flops / self.flops_per_second, traffic / self.hbm_bytes_per_second)
        for out, via, end in made.endings:
            comms = lhs.move.seconds + rhs.move.seconds + end.seconds
            busy = lhs.move.busy + rhs.move.busy + end.busy
            for window, transfer, steps in self._windows(lhs.move, rhs.move, end):
                if via is not None and window != "out":
                    continue  # the two halves in sequence are the AllReduce itself
                hidden = transfer + compute - max(compute, transfer + compute / steps)
                seconds = compute + comms - self.overlap * hidden
                peak = ceil(_peak(window, steps, lhs, rhs, made.block, end))
                is_simple = window is None and len(set(busy)) == len(busy)
                is_beaten = kept.beats(out, compute, comms, seconds, peak)
                if is_beaten and not is_simple:
                    continue
                moved = ceil(lhs.move.moved_bytes + rhs.move.moved_bytes + end.moved_bytes)
                kept.add(
                    Strategy(
                        self.question, roles, out, via, window, flops, compute, comms, seconds, moved, peak
                    ),
                    is_simple=is_simple,
                    is_beaten=is_beaten,
                )

    def _windows(self, lhs: Move, rhs: Move, end: Move) -> list[tuple[Operand | None, float, int]]:
        """(array, seconds, steps) of the transfers that can run under the product; first, of none."""
        found: list[tuple[Operand | None, float, int]] = [(None, 0.0, 1)]
        if lhs.legs and lhs.legs[-1][0] == "all_gather":
            found.append(("lhs", lhs.times[-1], self.question.mesh.size(lhs.legs[-1][1])))
        if rhs.legs and rhs.legs[-1][0] == "all_gather":
            found.append(("rhs", rhs.times[-1], self.question.mesh.size(rhs.legs[-1][1])))
        if end.legs and end.legs[0][0] == "reduce_scatter":
            found.append(("out", end.times[0], self.question.mesh.size(end.legs[0][1])))
        return found


@lru_cache(maxsize=1 << 16)
def _out(dims: Axes, split: Split, unreduced: Axes) -> ShardedArray:
    """The product C in a sharding; the same object each time, since many strategies end in it."""
    return ShardedArray("C", dims, split, unreduced)


class _Operand(NamedTuple):
    """An operand's move, the bytes of its block as given and as multiplied."""

    move: Move
    given: float
    block: float


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

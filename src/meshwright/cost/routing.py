"""The cheapest way of an array from one sharding to another on a machine, for thousands of arrays.

`notation.resharding.cheapest_reshard` takes about a millisecond. A way depends on where the mesh axes
stand before and after, on their links and on the bytes, but not on names, so it is searched once for
all arrays that are alike:

    dimensions that stay as they are   take no part, but for one that can take idle axes for a while
    axes with links of the same kind   stand for one another
    bytes                              are those of the nearest power of 16: a price is latency and bytes over
                                       bandwidth, so a way that is best for b takes at most 4 times the
                                       least for b/4 to 4 b
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, combinations
from math import ceil, floor, gcd, log, prod
from string import ascii_lowercase
from typing import NamedTuple

from meshwright.cost.moves import Leg, Split, move, way
from meshwright.cost.resharding import step_price
from meshwright.hardware.chip import SharedMemory
from meshwright.hardware.topology import Link, Placement
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective, Op
from meshwright.notation.lower_bound import LowerBounds
from meshwright.notation.mesh import Mesh
from meshwright.notation.resharding import cheapest_reshard
from meshwright.units import dtype_bytes

Rooms = tuple[int, ...]  # for each dimension, a number whose divisors are the degrees that split it

# A mesh with more axes is not searched: its ways are those of the rules.
MAX_AXES = 4
_BASE = 16  # of the powers of bytes that are searched
_LAST_POWER = 15
_LARGE = 10**15
_OPS: tuple[Op, ...] = ("all_gather", "all_reduce", "all_to_all", "permute")
_PRIME = 1_000_003  # devices come in no multiples of it


class Ask(NamedTuple):
    """From which sharding to which; rooms: how far each dimension divides."""

    source: Split
    partial: Axes
    target: Split
    target_partial: Axes
    rooms: Rooms


class _Case(NamedTuple):
    """An Ask without its names. names: the axes by their numbers; dims: places of those that take part."""

    pattern: "_Pattern | None"
    names: Axes
    dims: tuple[int, ...]
    fixed: Axes  # the axes that split the last of these all along
    shards: int  # that the numbered axes make of the array at first
    legs: dict[int, tuple[Leg, ...]]


_BY_RULES = _Case(None, (), (), (), 1, {})


class Router:
    """The ways of one placement."""

    def __init__(self, placement: Placement) -> None:
        self.placement, self.price = placement, step_price(placement)
        self.axes = tuple(axis for axis, size in placement.sizes.items() if size > 1)
        self.single = frozenset(placement.sizes) - set(self.axes)
        self.kinds = _kinds(placement)
        self._powers = self._where_powers_differ()
        self._cases: dict[Ask, _Case] = {}
        self._patterns: dict[tuple, _Pattern] = {}

    def legs(self, ask: Ask, block_bytes: float) -> tuple[Leg, ...] | None:
        """What a search finds for an array of which each device holds so many bytes at first.

        None where that is what the rules say, or the mesh is too large to search.
        """
        case = self._cases.get(ask) or self._case(ask)
        if case.pattern is None:
            return None
        power = self._power(block_bytes * case.shards)
        if power not in case.legs:
            steps = case.pattern.steps(power)
            case.legs[power] = tuple([(s.op, _named(s.axes, case.names)) for s in steps])
        return case.legs[power]

    def path(self, array: ShardedArray, ask: Ask, block_bytes: float) -> list[Collective]:
        """The same as steps of `array`, which lies as `ask` has it."""
        case = self._cases.get(ask) or self._case(ask)
        assert case.pattern is not None, f"{array}: its way is that of the rules"
        steps, operand = [], array
        for step in case.pattern.steps(self._power(block_bytes * case.shards)):
            found = [_named(axes, case.names) for axes in step.result.axes]
            if len(case.dims) > case.pattern.num_changed:
                found[-1] = case.fixed + found[-1]
            placed = {array.dims[dim]: axes for dim, axes in zip(case.dims, found, strict=True)}
            left = _named(step.result.unreduced, case.names)
            result = operand.replace(axes=placed, unreduced=tuple(a for a in array.unreduced if a in left))
            steps.append(Collective(step.op, _named(step.axes, case.names), operand, result))
            operand = result
        return steps

    def _power(self, num_bytes: float) -> int:
        least, most = self._powers
        return max(least, min(most, round(log(max(num_bytes, 1.0), _BASE))))

    def _where_powers_differ(self) -> tuple[int, int]:
        """Below the first power of the bytes latency sets every price, from the last on bandwidth does."""
        network = self.placement.network
        if isinstance(network, SharedMemory) or network.efficiency or not 0 < len(self.axes) <= MAX_AXES:
            return 0, _LAST_POWER
        # V is at most all of the array, and at least that over the devices that take no part.
        devices = prod(self.placement.sizes.values())
        crossings = {axes: [self._crossing(op, axes) for op in _OPS] for axes in _sets(self.axes)}
        least = min(min(found) for found in crossings.values())
        most = max(
            max(found) * devices / prod([self.placement.sizes[axis] for axis in axes])
            for axes, found in crossings.items()
        )
        return floor(log(max(1.0, least), _BASE)), ceil(log(max(1.0, most), _BASE))

    def _crossing(self, op: Op, axes: Axes) -> float:
        """The V at which a collective takes as long by bandwidth as by latency."""
        return self.price(op, axes, 0) / self.price(op, axes, _LARGE) * _LARGE

    def _case(self, ask: Ask) -> _Case:
        case = self._cases[ask] = self._worked_out(ask)
        return case

    def _worked_out(self, ask: Ask) -> _Case:
        source, target = ask.source, ask.target
        changed = [dim for dim, before in enumerate(source) if before != target[dim]]
        if len(changed) > 1:
            changed.sort(key=lambda dim: self._look(ask, dim))
        lists = [axes for dim in changed for axes in (source[dim], target[dim])]
        names = tuple(dict.fromkeys(chain(*lists, ask.partial, ask.target_partial)))
        idle = self._idle(ask, names)
        too_many = len(self.axes) > MAX_AXES or not self.single.isdisjoint(names)
        if too_many or not names or _is_one_step(ask, idle):
            return _BY_RULES
        host = self._host(ask, changed) if idle else []
        names += idle
        sizes = self.placement.sizes
        devices = prod([sizes[axis] for axis in names])
        rooms = [gcd(ask.rooms[dim], devices) for dim in changed]
        rooms += [gcd(self._left(ask, dim), devices) for dim in host]
        pattern = self._pattern(ask, lists, names, tuple(rooms))
        shards = prod([sizes[axis] for axes in lists[::2] for axis in axes])
        return _Case(pattern, names, (*changed, *host), source[host[0]] if host else (), shards, {})

    def _idle(self, ask: Ask, names: Axes) -> Axes:
        """The axes that neither move nor split what stays."""
        busy = {*names, *chain(*ask.source)}
        return tuple([axis for axis in self.axes if axis not in busy])

    def _pattern(self, ask: Ask, lists: list[Axes], names: Axes, rooms: Rooms) -> "_Pattern":
        """What the search is asked: `lists` are the axes before and after of each dimension that changes."""
        number = {axis: str(place) for place, axis in enumerate(names)}
        numbered = [
            tuple([number[axis] for axis in axes]) for axes in (*lists, ask.partial, ask.target_partial)
        ]
        kinds = tuple([self.kinds[axis] for axis in names])
        key = tuple(numbered), kinds, rooms
        if key not in self._patterns:
            self._patterns[key] = _Pattern(self, *key, names)
        return self._patterns[key]

    def _look(self, ask: Ask, dim: int) -> tuple:
        """What a dimension has that does not depend on names."""
        before, after = ask.source[dim], ask.target[dim]
        kept = [axis in after for axis in before]
        return (
            [self.kinds[a] for a in before],
            [self.kinds[a] for a in after],
            kept,
            [a in ask.partial for a in after],
        )

    def _host(self, ask: Ask, changed: list[int]) -> list[int]:
        """The dimension that stays as it is and divides best, if there is one."""
        others = [dim for dim in range(len(ask.source)) if dim not in changed]
        return [max(others, key=lambda dim: self._left(ask, dim))] if others else []

    def _left(self, ask: Ask, dim: int) -> int:
        """The room that a dimension has once it is split as given."""
        return ask.rooms[dim] // prod([self.placement.sizes[axis] for axis in ask.source[dim]])


class _Pattern:
    """A question to the search, with numbers for the axes, and its answers by the power of the bytes."""

    def __init__(
        self, router: Router, lists: tuple[Axes, ...], kinds: tuple[int, ...], rooms: Rooms, names: Axes
    ) -> None:
        *changed, partial, target_partial = lists
        self.num_changed = len(changed) // 2
        whole = ((),) * (len(rooms) - self.num_changed)
        dims = tuple(ascii_lowercase[: len(rooms)])
        self._array = ShardedArray("", dims, (*changed[::2], *whole), partial)
        self._target = ShardedArray("", dims, (*changed[1::2], *whole), target_partial)
        self._mesh = Mesh({str(place): router.placement.sizes[axis] for place, axis in enumerate(names)})
        self._sizes = {dim: room * _PRIME for dim, room in zip(dims, rooms, strict=True)}
        self._router, self._names, self._kinds = router, names, kinds
        self._found: dict[int, list[Collective]] = {}

    def steps(self, power: int) -> list[Collective]:
        """The cheapest steps for an array of 16^power bytes."""
        if power not in self._found:
            scale = _BASE**power / (2 * prod(self._sizes.values()))

            def price(op: Op, axes: Axes, gathered_bytes: int) -> float:
                return self._router.price(op, _named(axes, self._names), gathered_bytes * scale)

            bounds = _bounds(self._router, self._kinds, power)
            self._found[power] = cheapest_reshard(
                self._array, self._target, self._mesh, self._sizes, price, "bf16", bounds
            )
        return self._found[power]


@lru_cache(maxsize=1024)
def router(placement: Placement) -> Router:
    """The ways of `placement`, which all questions on it share."""
    return Router(placement)


@lru_cache(maxsize=4096)
def _bounds(router: Router, kinds: tuple[int, ...], power: int) -> LowerBounds:
    """What searches of so many bytes over axes of these kinds share."""
    return LowerBounds()


def cheapest_path(
    array: ShardedArray,
    target: ShardedArray,
    mesh: Mesh,
    sizes: Mapping[str, int],
    dtype: str,
    placement: Placement,
) -> tuple[Collective, ...] | None:
    """The steps of a search where they take less time than those of the rules, else None."""
    block = prod([sizes[dim] for dim in array.dims]) * dtype_bytes(dtype) / mesh.size(array.sharded_axes)
    rooms = rooms_of(array.dims, sizes, mesh.num_devices)
    ask = Ask(array.axes, array.unreduced, target.axes, target.unreduced, rooms)
    legs = router(placement).legs(ask, block)
    rules = way(array.axes, array.unreduced, target.axes, target.unreduced)
    if legs is None or move(legs, block, placement).seconds >= move(rules, block, placement).seconds:
        return None
    return tuple(router(placement).path(array, ask, block))


def rooms_of(dims: Axes, sizes: Mapping[str, int], num_devices: int) -> Rooms:
    """What each dimension and the devices of a mesh have in common: degrees that divide one divide it."""
    return tuple([gcd(sizes[dim], num_devices) for dim in dims])


def _is_one_step(ask: Ask, idle: Axes) -> bool:
    """Whether the rules take one collective, on which no search can improve: it uses every axis there is."""
    return not idle and len(way(ask.source, ask.partial, ask.target, ask.target_partial)) == 1


def _sets(axes: Axes) -> Iterator[Axes]:
    """Every choice of axes but none."""
    return chain.from_iterable(combinations(axes, count) for count in range(1, len(axes) + 1))


def _named(numbers: Iterable[str], names: Axes) -> Axes:
    return tuple([names[int(number)] for number in numbers])


def _kinds(placement: Placement) -> dict[str, int]:
    """A number for each axis, the same for those that can stand for one another."""
    kinds: dict[tuple, int] = {}
    return {axis: kinds.setdefault(_kind(placement, axis), len(kinds)) for axis in placement.sizes}


def _kind(placement: Placement, axis: str) -> tuple:
    """What a price knows of an axis. On a torus only axes with dimensions of their own are alike."""
    links = placement.links[axis]
    others = {link.dim for other, found in placement.links.items() if other != axis for link in found}
    own = all(link.kind != "ici" or link.dim not in others for link in links)
    return placement.sizes[axis], tuple(map(_anywhere, links)), None if own else axis


def _anywhere(link: Link) -> tuple:
    return (
        link.kind,
        link.size,
        link.one_way_bytes_per_second,
        link.hop_seconds,
        link.stride,
        link.ring,
        link.two_way,
    )

"""One array's way from a sharding to another: its collectives, priced, and the memory they take.

A way depends only on the positions of the mesh axes, not on the names of the array and its
dimensions, so ways are found once and shared by all arrays of a process.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from math import prod
from string import ascii_lowercase
from typing import NamedTuple

from meshwright.cost.collectives import seconds_by_bytes
from meshwright.cost.resharding import step_price
from meshwright.hardware.topology import Placement
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Op, gathered_bytes, reshard

Split = tuple[Axes, ...]  # the axes of each dimension
Leg = tuple[Op, Axes]


class Move(NamedTuple):
    """A way, priced for blocks of some size; times are those of its legs, bytes those of one device.

    last_gather: seconds of the last leg if it is an all-gather. held: of the result, 0 where nothing
    moves. extra: most that is held beside the array as given (without the last leg, without the first
    leg: where that one runs in steps under the product).
    """

    legs: tuple[Leg, ...]
    busy: Axes  # the axes of all that communicate
    times: tuple[float, ...]
    seconds: float
    last_gather: float
    moved_bytes: float
    held: float
    extra: float
    extra_but_last: float
    extra_but_first: float

    def replaces(self, other: "Move") -> bool:
        """Whether it serves better than `other` in any strategy."""
        return (
            self.seconds <= other.seconds
            and self.seconds - self.last_gather <= other.seconds - other.last_gather
            and self.seconds - self.first_scatter <= other.seconds - other.first_scatter
            and self.extra <= other.extra
        )

    @property
    def first_scatter(self) -> float:
        """Seconds of the first leg if it is a reduce-scatter."""
        return self.times[0] if self.legs and self.legs[0][0] == "reduce_scatter" else 0.0


NO_MOVE = Move((), (), (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@lru_cache(maxsize=1 << 18)
def way(source: Split, partial: Axes, target: Split, target_partial: Axes) -> tuple[Leg, ...]:
    """The collectives between two shardings. Dimensions that stay as they are take no part in them."""
    changed = [pair for pair in zip(source, target, strict=True) if pair[0] != pair[1]]
    if not changed and partial == target_partial:
        return ()
    # Routes do not depend on the names of the axes: they are found for numbers in order of appearance.
    lists = [*chain.from_iterable(changed), partial, target_partial]
    names = tuple(dict.fromkeys(chain.from_iterable(lists)))
    number = {axis: i for i, axis in enumerate(names)}
    legs = _way(tuple([tuple([number[axis] for axis in axes]) for axes in lists]))
    return tuple([(op, tuple([names[i] for i in axes])) for op, axes in legs])


@lru_cache(maxsize=1 << 18)
def _way(lists: tuple[tuple[int, ...], ...]) -> tuple[tuple[Op, tuple[int, ...]], ...]:
    """Of axes before and after for each dimension in turn, then of the partial sum."""
    *changed, partial, target_partial = [tuple(map(str, axes)) for axes in lists]
    before, after = tuple(changed[::2]), tuple(changed[1::2])
    dims = tuple(ascii_lowercase[: len(before)])
    source, target = ShardedArray("", dims, before, partial), ShardedArray("", dims, after, target_partial)
    return tuple((step.op, tuple(map(int, step.axes))) for step in reshard(source, target))


def move(legs: tuple[Leg, ...], block: float, placement: Placement) -> Move:
    """`legs` priced for an array of which each device holds `block` bytes at first."""
    if not legs:
        return NO_MOVE
    if len(legs) == 1:
        (op, axes), (after, seconds, sent) = legs[0], _leg(*legs[0], placement)(block)
        busy, gather = axes if op != "slice" else (), seconds if op == "all_gather" else 0.0
        return Move(legs, busy, (seconds,), seconds, gather, sent, after, after, 0.0, 0.0)
    busy: Axes = ()
    times: list[float] = []
    extras: list[float] = []
    moved = given = 0.0
    for op, axes in legs:
        after, seconds, sent = _leg(op, axes, placement)(block)
        times.append(seconds)
        extras.append(given + after)
        moved += sent
        if op != "slice":
            busy += axes
        block = given = after
    return Move(
        legs,
        busy,
        tuple(times),
        sum(times),
        times[-1] if legs[-1][0] == "all_gather" else 0.0,
        moved,
        block,
        max(extras),
        max(extras[:-1]),
        max(extras[1:]),
    )


@lru_cache(maxsize=1 << 16)
def _leg(op: Op, axes: Axes, placement: Placement) -> Callable[[float], tuple[float, float, float]]:
    """Of a block's bytes (those of the resulting block, seconds, those that a device sends)."""
    n = prod([placement.sizes[axis] for axis in axes])
    if op == "slice":
        return lambda block: (block / n, 0.0, 0.0)
    price = seconds_by_bytes(op, axes, placement)
    if op == "permute":  # whose price is the longer of two collectives
        price = lambda gathered: step_price(placement)(op, axes, round(gathered))  # noqa: E731
    growth = n if op == "all_gather" else 1 / n if op == "reduce_scatter" else 1
    gathered = gathered_bytes(op, 1.0, n)
    sent = sent_bytes(op, gathered, n)

    def leg(block: float) -> tuple[float, float, float]:
        return block * growth, price(block * gathered), block * sent

    return leg


def sent_bytes(op: Op, gathered: float, num_devices: int) -> float:
    """Bytes that one of n devices sends, where each passes on what it has not yet passed on.

        all_gather, reduce_scatter   V (n - 1)/n
        all_reduce                   twice that
        all_to_all                   V (n - 1)/n^2: a block is V/n, and one part of it stays
        permute                      V/n

    V: the gathered bytes. On a torus an all-to-all crosses more links than the one it leaves by.
    """
    n = num_devices
    if op == "permute":
        return gathered / n
    passes = 2 if op == "all_reduce" else 1 / n if op == "all_to_all" else 1
    return passes * gathered * (n - 1) / n

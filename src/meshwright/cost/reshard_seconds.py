"""Seconds of a reshard's steps on a machine, with the bytes that it sends and holds."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from meshwright.cost.collectives import seconds_by_bytes
from meshwright.hardware.topology import Placement
from meshwright.notation.array import Axes
from meshwright.notation.collective import Collective, ReshardOp, gathered_of_block
from meshwright.notation.resharding import Price


@lru_cache(maxsize=1024)
def step_price(placement: Placement) -> Price:
    """Seconds of (operation, axes, V) on the links of `placement`.

        permute  t = max(shift, all_to_all)

    A permute from I_XY to I_YX sends blocks to devices all over the group, not only to the next one. On a
    switch it takes the time of a shift. On a torus a block's mean way is a quarter of every ring, as in an
    all-to-all of equal blocks, so the longer of both is the price. A slice is free.
    """

    def price(op: ReshardOp, axes: Axes, gathered_bytes: int) -> float:
        if op == "slice":
            return 0.0
        seconds = seconds_by_bytes(op, axes, placement)(gathered_bytes)
        if op == "permute":
            seconds = max(seconds, seconds_by_bytes("all_to_all", axes, placement)(gathered_bytes))
        return seconds

    return price


class PricedReshard(NamedTuple):
    """The steps of a reshard with their seconds.

    block_bytes: bytes of the array on one device, before the first step and after each. sent_bytes: bytes
    that one device sends. by_rules: whether the steps are the result of `notation.collective.reshard`.
    """

    steps: tuple[Collective, ...]
    times: tuple[float, ...]
    block_bytes: tuple[float, ...]
    sent_bytes: float
    seconds: float
    by_rules: bool

    @property
    def last_gather(self) -> float:
        """Seconds of the last step if it is an all-gather."""
        return self.times[-1] if self.steps and self.steps[-1].op == "all_gather" else 0.0

    @property
    def first_scatter(self) -> float:
        """Seconds of the first step if it is a reduce-scatter."""
        return self.times[0] if self.steps and self.steps[0].op == "reduce_scatter" else 0.0

    @property
    def busy_axes(self) -> Axes:
        """The axes of all communicating steps, in order."""
        return tuple([axis for step in self.steps if step.op != "slice" for axis in step.axes])

    @property
    def result_bytes(self) -> float:
        """Bytes of the result in addition to the given array; 0 without steps."""
        return self.block_bytes[-1] if self.steps else 0.0

    def peak_bytes(self, first: int = 0, last: int | None = None) -> float:
        """Most bytes in the steps from `first` to `last`, in addition to the given array."""
        blocks = (0.0, *self.block_bytes[1:])  # a step holds its operand and its result
        return max([a + b for a, b in pairwise(blocks)][first:last], default=0.0)


def priced_reshard(
    steps: Iterable[Collective], block_bytes: float, placement: Placement, *, by_rules: bool = True
) -> PricedReshard:
    """`steps` priced for an array with `block_bytes` per device before the first step."""
    price, steps = step_price(placement), tuple(steps)
    times, blocks, sent = [], [block_bytes], 0.0
    for step in steps:
        n = prod([placement.sizes[axis] for axis in step.axes])
        gathered = gathered_of_block(step.op, blocks[-1], n)
        times.append(price(step.op, step.axes, gathered))
        sent += sent_bytes(step.op, gathered, n)
        growth = n if step.op == "all_gather" else 1 / n if step.op in ("reduce_scatter", "slice") else 1
        blocks.append(blocks[-1] * growth)
    return PricedReshard(steps, tuple(times), tuple(blocks), sent, sum(times), by_rules)


def sent_bytes(op: ReshardOp, gathered: float, num_devices: int) -> float:
    """Bytes that one of n devices sends, if each forwards every received block once.

        all_gather, reduce_scatter   V (n - 1)/n
        all_reduce                   twice that
        all_to_all                   V (n - 1)/n^2: a block is V/n, and one part of it stays
        permute                      V/n
        slice                        0

    V: the gathered bytes. On a torus the blocks of an all-to-all cross further links on their way.
    """
    n = num_devices
    if op == "slice":
        return 0.0
    if op == "permute":
        return gathered / n
    passes = 2 if op == "all_reduce" else 1 / n if op == "all_to_all" else 1
    return passes * gathered * (n - 1) / n

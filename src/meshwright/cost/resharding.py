"""What a step of a reshard costs on a machine: the price that the search of notation.resharding asks for."""

from functools import lru_cache

from meshwright.cost.collectives import collective_seconds
from meshwright.hardware.topology import Placement
from meshwright.notation.array import Axes
from meshwright.notation.collective import Op
from meshwright.notation.resharding import Price


@lru_cache(maxsize=1024)
def step_price(placement: Placement) -> Price:
    """Seconds of (operation, axes, V) on the links of `placement`.

        permute  t = max(shift, all_to_all)

    A permute that hands I_XY to I_YX sends blocks all over the group, not to the next device alone.
    On a switch that takes as long as a shift; on a torus its mean way is that of an all-to-all of
    blocks as large, a quarter of every ring, so it is priced by whichever is longer. A slice is free.
    """

    def price(op: Op, axes: Axes, gathered_bytes: int) -> float:
        if op == "slice":
            return 0.0
        seconds = collective_seconds(op, gathered_bytes, axes, placement).seconds
        if op == "permute":
            seconds = max(seconds, collective_seconds("all_to_all", gathered_bytes, axes, placement).seconds)
        return seconds

    return price

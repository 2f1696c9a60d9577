"""Measured shares of a bandwidth by the size of messages.

Points are ((bytes, share), ...) in ascending order of bytes, with a share of the bandwidth in (0, 1]. Between
two points log(share) is linear in log(bytes); before the first and after the last it is constant. Without
points the share is 1.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import exp, log

Points = tuple[tuple[float, float], ...]


def share_at(points: Points, num_bytes: float) -> float:
    """The share of the bandwidth for messages of `num_bytes`.

        share(b) = s0 (b / b0)^k,  k = log(s1 / s0) / log(b1 / b0)  between (b0, s0) and (b1, s1)

    The time b / share(b) is then a power of b as well. So it never falls as b grows if it does not fall from
    point to point, which `fault` checks.

    >>> share_at(((1e3, 0.25), (1e5, 1.0)), 1e4)
    0.5
    """
    if not points:
        return 1.0
    index = bisect_left(points, (num_bytes, 0.0))
    if index in (0, len(points)):
        return points[min(index, len(points) - 1)][1]
    (low, low_share), (high, high_share) = points[index - 1 : index + 1]
    slope = log(high_share / low_share) / log(high / low)
    return low_share * exp(slope * log(num_bytes / low))


def fault(points: Sequence[Sequence[float]], most: float = 1.0) -> str | None:
    """A fault of the points, in words that follow their key in an error; None if there is none.

    most: maximum of the second figure: 1 for a share, infinity for a rate.
    """
    for number, share in points:
        if number <= 0 or not 0 < share <= most:
            allowed = "bytes are above 0, a share in (0, 1]" if most == 1 else "both are above 0"
            return f"has [{number}, {share}]: {allowed}"
    for (low, low_share), (high, high_share) in pairwise(points):
        if high <= low:
            return f"has {high} bytes after {low}: sizes ascend"
        if high / high_share < low / low_share:
            return f"makes {high} bytes faster than {low}: no larger message takes less time"
    return None

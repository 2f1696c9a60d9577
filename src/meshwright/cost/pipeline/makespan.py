"""The makespan of a schedule in closed form, for a search that asks thousands of times.

A makespan is the longest chain of passes and hops that wait for each other, so with equal stages it is
the largest of a few sums: so many F, B, W and hops. Which chains can be the longest follows from the
table alone. They are listed here for each schedule and hold to the last digit for the times that
stages have: weight <= forward <= backward, and a hop no longer than a forward pass. (The gradient of
the weights has the forward pass's products without attention's; that of the input has them all, and
what is recomputed.) Outside, they are a lower bound; `simulate` is exact for any.

Letters: p stages, m microbatches, v chunks a stage; n = p - 1.
"""

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.pipeline.schedule import check_schedule, routes
from meshwright.cost.pipeline.simulate import Times


class Chain(NamedTuple):
    """How many passes and hops stand one after another."""

    forward: int
    backward: int
    weight: int
    hops: int


def makespan(name: str, num_stages: int, num_microbatches: int, num_chunks: int, times: Times) -> float:
    """Seconds of one step of the schedule, without the optimizer.

        max over chains (n_F F + n_B B + n_W W + n_hop hop), and where depths differ from the body
        + sum over those depths of (their F + B + W less the body's)
        + (m - 1) times the most that they add to one stage's work on a microbatch

    The second part is exact for a slow last stage of GPipe and 1F1B without hops, and close for the
    rest (tests/cost/test_pipeline.py). A hop that is not hidden counts as part of each F and B.
    Raises LayoutError for numbers with which the schedule does not exist.
    """
    forward, backward, weight = times.body
    hop = times.hop_seconds
    if not times.hops_hidden:
        forward, backward, hop = forward + hop, backward + hop, 0.0
    seconds = max(
        f * forward + b * backward + w * weight + h * hop
        for f, b, w, h in critical_chains(name, num_stages, num_microbatches, num_chunks)
    )
    if times.special:
        seconds += _special_seconds(name, num_stages, num_microbatches, num_chunks, times)
    return seconds


@lru_cache(maxsize=65536)
def critical_chains(name: str, p: int, m: int, v: int = 1) -> tuple[Chain, ...]:
    """The chains of which one is the longest, whatever the times.

    >>> critical_chains("gpipe", p=4, m=8)
    (Chain(forward=11, backward=11, weight=11, hops=6),)
    """
    check_schedule(name, p, m, v)
    if name == "interleaved":
        return (_whole(v * m + p - 1, 2 * (v * p - 1)),)
    chains = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "zb-h1": _zb_h1, "zb-v": _zb_v, "dualpipe": _dualpipe}
    return tuple(chains[name](p, m))


def _whole(num_passes: int, hops: int) -> Chain:
    """As many F as B as W."""
    return Chain(num_passes, num_passes, num_passes, hops)


def _gpipe(p: int, m: int) -> list[Chain]:
    """Forward: one microbatch through all stages, the others after it through one; backward likewise."""
    return [_whole(m + p - 1, 2 * (p - 1))]


def _one_f_one_b(p: int, m: int) -> list[Chain]:
    """As many passes as GPipe's, but a round trip of hops for every p microbatches.

    The first stage may run p ahead: its next F waits for a B, which comes back over 2 (p - 1) hops.
    """
    return [_whole(m + p - 1, _round_trip_hops(p, m))]


def _round_trip_hops(p: int, m: int) -> int:
    """One round trip for the first microbatch and for every p others; for the r that are left, to stage r."""
    trips, rest = divmod(m - 1, p)
    return 2 * (p - 1) * (trips + 1) + 2 * max(rest - 1, 0)


def _zb_h1(p: int, m: int) -> list[Chain]:
    """1F1B's passes less the W that filled the bubble; or its round trips, each with the W on the way."""
    n = p - 1
    most = Chain(m + n, m + n, m - min(n, m - 1), 2 * n + 2 * min(max(m - 2, 0), n))
    if m <= p:
        return [most]
    trips, rest = divmod(m - 1, p)
    return [most, Chain(m + n, m + n, trips + 1 + (rest > 0), _round_trip_hops(p, m))]


def _zb_v(p: int, m: int) -> list[Chain]:
    """All of one stage's work, and the way of the first microbatch to it or the last one's from it.

    A slow B keeps the later stages waiting on the way up; W fill the time.
    """
    n, odd = p - 1, (p - 1) // 2
    filled = min(m - 1, n + p // 2)
    chains = [Chain(0, 2 * n, -filled, 6 * n - 2)]
    if m > p:
        chains += [
            Chain(0, n + odd, -odd, 5 * n + odd - 2),
            Chain(n, n, -filled, 6 * n),
            Chain(n, odd, -odd, 5 * n + odd),
            Chain(-1, 2 * n, -filled - (p > 2), 6 * n),
        ]
    return [Chain(2 * m + f, 2 * m + b, 2 * m + w, h) for f, b, w, h in chains]


def _dualpipe(p: int, m: int) -> list[Chain]:
    """All of a stage's work; what the way in and out adds, F or B of the stages to the middle, less W."""
    inner = p // 2 - 1
    trips, rest = divmod(m - 2 * p, p)
    hops = (p - 1) * trips + (rest if rest < 4 else rest - 1)
    if not inner:
        return [Chain(m, m, m, 3 + hops)]
    hops += 4 * p - 6
    return [
        Chain(m + inner - 1, m + 2 * inner, m - inner, hops),
        Chain(m + 2 * inner, m + inner, m - inner, hops - inner),
    ]


def _special_seconds(name: str, p: int, m: int, v: int, times: Times) -> float:
    """What depths that differ from the body add to the makespan."""
    directions = routes(name, p, v)
    by_stage: defaultdict[int, float] = defaultdict(float)
    once = 0.0
    for depth, seconds in times.special.items():
        extra = seconds.total - times.body.total
        once += extra
        for route in directions:
            by_stage[route[depth].stage] += extra / len(directions)
    # A stage without special depths adds nothing.
    loads = [*by_stage.values(), *([0.0] if len(by_stage) < p else [])]
    return once + (m - 1) * max(loads)


@lru_cache(maxsize=65536)
def in_flight(name: str, p: int, m: int, v: int = 1, stage: int = 0) -> int:
    """The most microbatch-chunks whose activations are alive at once on the stage.

    A chunk is the whole of a stage's layers for gpipe, 1f1b, zb-h1 and (of one direction) dualpipe, and
    1/v or half of them for interleaved and zb-v. Raises LayoutError for numbers with which the schedule
    does not exist.

    >>> [in_flight("1f1b", p=4, m=8, stage=s) for s in range(4)], in_flight("gpipe", p=4, m=8)
    ([4, 3, 2, 1], 8)
    """
    check_schedule(name, p, m, v)
    if name == "interleaved":
        return min(v * m, 2 * (p - 1 - stage) + (v - 1) * p + 1)
    alive = {"gpipe": m, "1f1b": p - stage, "zb-h1": p, "zb-v": 2 * p, "dualpipe": p + 1}[name]
    return min(2 * m if name == "zb-v" else m, alive)

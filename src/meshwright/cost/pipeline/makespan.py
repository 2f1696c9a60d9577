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

from meshwright.cost.pipeline.simulate import Times
from meshwright.layout.pipeline.schedule import check_schedule, routes

# Of F, B, W and a hop.
_Seconds = tuple[float, float, float, float]


class Chain(NamedTuple):
    """How many passes and hops stand one after another."""

    forward: int
    backward: int
    weight: int
    hops: int


def makespan(name: str, num_stages: int, num_microbatches: int, num_chunks: int, times: Times) -> float:
    """Seconds of one step of the schedule, without the optimizer.

        max over chains (n_F F + n_B B + n_W W + n_hop hop)

    Where some depths differ from the body, the chain may as well stay on the stage that they slow most:
    exact for a slow last stage of GPipe and 1F1B, within a few percent for others
    (tests/cost/test_pipeline.py). A hop that is not hidden counts as part of each F and B.
    Raises LayoutError for numbers with which the schedule does not exist.
    """
    p, m, v = num_stages, num_microbatches, num_chunks
    forward, backward, weight = times.body
    hop = times.hop_seconds
    if not times.hops_hidden:
        held = hop * _sent_share(name, p)
        forward, backward, hop = forward + held, backward + held, 0.0
    body = forward, backward, weight, hop
    seconds = max(_seconds(chain, body) for chain in critical_chains(name, p, m, v))
    if not times.special:
        return seconds
    once, slowest = _extra_seconds(name, p, v, times)
    if slowest < 0:
        return seconds + once + (m - 1) * slowest
    return max(
        seconds + _passing_seconds(name, p, m, once, slowest), _staying(name, p, m, v, body, once, slowest)
    )


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


def _sent_share(name: str, p: int) -> float:
    """Of the passes F and B of the busiest stage, the share whose result goes to another stage.

    Of two stages one sends forward and the other back, unless all F come first or chunks form a loop.
    """
    return min(p - 1, 2) / 2 if name not in ("gpipe", "interleaved") else min(p - 1, 1)


def _seconds(chain: Chain, body: _Seconds) -> float:
    return sum(count * seconds for count, seconds in zip(chain, body, strict=True))


def _extra_seconds(name: str, p: int, v: int, times: Times) -> tuple[float, float]:
    """What the special depths add: to one microbatch's way, and at most to one stage's work on it."""
    directions = routes(name, p, v)
    by_stage: defaultdict[int, float] = defaultdict(float)
    once = 0.0
    for depth, seconds in times.special.items():
        extra = seconds.total - times.body.total
        once += extra
        for route in directions:
            by_stage[route[depth].stage] += extra / len(directions)
    # A stage without special depths adds nothing.
    return once, max([*by_stage.values(), *([0.0] if len(by_stage) < p else [])])


def _passing_seconds(name: str, p: int, m: int, once: float, slowest: float) -> float:
    """What the special depths add to the longest chain of equal stages, which passes them now and then."""
    if name == "1f1b":  # on every round trip
        return once * -(-m // p)
    if name == "zb-h1":  # every F and B of the last stage, but not the W that it leaves for later
        return max(once, (m - p / 3) * slowest)
    return once


def _staying(name: str, p: int, m: int, v: int, body: _Seconds, once: float, slowest: float) -> float:
    """The chain of all the work of the slowest stage, the way to it and the way from it."""
    n, inner = p - 1, (p - 1) // 2
    work = m * (sum(body[:3]) * _chunks(name, v) + slowest)
    if name == "zb-h1":
        return work + _seconds(Chain(n, 0, 0, n), body)
    if name == "zb-v":  # the first stage waits for the turn, the less the slower it is
        return work + max(_seconds(Chain(p // 2, inner, -inner, 3 * n), body) - slowest * p / 12, 0.0)
    if name == "dualpipe":
        return work + _seconds(Chain(0, inner, -inner, n), body)
    return work + _seconds(_whole(n, 2 * (v * p - 1)), body) + once - slowest


def _chunks(name: str, v: int) -> int:
    """Chunks of one stage that a microbatch visits."""
    return 2 if name == "zb-v" else v if name == "interleaved" else 1


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

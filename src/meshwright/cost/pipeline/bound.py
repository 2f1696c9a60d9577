"""Lower bounds of a schedule's step time, for a search with thousands of evaluations.

A step takes at least the longest of four times, in any table of a schedule:

    one microbatch   its way through all depths and back
    a stage          the first microbatch's way to it, all of its passes, the last one's way back from it
    its first B      before a microbatch has been to the last depth and back, a stage runs only F, at most
                     one per microbatch that may be alive; all of its other passes come after
    memory           a microbatch is alive from its F until its B has come back from all later depths: the sum
                     over microbatches, divided by the number that may be alive together

Letters: p stages, m microbatches, v chunks a stage.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.layout.pipelines import SCHEDULES
from meshwright.units import Numeric


def least_makespan(
    name: str,
    stages: int,
    microbatches: Numeric,
    chunks: int,
    depths: tuple[Any, Any, Any],
    hop_seconds: Numeric,
) -> Any:
    """Lower bound of the seconds of a step of the schedule.

    depths: (forward, backward, weight) as in PassSeconds, each with an entry a depth. Entries may be arrays
    of one number for each of many layouts with equal stages and chunks; `microbatches` and `hop_seconds` are
    then such arrays, too.
    """
    schedule = SCHEDULES[name]
    stage_depths, shares, hops = _places(name, stages, chunks)
    forward, backward, weight = (np.asarray(seconds, dtype=float) for seconds in depths)
    # The gradient of the weights delays the way back only if it is never split off.
    back = backward if schedule.splits_backward else backward + weight
    apart = np.multiply.outer(hops, hop_seconds)
    coming, going = _before(forward + apart), _before(back + apart)
    round_trips = _from(forward + back + 2 * apart)
    work = shares @ (forward + backward + weight) * microbatches
    put_off = shares @ weight * microbatches if schedule.splits_backward else 0.0
    ready, after = coming[stage_depths[:, 0]], going[stage_depths[:, 0]]
    first_back = (coming + round_trips - back)[stage_depths[:, -1]]
    most, held = int(np.max(microbatches)), schedule.chunks(chunks)
    alive = [schedule.most_alive(stages, most, held, stage) for stage in range(stages)]
    had = np.multiply.outer(alive, np.ones_like(hop_seconds)) * forward[stage_depths].max(axis=1)
    start = np.maximum(ready, first_back - had)
    by_stage = start + work + np.maximum(after - put_off, 0.0)
    shared = ready[0] + (shares @ round_trips)[0] * microbatches / alive[0] + after[0]
    return np.maximum(np.maximum(by_stage.max(axis=0), shared), round_trips[0])


def _before(seconds: Numeric) -> Any:
    """For each depth, the sum over earlier depths."""
    return np.cumsum(seconds, axis=0) - seconds


def _from(seconds: Any) -> Any:
    """For each depth, the sum over it and later depths."""
    return np.cumsum(seconds[::-1], axis=0)[::-1]


@lru_cache(maxsize=64)
def _places(name: str, stages: int, chunks: int) -> tuple[Any, Any, Any]:
    """(depths of every stage, runs of a microbatch there, hops after each depth).

    Depths of a stage are in order. Runs: share of the microbatches of each stage and depth.
    """
    schedule = SCHEDULES[name]
    routes = schedule.routes(stages, schedule.chunks(chunks))
    stage_depths: list[list[int]] = [[] for _ in range(stages)]
    shares = np.zeros((stages, len(routes[0])))
    for route in routes:
        for depth, place in enumerate(route):
            stage_depths[place.stage].append(depth)
            shares[place.stage, depth] += 1 / len(routes)
    on = [place.stage for place in routes[0]]
    hops = np.array([float(one != two) for one, two in zip(on, [*on[1:], on[-1]], strict=True)])
    return np.array([sorted(depths) for depths in stage_depths]), shares, hops

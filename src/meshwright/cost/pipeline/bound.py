"""Seconds that no step of a schedule falls below, for a search that asks thousands of times.

Four things take their time in any table of a schedule; the step is at least as long as the longest:

    one microbatch   its way through all depths and back
    a stage          the first microbatch's way to it, all of its passes, the last one's way back from it
    its first B      until one microbatch has been to the last depth and back, a stage has had only F, as many
                     as may be alive; all of its other passes come after
    memory           a microbatch is alive from its F until its B has come back from all depths behind: all
                     of these times, shared by as many as may be alive together

Letters: p stages, m microbatches, v chunks a stage.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.layout.pipelines import SCHEDULES


def least_makespan(
    name: str, stages: int, microbatches: Any, chunks: int, depths: tuple[Any, Any, Any], hop_seconds: Any
) -> Any:
    """Seconds that a step of the schedule takes at least.

    depths: (forward, backward, weight) as in PassSeconds, each with an entry a depth. Entries may be arrays
    of one number for each of many layouts that have as many stages and chunks; `microbatches` and
    `hop_seconds` are then such arrays, too.
    """
    schedule = SCHEDULES[name]
    own, shares, hops = _places(name, stages, chunks)
    forward, backward, weight = (np.asarray(seconds, dtype=float) for seconds in depths)
    # Only where it is never split does the gradient of the weights hold up the way back.
    back = backward if schedule.splits_backward else backward + weight
    apart = np.multiply.outer(hops, hop_seconds)
    coming, going = _before(forward + apart), _before(back + apart)
    round_trips = _behind(forward + back + 2 * apart)
    work = shares @ (forward + backward + weight) * microbatches
    put_off = shares @ weight * microbatches if schedule.splits_backward else 0.0
    ready, after = coming[own[:, 0]], going[own[:, 0]]
    first_back = (coming + round_trips - back)[own[:, -1]]
    most, held = int(np.max(microbatches)), schedule.chunks(chunks)
    alive = [schedule.most_alive(stages, most, held, stage) for stage in range(stages)]
    had = np.multiply.outer(alive, np.ones_like(hop_seconds)) * forward[own].max(axis=1)
    start = np.maximum(ready, first_back - had)
    by_stage = start + work + np.maximum(after - put_off, 0.0)
    shared = ready[0] + (shares @ round_trips)[0] * microbatches / alive[0] + after[0]
    return np.maximum(np.maximum(by_stage.max(axis=0), shared), round_trips[0])


def _before(seconds: Any) -> Any:
    """For each depth, the sum over the depths before it."""
    return np.cumsum(seconds, axis=0) - seconds


def _behind(seconds: Any) -> Any:
    """For each depth, the sum over it and the depths after it."""
    return np.cumsum(seconds[::-1], axis=0)[::-1]


@lru_cache(maxsize=64)
def _places(name: str, stages: int, chunks: int) -> tuple[Any, Any, Any]:
    """(depths of every stage in order, how often a microbatch is at each of all, hops after each depth)."""
    schedule = SCHEDULES[name]
    routes = schedule.routes(stages, schedule.chunks(chunks))
    own: list[list[int]] = [[] for _ in range(stages)]
    shares = np.zeros((stages, len(routes[0])))
    for route in routes:
        for depth, place in enumerate(route):
            own[place.stage].append(depth)
            shares[place.stage, depth] += 1 / len(routes)
    on = [place.stage for place in routes[0]]
    hops = np.array([float(one != two) for one, two in zip(on, [*on[1:], on[-1]], strict=True)])
    return np.array([sorted(depths) for depths in own]), shares, hops

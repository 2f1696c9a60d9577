"""Seconds that no step of a schedule falls below, for a search that asks thousands of times.

Three things take their time in any table of a schedule; the step is at least as long as the longest:

    one microbatch   its way through all depths and back
    a stage          the first microbatch's way to it, all of its passes, the last one's way back from it
    memory           a stage has at most so many microbatches alive, each from its F until its B has come back
                     from all depths behind: all of these times, shared by those that are alive together

Letters: p stages, m microbatches, v chunks a stage.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from meshwright.layout.pipeline import SCHEDULES


def least_makespan(
    name: str, stages: int, microbatches: Any, chunks: int, depths: tuple[Any, Any, Any], hop_seconds: Any
) -> Any:
    """Seconds that a step of the schedule takes at least.

    depths: (forward, backward, weight) as in PassSeconds, each with an entry a depth. Entries may be arrays
    of one number for each of many layouts that have as many stages and chunks; `microbatches` and
    `hop_seconds` are then such arrays, too.
    """
    schedule = SCHEDULES[name]
    lowest, shares, hops = _places(name, stages, chunks)
    forward, backward, weight = (np.asarray(seconds, dtype=float) for seconds in depths)
    total = forward + backward + weight
    # Only where it is never split does the gradient of the weights hold up the way back.
    back = backward if schedule.splits_backward else backward + weight
    apart = np.multiply.outer(hops, hop_seconds)
    coming, going = _before(forward + apart), _before(back + apart)
    round_trips = _behind(forward + back + 2 * apart)
    work = shares @ total * microbatches
    ready, after = coming[lowest], going[lowest]
    by_stage = ready + work
    if schedule.splits_backward:
        by_stage = np.maximum(by_stage, by_stage - shares @ weight * microbatches + after)
    else:
        by_stage = by_stage + after
    alive = schedule.most_alive(stages, int(np.max(microbatches)), schedule.chunks(chunks), 0)
    shared = ready[0] + (shares @ round_trips)[0] * microbatches / alive + after[0]
    return np.maximum(np.maximum(by_stage.max(axis=0), shared), round_trips[0])


def _before(seconds: Any) -> Any:
    """By depth, the sum of the depths before it."""
    return np.cumsum(seconds, axis=0) - seconds


def _behind(seconds: Any) -> Any:
    """By depth, the sum of it and of the depths behind it."""
    return np.cumsum(seconds[::-1], axis=0)[::-1]


@lru_cache(maxsize=64)
def _places(name: str, stages: int, chunks: int) -> tuple[Any, Any, Any]:
    """(lowest depth of every stage, how often a microbatch is at each depth of it, hops after each depth)."""
    schedule = SCHEDULES[name]
    routes = schedule.routes(stages, schedule.chunks(chunks))
    shares = np.zeros((stages, len(routes[0])))
    for route in routes:
        for depth, place in enumerate(route):
            shares[place.stage, depth] += 1 / len(routes)
    on = [place.stage for place in routes[0]]
    hops = np.array([float(one != two) for one, two in zip(on, [*on[1:], on[-1]], strict=True)])
    return (shares > 0).argmax(axis=1), shares, hops

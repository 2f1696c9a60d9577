"""Depths: a schedule's chunks of layers, in the model's order.

Only this file assigns layers to depths, for time, memory, pictures and programs.
"""

from functools import lru_cache
from itertools import accumulate, pairwise
from math import floor

from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.pass_table import StageRoute
from meshwright.models.config import ModelConfig


def stage_routes(schedule: str, pipe: int, interleave: int) -> tuple[StageRoute, ...]:
    """The places of all depths, one route for each direction."""
    record = SCHEDULES[schedule]
    return record.routes(pipe, record.chunks(interleave))


@lru_cache(maxsize=1024)
def layers_of_depths(
    num_layers: int, schedule: str, pipe: int, interleave: int, head_layers: float = 0.0
) -> tuple[range, ...]:
    """The layers of every depth, in order and as even as whole layers allow.

    head_layers: the head's work in layers, if the software counts it. Each depth but the last then takes
    layers until it is past its share, as nanotron fills stages.

    All depths get equal numbers of layers. The remaining layers go to one depth of every stage in turn:
    first to the middle stages, then to the stage with the embedding, then to the stage with the head. Within
    a stage, the depth with the embedding or the head comes last. So 126 layers in 8 chunks on each of 16
    stages are one layer a chunk, and no layer next to the embedding or the head.

    >>> [len(layers) for layers in layers_of_depths(126, "1f1b", 8, 1)]
    [15, 16, 16, 16, 16, 16, 16, 15]
    """
    route = stage_routes(schedule, pipe, interleave)[0]
    if head_layers:
        share = (num_layers + head_layers) / len(route)
        ends = [min(num_layers, floor(share * (depth + 1)) + 1) for depth in range(len(route) - 1)]
        return tuple(range(first, last) for first, last in pairwise((0, *ends, num_layers)))
    least, over = divmod(num_layers, len(route))
    more = set(_depths_in_turn(route, pipe)[:over])
    bounds = accumulate((least + (depth in more) for depth in range(len(route))), initial=0)
    return tuple(range(first, last) for first, last in pairwise(bounds))


def cuts_groups(config: ModelConfig, schedule: str, pipe: int, interleave: int) -> bool:
    """Whether a depth would begin between layers that share keys and values."""
    each = config.layers_per_cache
    depths = layers_of_depths(config.num_layers, schedule, pipe, interleave) if each > 1 else ()
    return any(depth.start % each for depth in depths)


def _depths_in_turn(route: StageRoute, pipe: int) -> list[int]:
    """Depths in the order of receiving one more layer."""
    last = len(route) - 1
    depths: list[list[int]] = [[] for _ in range(pipe)]
    for depth in (*range(1, last), 0, last) if last else (0,):
        depths[route[depth].stage].append(depth)
    first, final = route[0].stage, route[-1].stage
    stages = sorted(range(pipe), key=lambda stage: (stage == final, stage == first, stage))
    return [depths[stage][turn] for turn in range(len(depths[0])) for stage in stages]

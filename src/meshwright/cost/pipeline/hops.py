"""Activations and cotangents between the stages of a pipeline in one step."""

from dataclasses import dataclass
from itertools import pairwise

from meshwright.cost.pipeline.makespan import makespan
from meshwright.cost.pipeline.order import Times
from meshwright.layout.pipelines import pipeline_schedule


@dataclass(frozen=True)
class Hops:
    """The hops of one step, on one stage.

    forward: activations sent to the next depth. backward: cotangents sent to the depth before. seconds: of
    one hop. exposed_seconds: time that all hops add to the step. makespan_seconds: of the step, hops
    included.
    """

    forward: int
    backward: int
    seconds: float
    exposed_seconds: float
    makespan_seconds: float

    @property
    def count(self) -> int:
        return self.forward + self.backward


def hops(
    schedule: str, stages: int, microbatches: int, chunks: int, times: Times, stage: int | None = None
) -> Hops:
    """The hops of one step; the exposed time is the difference to a simulation without them.

    stage: the sender; by default the stage that sends most. Raises LayoutError for numbers that the schedule
    does not support.
    """
    whole = makespan(schedule, stages, microbatches, chunks, times)
    without_hops = makespan(schedule, stages, microbatches, chunks, Times(times.depths))
    sent = sent_hops(schedule, stages, microbatches, chunks)
    forward, backward = max(sent, key=sum) if stage is None else sent[stage]
    return Hops(forward, backward, times.hop_seconds, whole - without_hops, whole)


def sent_hops(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[tuple[int, int]]:
    """(activations, cotangents) that each stage sends to others in a step.

    Equal SPMD stages send in every tick, also at the ends of the pipeline.

    >>> sent_hops("1f1b", 4, 8)
    [(8, 0), (8, 8), (8, 8), (0, 8)]
    """
    record = pipeline_schedule(schedule)
    if record.spmd:
        ticks = record.num_passes(stages, microbatches)
        return [(ticks, ticks)] * stages
    routes = record.routes(stages, record.chunks(chunks))
    forward, backward = [0] * stages, [0] * stages
    for route in routes:
        for before, after in pairwise(route):
            if before.stage != after.stage:
                forward[before.stage] += microbatches // len(routes)
                backward[after.stage] += microbatches // len(routes)
    return list(zip(forward, backward, strict=True))

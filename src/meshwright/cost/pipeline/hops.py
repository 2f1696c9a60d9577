"""What the stages of a pipeline send each other in one step."""

from dataclasses import dataclass
from itertools import pairwise

from meshwright.cost.pipeline.makespan import makespan
from meshwright.cost.pipeline.order import Times
from meshwright.layout.pipelines import pipeline_schedule


@dataclass(frozen=True)
class Hops:
    """The hops of one step, on one stage.

    forward: activations that it sends to the next depth. backward: cotangents that it sends to the one
    before. seconds: of one. exposed_seconds: by how much all hops lengthen the step. makespan_seconds: of
    the step with them.
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
    """The hops of one step, exposed by what a simulation without them is shorter.

    stage: that sends them; by default the one that sends most.
    Raises LayoutError for numbers with which the schedule does not exist.
    """
    whole = makespan(schedule, stages, microbatches, chunks, times)
    alone = makespan(schedule, stages, microbatches, chunks, Times(times.depths))
    sent = sent_hops(schedule, stages, microbatches, chunks)
    forward, backward = max(sent, key=sum) if stage is None else sent[stage]
    return Hops(forward, backward, times.hop_seconds, whole - alone, whole)


def sent_hops(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[tuple[int, int]]:
    """(activations, cotangents) that each stage sends to others in a step.

    >>> sent_hops("1f1b", 4, 8)
    [(8, 0), (8, 8), (8, 8), (0, 8)]

    Stages that are alike send in every tick, at the ends to nobody.
    """
    record = pipeline_schedule(schedule)
    if record.spmd:
        ticks = record.num_passes(stages, microbatches)
        return [(ticks, ticks)] * stages
    routes = record.routes(stages, record.chunks(chunks))
    forward, backward = [0] * stages, [0] * stages
    for route in routes:
        for one, two in pairwise(route):
            if one.stage != two.stage:
                forward[one.stage] += microbatches // len(routes)
                backward[two.stage] += microbatches // len(routes)
    return list(zip(forward, backward, strict=True))

"""The step of a pipelined layout pass by pass, under its own schedule and under the others."""

from collections.abc import Iterator

from meshwright.cost.ops import record_training
from meshwright.cost.pipeline import PipelineTimeline, simulate
from meshwright.cost.recorder import Shape
from meshwright.cost.step import StepPricer
from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.pipelines import SCHEDULES, pass_table
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate

# Microbatches whose passes a picture can still tell apart; of more, the first whole rounds are simulated.
_MOST_SHOWN = 64


def timelines(config: ModelConfig, workload: Workload, candidate: Candidate) -> dict[str, PipelineTimeline]:
    """The timeline of every schedule that exists for the stages of a candidate, by name, its own first.

    The passes have the seconds with which the planner prices them, the schedule's chunks per stage.
    """
    found: dict[str, PipelineTimeline] = {}
    for layout in _variants(candidate.layout):
        try:
            found[layout.schedule.pipeline] = _timeline(config, workload, candidate, layout)
        except LayoutError:
            continue
    return found


def shown_microbatches(pipe: int, microbatches: int) -> int:
    """The number of microbatches to simulate: all, or as many whole rounds of the stages as can be shown.

    >>> shown_microbatches(8, 32), shown_microbatches(8, 244), shown_microbatches(64, 1024)
    (32, 64, 128)
    """
    return min(microbatches, max(2, _MOST_SHOWN // pipe) * pipe)


def _variants(layout: Layout) -> Iterator[Layout]:
    """The layout under every schedule; interleaved in its own chunks or two."""
    yield layout
    for name in SCHEDULES:
        if name != layout.schedule.pipeline:
            chunks = max(2, layout.interleave) if name == "interleaved" else 1
            try:
                yield layout.replace(schedule=name, interleave=chunks)
            except LayoutError:
                continue


def _timeline(
    config: ModelConfig, workload: Workload, candidate: Candidate, layout: Layout
) -> PipelineTimeline:
    shape = Shape.of_microbatch(workload, layout)
    graph = record_training(config, candidate.hardware, layout, shape)
    pricer = StepPricer(graph, layout, candidate.hardware, candidate.placement)
    times = pricer.pipeline_times()
    count = shown_microbatches(layout.pipe, layout.microbatches)
    return simulate(pass_table(layout.schedule.pipeline, layout.pipe, count, layout.interleave), times)

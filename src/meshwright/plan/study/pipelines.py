"""The step of a pipelined layout pass by pass, under its own schedule and under the others."""

from contextlib import suppress

from meshwright.cost.pipeline import PipelineTimeline, simulate
from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_cost import StepPricer
from meshwright.errors import LayoutError
from meshwright.layout.pipelines import SCHEDULES, pass_table
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.candidate import Candidate

# A picture of more passes than these microbatches have cannot be read.
_MOST_SHOWN = 64


def timelines(config: ModelConfig, workload: Workload, candidate: Candidate) -> dict[str, PipelineTimeline]:
    """The timeline of every schedule that the stages of a candidate can run, by name, its own first.

    Passes take the seconds that the planner prices, with the chunks per stage of the schedule.
    """
    layout, timelines = candidate.layout, dict[str, PipelineTimeline]()
    for name in dict.fromkeys([layout.schedule.pipeline, *SCHEDULES]):
        with suppress(LayoutError):
            timelines[name] = _timeline(config, workload, candidate, name)
    return timelines


def shown_microbatches(pipe: int, microbatches: int) -> int:
    """The number of microbatches to simulate: all, or a multiple of the stages that can be drawn.

    >>> shown_microbatches(8, 32), shown_microbatches(8, 244), shown_microbatches(64, 1024)
    (32, 64, 128)
    """
    return min(microbatches, max(2, _MOST_SHOWN // pipe) * pipe)


def _timeline(
    config: ModelConfig, workload: Workload, candidate: Candidate, schedule: str
) -> PipelineTimeline:
    """Simulate one schedule. Raises LayoutError if the layout cannot run it."""
    layout = candidate.layout
    if schedule != layout.schedule.pipeline:
        chunks = max(2, layout.schedule.interleave) if schedule == "interleaved" else 1
        layout = layout.replace(schedule=schedule, interleave=chunks)
    graph = record_training(config, candidate.hardware, layout, PassShape.of_microbatch(workload, layout))
    times = StepPricer(graph, layout, candidate.hardware, candidate.placement).pipeline_times()
    count = shown_microbatches(layout.pipe, layout.schedule.microbatches)
    return simulate(pass_table(schedule, layout.pipe, count, layout.schedule.interleave), times)

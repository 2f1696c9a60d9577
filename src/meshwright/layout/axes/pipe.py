"""Pipeline parallelism: stages of layers, one after another."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.layout.axes.axis import Ask, Axis, Form, divisors
from meshwright.layout.pipeline import SCHEDULES
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig

if TYPE_CHECKING:
    from meshwright.layout.layout import Layout

# With more stages the bubble or the activations grow beyond what batches in use pay for.
_MOST_STAGES = 64


class Pipe(Axis):
    """No array is split over `pipe`: the schedule gives each stage its layers."""

    def choices(self, ask: Ask, form: Form) -> Iterator[dict[str, object]]:
        most = min(_MOST_STAGES, ask.config.num_layers)
        for degree in divisors(ask.chips):
            if degree <= most:
                yield {"pipe": degree}

    def words(self, config: ModelConfig, workload: Workload, layout: "Layout") -> str:
        chunks = f", each in {layout.interleave} chunks" if layout.interleave > 1 else ""
        return (
            f"the {config.num_layers} layers lie in {layout.pipe} stages{chunks}; microbatches pass from "
            f"stage to stage: {SCHEDULES[layout.schedule.pipeline].words}"
        )

    def why_not(self, layout: "Layout") -> str | None:
        return None if SCHEDULES[layout.schedule.pipeline].runs else f"pipe={layout.pipe}"


PIPE = Pipe("pipe", runs=any(schedule.runs for schedule in SCHEDULES.values()))

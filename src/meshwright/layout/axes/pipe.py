"""Pipeline parallelism: stages of layers, one after another."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import EVERYWHERE, Ask, Axis, Composition, ShortForm, divisors
from meshwright.layout.pipeline import SCHEDULES
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig

if TYPE_CHECKING:
    from meshwright.layout.layout import Layout

# With more stages the bubble or the activations grow beyond what batches in use pay for.
_MOST_STAGES = 64


class Pipe(Axis):
    """No array is split over `pipe`: the schedule gives each stage its layers, and what it is handed.

    Where all stages run one program, weights are split by layer (L), and everything by vocabulary (V).
    """

    def compose(self, tables: Composition) -> None:
        if tables.form["stages_alike"]:
            tables.add(EVERYWHERE, "V", "pipe")
            tables.add("stored used gradients updated", "L", "pipe")

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, object]]:
        most = min(_MOST_STAGES, ask.config.num_layers)
        for degree in divisors(ask.chips):
            if degree <= most:
                yield {"pipe": degree}

    def fit(self, config: ModelConfig, layout: "Layout") -> None:
        schedule = layout.schedule
        if layout.pipe > 1:
            SCHEDULES[schedule.pipeline].check(layout.pipe, schedule.microbatches, schedule.interleave)
        if layout.stages_alike and len({layer.kind.stack for layer in config.layers}) > 1:
            raise LayoutError(
                f"layout {layout}: the stages of lanes run one program, and {config.name} has dense layers "
                "beside experts; fits: pipe = 1, or another schedule"
            )

    def words(self, config: ModelConfig, workload: Workload, layout: "Layout") -> str:
        chunks = f", each in {layout.interleave} chunks" if layout.interleave > 1 else ""
        return (
            f"the {config.num_layers} layers are cut into {layout.pipe} stages{chunks}; microbatches pass "
            "from "
            f"stage to stage: {SCHEDULES[layout.schedule.pipeline].words}"
        )


PIPE = Pipe("pipe")

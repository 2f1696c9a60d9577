"""Pipeline parallelism: stages of layers, one after another."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import EVERYWHERE, Ask, Axis, Composition, ShortForm, divisors
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.depths import cuts_groups
from meshwright.layout.pipelines.pipeline import fitting
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
        if layout.pipe > 1:
            _check_groups(config, layout)
        each, over = divmod(config.num_layers, layout.pipe)
        stacks = [layer.kind.stack for layer in config.layers]
        if layout.stages_alike and not over and stacks != stacks[:each] * layout.pipe:
            raise LayoutError(
                f"layout {layout}: the stages of lanes run one program, and those of {config.name} have not "
                "the same dense layers beside experts; fits: pipe = 1, or another schedule"
            )

    def words(self, config: ModelConfig, workload: Workload, layout: "Layout") -> str:
        chunks = f", each in {layout.schedule.interleave} chunks" if layout.schedule.interleave > 1 else ""
        return (
            f"the {config.num_layers} layers are cut into {layout.pipe} stages{chunks}; microbatches pass "
            "from "
            f"stage to stage: {SCHEDULES[layout.schedule.pipeline].words}"
        )


def _check_groups(config: ModelConfig, layout: "Layout") -> None:
    """Raises LayoutError where a stage would begin between layers that share keys and values."""
    each, schedule, chunks = config.layers_per_cache, layout.schedule.pipeline, layout.schedule.interleave
    if not cuts_groups(config, schedule, layout.pipe, chunks):
        return
    record, most = SCHEDULES[schedule], min(_MOST_STAGES, config.num_layers // each)
    microbatches = layout.schedule.microbatches
    exists = [p for p in range(1, most + 1) if p == 1 or record.exists(p, microbatches, chunks)]
    pipes = [p for p in exists if not cuts_groups(config, schedule, p, chunks)]
    raise LayoutError(
        f"layout {layout}: a stage would begin within a group of layers_per_cache = {each} of the "
        f"{config.num_layers} layers (L) of {config.name}; fits: pipe in {fitting(*pipes)}"
    )


PIPE = Pipe("pipe")

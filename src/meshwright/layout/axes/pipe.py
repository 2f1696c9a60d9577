"""Pipeline parallelism: stages of layers, one after another."""

from collections.abc import Iterator

from meshwright.errors import LayoutError
from meshwright.layout.axes.axis import EVERYWHERE, Ask, Axis, Composition, ShortForm
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.pipelines.depths import cuts_groups
from meshwright.layout.pipelines.pipeline import fitting
from meshwright.layout.rules import STAGES, AxisTable
from meshwright.layout.schedule import Schedule
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.notation.mesh import Mesh
from meshwright.units import divisors

# With more stages the bubble or the activations grow beyond what batches in use pay for.
_MOST_STAGES = 64


class Pipe(Axis):
    """Pipeline stages: the schedule gives each stage its layers, and no array is split over `pipe`.

    If all stages run one program, weights are split by layer (L), and all arrays by vocabulary (V).
    """

    def compose(self, tables: Composition) -> None:
        if tables.form["spmd_stages"]:
            tables.add(EVERYWHERE, "V", "pipe")
            tables.add("stored used gradients updated", "L", "pipe")

    def choices(self, ask: Ask, form: ShortForm) -> Iterator[dict[str, object]]:
        # A draft head reads the first embedding and the last hidden state.
        most = 1 if ask.config.draft_head else min(_MOST_STAGES, ask.config.num_layers)
        for degree in divisors(ask.chips):
            if degree <= most:
                yield {"pipe": degree}

    def fit(self, config: ModelConfig, mesh: Mesh, table: AxisTable, schedule: Schedule) -> None:
        pipe, record = mesh.sizes.get("pipe", 1), SCHEDULES[schedule.pipeline]
        if pipe == 1:
            return
        record.check(pipe, schedule.microbatches, schedule.interleave)
        _check_groups(config, pipe, schedule)
        each, over = divmod(config.num_layers, pipe)
        stacks = [layer.kind.stack for layer in config.layers]
        if record.spmd and not over and stacks != stacks[:each] * pipe:
            raise LayoutError(
                f"layout: the stages of schedule = {record.name} run one program, and pipe = {pipe} cuts "
                f"{config.name} into stages with unlike layers; fits: pipe = 1, or another schedule"
            )

    def words(self, config: ModelConfig, workload: Workload, form: ShortForm, schedule: Schedule) -> str:
        chunks = f", each in {schedule.interleave} chunks" if schedule.interleave > 1 else ""
        return (
            f"the {config.num_layers} layers are cut into {form['pipe']} stages{chunks}; microbatches pass "
            f"from stage to stage: {SCHEDULES[schedule.pipeline].words}"
        )


def _check_groups(config: ModelConfig, pipe: int, schedule: Schedule) -> None:
    """Raises LayoutError if a stage would begin between layers that share keys and values."""
    each, record, chunks = config.layers_per_cache, SCHEDULES[schedule.pipeline], schedule.interleave
    if not cuts_groups(config, record.name, pipe, chunks):
        return
    most = min(_MOST_STAGES, config.num_layers // each)
    exists = [p for p in range(1, most + 1) if p == 1 or record.exists(p, schedule.microbatches, chunks)]
    fits = [p for p in exists if not cuts_groups(config, record.name, p, chunks)]
    raise LayoutError(
        f"layout: with pipe = {pipe} and schedule = {record.name} a stage would begin within a group of "
        f"layers_per_cache = {each} of the {config.num_layers} layers (L) of {config.name}; fits: pipe in "
        f"{fitting(*fits)}"
    )


PIPE = Pipe(STAGES, turn=0, also=("pp", "pipeline", "pipeline_parallel", "pipeline_model_parallel_size"))

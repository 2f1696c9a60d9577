"""Predictions of published rows of serving: a generate step, a prefill, or a batch with both.

    tpot_s              one generate step of the batch, after the prompt and half of the answer
    ttft_s              prefill of the whole batch
    request_latency_s   prefill and output_len generate steps
    tokens_per_s        the batch's new tokens over that time; of all chips or per chip, by the unit

A batch that does not fit the cache runs in several waves. The rows do not say how a cache is split except
over heads, so the fastest layout that fits is taken.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil

from meshwright.cost.serving_step import pass_cost
from meshwright.dtypes import NUMBER_TYPES, number_type, types_for
from meshwright.engines.serving_engine import ENGINES, ServingEngine
from meshwright.errors import LayoutError
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.axes import DATA, EXPERT, PIPE
from meshwright.layout.layout_checks import check_fits, num_replicas
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.layouts import one_replica
from meshwright.plan.serve.phase import max_batch
from meshwright.plan.serve.with_engine import with_engine
from meshwright.validate.load_test_row import MAX_BATCH
from meshwright.validate.published import InferenceRow
from meshwright.validate.reproduce import arithmetic, machine_of_row
from meshwright.validate.shape_guess import model_of


@dataclass(frozen=True)
class ServedCase:
    """The planner's input for a row. layouts: possible layouts of the row."""

    row: InferenceRow
    config: ModelConfig
    hardware: Hardware
    layouts: tuple[Layout, ...]

    @cached_property
    def choice(self) -> tuple[Layout, float]:
        """(layout, predicted figure in the row's unit) of the fastest layout."""
        figures = [(layout, self._figure(layout, self.hardware)) for layout in self.layouts]
        faster = max if self.row.metric == "tokens_per_s" else min
        return faster(figures, key=lambda pair: pair[1])

    def _figure(self, layout: Layout, hardware: Hardware) -> float:
        row, is_max = self.row, self.row.batch == MAX_BATCH
        if row.metric == "ttft_s":
            return self._prefill(
                layout, hardware, min(row.batch, self.capacity(layout)) if is_max else row.batch
            )
        batch = self.capacity(layout)
        step = self._generate(layout, hardware, batch)
        if row.metric == "tpot_s":
            return step
        seconds = self._prefill(layout, hardware, batch) + row.output_len * step
        if row.metric == "request_latency_s":
            return (1 if is_max else ceil(row.batch / batch)) * seconds
        return row.in_unit(seconds, batch)

    @cache  # noqa: B019
    def capacity(self, layout: Layout) -> int:
        """Sequences of the batch that fit at once; all if none fits by the planner's count.

        For "max", the most that the memory and the engine take.
        """
        at, context = layout.at("generate"), self.row.prompt_len + max(1, self.row.output_len // 2)
        most = max_batch(self.config, self.hardware, at, 1, context)
        if self.row.batch < MAX_BATCH:
            return min(self.row.batch, most or self.row.batch)
        engine = engine_of(self.row)
        limit = ENGINES[engine].max_sequences if engine else ServingEngine.max_sequences
        return max(1, min(most, limit * num_replicas(at, self.config)))

    def microbatches(self, layout: Layout, batch: int) -> tuple[int, float]:
        """(parts of a batch that follow each other through the stages, time relative to one part's).

        A prefill fills and empties the stages. In generate steps a part's next token enters the first stage
        when its previous token leaves the last stage, so the time is one pass's.
        """
        parts = min(batch, layout.pipe)
        if layout.phase == "generate":
            return parts, 1.0
        return parts, (parts + layout.pipe - 1) / layout.pipe

    def _generate(self, layout: Layout, hardware: Hardware, batch: int) -> float:
        context = self.row.prompt_len + max(1, self.row.output_len // 2)
        return self._pass(layout.at("generate"), hardware, batch, 1, context)

    def _prefill(self, layout: Layout, hardware: Hardware, batch: int) -> float:
        length = self.row.prompt_len
        return self._pass(layout.at("prefill"), hardware, batch, length, length)

    def _pass(self, at: Layout, hardware: Hardware, batch: int, queries: int, context: int) -> float:
        parts, times = self.microbatches(at, batch)
        cost, _ = pass_cost(self.config, at, hardware, batch / parts, queries, context)
        return times * cost.seconds


def reproduce_inference(row: InferenceRow) -> ServedCase:
    """The case of a row. Raises MeshwrightError if the row cannot be expressed."""
    config, hardware = model_of(row), _with_engine(row)
    if hardware.num_chips != row.chips:
        raise LayoutError(f"{row.hardware} has {hardware.num_chips} chips, and the row says {row.chips}")
    layouts = tuple(_layouts(row, config))
    if not layouts:
        degrees = f"{row.tensor or row.chips}·{row.pipe or 1}"
        raise LayoutError(
            f"tensor·pipe = {degrees} on {row.chips} chips divides neither the heads nor the layers of "
            f"{config.name}"
        )
    return ServedCase(row, config, hardware, layouts)


def _layouts(row: InferenceRow, config: ModelConfig) -> list[Layout]:
    pipe = row.pipe or 1
    # Sources may count the two cores of a chip as devices, so tensor is at most the chips.
    tensor = min(row.tensor or row.chips // pipe, row.chips // pipe)
    data = max(1, row.chips // (tensor * pipe))
    weights, matmul = dtype_of_source(row.weight_dtype)
    kv, _ = dtype_of_source(row.kv_dtype or row.weight_dtype)
    layouts = []
    for form in one_replica(config, tensor):
        for expert in _experts(config, data, tensor):
            words = {**form, DATA.name: data, PIPE.name: pipe, EXPERT.name: expert}
            try:
                layout = Layout.of(**words, weights_dtype=weights, kv_dtype=kv, matmul_dtype=matmul)
                check_fits(layout, config, padded=True)
            except LayoutError:
                continue
            at = layout.at("generate")
            if row.batch % num_replicas(at, config) == 0 or layout.word("cache") == "copies":
                layouts.append(layout)
    return layouts


def _experts(config: ModelConfig, data: int, tensor: int) -> list[int]:
    if config.moe is None:
        return [1]
    return [n for n in dict.fromkeys((1, data, data * tensor)) if config.moe.num_experts % n == 0]


def dtype_of_source(text: str) -> tuple[str, str | None]:
    """(type in memory, type of products; None for bf16) of a dtype as sources write it: `int4 (group 32)`.

    With integers only weights are quantised; with fp8 also products.
    """
    name = text.split()[0]
    if name in NUMBER_TYPES and number_type(name).is_integer:
        return name, None
    compute, matmul = arithmetic(name)
    return (matmul, matmul) if matmul in types_for("weights") else (compute, None)


def engine_of(row: InferenceRow) -> str | None:
    """The name of the engine's record, with `-0` for versions 0 if it has such a record: tensorrt-llm-0."""
    if not row.engine:
        return None
    name, _, version = row.engine.lower().partition(" ")
    older = f"{name}-0"
    return older if version.removeprefix("v").startswith("0.") and older in ENGINES else name


def _with_engine(row: InferenceRow) -> Hardware:
    """The row's machine, with the engine's efficiency if the engine is known."""
    machine, engine = machine_of_row(row), engine_of(row)
    return with_engine(machine, ENGINES[engine]) if engine and engine in ENGINES else machine

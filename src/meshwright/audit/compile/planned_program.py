"""What is audited of a plan, by its phase: the step as it is planned, and as JAX traces it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from meshwright.cost.graph import Graph, recomputed_nodes
from meshwright.cost.memory import held_bytes, stage_memory
from meshwright.cost.ops import record_training
from meshwright.cost.pipeline.stages import mean_runs, stage_counts, stage_of
from meshwright.cost.priced import PricedCollective
from meshwright.cost.recorder import Shape
from meshwright.cost.serving_step import form_on_cpus, inference_cost, record_inference, record_pass
from meshwright.cost.state import StageState
from meshwright.cost.step import StepPricer
from meshwright.dtypes import number_type
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.flash import BLOCK
from meshwright.layout.pipelines.depths import stage_routes
from meshwright.layout.workload import Phase
from meshwright.models.parameters import STACK_LETTERS, Param, dimensions, parameters
from meshwright.optimizers import OPTIMIZERS
from meshwright.optimizers.optimizer import PACKED_DTYPES, WeightShard
from meshwright.plan.train import price
from meshwright.plan_file import Plan

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class PlannedStep:
    """The planned side of an audit; FLOPs are a device's, memory is bytes on one chip, by cause.

    products: FLOPs by tensor and pass (forward, recompute, backward). state_bytes: of what enters the step
    and stays: weights, moments, caches. matmul_dtype: of the operands of products, attention_dtype: of those
    of attention. layer_saved_bytes: what layers keep of one microbatch for the backward pass; None where they
    differ, have experts or are staged.
    update: of the optimizer; None in inference, and where the optimizer's operations are not counted.
    operations: the names of all operations of the forward pass, and of all that is sent; elementwise:
    of those that are so. split_weights: by axis, how many gradients it splits. attention_edge: the share of
    its scores that a flash kernel computes besides, in the blocks that a causal mask cuts.
    """

    collectives: tuple[PricedCollective, ...]
    seconds: float
    flops: float
    products: Mapping[tuple[str, str], float]
    matmul_dtype: str
    memory: Mapping[str, int]
    memory_total: int
    layer_saved_bytes: int | None = None
    update: "PlannedUpdate | None" = None
    operations: frozenset[str] = frozenset()
    elementwise: frozenset[str] = frozenset()
    split_weights: Mapping[str, int] = field(default_factory=dict)
    attention_edge: float = 0.0
    attention_dtype: str = "bf16"

    @property
    def state_bytes(self) -> int:
        return sum(self.memory.get(cause, 0) for cause in _STATE)


_STATE = ("weights", "optimizer", "cache")


@dataclass(frozen=True)
class PlannedUpdate:
    """What one device does in the update.

    computed: elements that elementwise operations make. reduced: elements of gradients, whose norm is taken.
    num_bytes: that are read and written.
    """

    computed: float
    reduced: float
    num_bytes: float


def planned_step(
    plan: Plan, hardware: Hardware, *, by_cpu: bool = False, stage: int | None = None
) -> PlannedStep:
    """The step of `plan` as the cost model has it.

    by_cpu: it is compared with a program for CPUs, where no kernel takes attention. stage: of a pipeline,
    whose chips are meant; where None the busiest, or the mean.
    """
    workload, layout = plan.workload, plan.layout
    saved = update = None
    if workload.phase == "train":
        candidate = price(plan.model, hardware, workload, layout)
        cost, memory = candidate.cost, candidate.memory
        kept = layout
        # XLA:CPU counts arrays that wait in the host's memory among the others.
        if by_cpu and layout.schedule.offload_optimizer:
            kept = layout.replace(offload_optimizer=False)
            memory = price(plan.model, hardware, workload, kept).memory
        graph = candidate.graph
        if stage is not None:
            cost = StepPricer(graph, layout, hardware).cost(stage)
            memory = stage_memory(graph, kept, stage_of(graph, kept, stage))
        if by_cpu:
            shape = Shape.of_microbatch(workload, layout)
            graph = record_training(plan.model, hardware, layout, shape, has_kernel=False)
        if layout.pipe == 1 and not plan.model.moe and not layout.schedule.offload:
            saved = _saved_by_layers(graph, layout)
        # How often it computes a moment that is unpacked, a compiler decides.
        counted = OPTIMIZERS[layout.precision.optimizer].operations is not None
        if counted and layout.precision.optimizer_dtype not in PACKED_DTYPES:
            state = StageState(graph, layout, stage or 0)
            work, reduced = state.update_work(), state.stored.updated
            update = PlannedUpdate(work.flops, reduced, work.hbm_bytes)
    else:
        phase, layout = cast(Phase, workload.phase), layout.replace(microbatches=1)
        # Engines on CPUs keep 16-bit pages as float32 (nn/attention/paged.py).
        is_widened = by_cpu and number_type(layout.precision.cache_dtype).bits == 16
        stored = layout.replace(kv_dtype="f32") if is_widened else layout
        asked = workload.num_sequences, workload.seq_len
        cost, _ = inference_cost(plan.model, layout, hardware, phase, *asked)
        _, memory = inference_cost(plan.model, stored, hardware, phase, *asked)
        queries = workload.seq_len if phase == "prefill" else 1
        shape = Shape(workload.num_sequences, queries, workload.seq_len)
        at = layout.at(phase)
        if by_cpu:
            graph = record_pass(plan.model, at, shape, form_on_cpus(at))
        else:
            graph = record_inference(plan.model, hardware, at, shape)
    of_update = _update_products(plan, stage)
    runs = zip(graph.segments, mean_runs(graph, layout, stage), strict=True)
    nodes = [node for segment, count in runs if count for node in segment.nodes]
    return PlannedStep(
        collectives=cost.collectives,
        seconds=cost.seconds,
        flops=cost.executed_flops + sum(of_update.values()),
        products=product_flops(graph, layout, stage) | of_update,
        matmul_dtype=layout.precision.operand_dtype,
        memory=asdict(memory),
        memory_total=memory.total,
        layer_saved_bytes=saved,
        update=update,
        elementwise=frozenset(node.name for node in nodes if node.kind == "elementwise"),
        operations=graph.fused | {node.name for node in nodes} | {one.tensor for one in cost.collectives},
        split_weights=_split_weights(plan, stage),
        attention_edge=min(1.0, BLOCK / workload.seq_len),
        attention_dtype=layout.precision.compute_dtype,
    )


def _update_products(plan: Plan, stage: int | None) -> dict[tuple[str, str], float]:
    """FLOPs of the optimizer's products on one device; none of optimizers that have none."""
    if plan.workload.phase != "train":
        return {}
    layout, total = plan.layout, 0.0
    for path, param, sizes in _weights(plan, stage):
        array = layout.rules.updated.weight(path.rpartition("/")[2], param.letters)
        shard = WeightShard(path, param, array, sizes, layout.mesh)
        total += param.trained * OPTIMIZERS[layout.precision.optimizer].product_flops(shard)
    return {("update", "update"): total} if total else {}


def _split_weights(plan: Plan, stage: int | None) -> Counter[str]:
    """How many of a plan's gradients each mesh axis splits."""
    found: Counter[str] = Counter()
    for path, param, _ in _weights(plan, stage):
        array = plan.layout.rules.updated.weight(path.rpartition("/")[2], param.letters)
        found.update(param.trained * [axis for axis in array.sharded_axes if plan.layout.mesh.size(axis) > 1])
    return found


def _weights(plan: Plan, stage: int | None) -> Iterator[tuple[str, Param, Mapping[str, int]]]:
    """(path, parameter, sizes of its letters) of all parameters, or of those that a stage updates.

    A stage with several depths updates each of them.
    """
    sizes, of_all = dimensions(plan.model), parameters(plan.model).items()
    if stage is None:
        yield from ((path, param, sizes) for path, param in of_all)
        return
    from meshwright.nn.pipeline.stage_programs import Chunk

    schedule = plan.layout.schedule
    owners = stage_routes(schedule.pipeline, plan.layout.pipe, schedule.interleave)[0]
    for place, chunk in zip(owners, Chunk.of_depths(plan.model, plan.layout), strict=True):
        counts = {STACK_LETTERS[stack]: rows.stop - rows.start for stack, rows in chunk.rows.items()}
        if place.stage == stage:
            yield from ((path, param, {**sizes, **counts}) for path, param in of_all if chunk.has(path))


def _saved_by_layers(graph: Graph, layout: Layout) -> int | None:
    """Bytes that all layers keep of one microbatch; None where layers differ."""
    if sum(segment.source is not None for segment in graph.segments) > 1:
        return None
    [counts] = stage_counts(graph, layout.schedule.pipeline, 1, 1)
    return held_bytes(graph, counts, layout.schedule.remat).a_microbatch


def product_flops(graph: Graph, layout: Layout, stage: int | None = None) -> dict[tuple[str, str], float]:
    """FLOPs of a step by tensor and pass, on the mean chip, of all or of a stage."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for segment, runs in zip(graph.segments, mean_runs(graph, layout, stage), strict=True):
        for direction in graph.directions:
            nodes = segment.nodes
            if direction == "recompute":
                nodes = recomputed_nodes(segment, layout.schedule.remat)
            for node in nodes:
                work = (*node.backward, *node.weight_gradient) if direction == "backward" else node.forward
                if flops := sum(piece.flops for piece in work):
                    found[node.name, direction] += flops * runs
    return dict(found)


def training_step(plan: Plan, mesh: "jax.sharding.Mesh | None") -> Any:
    """The training step of `plan` for `mesh`, or for the devices that there are: one program or several."""
    from meshwright.train.optimizers import OptimizerConfig
    from meshwright.train.stage_step import training_step

    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=2)
    return training_step(
        plan.model,
        plan.layout,
        plan.workload,
        optimizer,
        chip_flops_per_second=1.0,
        mesh=mesh,
        options=plan.compiler,
    )


def traced_step(plan: Plan, mesh: "jax.sharding.Mesh | None") -> Any:
    """The step of `plan`, traced by JAX for `mesh`, or for the devices that there are."""
    import jax

    workload = plan.workload
    if workload.phase == "train":
        step = training_step(plan, mesh)
        jitted, mesh = step.jitted, step.mesh
        arguments = step.abstract_state(), step.abstract_tokens()
    else:
        from meshwright.serve.device.programs import workload_step

        phase = cast(Phase, workload.phase)
        jitted, arguments, mesh = workload_step(plan.model, plan.layout, workload, phase, mesh=mesh)
    with jax.set_mesh(mesh):
        return jitted.trace(*arguments)

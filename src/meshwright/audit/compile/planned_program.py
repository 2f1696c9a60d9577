"""The step that is audited, by the plan's phase: as planned, and as traced by JAX."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from meshwright.cost.cached_ops import CacheReads, form_by_pages
from meshwright.cost.graph import Graph, recomputed_nodes, saved_values
from meshwright.cost.memory import held_bytes
from meshwright.cost.pipeline.stages import mean_runs, stage_counts, stage_of
from meshwright.cost.priced import PricedCollective
from meshwright.cost.record import record_training
from meshwright.cost.record_inference import record_inference, record_pass
from meshwright.cost.recorder import Lowering, PassShape
from meshwright.cost.serving_step import inference_cost
from meshwright.cost.state import StageState
from meshwright.cost.step_cost import StepPricer
from meshwright.cost.step_memory import stage_memory
from meshwright.dtypes import dtype_bytes
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import BLOCK
from meshwright.layout.pipelines.depths import stage_routes
from meshwright.layout.workload import InferencePhase
from meshwright.models.parameters import Param, dimensions, parameters
from meshwright.optimizers import OPTIMIZERS
from meshwright.optimizers.optimizer import PACKED_DTYPES, WeightShard
from meshwright.plan.train import price
from meshwright.plan_file import Plan
from meshwright.platforms import Platform

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class PlannedStep:
    """The planned side of an audit, for one device.

    products: FLOPs by tensor and pass (forward, recompute, backward). matmul_dtype, attention_dtype: types of
    the operands of products, in attention and elsewhere. memory: bytes by cause. layer_saved_bytes: bytes
    that layers save of one microbatch for the backward pass; None if layers differ, have experts or form
    stages. update: of the optimizer; None in inference, and if the optimizer's operations are not counted.
    operations: names of all operations of the forward pass and of all sent arrays. elementwise: names of
    elementwise operations. split_weights: number of gradients that each axis splits. attention_edge:
    additional share of scores that a flash kernel computes in the blocks that the causal mask cuts. wide:
    operations whose products are float32. same_input: sets of tensors that multiply the same array.
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
    wide: frozenset[str] = frozenset()
    same_input: tuple[frozenset[str], ...] = ()

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, moments and caches."""
        return sum(self.memory.get(cause, 0) for cause in _STATE)


_STATE = ("weights", "optimizer", "cache")


@dataclass(frozen=True)
class PlannedUpdate:
    """Work of one device in the update.

    computed: elements that elementwise operations compute. reduced: elements of gradients, for their norm.
    num_bytes: read and written.
    """

    computed: float
    reduced: float
    num_bytes: float


def planned_step(
    plan: Plan, hardware: Hardware, *, compared_on: Platform | None = None, stage: int | None = None
) -> PlannedStep:
    """The step of `plan` as the cost model has it.

    compared_on: platform of the program that is compared, if it has no flash kernels but the hardware may.
    stage: of a pipeline, whose chips are counted; None: the busiest stage, or the mean.
    """
    stand_in = compared_on if compared_on and not compared_on.flash else None
    plan = replace(plan, model=plan.model.text)
    workload, layout = plan.workload, plan.layout
    saved = update = None
    if workload.phase == "train":
        candidate = price(plan.model, hardware, workload, layout)
        cost, memory = candidate.cost, candidate.memory
        kept = layout
        # Its memory has both the device's and the host's arrays.
        if stand_in and stand_in.host_memory and layout.schedule.offload_optimizer:
            kept = layout.replace(offload_optimizer=False)
            memory = price(plan.model, hardware, workload, kept).memory
        graph = candidate.graph
        if stand_in and stand_in.compiler.widens and layout.pipe == 1:
            memory = replace(memory, buffers=memory.buffers + _widened_bytes(graph, layout))
        if stage is not None:
            cost = StepPricer(graph, layout, hardware).cost(stage)
            memory = stage_memory(graph, kept, stage_of(graph, kept, stage))
        if stand_in:
            shape = PassShape.of_microbatch(workload, layout)
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
        phase, layout = cast(InferencePhase, workload.phase), layout.replace(microbatches=1)
        cost, memory = inference_cost(
            plan.model, layout, hardware, phase, workload.num_sequences, workload.seq_len
        )
        queries = workload.seq_len if phase == "prefill" else 1
        shape = PassShape(workload.num_sequences, queries, workload.seq_len)
        at = layout.at(phase)
        if stand_in:
            lowering = Lowering(static_blocks=stand_in.expert_blocks)
            reads = CacheReads(form_by_pages(at), rows=stand_in.prompt_rows)
            graph = record_pass(plan.model, at, shape, reads, lowering)
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
        wide=graph.wide,
        same_input=_of_same_input(graph),
    )


def _of_same_input(graph: Graph) -> tuple[frozenset[str], ...]:
    """Sets of tensors that multiply the same array in a layer, directly or after moves."""
    by_input: dict[int, set[str]] = defaultdict(set)
    for segment, node in graph.nodes():
        if node.kind == "matmul":
            value = node.inputs[0]
            while (made_by := segment.producers.get(id(value))) and made_by.kind == "move":
                value = made_by.inputs[0]
            by_input[id(value)].add(node.name)
    joined: list[set[str]] = []
    for names in by_input.values():
        apart = [one for one in joined if one.isdisjoint(names)]
        joined = [*apart, names.union(*(one for one in joined if one not in apart))]
    return tuple(frozenset(names) for names in joined if len(names) > 1)


def _update_products(plan: Plan, stage: int | None) -> dict[tuple[str, str], float]:
    """FLOPs of the optimizer's products on one device; empty for optimizers without products."""
    if plan.workload.phase != "train":
        return {}
    layout, total = plan.layout, 0.0
    for path, param, sizes in _weights(plan, stage):
        array = layout.rules.updated.weight(path.rpartition("/")[2], param.letters)
        shard = WeightShard(path, param, array, sizes, layout.mesh)
        total += param.trained * OPTIMIZERS[layout.precision.optimizer].product_flops(shard)
    return {("update", "update"): total} if total else {}


def _split_weights(plan: Plan, stage: int | None) -> Counter[str]:
    """The number of a plan's gradients that each mesh axis splits."""
    counts: Counter[str] = Counter()
    for path, param, _ in _weights(plan, stage):
        array = plan.layout.rules.updated.weight(path.rpartition("/")[2], param.letters)
        counts.update(
            param.trained * [axis for axis in array.sharded_axes if plan.layout.mesh.size(axis) > 1]
        )
    return counts


def _weights(plan: Plan, stage: int | None) -> Iterator[tuple[str, Param, Mapping[str, int]]]:
    """(path, parameter, sizes of its letters) of all parameters, or of the parameters that a stage updates.

    A stage with several depths updates each depth.
    """
    of_all = parameters(plan.model).items()
    if stage is None:
        yield from ((path, param, dimensions(plan.model, path)) for path, param in of_all)
        return
    from meshwright.nn.pipeline.stage_programs import Chunk

    schedule = plan.layout.schedule
    owners = stage_routes(schedule.pipeline, plan.layout.pipe, schedule.interleave)[0]
    for place, chunk in zip(owners, Chunk.of_depths(plan.model, plan.layout), strict=True):
        for path, param in of_all if place.stage == stage else ():
            if chunk.has(path):
                stack, sizes = path.rpartition("/")[0], dimensions(plan.model, path)
                yield path, param, {**sizes, param.letters[0]: chunk.num_rows(stack)} if stack else sizes


def _saved_by_layers(graph: Graph, layout: Layout) -> int | None:
    """Bytes that all layers save of one microbatch; None if layers differ."""
    if sum(segment.source is not None for segment in graph.segments) > 1:
        return None
    [counts] = stage_counts(graph, layout.schedule.pipeline, 1, 1)
    return held_bytes(graph, counts, layout.schedule.remat).a_microbatch


def _widened_bytes(graph: Graph, layout: Layout) -> int:
    """Bytes of float32 copies of the 16-bit values that layers save.

    XLA for CPU computes in float32, and casts the values of all layers before the loop of the backward pass.
    """
    [counts] = stage_counts(graph, layout.schedule.pipeline, 1, 1)
    narrow = (
        (count, value)
        for segment, count in zip(graph.segments, counts, strict=True)
        if segment.source
        for value in saved_values(segment, layout.schedule.remat)
        if dtype_bytes(value.dtype) == _NARROW_BYTES
    )
    return round(
        sum(count * value.memory_bytes for count, value in narrow) * dtype_bytes("f32") / _NARROW_BYTES
    )


_NARROW_BYTES = 2


def product_flops(graph: Graph, layout: Layout, stage: int | None = None) -> dict[tuple[str, str], float]:
    """FLOPs of a step by tensor and pass, on the mean chip, of all or of a stage."""
    by_name: dict[tuple[str, str], float] = defaultdict(float)
    for segment, runs in zip(graph.segments, mean_runs(graph, layout, stage), strict=True):
        for direction in graph.directions:
            nodes = segment.nodes
            if direction == "recompute":
                nodes = recomputed_nodes(segment, layout.schedule.remat)
            for node in nodes:
                work = (*node.backward, *node.weight_gradient) if direction == "backward" else node.forward
                if flops := sum(piece.flops for piece in work):
                    by_name[node.name, direction] += flops * runs
    return dict(by_name)


def planned_training_step(plan: Plan, mesh: "jax.sharding.Mesh | None") -> Any:
    """The training step of `plan` for `mesh` or the available devices, in one program or several."""
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
    """The step of `plan`, traced by JAX for `mesh` or the available devices."""
    import jax

    workload = plan.workload
    if workload.phase == "train":
        step = planned_training_step(plan, mesh)
        jitted, mesh = step.jitted, step.mesh
        arguments = step.abstract_state(), step.abstract_tokens()
    else:
        from meshwright.serve.device.programs import workload_step

        phase = cast(InferencePhase, workload.phase)
        jitted, arguments, mesh = workload_step(plan.model, plan.layout, workload, phase, mesh=mesh)
    with jax.set_mesh(mesh):
        return jitted.trace(*arguments)

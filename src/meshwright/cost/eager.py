"""Bytes on one chip at the peak of a step that runs operation by operation, as in PyTorch.

XLA plans the memory of a step as a whole (memory.py). Without such a plan

    activations  include the values that the steps of an operation keep (`Node.unfused_bytes`): a norm's input
                 in float32 and over its size, the activated gate, keys and values for each head of the
                 queries
    the loss     has the logits, and three float32 arrays of their size: the logarithms of probabilities,
                 their cotangents and the logits' cotangents. If the vocabulary is split, the exponentials are
                 a fourth. A program without float32 has these arrays in the type of its activations.
                 Megatron's loss works in place and has two, a fused loss only the cotangents
    weights      of the embedding and the head stay gathered until the backward pass has used them, in
                 addition to the flat array of the gather; of layers, the last and the next one are gathered
    gradients    that are scattered layer by layer come from the memory of another stream of kernels, which an
                 allocator never reuses for this stream. Other gradients take memory that activations free
    blocks       freed by a layer's forward pass are too small for an array of the loss, and stay allocated;
                 those freed by activations are too small for an update's, and stay reserved
    buckets      of DistributedDataParallel are copies of the gradients in the type of the weights
    the update   has a float32 copy of narrower gradients and, if it runs on lists of tensors, an array of
                 the size of a moment. Activations are freed by then
    a product    of queries, keys and values stays whole if values are a view of it (Megatron-Core: rotary
                 embeddings make new queries and keys)
    operands     cast to fp8 are kept in fp8 (Transformer Engine), in addition if another operation needs
                 them in bf16; so are two copies of each weight of a layer

Sources: PyTorch, torch/distributed/tensor/parallel/loss.py (the split loss), pytorch/pytorch#129721 (the
memory of FSDP's streams), torch/distributed/fsdp (the root's weights are not resharded after the forward
pass); PyTorch's notes on CUDA, "Memory management", `Tensor.record_stream` and DistributedDataParallel
(`gradient_as_bucket_view`).
"""

from collections.abc import Iterable
from typing import Any

from meshwright.cost.arrays import larger, largest, smaller
from meshwright.cost.graph import Graph, Segment, Value, kept_with, saved_values
from meshwright.cost.memory import Memory, gathered_weights_bytes, held_bytes
from meshwright.cost.pipeline.stages import SegmentRuns
from meshwright.dtypes import dtype_bytes
from meshwright.layout import Layout
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.programs.program import STEPS, TrainingProgram
from meshwright.units import Numeric, whole

# Arrays of the logits' size in addition to the logits, with a whole and with a split vocabulary.
_WHOLE_LOSS, _SPLIT_LOSS = 3, 4
# Policies that never repeat a norm, activation or attention, so that the values of its steps are kept.
_RUN_ONCE = ("none", "attention")


def whole_microbatches(alive: Iterable[Alive]) -> Any:
    """Microbatches with kept activations, also if only gradients of weights are left."""
    return largest(one.saved + one.left for one in alive)


def eager_phases(
    graph: Graph,
    counts: SegmentRuns,
    states: tuple[Any, Any, Any],
    alive: Numeric,
    layout: Layout,
    software: TrainingProgram,
) -> tuple[Memory, ...]:
    """Memory at the loss and at the backward passes of the last and the first layer of a stage.

    states: as for `memory.peak`. alive: as from `whole_microbatches`. Figures are arrays if the graph was
    recorded for many layouts.
    """
    weights, gradients, optimizer = states
    scattered = layout.rules.zero_stage >= 2
    made_in = dtype_bytes(layout.precision.trained_dtype)
    kept_in = dtype_bytes(layout.precision.accumulated_dtype)
    # Gradients in another form than autograd's have separate arrays, which stay.
    accumulated = scattered or layout.schedule.microbatches > 1 or made_in != kept_in
    early = gradients if accumulated else 0  # before the first of this step
    if software.buckets and not scattered and layout.num_batch_shards > 1:
        buckets = whole(gradients / kept_in * made_in)
        early, gradients = early + buckets, gradients + buckets
    held = held_bytes(graph, counts, layout.schedule.remat)
    present = [pair for pair in zip(graph.segments, counts, strict=True) if pair[1]]
    layers = [(segment, count) for segment, count in present if segment.source]
    ends = [segment for segment, _ in present if not segment.source]

    narrow = _narrow_operand(layout, software)
    if narrow and not software.casts_weights:
        weights = weights + whole(
            sum(count * _copies_of_weights(segment, narrow) for segment, count in layers)
        )
    saved = alive * held.a_microbatch + held.once + sum(_unfused(segment, software) for segment in ends)
    if layout.schedule.remat in _RUN_ONCE:
        saved += alive * sum(count * _unfused(segment, software) for segment, count in layers)
    if layout.schedule.remat != "full":
        more = (count * _in_program(segment, layout, software) for segment, count in layers)
        saved += alive * sum(more)
    kept = whole(smaller(saved, held.on_chip) if layout.schedule.offload else saved)
    host = whole(saved - kept)
    gathered = (2 if layout.rules.zero_stage == 3 else 1) * sum(map(gathered_weights_bytes, ends))
    layer = gathered + largest(_working_set(segment, layout.schedule.remat) for segment, _ in layers)
    layer += largest(_unfused(segment, software) for segment, _ in layers)
    blocks = largest(_forward_peak(segment, layout.schedule.remat) for segment, _ in layers)
    loss = gathered + 2 * largest(gathered_weights_bytes(segment) for segment, _ in layers) + blocks
    loss += sum(_loss_bytes(segment, layout, software) for segment in ends)
    return (
        Memory(weights, early, optimizer, kept, loss, host),
        Memory(weights, early, optimizer, kept, layer, host),
        Memory(weights, gradients, optimizer, 0, layer),
        Memory(weights, gradients, optimizer, 0, update_bytes(optimizer, layout, software)),
    )


def update_bytes(optimizer: Any, layout: Layout, software: TrainingProgram) -> Any:
    """Bytes of an update in addition to the states.

    optimizer: of its state, as if that were Adam's: two arrays.
    """
    precision = layout.precision
    moment_bytes = dtype_bytes(precision.optimizer_dtype)
    updated_in = dtype_bytes("f32" if precision.master_weights else precision.trained_dtype)
    made_in = dtype_bytes(precision.accumulated_dtype)
    copied = updated_in if made_in < updated_in else 0
    listed = moment_bytes if software.by_tensor_lists else 0
    return whole(optimizer / 2 / moment_bytes * (copied + listed))


def _narrow_operand(layout: Layout, software: TrainingProgram) -> str | None:
    """The type of kept operands of products, if it is narrower than activations."""
    precision = layout.precision
    narrow, made = precision.matmul_dtype, precision.compute_dtype
    is_cast = software.casts_operands and narrow and dtype_bytes(narrow) < dtype_bytes(made)
    return narrow if is_cast else None


def _copies_of_weights(segment: Segment, dtype: str) -> Any:
    """Bytes of a layer's weights by rows and by columns in a narrow type."""
    products = (node for node in segment.nodes if node.kind == "matmul" and node.weight_gradient)
    weights = {id(node.inputs[1]): node.inputs[1] for node in products}
    return 2 * sum(_as(value, dtype) for value in weights.values())


def _as(value: Value, dtype: str) -> Any:
    return value.bytes_per_device * dtype_bytes(dtype) / dtype_bytes(value.dtype)


def _in_program(segment: Segment, layout: Layout, software: TrainingProgram) -> Any:
    """Bytes of a layer that the program's kernels keep in addition to the values that it reads."""
    kept = {id(value): value for value in saved_values(segment, layout.schedule.remat)}
    made_by, more = segment.producers, 0
    narrow = _narrow_operand(layout, software)
    products, others = _readers(segment)
    for key, value in kept.items():
        if narrow and key in products:
            more += _as(value, narrow) - (0 if key in others else value.bytes_per_device)
    for node in segment.nodes:
        if software.joins_keys and node.kind == "attention":
            *rotated, values = node.inputs[:3]
            product = made_by.get(id(values))
            if product and product.kind == "matmul" and id(values) in kept:
                moved = (value for value in rotated if made_by[id(value)].kind != "matmul")
                more += sum(value.bytes_per_device for value in moved)
        if software.weighs_early and node.kind == "elementwise" and node.inputs:
            rows = node.inputs[0]
            is_sum = "C" in rows.array.dims and "C" not in node.outputs[0].array.dims
            if is_sum and id(rows) in kept:
                more -= rows.bytes_per_device
    return more


def _readers(segment: Segment) -> tuple[set[int], set[int]]:
    """(values that products read in their backward pass, values that other operations read), by id.

    A product that reads a moved value keeps the value before the move. Flash attention reads its result.
    """
    before = {
        id(out): id(node.inputs[0])
        for node in segment.nodes
        if node.kind in ("move", "exchange") and node.inputs
        for out in node.outputs
    }
    products: set[int] = set()
    others = {id(segment.source)}
    for node in segment.nodes:
        is_product = node.kind == "matmul" and bool(node.weight_gradient)
        results = node.outputs if node.kind == "attention" else ()
        (products if is_product else others).update(id(value) for value in (*node.needs, *results))
    return products | {before[key] for key in products if key in before}, others


@kept_with
def _working_set(segment: Segment, remat: str) -> Any:
    """Bytes of the backward pass of a layer in addition to saved values.

    Gathered weights of two layers, recomputed values, and cotangents of the size of all values.
    """
    everything = {id(v): v for node in segment.nodes for v in node.outputs if node.kind != "gather"}
    saved = {id(v): v for v in saved_values(segment, remat) if id(v) in everything or v is segment.source}
    recomputed = sum(v.bytes_per_device * v.is_copy for v in everything.values())
    kept = sum(v.bytes_per_device for v in saved.values())
    return (2 if segment.count > 1 else 1) * gathered_weights_bytes(segment) + 2 * recomputed - kept


def _unfused(segment: Segment, software: TrainingProgram) -> Any:
    kept = set(STEPS).difference(software.fused)
    return sum(node.unfused_bytes for node in segment.nodes if node.steps in kept)


@kept_with
def _forward_peak(segment: Segment, remat: str) -> Any:
    """Peak bytes of one forward pass in addition to weights and saved values."""
    saved = {id(value) for value in saved_values(segment, remat)}
    last_use = {id(value): place for place, node in enumerate(segment.nodes) for value in node.inputs}
    alive: dict[int, Any] = {}
    peak = 0
    for place, node in enumerate(segment.nodes):
        if node.kind != "gather":
            alive |= {id(v): v.bytes_per_device for v in node.outputs if id(v) not in saved}
            peak = larger(peak, sum(alive.values()))
        for value in node.inputs:
            if last_use[id(value)] == place:
                alive.pop(id(value), None)
    return peak


def _loss_bytes(segment: Segment, layout: Layout, software: TrainingProgram) -> Any:
    """Bytes of a loss's arrays in addition to the logits."""
    precision = layout.precision
    wide = "f32" in (precision.trained_dtype, precision.optimizer_dtype) or precision.master_weights
    dtype = "f32" if wide else precision.compute_dtype
    total = 0
    for node in (node for node in segment.nodes if node.kind == "loss"):
        logits = node.inputs[0]
        split = logits.array.axes_of("V") and not software.whole_logits
        stated = software.split_loss_arrays if split else software.loss_arrays
        arrays = stated or (_SPLIT_LOSS if split else _WHOLE_LOSS)
        size = node.unfused_bytes if software.whole_logits else logits.bytes_per_device
        wide_size = whole(size / dtype_bytes(logits.dtype) * dtype_bytes(dtype))
        total += size if software.fused_loss else arrays * wide_size
    return total

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
    blocks       freed by a layer's forward pass are too small for an array of the loss, and stay allocated
    buckets      of DistributedDataParallel are copies of the gradients in the type of the weights

Sources: PyTorch, torch/distributed/tensor/parallel/loss.py (the split loss), pytorch/pytorch#129721 (the
memory of FSDP's streams), torch/distributed/fsdp (the root's weights are not resharded after the forward
pass); PyTorch's notes on CUDA, "Memory management", `Tensor.record_stream` and DistributedDataParallel
(`gradient_as_bucket_view`).
"""

from collections.abc import Iterable
from typing import Any

from meshwright.cost.arrays import larger, largest, smaller
from meshwright.cost.graph import Graph, Segment, kept_with, saved_values
from meshwright.cost.memory import Memory, gathered_weights_bytes, held_bytes
from meshwright.cost.pipeline.stages import SegmentRuns
from meshwright.dtypes import dtype_bytes
from meshwright.layout import Layout
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.programs.program import STEPS, TrainingProgram
from meshwright.units import whole

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
    alive: Any,
    layout: Layout,
    software: TrainingProgram,
) -> tuple[Memory, ...]:
    """The loss, the backward pass of the last layer and that of the first, on one stage.

    states: as for `memory.peak`. alive: as from `whole_microbatches`. Figures are arrays if the graph was
    recorded for many layouts.
    """
    weights, gradients, optimizer = states
    scattered = layout.rules.zero_stage >= 2
    made_in = dtype_bytes(layout.precision.trained_dtype)
    kept_in = dtype_bytes(layout.precision.gradients_dtype or layout.precision.trained_dtype)
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

    saved = alive * held.a_microbatch + held.once + sum(_unfused(segment, software) for segment in ends)
    if layout.schedule.remat in _RUN_ONCE:
        saved += alive * sum(count * _unfused(segment, software) for segment, count in layers)
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
    )


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

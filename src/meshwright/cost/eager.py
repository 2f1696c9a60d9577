"""Bytes on one chip at the peak of a step that a framework runs operation by operation, as PyTorch does.

XLA plans the memory of a step as a whole (memory.py). Without that

    activations  have what the steps of an operation keep besides (`Node.unfused_bytes`): a norm's input in
                 float32 and over its size, the activated gate, keys and values for each head of the queries
    the loss     has the logits, and three arrays as large in float32: the logarithms of probabilities, their
                 cotangents and those of the logits. Where the vocabulary is split the exponentials are a
                 fourth. A program without anything in float32 has them in the type of its activations.
                 Megatron's, which works in place, has two; a fused one the cotangents alone
    weights      of the embedding and the head stay gathered until the backward pass has used them, beside
                 the flat array that they arrived in; of layers there are the last and the next
    gradients    that are scattered layer by layer come from the memory of another stream of kernels, which
                 an allocator never gives to this one. Others take the room that activations leave
    blocks       that a layer's forward pass left are too small for an array of the loss, and stay beside
    buckets      of DistributedDataParallel are copies of the gradients in the type of the weights

What an allocator reports is more where there is room (`reported_bytes`): the input of a reduce-scatter of
activations is not given to anything else until the stream that sends it is done, and the host launches up to
a whole forward pass ahead of it. Where there is no room the allocator waits, and flushes its blocks.

Sources: PyTorch, torch/distributed/tensor/parallel/loss.py (the split loss), pytorch/pytorch#129721 (the
memory of FSDP's streams), torch/distributed/fsdp (the root's weights are not resharded after the forward
pass); PyTorch's notes on CUDA, "Memory management", `Tensor.record_stream` and DistributedDataParallel
(`gradient_as_bucket_view`).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from meshwright.cost.arrays import larger, largest, smaller
from meshwright.cost.graph import Graph, Segment, kept_with, saved_values
from meshwright.cost.memory import (
    Memory,
    gathered_weights_bytes,
    held_bytes,
    peak_of,
    train_memory,
)
from meshwright.cost.pipeline.stages import SegmentRuns, Stage, stage_of, stages_of_kinds
from meshwright.cost.state import StageState
from meshwright.dtypes import dtype_bytes
from meshwright.layout import Layout
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.programs.program import STEPS, TrainingProgram
from meshwright.units import whole

# Arrays as large as the logits, besides them, where the vocabulary is whole and where it is split.
_WHOLE_LOSS, _SPLIT_LOSS = 3, 4
# A host runs so many layers ahead of the device: CUDA queues 1,024 launches, and a layer's forward pass in
# PyTorch is some 45 kernels, copies and events.
_LAYERS_AHEAD = 23
# Policies under which no norm, activation or attention runs again, so that what its steps keep stays.
_RUN_ONCE = ("none", "attention")


def step_memory(graph: Graph, layout: Layout, software: TrainingProgram) -> Memory:
    """The peak of a step as its software has it: of a program that is planned, or operation by operation."""
    return eager_memory(graph, layout, software) if software.eager else train_memory(graph, layout)


def eager_memory(graph: Graph, layout: Layout, software: TrainingProgram) -> Memory:
    """The peak of a step whose microbatch is `graph`, on the stage that has most."""
    return peak_of(_stage_memory(graph, layout, software, stage) for stage in stages_of_kinds(graph, layout))


def _stage_memory(graph: Graph, layout: Layout, software: TrainingProgram, stage: Stage) -> Memory:
    state = StageState(graph, layout, stage.number)
    states = state.device_bytes(reduced_at_once=False)
    alive = whole_microbatches(stage.alive)
    found = peak_of(eager_phases(graph, stage.counts, states, alive, layout, software))
    return replace(found, host=found.host + state.host_bytes)


def reported_bytes(graph: Graph, layout: Layout, software: TrainingProgram, room: float) -> float:
    """What the software says that a step takes: of the rank that it asks, and with what its allocator holds.

    room: bytes that a program may have. What is held is at most what is left of them. With stages half of
    the published runs hold something, and the others nothing, which is what is counted.
    """
    if not software.eager:
        return train_memory(graph, layout).total
    needed = eager_memory(graph, layout, software).total
    if software.reports_first_stage:
        needed = _stage_memory(graph, layout, software, stage_of(graph, layout, 0)).total
    held = _held_while_sent(graph, layout) if software.holds_sent and layout.pipe == 1 else 0.0
    return max(needed, min(room, needed + held))


def flushes(graph: Graph, layout: Layout, software: TrainingProgram, room: float) -> float:
    """How often an allocator of `room` bytes runs out in a step.

    It does where what is needed and what is still being sent are more than there is. Then it waits for the
    device, gives all free blocks back and asks for them anew, before it would fail: once a microbatch, or,
    where a pass is longer than a host runs ahead, each time that the host is so far ahead again.
    Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp (`num_alloc_retries`).
    """
    if not software.eager:
        return 0.0
    taken = eager_memory(graph, layout, software).total
    taken += _held_while_sent(graph, layout) if software.holds_sent else 0.0
    times = max(1.0, _num_layers(graph) / layout.pipe / _LAYERS_AHEAD)
    return layout.schedule.microbatches * times if taken > room else 0.0


def _held_while_sent(graph: Graph, layout: Layout) -> float:
    """Bytes of what reduce-scatters of activations send in the layers that a host runs ahead.

    Those are of one forward pass of a stage: before the next the host waits for a message.
    """
    sent = sum(
        segment.count * transfer.gathered_bytes
        for segment in graph.segments
        if segment.source
        for node in segment.nodes
        for transfer in node.forward_transfers
        if transfer.op == "reduce_scatter" and transfer.critical
    )
    num_layers = _num_layers(graph)
    return sent * min(_LAYERS_AHEAD, num_layers / layout.pipe) / num_layers


def _num_layers(graph: Graph) -> float:
    return sum(segment.count for segment in graph.segments if segment.source)


def whole_microbatches(alive: Iterable[Alive]) -> Any:
    """Microbatches of which all is kept, also where gradients of weights alone are to come."""
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

    states: as `peak` of memory.py has them. alive: as of `whole_microbatches`. Arrays where
    the graph was recorded for many layouts.
    """
    weights, gradients, optimizer = states
    scattered = layout.rules.zero_stage >= 2
    made_in = dtype_bytes(layout.precision.weights_dtype)
    kept_in = dtype_bytes(layout.precision.gradients_dtype or layout.precision.weights_dtype)
    # Gradients that are not as autograd makes them have arrays of their own, which stay.
    accumulated = scattered or layout.schedule.microbatches > 1 or made_in != kept_in
    early = gradients if accumulated else 0  # before any of this step is made
    if software.buckets and not scattered and layout.num_batch_shards > 1:
        buckets = whole(gradients / kept_in * made_in)
        early, gradients = early + buckets, gradients + buckets
    held = held_bytes(graph, counts, layout.schedule.remat)
    here = [pair for pair in zip(graph.segments, counts, strict=True) if pair[1]]
    layers = [(segment, count) for segment, count in here if segment.source]
    ends = [segment for segment, _ in here if not segment.source]

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
    """Gathered weights of two layers, what the backward pass recomputed, a cotangent as large as it all."""
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
    """The most bytes that one forward pass has at once, besides weights and what it saves."""
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
    """Bytes of the arrays that a loss has besides the logits."""
    precision = layout.precision
    wide = "f32" in (precision.weights_dtype, precision.optimizer_dtype) or precision.master_weights
    dtype = "f32" if wide else precision.compute_dtype
    found = 0
    for node in (node for node in segment.nodes if node.kind == "loss"):
        logits = node.inputs[0]
        split = logits.array.axes_of("V") and not software.whole_logits
        own = software.split_loss_arrays if split else software.loss_arrays
        arrays = own or (_SPLIT_LOSS if split else _WHOLE_LOSS)
        size = node.unfused_bytes if software.whole_logits else logits.bytes_per_device
        wide_size = whole(size / dtype_bytes(logits.dtype) * dtype_bytes(dtype))
        found += size if software.fused_loss else arrays * wide_size
    return found

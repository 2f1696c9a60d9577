"""Bytes on one chip at the peak of a step that a framework runs operation by operation, as PyTorch does.

XLA plans the memory of a step as a whole (memory.py). Without that

    activations  have what the steps of an operation keep besides (`Node.unfused_bytes`): a norm's input in
                 float32 and over its size, the activated gate, keys and values for each head of the queries
    the loss     has the logits, and three arrays as large in float32: the logarithms of probabilities, their
                 cotangents and those of the logits. Where the vocabulary is split the exponentials are a
                 fourth. A program without anything in float32 has them in the type of its activations
    weights      of the embedding and the head stay gathered until the backward pass has used them, beside
                 the flat array that they arrived in; of layers there are the last and the next
    gradients    that are scattered layer by layer come from the memory of another stream of kernels, which
                 an allocator never gives to this one. Others take the room that activations leave
    blocks       that a layer's forward pass left are too small for an array of the loss, and stay beside

Sources: PyTorch, torch/distributed/tensor/parallel/loss.py (the split loss), pytorch/pytorch#129721 (the
memory of FSDP's streams), torch/distributed/fsdp (the root's weights are not resharded after the forward
pass); PyTorch's notes on CUDA, "Memory management".
"""

from collections.abc import Iterable

from meshwright.cost.graph import Graph, Segment, saved_values
from meshwright.cost.memory import Memory, gathered_weights_bytes, held_bytes, state_bytes
from meshwright.cost.stages import alive_microbatches, different_stages, stage_counts
from meshwright.layout import Layout
from meshwright.units import dtype_bytes

# Arrays as large as the logits, besides them, where the vocabulary is whole and where it is split.
_WHOLE_LOSS, _SPLIT_LOSS = 3, 4
# Policies under which no norm, activation or attention runs again, so that what its steps keep stays.
_RUN_ONCE = ("none", "attention")


def eager_memory(graph: Graph, layout: Layout) -> Memory:
    """The peak of a step whose microbatch is `graph`, on the stage that has most."""
    stages = different_stages(graph, layout.schedule.pipeline, layout.pipe, layout.interleave)
    phases = (phase for stage in stages for phase in _phases(graph, layout, stage))
    return max(phases, key=lambda memory: memory.total)


def _phases(graph: Graph, layout: Layout, index: int) -> tuple[Memory, ...]:
    """The loss, the backward pass of the last layer and that of the first, on one stage."""
    weights, gradients, optimizer = state_bytes(graph, layout, index)
    scattered = layout.zero_stage >= 2
    early = gradients if scattered or layout.microbatches > 1 else 0  # before any of this step is made
    counts = stage_counts(graph, layout.schedule.pipeline, layout.pipe, layout.interleave)[index]
    held = held_bytes(graph, counts, layout.remat)
    alive = alive_microbatches(
        layout.schedule.pipeline, layout.pipe, layout.microbatches, layout.interleave, index
    )
    here = [pair for pair in zip(graph.segments, counts, strict=True) if pair[1]]
    layers = [(segment, count) for segment, count in here if segment.source]
    ends = [segment for segment, _ in here if not segment.source]

    saved = held.saved(alive) + sum(map(_unfused, ends))
    if layout.remat in _RUN_ONCE:
        saved += alive * sum(count * _unfused(segment) for segment, count in layers)
    kept = round(min(saved, held.on_chip) if layout.offload else saved)
    host = round(saved - kept)
    gathered = (2 if layout.zero_stage == 3 else 1) * sum(map(gathered_weights_bytes, ends))
    layer = gathered + held.layer + _most(_unfused(segment) for segment, _ in layers)
    blocks = _most(_forward_peak(segment, layout.remat) for segment, _ in layers)
    loss = gathered + 2 * _most(gathered_weights_bytes(segment) for segment, _ in layers) + blocks
    loss += sum(_loss_bytes(segment, _loss_dtype(layout)) for segment in ends)
    return (
        Memory(weights, early, optimizer, kept, loss, host),
        Memory(weights, early, optimizer, kept, layer, host),
        Memory(weights, gradients, optimizer, 0, layer),
    )


def _unfused(segment: Segment) -> int:
    return sum(node.unfused_bytes for node in segment.nodes)


def _most(sizes: Iterable[int]) -> int:
    """Of the kinds of layers, which run one at a time; a stage may have none."""
    return max(sizes, default=0)


def _forward_peak(segment: Segment, remat: str) -> int:
    """The most bytes that one forward pass has at once, besides weights and what it saves."""
    saved = {id(value) for value in saved_values(segment, remat)}
    last_use = {id(value): place for place, node in enumerate(segment.nodes) for value in node.inputs}
    alive: dict[int, int] = {}
    peak = 0
    for place, node in enumerate(segment.nodes):
        if node.kind != "gather":
            alive |= {id(v): v.bytes_per_device for v in node.outputs if id(v) not in saved}
            peak = max(peak, sum(alive.values()))
        for value in node.inputs:
            if last_use[id(value)] == place:
                alive.pop(id(value), None)
    return peak


def _loss_dtype(layout: Layout) -> str:
    wide = "f32" in (layout.weights_dtype, layout.optimizer_dtype) or layout.master_weights
    return "f32" if wide else layout.compute_dtype


def _loss_bytes(segment: Segment, dtype: str) -> int:
    """Of the arrays that a loss has besides the logits."""
    found = 0
    for logits in (value for node in segment.nodes if node.kind == "loss" for value in node.inputs):
        arrays = _SPLIT_LOSS if logits.array.axes_of("V") else _WHOLE_LOSS
        found += arrays * round(logits.bytes_per_device / dtype_bytes(logits.dtype) * dtype_bytes(dtype))
    return found

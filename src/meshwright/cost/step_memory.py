"""Bytes on one chip at the peak of a step, and of an allocator that runs out of them.

For each set of stages with the same layers only the first is computed: it has the most microbatches alive.

An allocator with free memory reports more (`reported_bytes`): it does not reuse the input of a reduce-scatter
of activations until the stream that sends it is done, and the host launches up to a whole forward pass ahead
of that. Without free memory the allocator waits, and flushes its blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshwright.cost.eager import eager_phases, whole_microbatches
from meshwright.cost.graph import Graph
from meshwright.cost.memory import Memory, held_bytes, peak
from meshwright.cost.pipeline.stages import SegmentRuns, Stage, stage_of, stages_of_kinds
from meshwright.cost.state import StageState
from meshwright.layout import Layout
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.programs.program import TrainingProgram
from meshwright.units import Numeric

# Layers that a host runs ahead of the device: CUDA queues 1,024 launches, and a layer's forward pass in
# PyTorch is some 45 kernels, copies and events.
_LAYERS_AHEAD = 23
# Share of reserved memory that no array has: sizes are rounded, and blocks are cut (torchtitan's figures and
# BigScience's are 3 to 14% above the arrays).
_FRAGMENTS = 0.05
_CONTEXT_BYTES, _COMMUNICATOR_BYTES = 500e6, 400e6


def step_memory(graph: Graph, layout: Layout, software: TrainingProgram | None = None) -> Memory:
    """The peak of a step with microbatch `graph`, on the stage with the most bytes.

    software: None for a program that XLA plans as a whole.
    """
    return _largest(stage_memory(graph, layout, stage, software) for stage in stages_of_kinds(graph, layout))


def stage_memory(
    graph: Graph, layout: Layout, stage: Stage, software: TrainingProgram | None = None
) -> Memory:
    """The peak of one stage."""
    state, microbatches = StageState(graph, layout, stage.number), layout.schedule.microbatches
    states = stage_state_bytes(state, microbatches, software)
    memory = _largest(stage_phases(graph, stage.counts, states, stage.alive, microbatches, layout, software))
    return replace(memory, host=memory.host + state.host_bytes)


def _phases(graph: Graph, layout: Layout, software: TrainingProgram) -> Iterable[tuple[Memory, ...]]:
    """The phases of every stage with other layers."""
    microbatches = layout.schedule.microbatches
    for stage in stages_of_kinds(graph, layout):
        states = stage_state_bytes(StageState(graph, layout, stage.number), microbatches, software)
        yield stage_phases(graph, stage.counts, states, stage.alive, microbatches, layout, software)


def stage_state_bytes(
    state: StageState, microbatches: int, software: TrainingProgram | None
) -> tuple[Any, Any, Any]:
    """Bytes of (weights, gradients, optimizer) of a stage.

    A planned program reduces the gradients of a single microbatch as soon as they are made.
    """
    is_eager = software is not None and software.eager
    return state.device_bytes(reduced_at_once=microbatches == 1 and not is_eager)


def stage_phases(
    graph: Graph,
    counts: SegmentRuns,
    states: tuple[Any, Any, Any],
    alive: Sequence[Alive],
    microbatches: Numeric,
    layout: Layout,
    software: TrainingProgram | None,
) -> tuple[Memory, ...]:
    """The phases of one stage that may be its peak; arrays for many layouts.

    counts: runs of each segment. states: as from `stage_state_bytes`. alive: microbatches with activations.
    """
    if software is not None and software.eager:
        return eager_phases(graph, counts, states, whole_microbatches(alive), layout, software)
    return (peak(states, held_bytes(graph, counts, layout.schedule.remat), alive, microbatches, layout),)


def _largest(memories: Iterable[Memory]) -> Memory:
    """The memory with the largest total, and the largest `host` of all."""
    of_all = list(memories)
    largest = max(of_all, key=lambda memory: memory.total)
    return replace(largest, host=max(memory.host for memory in of_all))


def reported_bytes(graph: Graph, layout: Layout, software: TrainingProgram, room: float) -> float:
    """Bytes of a step that the software reports.

    They include the blocks that its reporting rank's allocator holds. room: bytes that a program
    may have; held blocks take at most the rest of them. In pipelines, half of the published runs hold some
    blocks and the others none; none are counted.
    """
    needed = step_memory(graph, layout, software).total
    if not software.eager:
        return needed
    if software.reports_first_stage:
        needed = stage_memory(graph, layout, stage_of(graph, layout, 0), software).total
    held = _held_while_sent(graph, layout) if software.holds_sent and layout.pipe == 1 else 0.0
    if software.memory_figure == "allocated":
        return max(needed, min(room, needed + held))
    # Blocks that activations free are too small for the arrays of an update, and stay reserved.
    *before, update = max(_phases(graph, layout, software), key=lambda phases: max(p.total for p in phases))
    needed = max(memory.total for memory in before) + update.buffers
    held += _FRAGMENTS * needed
    if software.memory_figure == "device":
        held += _process_bytes(layout)
    return max(needed, min(room, needed + held))


def _process_bytes(layout: Layout) -> float:
    """Bytes of a process outside of its allocator: the context, and buffers of communicators.

    Sources: NVIDIA, CUDA C++ best practices: a context has some 500 MB; NCCL, NCCL_BUFFSIZE: 4 MiB a channel,
    for 16 to 32 channels with two peers.
    """
    groups = sum(size > 1 for size in (layout.num_batch_shards, layout.tensor, layout.pipe, layout.context))
    return _CONTEXT_BYTES + groups * _COMMUNICATOR_BYTES


def flushes(graph: Graph, layout: Layout, software: TrainingProgram, room: float) -> float:
    """Times per step that an allocator of `room` bytes runs out.

    It runs out if the needed bytes and the bytes still being sent exceed `room`. Before it would fail, it
    waits for the device, frees all unused blocks and allocates again: once a microbatch or, if a pass is
    longer than a host runs ahead, each time that the host is as far ahead again. Source: PyTorch,
    c10/cuda/CUDACachingAllocator.cpp (`num_alloc_retries`).
    """
    if not software.eager:
        return 0.0
    taken = step_memory(graph, layout, software).total
    taken += _held_while_sent(graph, layout) if software.holds_sent else 0.0
    times = max(1.0, _num_layers(graph) / layout.pipe / _LAYERS_AHEAD)
    return layout.schedule.microbatches * times if taken > room else 0.0


def _held_while_sent(graph: Graph, layout: Layout) -> float:
    """Bytes of the inputs of reduce-scatters of activations in the layers that a host runs ahead.

    At most a stage's layers of one forward pass count: before the next one the host waits for a message.
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

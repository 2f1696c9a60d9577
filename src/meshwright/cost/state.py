"""Stored parameters and the optimizer's work on one chip of a stage."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

from meshwright.cost.arrays import ceiling
from meshwright.cost.graph import Cargo, Graph, StoredWeights, Transfer, WeightsPlace, Work
from meshwright.cost.pipeline.stages import stage_ends, stage_layers
from meshwright.dtypes import dtype_bytes
from meshwright.layout import Layout
from meshwright.layout.pipelines.depths import layers_of_depths, stage_routes
from meshwright.layout.rules import STAGES
from meshwright.optimizers import OPTIMIZERS
from meshwright.optimizers.optimizer import state_bytes
from meshwright.units import Numeric, whole


@dataclass(frozen=True)
class Stored:
    """Parameters on one chip of a stage: as stored, as accumulated gradients, and in the optimizer.

    weight_bytes: stored weights with scales. optimizer: elements of the state. optimizer_blocks: its blocks
    with a scale. update_flops: FLOPs of an update.
    """

    weights: int
    weight_bytes: int
    gradients: int
    updated: int
    optimizer: int
    optimizer_blocks: int
    update_flops: int


class StageState:
    """Weights, gradients and the optimizer of one chip of a stage; arrays for many layouts.

    stored: the parameters of the stage's layers, and of the embedding and the head if the schedule puts them
    there. If several stages read a weight, its optimizer state is on the first of them.
    """

    def __init__(self, graph: Graph, layout: Layout, stage: int = 0) -> None:
        self.layout, self._parts = layout, tuple(_weights_of_stage(graph, layout, stage))
        self._graph = graph
        totals: list[Any] = [0] * len(fields(Stored))
        for part, share in self._parts:
            read = (share.read * count for count in (part.stored, part.stored_bytes, part.accumulated))
            state = part.optimizer, part.optimizer_blocks
            updated = (share.updated * count for count in (part.updated, *state, part.update_flops))
            totals = [total + count for total, count in zip(totals, (*read, *updated), strict=True)]
        self.stored = Stored(*map(ceiling, totals))
        # A float32 copy of the weights, and the optimizer's state.
        self._master = self.stored.updated * dtype_bytes("f32") if layout.precision.master_weights else 0
        of_state = self.stored.optimizer, self.stored.optimizer_blocks
        self._optimizer = state_bytes(layout.precision.optimizer_dtype, *of_state)

    def device_bytes(self, *, reduced_at_once: bool) -> tuple[Any, Any, Any]:
        """Bytes of (weights, gradients, optimizer) on the chip.

        reduced_at_once: gradients are reduced to the optimizer's shards as soon as they are made.
        """
        stored, precision = self.stored, self.layout.precision
        offloads = self.layout.schedule.offload_optimizer
        gradients = stored.updated if reduced_at_once else stored.gradients
        return (
            whole(stored.weight_bytes + (0 if offloads else self._master)),
            whole(gradients * dtype_bytes(precision.accumulated_dtype)),
            whole(0 if offloads else self._optimizer),
        )

    @property
    def host_bytes(self) -> Any:
        """Bytes of the optimizer in the host's memory for the chip."""
        return whole(self._master + self._optimizer) if self.layout.schedule.offload_optimizer else 0

    def update_work(self) -> Work:
        """The optimizer on the chip's shard.

        It reads weight, gradient and state, and writes all but the gradient. Memory is the limit, except for
        Muon.
        """
        layout, stored = self.layout, self.stored
        master = 2 * dtype_bytes("f32") if layout.precision.master_weights else 0
        weights = 3 * dtype_bytes(layout.precision.trained_dtype) + master
        return Work(stored.update_flops, stored.updated * weights + 2 * self._optimizer)

    def update_transfers(self, microbatches: Numeric) -> list[tuple[Transfer, Any]]:
        """(transfer, times a step) of an update: sums of norms, and each weight's collectives.

        If other stages also read a weight, it is sent to them when a step begins; its gradients are returned
        once they are summed.
        """
        axes = self.layout.weight_axes
        norm = Transfer("norm of gradients", "all_reduce", axes, "grad_norm", 4, "f32", critical=True)
        transfers = [(norm, float(OPTIMIZERS[self.layout.precision.optimizer].num_sums))] if axes else []
        transfers += [
            (transfer, share.updated * self._num_updates(part))
            for part, share in self._parts
            for transfer in part.exchanged
        ]
        transfers += [
            (transfer, share.second_once if transfer.once else share.second * microbatches)
            for part, share in self._parts
            for transfer in part.summed
            if (share.second_once if transfer.once else share.second)
        ]
        return transfers + [(transfer, 1.0) for transfer in self._between_stages()]

    def broadcasts(self) -> Iterator[tuple[Transfer, Any]]:
        """(transfer, times a step) of updated weights that each rank with a part sends to the others.

        A broadcast over a ring passes the same number of ranks as an all-gather.
        """
        gathers = (
            t for _, node in self._graph.nodes() for t in node.update_transfers if t.op == "all_gather"
        )
        axes = next((transfer.axes for transfer in gathers), None)
        if axes:
            ranks = self.layout.mesh.size(axes)
            sent, dtype = whole(self.stored.weight_bytes / ranks), self.layout.precision.trained_dtype
            yield (
                Transfer("updated weights", "all_gather", axes, "a rank's", sent, dtype, critical=True),
                ranks,
            )

    def _num_updates(self, part: StoredWeights) -> int:
        """Updates of the part in a step.

        If stages have parts of a stack, a first update only finds Adafactor's sizes of the whole stack.
        """
        is_sized = OPTIMIZERS[self.layout.precision.optimizer].by_whole_sizes and self.layout.stage_programs
        return 2 if is_sized and part.place == "layers" else 1

    def _between_stages(self) -> Iterator[Transfer]:
        """The weights sent to other stages, and the gradients returned to their stage."""
        layout = self.layout
        dtype = layout.precision.accumulated_dtype
        if any(share.lent for _, share in self._parts):
            lent = sum(share.lent * part.stored_bytes for part, share in self._parts)
            yield self._to_stages("weights between stages", lent, layout.precision.weights_dtype)
        if any(share.borrowed for _, share in self._parts):
            borrowed = sum(share.borrowed * part.updated for part, share in self._parts)
            yield self._to_stages("gradients between stages", borrowed * dtype_bytes(dtype), dtype)

    def _to_stages(self, what: Cargo, num_bytes: Numeric, dtype: str) -> Transfer:
        sent = whole(self.layout.pipe * num_bytes)
        return Transfer(what, "permute", (STAGES,), what, sent, dtype, critical=True)


class _Share(NamedTuple):
    """A stage's share of a part of the weights.

    read, updated: shares that it reads and that it updates. lent: copies sent to other stages. borrowed: the
    share that it reads and another stage updates. second: the share of the microbatches whose second use of
    the part is here, in a separate program. second_once: 1 if the stage has no first use of it; otherwise
    the second's gradients are added to the first's before the sum.
    """

    read: float
    updated: float
    lent: float = 0.0
    borrowed: float = 0.0
    second: float = 0.0
    second_once: float = 0.0


class _Cut(NamedTuple):
    """A model's layers cut into stages.

    head_layers: as in `layers_of_depths`. schedule, pipe, interleave: of the layout. is_spmd: all stages run
    one program, whose stacks are split over them. has_programs: each stage runs a program of its own.
    """

    num_layers: int
    head_layers: float
    schedule: str
    pipe: int
    interleave: int
    is_spmd: bool
    has_programs: bool


def _weights_of_stage(graph: Graph, layout: Layout, stage: int) -> Iterator[tuple[StoredWeights, _Share]]:
    """The parts of the recorded weights, each with the share of it that a stage has."""
    schedule = layout.schedule
    cut = _Cut(
        len(graph.layers),
        graph.head_layers,
        schedule.pipeline,
        layout.pipe,
        schedule.interleave,
        layout.spmd_stages,
        layout.stage_programs,
    )
    return ((part, _share(cut, stage, part.place, part.layers)) for part in graph.weights)


@lru_cache(maxsize=8192)
def _share(cut: _Cut, stage: int, place: WeightsPlace, layers: frozenset[int]) -> _Share:
    """A stage's share of a part of the weights.

    If several stages read the part, it is sent to each of them once. A tied table is where the embedding is
    and where the head is. place, layers: of a StoredWeights.
    """
    schedule, pipe, interleave = cut.schedule, cut.pipe, cut.interleave
    by_depth = layers_of_depths(cut.num_layers, schedule, pipe, interleave, cut.head_layers)
    if place == "layers" and cut.is_spmd:
        read = 1.0  # recorded as its stage's rows: L is split over pipe
    elif place == "layers":
        of_stage = stage_layers(by_depth, schedule, pipe, interleave, stage)
        read = sum(layer in layers for layer in of_stage) / len(layers)
    else:
        first, last = stage_ends(schedule, pipe, stage)
        read = {"first": first, "last": last, "first and last": first or last}[place]
    if not cut.has_programs:
        return _Share(read, read)
    routes = stage_routes(schedule, pipe, interleave)
    # (share of the part, depths that read it); the first of the depths updates it.
    if place == "layers":
        shares = [
            (len(layers.intersection(of_depth)) / len(layers), (depth,))
            for depth, of_depth in enumerate(by_depth)
        ]
    else:
        shares = [(1.0, _ENDS[place])]
    updated = lent = borrowed = 0.0
    for share, depths in shares:
        owner = routes[0][depths[0]].stage
        others = {route[depth].stage for route in routes for depth in depths} - {owner}
        updated += share * (owner == stage)
        lent += share * len(others) * (owner == stage)
        borrowed += share * (stage in others)
    if place != "first and last":
        return _Share(read, updated, lent, borrowed)
    first, last = (sum(route[depth].stage == stage for route in routes) / len(routes) for depth in (0, -1))
    return _Share(read, updated, lent, borrowed, last, float(last > 0 and not first))


# The depths that read the weights outside of the layers; the first of them updates the weights.
_ENDS = {"first": (0,), "last": (-1,), "first and last": (0, -1)}

"""What one chip of a stage stores between steps, and what the optimizer does with it once a step."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from meshwright.cost.figures import ceiling
from meshwright.cost.graph import Graph, StoredWeights, Transfer, Work
from meshwright.cost.stages import stage_ends, stage_layers
from meshwright.layout import Layout
from meshwright.layout.optimizers import num_sums
from meshwright.units import dtype_bytes, whole


@dataclass(frozen=True)
class Stored:
    """Parameters on one chip of a stage: as stored, as gradients accumulate, as the optimizer has them.

    weight_bytes: as stored, with scales. optimizer: elements of its state. update_flops: of an update.
    """

    weights: int
    weight_bytes: int
    gradients: int
    updated: int
    optimizer: int
    update_flops: int


class StageState:
    """Weights, gradients and the optimizer of one chip of a stage; figures of many layouts are arrays.

    stored: the parameters of its layers, and of what the schedule's ends have besides.
    """

    def __init__(self, graph: Graph, layout: Layout, stage: int = 0) -> None:
        self.layout, self._parts = layout, tuple(_weights_of_stage(graph, layout, stage))
        totals: list[Any] = [0] * len(fields(Stored))
        for part, share in self._parts:
            stored = part.stored, part.stored_bytes
            counts = (*stored, part.accumulated, part.updated, part.optimizer, part.update_flops)
            totals = [total + share * count for total, count in zip(totals, counts, strict=True)]
        self.stored = Stored(*map(ceiling, totals))
        # Float32 weights beside those that are multiplied, and the optimizer's own state.
        self._master = self.stored.updated * dtype_bytes("f32") if layout.master_weights else 0
        self._optimizer = self.stored.optimizer * dtype_bytes(layout.optimizer_dtype)

    def device_bytes(self, *, reduced_at_once: bool) -> tuple[Any, Any, Any]:
        """Bytes of (weights, gradients, optimizer) on the chip.

        reduced_at_once: whether gradients are reduced where they are made, to the shards of the optimizer.
        """
        stored, layout = self.stored, self.layout
        offloads = layout.offload_optimizer
        gradients = stored.updated if reduced_at_once else stored.gradients
        return (
            whole(stored.weight_bytes + (0 if offloads else self._master)),
            whole(gradients * dtype_bytes(layout.gradients_dtype or layout.weights_dtype)),
            whole(0 if offloads else self._optimizer),
        )

    @property
    def host_bytes(self) -> Any:
        """Bytes that the optimizer has in the host's memory for the chip."""
        return whole(self._master + self._optimizer) if self.layout.offload_optimizer else 0

    def update_work(self) -> Work:
        """The optimizer on the chip's shard.

        Weight, gradient and state are read, all but the gradient written; but for Muon memory decides.
        """
        layout, stored = self.layout, self.stored
        master = 2 * dtype_bytes("f32") if layout.master_weights else 0
        weights, state = (
            3 * dtype_bytes(layout.weights_dtype) + master,
            2 * dtype_bytes(layout.optimizer_dtype),
        )
        return Work(stored.update_flops, stored.updated * weights + stored.optimizer * state)

    def update_transfers(self) -> list[tuple[Transfer, float]]:
        """What an update sends, and how often: sums of norms over the axes that split weights, and momentum.

        Momentum goes to where its matrices are whole, and what is made of it comes back.
        """
        axes = self.layout.weight_axes
        norm = Transfer("norm of gradients", "all_reduce", axes, "grad_norm", 4, "f32", critical=True)
        found = [(norm, float(num_sums(self.layout.optimizer)))] if axes else []
        return found + [(one, 2 * share) for part, share in self._parts for one in part.exchanged]


def _weights_of_stage(graph: Graph, layout: Layout, stage: int) -> Iterator[tuple[StoredWeights, float]]:
    """The parts of the recorded weights, each with the share of it that a stage has.

    A tied table is where the embedding is and where the head is.
    """
    pipe, schedule = layout.pipe, layout.schedule.pipeline
    own = stage_layers(len(graph.layers), schedule, pipe, layout.interleave, stage, graph.head_layers)
    first, last = stage_ends(schedule, pipe, stage)
    here = {"first": first, "last": last, "first and last": first or last}
    for part in graph.weights:
        if part.place == "layers" and layout.stages_alike:
            share = 1.0  # recorded as its stage's rows: L is split over pipe
        elif part.place == "layers":
            share = sum(layer in part.layers for layer in own) / len(part.layers)
        else:
            share = here[part.place]
        yield part, share

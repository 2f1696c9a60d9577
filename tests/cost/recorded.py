"""A small model recorded under a layout, and what its step moves, counted from the graph alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.cost.graph import Direction, Graph, Transfer, recomputed_nodes
from meshwright.cost.record import record_loss
from meshwright.cost.recorder import Lowering, PassShape
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig

SMALL = ModelConfig(
    name="small",
    num_layers=3,
    d_model=64,
    d_ff=192,
    num_heads=8,
    num_kv_heads=4,
    d_head=16,
    vocab_size=320,
    max_seq_len=128,
)
B, T = 16, 32
L, D, F, N, K, H, V = 3, 64, 192, 8, 4, 16, 320
TOKENS = B * T
LAYER_WEIGHTS = 3 * D * F + 2 * D * (N + K) * H
BF16 = 2

# Rounds of the ring: an all-reduce is a reduce-scatter and an all-gather.
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 0.25}


def record(layout: Layout, config: ModelConfig = SMALL, *, flash_attention: bool = True) -> Graph:
    return record_loss(config, layout, PassShape(B, T, T), Lowering(flash_attention=flash_attention))


@dataclass(frozen=True)
class Move:
    """A transfer of one layer (or of the embedding, or the head)."""

    segment: str
    direction: Direction
    transfer: Transfer

    @property
    def ring_bytes(self) -> float:
        return PASSES[self.transfer.op] * self.transfer.gathered_bytes

    def __str__(self) -> str:
        t = self.transfer
        return f"{self.direction} {t.op} {t.tensor}"


def moves(layout: Layout, config: ModelConfig = SMALL) -> Iterator[Move]:
    """Everything that one microbatch moves, each segment once."""
    for segment in record(layout, config).segments:
        again = recomputed_nodes(segment, layout.schedule.remat)
        for node in segment.nodes:
            for transfer in node.forward_transfers:
                yield Move(segment.name, "forward", transfer)
                if node in again:
                    yield Move(segment.name, "recompute", transfer)
            for transfer in node.backward_transfers:
                yield Move(segment.name, "backward", transfer)


def layer_moves(layout: Layout, *axes: str) -> list[Move]:
    """What one layer moves over exactly these mesh axes, norms' scales aside (D elements)."""
    return [
        move
        for move in moves(layout)
        if move.segment == "layer" and move.transfer.axes == axes and "norm" not in move.transfer.tensor
    ]


def ring_bytes(found: list[Move], *directions: Direction) -> float:
    return sum(move.ring_bytes for move in found if move.direction in directions)

"""The recorded forward pass: nodes with their work and transfers, forward and backward.

A node says which values its backward pass reads (`needs`). From that and the values that a remat
policy saves follows what is recomputed, and so every collective and FLOP of the backward pass.

Bytes, FLOPs and the like are numbers; or arrays of numbers, where many layouts were recorded at once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from meshwright.cost.collectives import Op
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective

Direction = Literal["forward", "recompute", "backward", "update"]


@dataclass(frozen=True, eq=False)
class Value:
    """An activation or weight: its sharding, dtype and bytes on one device."""

    array: ShardedArray
    dtype: str
    bytes_per_device: int

    @property
    def name(self) -> str:
        return self.array.name


@dataclass(frozen=True)
class Transfer:
    """A planned collective on one tensor.

    gathered_bytes: V, as cost/collectives.py prices it. critical: compute waits for it; the others
    (weights gathered, gradients reduced) may hide under compute. step: in the notation, where a
    contraction asked for it. once: of a step, not of every microbatch, as gradients that accumulate
    where they are made are reduced. repeat: times in a row, as the blocks of a ring. copies: of each
    row that go to different devices, as a token goes to several experts.
    """

    op: Op
    axes: tuple[str, ...]
    tensor: str
    gathered_bytes: int
    dtype: str
    critical: bool
    step: Collective | None = None
    once: bool = False
    repeat: int = 1
    copies: int = 1


@dataclass(frozen=True)
class Work:
    """Compute on one device: FLOPs, bytes of HBM traffic, and the kernels that do it.

    shape: (rows, contracted, columns) of the product, where it is one, and (queries, head dimension, keys)
    of attention. batch: such products at once.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    kernels: float = 1
    shape: tuple[float, float, float] | None = None
    batch: float = 1.0


NO_WORK = Work(kernels=0)


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on one device.

    kind groups nodes in a breakdown: "matmul", "attention", "elementwise", "cast", "embed", "loss"
    compute; "gather" (a weight), "move" (an activation), "exchange" (tokens to and from
    experts) and "reduce" (a partial sum) only communicate.
    forward, backward: its pieces of work, one after another. weight_gradient: the piece of the backward
    pass that nothing in it waits for, which a zero-bubble schedule puts off.
    update_transfers: of the weight, after the optimizer (ZeRO 1 and 2 gather what they updated).
    unfused_bytes: what its steps keep for the backward pass besides `needs`, where no compiler fuses them.
    """

    name: str
    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    needs: tuple[Value, ...] = ()
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    weight_gradient: tuple[Work, ...] = ()
    forward_transfers: tuple[Transfer, ...] = ()
    backward_transfers: tuple[Transfer, ...] = ()
    update_transfers: tuple[Transfer, ...] = ()
    unfused_bytes: int = 0


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that run `count` times: the embedding, one layer, the head.

    source: the input that a layer's rematerialisation starts from; None where nothing is recomputed:
    such a segment is on the first stage of a pipeline, or after the layers on the last.
    """

    name: str
    nodes: tuple[Node, ...]
    count: int
    source: Value | None = None

    @cached_property
    def producers(self) -> dict[int, Node]:
        """The node that makes each value, by the value's id."""
        return {id(value): node for node in self.nodes for value in node.outputs}


@dataclass(frozen=True, eq=False)
class Graph:
    """The forward pass in order. Compared by identity: prices are kept by graph."""

    segments: tuple[Segment, ...]

    @cached_property
    def num_layers(self) -> int:
        """Runs of all segments that a stage of a pipeline may have some of."""
        return sum(segment.count for segment in self.segments if segment.source)

    def nodes(self) -> Iterator[tuple[Segment, Node]]:
        for segment in self.segments:
            for node in segment.nodes:
                yield segment, node


# Kinds of nodes whose results the policy `matmuls` keeps. Attention's is as small as one of its inputs.
_KEPT_AS_MATMULS = ("matmul", "attention", "reduce", "exchange")


# Memory and time of a segment ask for the same, soon after one another; a result keeps the whole segment.
@lru_cache(maxsize=512)
def saved_values(segment: Segment, remat: str) -> list[Value]:
    """What the backward pass of one run of `segment` finds in memory.

    none: everything it reads but gathered arrays, which are gathered again. attention: all of that but
    the scores between its products. matmuls: the results of matmuls, of attention and of exchanges.
    alternate: the same but for the second, the fourth, ... of the products. full: only the segment's
    input. A value that nothing needs is not counted.
    """
    kept = {id(segment.source)}
    for node in segment.nodes:
        if segment.source is None:
            kept |= {id(value) for value in node.outputs}
        if remat == "none" and node.kind not in ("gather", "move"):
            kept |= {id(value) for value in node.outputs}
        if remat == "attention" and node.kind not in ("gather", "move", "softmax"):
            kept |= {id(value) for value in node.outputs}
        if remat in ("matmuls", "alternate") and node.kind in _KEPT_AS_MATMULS:
            kept |= {id(value) for value in node.outputs}
    if remat == "alternate" and segment.source:
        kept -= {id(value) for node in _every_second_product(segment) for value in node.outputs}
    read = {id(value): value for value in _read_by_backward(segment, kept)}
    return [value for key, value in read.items() if key in kept]


def _every_second_product(segment: Segment) -> list[Node]:
    return [node for node in segment.nodes if node.kind == "matmul"][1::2]


@lru_cache(maxsize=512)
def recomputed_nodes(segment: Segment, remat: str) -> list[Node]:
    """The nodes whose forward work the backward pass repeats, in order."""
    saved = {id(value) for value in saved_values(segment, remat)}
    wanted = {id(value) for value in _read_by_backward(segment, saved)} - saved
    return [node for node in segment.nodes if any(id(value) in wanted for value in node.outputs)]


def _read_by_backward(segment: Segment, kept: set[int]) -> Iterable[Value]:
    """Every value that the backward pass reads, or reads to recompute one that is not kept."""
    producer = segment.producers
    pending = [value for node in segment.nodes for value in node.needs]
    seen: dict[int, Value] = {}
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if id(value) in producer and id(value) not in kept:
            pending.extend(producer[id(value)].inputs)
    return list(seen.values())

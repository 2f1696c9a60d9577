"""The recorded forward pass: nodes with their work and transfers, forward and backward.

A node says which values its backward pass reads (`needs`). From that and the values that a remat
policy saves follows what is recomputed, and so every collective and FLOP of the backward pass.

Bytes, FLOPs and the like are numbers; or arrays of numbers, where many layouts were recorded at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from meshwright.cost.collectives import ALONE, Copies, Op
from meshwright.models.parameters import is_latent
from meshwright.notation.array import ShardedArray

Direction = Literal["forward", "recompute", "backward", "update"]
# What a collective carries. "tokens" travel to and from experts; what goes back in the backward pass are the
# cotangents of the same arrays.
Cargo = Literal[
    "weights",
    "gradients",
    "updated weights",
    "norm of gradients",
    "momentum",
    "mean squares",
    "activations",
    "activations between stages",
    "weights between stages",
    "gradients between stages",
    "keys and values",
    "tokens",
    "norm statistics",
    "logits",
    "loss",
]
# Where the weights of one part of a model lie in a pipeline: dealt over its stages, with the embedding on
# the first, with the head on the last, or with both (a tied table).
WeightsPlace = Literal["layers", "first", "last", "first and last"]


@dataclass(frozen=True, eq=False)
class Value:
    """An activation or weight: its sharding, dtype and bytes on one device.

    frozen: a weight that is not trained, of which there is no gradient. is_copy: whether it is an array of
    its own beside what it was made from; of many layouts those in which something moves for it.
    padding_bytes: what the tiles of a kernel add to it in memory.
    """

    array: ShardedArray
    dtype: str
    bytes_per_device: int
    frozen: bool = False
    is_copy: Any = True
    padding_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        return self.bytes_per_device + self.padding_bytes

    @property
    def name(self) -> str:
        return self.array.name


@dataclass(frozen=True)
class Transfer:
    """A recorded collective on one tensor, not priced yet; its node says in which direction it runs.

    what: the kind of array that travels. gathered_bytes: V, as cost/collectives.py prices it. critical:
    compute waits for it; the others (weights gathered, gradients reduced) may hide under compute. once: of
    a step, not of every microbatch, as gradients that accumulate where they are made are reduced. repeat:
    times in a row, as the blocks of a ring. copies: of each row, which cross to a node as one.
    """

    what: Cargo
    op: Op
    axes: tuple[str, ...]
    tensor: str
    gathered_bytes: int
    dtype: str
    critical: bool
    once: bool = False
    repeat: int = 1
    copies: Copies = ALONE


@dataclass(frozen=True)
class Work:
    """Compute on one device: FLOPs, bytes of HBM traffic, and the kernels that do it.

    shape: (rows, contracted, columns) of the product, where it is one, and (queries, head dimension, keys)
    of attention. batch: such products at once. routed: whether their rows are what a router gave experts.
    unfused_bytes: the traffic besides where no kernel fuses the steps of the operation. widened: whether its
    weights are stored narrower than they are multiplied.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    kernels: float = 1
    shape: tuple[float, float, float] | None = None
    batch: float = 1.0
    routed: bool = False
    unfused_bytes: float = 0.0
    widened: bool = False


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on one device.

    kind groups nodes in a breakdown: "matmul", "attention", "elementwise", "cast", "embed", "loss"
    compute; "gather" (a weight), "move" (an activation), "exchange" (tokens to and from
    experts) and "reduce" (a partial sum) only communicate.
    recompute_transfers: of its forward pass when that is repeated, where they are others; None: the same.
    forward, backward: its pieces of work, one after another. weight_gradient: the piece of the backward
    pass that nothing in it waits for, which a zero-bubble schedule puts off.
    update_transfers: of the weight, after the optimizer (ZeRO 1 and 2 gather what they updated).
    unfused_bytes: what its steps keep for the backward pass besides `needs`, where nothing fuses them; steps:
    whose ("norms", "gates", "keys": see `Software.fused`). Of a loss ("logits") what the logits of the whole
    vocabulary take.
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
    recompute_transfers: tuple[Transfer, ...] | None = None
    unfused_bytes: int = 0
    steps: str = ""

    def transfers(self, direction: Direction) -> tuple[Transfer, ...]:
        """What it sends in a pass of this direction."""
        if direction == "backward":
            return self.backward_transfers
        if direction == "recompute" and self.recompute_transfers is not None:
            return self.recompute_transfers
        return self.forward_transfers


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that run `count` times: the embedding, one layer, the head.

    source: the input that a layer's rematerialisation starts from; None where nothing is recomputed:
    such a segment is on the first stage of a pipeline, or after the layers on the last. handed_on: what
    layers after it read besides, and keep for their backward passes; shared: what it reads of a layer
    before. narrowed: bytes of the values that are kept narrower than they are made, by the id of each.
    recomputed_early: whether a compiler may recompute it long before its backward pass, so that what it makes
    waits.
    """

    name: str
    nodes: tuple[Node, ...]
    count: int
    source: Value | None = None
    handed_on: tuple[Value, ...] = ()
    shared: tuple[Value, ...] = ()
    narrowed: Mapping[int, Any] = field(default_factory=dict)
    recomputed_early: bool = False
    memo: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def producers(self) -> dict[int, Node]:
        """The node that makes each value, by the value's id."""
        return {id(value): node for node in self.nodes for value in node.outputs}


class StoredWeights(NamedTuple):
    """The weights of one part of the model on one device, all of its layers together, in elements.

    layers: whose weights they are; none of those outside the layers. stored: as they lie between steps, in
    stored_bytes, their scales among them.
    accumulated: of their gradients, while microbatches add to them. updated: as the optimizer has them, and
    their gradients once summed. optimizer: its state, and optimizer_blocks of it. update_flops: of an update.
    exchanged: what an update sends, of all layers at once. summed: of a table that is read twice, how the
    gradient of the second use is, where it is not added to that of the first before.
    """

    place: WeightsPlace
    layers: frozenset[int] = frozenset()
    stored: Any = 0
    stored_bytes: Any = 0
    accumulated: Any = 0
    updated: Any = 0
    optimizer: Any = 0
    optimizer_blocks: Any = 0
    update_flops: Any = 0
    exchanged: tuple[Transfer, ...] = ()
    summed: tuple[Transfer, ...] = ()


@dataclass(frozen=True, eq=False)
class Graph:
    """The recorded passes of one microbatch, in order, and what lies in memory between them.

    layers: for every layer in order, the index of its segment. directions: in which each segment runs; in
    prefill and generate forward alone.
    caches: the keys and values (or latents) that generation keeps. head_layers: the head's parameters over a
    layer's, where stages are filled by them (`Software.counts_head`); else 0. head_waits: whether the
    gradient of the head's weight may be put off until the layers' backward passes are done, and so keep its
    operands, as XLA for GPU does to hide collectives; XLA for TPU computes it first. fused: the names of
    operations that are no nodes of their own, such as biases. Graphs are compared by identity.
    """

    segments: tuple[Segment, ...]
    layers: tuple[int, ...]
    weights: tuple[StoredWeights, ...] = ()
    caches: tuple[Value, ...] = ()
    directions: tuple[Direction, ...] = ("forward", "recompute", "backward")
    head_layers: float = 0.0
    head_waits: bool = True
    fused: frozenset[str] = frozenset()
    memo: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @property
    def trains(self) -> bool:
        return "backward" in self.directions

    def nodes(self) -> Iterator[tuple[Segment, Node]]:
        for segment in self.segments:
            for node in segment.nodes:
                yield segment, node


_P = ParamSpec("_P")
_R = TypeVar("_R")
_Owner = TypeVar("_Owner", "Segment", "Graph")


def kept_with(function: Callable[Concatenate[_Owner, _P], _R]) -> Callable[Concatenate[_Owner, _P], _R]:
    """`function` of a segment or graph, which keeps the results, so that they live as long as it does."""

    @wraps(function)
    def ask(owner: _Owner, *rest: _P.args, **named: _P.kwargs) -> _R:
        key = (function, *rest, *named.items())
        if key not in owner.memo:
            owner.memo[key] = function(owner, *rest, **named)
        return owner.memo[key]

    return ask


# Kinds of nodes whose results the policy `matmuls` keeps. Attention's is as small as one of its inputs.
_KEPT_AS_MATMULS = ("matmul", "attention", "reduce", "exchange")


@kept_with
def saved_values(segment: Segment, remat: str) -> list[Value]:
    """What the backward pass of one run of `segment` finds in memory.

    none: everything it reads but gathered arrays, which are gathered again. attention: all of that but
    the scores between its products. matmuls: the results of matmuls, of attention and of exchanges.
    latents: of these not what is made of latents. alternate: the results of matmuls but for the second,
    the fourth, ... of the products. full: only the segment's input. A value that nothing needs is not
    counted.
    """
    kept = {id(segment.source)}
    for node in segment.nodes:
        if segment.source is None:
            kept |= {id(value) for value in node.outputs}
        if remat == "none" and node.kind not in ("gather", "move"):
            kept |= {id(value) for value in node.outputs}
        if remat == "attention" and node.kind not in ("gather", "move", "softmax"):
            kept |= {id(value) for value in node.outputs}
        if remat in ("matmuls", "latents", "alternate") and node.kind in _KEPT_AS_MATMULS:
            kept |= {id(value) for value in node.outputs}
    if remat == "alternate" and segment.source:
        kept -= {id(value) for node in _products(segment)[1::2] for value in node.outputs}
    if remat == "latents":
        made = [node for node in _products(segment) if is_latent(node.inputs[0].array.dims)]
        kept -= {id(value) for node in made for value in node.outputs}
    read = {id(value): value for value in _read_by_backward(segment, kept)}
    return [value for key, value in read.items() if key in kept]


def _products(segment: Segment) -> list[Node]:
    return [node for node in segment.nodes if node.kind == "matmul"]


@kept_with
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

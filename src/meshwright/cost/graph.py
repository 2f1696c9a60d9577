"""The recorded forward pass: nodes with their work and transfers, forward and backward.

A node lists the values that its backward pass reads (`needs`). These and the values that a remat policy saves
determine the recomputed nodes, and with them every collective and FLOP of the backward pass.

Figures such as bytes and FLOPs are numbers, or arrays of numbers if many layouts are recorded at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from meshwright.cost.collectives import ALONE, Copies, Op
from meshwright.models.parameters import is_latent
from meshwright.notation.array import ShardedArray

Direction = Literal["forward", "recompute", "backward", "update"]
# Kinds of arrays in collectives. "tokens" go to and from experts. The backward pass sends the cotangents
# of the same arrays.
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
# Stages with the weights of one part of a model: dealt over all, with the embedding on the first, with the
# head on the last, or with both (a tied table).
WeightsPlace = Literal["layers", "first", "last", "first and last"]


@dataclass(frozen=True, eq=False)
class Value:
    """An activation or weight: its sharding, dtype and bytes on one device.

    frozen: a weight that is not trained and has no gradient. is_copy: whether it has memory separate from its
    source; for many layouts, the layouts that move it. padding_bytes: added in memory by a kernel's
    tiles.
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
    """A recorded collective on one tensor, without a price; its node gives the direction.

    what: the kind of array. gathered_bytes: V, as in cost/collectives.py. critical: compute waits for it;
    others (weights gathered, gradients reduced) may hide under compute. once: runs once a step, not in every
    microbatch; for example the sum of gradients that are accumulated before it. repeat: runs in sequence, as
    for the blocks of a ring. copies: of each row, which cross to a node once.
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

    shape: (rows, contracted, columns) of a product, (queries, head dimension, keys) of attention; None for
    other work. batch: products of this shape at once. routed: a router gave the rows to
    experts. unfused_bytes: extra traffic if no kernel fuses the steps of the operation. widened: the weights
    are stored in a narrower type than they are multiplied in. wide: the weights are stored and multiplied in
    the type of activations, where other products have a narrower one. looped: 1 for work in a loop over
    blocks of rows, during which no collective runs; otherwise 0.
    """

    flops: float = 0.0
    hbm_bytes: float = 0.0
    kernels: float = 1
    shape: tuple[float, float, float] | None = None
    batch: float = 1.0
    routed: bool = False
    unfused_bytes: float = 0.0
    widened: bool = False
    wide: bool = False
    looped: Any = 0


@dataclass(frozen=True, eq=False)
class Node:
    """One operation on one device.

    kind: groups nodes in a breakdown. "matmul", "attention", "elementwise", "cast", "embed" and "loss"
    compute. "gather" (a weight), "move" (an activation), "exchange" (tokens to and from experts) and "reduce"
    (a partial sum) only communicate.

    forward, backward: pieces of work in sequence. weight_gradient: the piece of the backward pass that
    nothing in it waits for; a zero-bubble schedule defers it. recompute_transfers: collectives of a repeated
    forward pass; None if they equal the forward pass's. update_transfers: of the weight after the
    optimizer (ZeRO 1 and 2 gather the updated weights).

    unfused_bytes: kept for the backward pass in addition to `needs` if nothing fuses the operation's steps;
    for a loss ("logits") the bytes of the logits of the whole vocabulary. steps: kind of the operation's
    steps ("norms", "gates", "keys": see `Software.fused`). scratch: bytes of temporary arrays of its backward
    pass except cotangents; in inference, of arrays except its results. fixed_rows: whether experts have a
    fixed number of rows, so that no loop or kernel makes them. carried: bytes of weights and gradients that
    the backward pass of experts holds during further passes; 0 if one pass takes all rows.
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
    scratch: Any = 0
    steps: str = ""
    fixed_rows: bool = False
    carried: Any = 0

    def transfers(self, direction: Direction) -> tuple[Transfer, ...]:
        """Its collectives in a pass of this direction."""
        if direction == "backward":
            return self.backward_transfers
        if direction == "recompute" and self.recompute_transfers is not None:
            return self.recompute_transfers
        return self.forward_transfers


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that run `count` times: the embedding, one layer, the head.

    source: the input that a layer's rematerialisation starts from. None without recomputation: such a segment
    is on the first stage of a pipeline, or after the layers on the last. handed_on: further values that later
    layers read, and keep for their backward passes. shared: values of an earlier layer that it reads.
    narrowed: bytes of values that are kept in a narrower type, by id. recomputed_early: a compiler may
    recompute it long before its backward pass, so that recomputed values wait in memory. whole_sums: bytes of
    gradients that a compiler sums by all-reduces and keeps whole until the update, beyond each shard.
    """

    name: str
    nodes: tuple[Node, ...]
    count: int
    source: Value | None = None
    handed_on: tuple[Value, ...] = ()
    shared: tuple[Value, ...] = ()
    narrowed: Mapping[int, Any] = field(default_factory=dict)
    recomputed_early: bool = False
    whole_sums: Any = 0
    memo: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def producers(self) -> dict[int, Node]:
        """The node that makes each value, by the value's id."""
        return {id(value): node for node in self.nodes for value in node.outputs}


class StoredWeights(NamedTuple):
    """The weights of one part of the model on one device, in elements.

    Figures are for all of its layers together. name: of a stack, or of an array outside stacks. layers:
    the layers that have them; empty outside the layers. stored, stored_bytes: between steps, scales included.
    accumulated: gradients while microbatches add to them. updated: in the optimizer's sharding, which summed
    gradients also have. optimizer, optimizer_blocks: its state, and the blocks of it. update_flops: of an
    update. exchanged: an update's collectives for all layers. summed: collectives for the gradient of a tied
    table's second use, if that is not added to the first use's before.
    """

    name: str
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

    def plus(self, **figures: Any) -> "StoredWeights":
        """These weights with figures of one more array added."""
        return self._replace(**{name: getattr(self, name) + figure for name, figure in figures.items()})


@dataclass(frozen=True, eq=False)
class Graph:
    """The recorded passes of one microbatch, in order, and the values in memory between them.

    layers: index of the segment of every layer, in order. directions: passes of each segment; only
    forward in prefill and generate. caches: the keys and values (or latents) that generation keeps.
    head_layers: the head's parameters divided by a layer's if stages are filled by them
    (`Software.counts_head`); otherwise 0. head_waits: the gradient of the head's weight may be deferred until
    the layers' backward passes are done, and keep its operands. XLA for GPU does so to hide collectives; XLA
    for TPU computes it first. gathers_ahead: the next layer's weights are gathered while a layer runs, by a
    loop without one of the layers; not in pipelines, nor if activations are offloaded. asynchronous:
    collectives run during compute. copies_experts: gathered weights of experts are copied to another form
    before their products. fused: names of operations without a node, such as biases. wide: names of
    operations whose products are float32.
    Graphs are compared by identity.
    """

    segments: tuple[Segment, ...]
    layers: tuple[int, ...]
    weights: tuple[StoredWeights, ...] = ()
    caches: tuple[Value, ...] = ()
    directions: tuple[Direction, ...] = ("forward", "recompute", "backward")
    head_layers: float = 0.0
    head_waits: bool = True
    gathers_ahead: bool = False
    asynchronous: bool = True
    copies_experts: bool = False
    fused: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()
    memo: dict[tuple, Any] = field(default_factory=dict, repr=False)

    @property
    def trains(self) -> bool:
        return "backward" in self.directions

    @property
    def unlooped(self) -> set[int]:
        """Indices of the segments of single-layer stacks, which run outside of loops."""
        single = (part.layers for part in self.weights if len(part.layers) == 1)
        return {self.layers[layer] for layers in single for layer in layers}

    def nodes(self) -> Iterator[tuple[Segment, Node]]:
        for segment in self.segments:
            for node in segment.nodes:
                yield segment, node


_P = ParamSpec("_P")
_R = TypeVar("_R")
_Owner = TypeVar("_Owner", "Segment", "Graph")


def kept_with(function: Callable[Concatenate[_Owner, _P], _R]) -> Callable[Concatenate[_Owner, _P], _R]:
    """`function` of a segment or graph, with its results cached for the owner's lifetime."""

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
    """Values in memory for the backward pass of one run of `segment`.

    none: all values that it reads, except gathered arrays, which are gathered again. attention: these without
    the scores between attention's products. matmuls: results of matmuls, attention and exchanges. latents:
    these without the values computed from latents. alternate: results of matmuls without every second
    product's. full: only the segment's input. Values without a reader do not count.
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

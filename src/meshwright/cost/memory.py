"""Bytes on one chip at the peak of a training step, itemised.

    weights      stored shards, and a float32 master copy if the layout keeps one
    gradients    as accumulated: sharded from ZeRO 2 on, and from ZeRO 1 on if there is one microbatch
    optimizer    its state, such as Adam's two moments: sharded from ZeRO 1 on; 0 if it is offloaded to the
                 host, together with the master copy
    activations  values saved for the backward pass by the layers of this stage, for every microbatch in
                 flight; values that a split backward pass keeps for gradients of weights; the head's inputs
                 and logits
    buffers      further values in the largest of three phases

The phases:

    head         its gathered weight and that weight's gradient before its reduction
    layers       live values in the backward pass of a layer: gathered weights, recomputed values, cotangents,
                 and a weight's gradient before its reduction. The head's weight gradient waits for its
                 reduction. If a compiler may defer that gradient (`Graph.head_waits`), its operands wait
                 instead, provided that they are larger. If experts may take their rows in several passes,
                 the peak is in a pass after the first, while the gradients of the first are alive. A
                 microbatch's gradients are new arrays until they are added to the sum, if there are several.
                 In a pipeline they are assumed to be added at once, except under SPMD 1F1B. Sums that a
                 compiler leaves whole (`Segment.whole_sums`) wait for the update while earlier layers run
    embedding    the gradient of its table, as scattered and as reduced, and the head's

If a compiler gathers the next layer's weights ahead (`Graph.gathers_ahead`), it takes one layer out of the
loop. While the head runs, that layer's saved values are arrays in addition to the loop's, the weights of one
layer are gathered, and the gradients exist. Layers outside of loops have no weights gathered ahead. There, a
compiler that copies gathered weights of experts (`Graph.copies_experts`) keeps the copies until the layer's
values are recomputed.

These are programs that XLA plans as a whole. eager.py has the same for programs that run operation by
operation, and step_memory.py chooses between them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from meshwright.cost.arrays import is_zero, larger, largest, smaller
from meshwright.cost.graph import Graph, Node, Segment, Value, kept_with, recomputed_nodes, saved_values
from meshwright.cost.pipeline.stages import SegmentRuns
from meshwright.layout import Layout
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.units import Numeric, whole

# Layers with activations on the chip while other layers' activations are on the host.
_LAYERS_NOT_OFFLOADED = 2
# Microbatches outside the ring under SPMD 1F1B: one of a forward pass, one of a backward pass.
_OFF_RING = Alive(2)


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip by cause.

    host: in the host's memory for this chip; not part of the total.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def largest(self) -> tuple[str, int]:
        """(name, bytes) of the largest cause on the chip."""
        parts = {name: size for name, size in asdict(self).items() if name != "host"}
        return max(parts.items(), key=lambda part: part[1])

    def to_dict(self) -> dict[str, int]:
        """The keys of docs/reference/json.md, and `host` if something is offloaded."""
        items = asdict(self)
        if not self.host:
            del items["host"]
        return {**items, "total": self.total}


def peak(
    states: tuple[Any, Any, Any],
    held: "HeldBytes",
    alive: Sequence[Alive],
    microbatches: Numeric,
    layout: Layout,
) -> Memory:
    """Peak memory of one stage with `alive` microbatches; arguments may be arrays by layout."""
    weights, gradients, optimizer = states
    saved = held.saved(alive)
    on_chip = held.saved([_OFF_RING]) if layout.spmd_stages else held.on_chip
    kept = smaller(saved, on_chip) if layout.schedule.offload else saved
    if layout.pipe > 1 or layout.schedule.offload:
        held = held._replace(in_loop=0, ahead=0)
    if layout.pipe == 1 and layout.schedule.offload:
        held = held.with_layers_on_host(kept)
    buffers = held.buffers(gradients, microbatches, kept, layout.pipe == 1 or layout.schedule.is_spmd)
    over = smaller(buffers, 0)  # the logits' bytes, if these are freed before the peak
    return Memory(
        weights, gradients, optimizer, whole(kept + over), whole(buffers - over), whole(saved - kept)
    )


class HeldBytes(NamedTuple):
    """Bytes that the passes of one stage hold.

    a_microbatch: saved by its layers for one microbatch. left: kept by their split backward pass for the
    gradients of weights. once: saved by the embedding and the head, which run one at a time, and the last
    layer's output. on_chip: the part of all saved bytes on the chip if the rest is offloaded. layer: alive in
    the backward pass of a layer. in_loop: the same, in a loop with `ahead` beside it; at least `layer`.
    head: beyond its saved values. waits: of the head while the layers run, beyond its saved values; negative
    if these are freed by then. head_gradient: of the head's weight before its reduction. table: of the
    gathered embedding. ahead: of the next layer of a loop that gathers weights ahead: its saved values and
    gathered weights. sums: of gradients that stay whole, of all layers (`Segment.whole_sums`).

    Figures are arrays if the graph was recorded for many layouts.
    """

    a_microbatch: Any
    left: Any
    once: Any
    on_chip: Any
    layer: Any
    in_loop: Any
    head: Any
    waits: Any
    head_gradient: Any
    table: Any
    ahead: Any
    sums: Any

    def with_layers_on_host(self, kept: Any) -> "HeldBytes":
        """These bytes if no layer's values are on the chip while the head runs.

        The head's gradient is computed before the layers' backward passes, which frees its operands (XLA for
        GPUs and TPUs, jax 0.10.2). kept: activations on the chip while the layers run.
        """
        of_layers = kept - self.once
        return self._replace(head=self.head - of_layers, waits=self.head_gradient - self.once)

    def saved(self, alive: Iterable[Alive]) -> Any:
        """Bytes of saved activations at their maximum."""
        totals = (each.saved * self.a_microbatch + each.left * self.left for each in alive)
        return largest(totals) + self.once

    def buffers(self, gradients: Numeric, microbatches: Numeric, kept: Numeric, apart: bool) -> Any:
        """Bytes of the largest phase beyond states, gradients and the saved activations `kept`.

        apart: the gradients of a microbatch are separate arrays until they are added to the sum. They do not
        exist yet while the head runs. The gradients of a single microbatch count as the step's.
        """
        single = microbatches == 1
        new = gradients * (single | apart)
        tables = 2 * self.table + self.head_gradient + self.sums - kept
        head = self.head + self.ahead + new * single * (self.ahead > 0)
        layers = larger(self.layer, self.in_loop) + self.waits + new
        return larger(larger(layers, head), tables + new) - new * single


@kept_with
def held_bytes(graph: Graph, counts: SegmentRuns, remat: str) -> HeldBytes:
    """Bytes that a stage with `counts` of each segment holds under one remat policy."""
    present = [pair for pair in zip(graph.segments, counts, strict=True) if pair[1]]
    layers = [(segment, count) for segment, count in present if segment.source]
    ends = [segment for segment, _ in present if not segment.source]
    last = layers[-1][0].source if layers else None  # a stage may hold only the embedding or the head
    once = sum(segment.count * saved_bytes(segment, remat) for segment in ends)
    once += last.memory_bytes if last else 0
    head_gradient = largest(_weight_gradient(node) for segment in ends for node in segment.nodes)
    waits = head_gradient - once
    alive_and_ahead = [
        (_in_layer(graph, segment, remat) + _sums_after(graph, segment), _ahead(graph, segment, remat))
        for segment, _ in layers
    ]
    if graph.head_waits:
        # If experts may take several passes, XLA computes the gradient first: during their loops no
        # collectives run that it could hide. XLA for CPU hides none at all.
        carried = sum(node.carried for segment, _ in layers for node in segment.nodes)
        has_passes = (carried > 0) * graph.asynchronous
        waits = larger(waits, 0) * (1 - has_passes) + waits * has_passes
    return HeldBytes(
        # Values that are recomputed too early wait in memory, as if they had all been saved.
        a_microbatch=sum(
            count * saved_bytes(segment, "none" if segment.recomputed_early else remat)
            for segment, count in layers
        ),
        left=sum(count * left_bytes(segment) for segment, count in layers),
        once=once,
        on_chip=sum(_LAYERS_NOT_OFFLOADED * saved_bytes(segment, remat) for segment, _ in layers) + once,
        layer=largest(alive for alive, _ in alive_and_ahead),
        in_loop=largest(alive + ahead for alive, ahead in alive_and_ahead),
        head=largest(map(_beyond_saved, ends)),
        waits=waits,
        head_gradient=head_gradient,
        table=largest(_table(segment) for segment in ends),
        ahead=largest(ahead for _, ahead in alive_and_ahead),
        sums=sum(segment.whole_sums for segment, _ in layers),
    )


def _gathers_ahead(graph: Graph, segment: Segment) -> bool:
    """Whether a loop over such layers gathers the weights of the next one."""
    return graph.gathers_ahead and graph.segments.index(segment) not in graph.unlooped


def _in_layer(graph: Graph, segment: Segment, remat: str) -> Any:
    """The larger of `alive_bytes` and, with copied weights of experts, the bytes while values are recomputed.

    The copies are left out in loops that gather weights ahead, since those weights are counted instead.
    """
    alive = alive_bytes(segment, remat)
    if not graph.copies_experts or _gathers_ahead(graph, segment):
        return alive
    gathered = (value for node in segment.nodes if node.kind == "gather" for value in _new_arrays(node))
    copies = {id(value): value.memory_bytes * value.is_copy for value in gathered if "E" in value.array.dims}
    return larger(alive, _recomputing_bytes(segment, remat) + sum(copies.values()))


@kept_with
def _recomputing_bytes(segment: Segment, remat: str) -> Any:
    """Peak bytes of gathered weights and recomputed values, before the first cotangent."""
    saved = {id(value) for value in saved_values(segment, remat)}
    steps = _backward_steps(segment, remat)
    last = {id(value): place for place, step in enumerate(steps) for value in step.reads}
    values, most = _Alive(), 0
    for place, step in enumerate(one for one in steps if one.recomputes):
        if _is_in_place(step.node):
            _end_of_use(values, segment, last, place)
        for value in _new_arrays(step.node):
            values.add(value, value.memory_bytes * value.is_copy * (id(value) not in saved))
        most = larger(most, values.total)
        _end_of_use(values, segment, last, place)
    return most


def _sums_after(graph: Graph, segment: Segment) -> Any:
    """Bytes of `whole_sums` of later layers, whose backward passes run before this segment's."""
    first = graph.layers.index(graph.segments.index(segment))
    later = {number for number in graph.layers[first + 1 :] if graph.segments[number] is not segment}
    return sum(graph.segments[number].whole_sums for number in later)


def _ahead(graph: Graph, segment: Segment, remat: str) -> Any:
    """Bytes of the next layer's saved values and gathered weights; 0 if no loop gathers this layer ahead."""
    if not _gathers_ahead(graph, segment):
        return 0
    sent = (node for node in segment.nodes if node.kind == "gather" and node.forward_transfers)
    gathered = sum(value.memory_bytes * value.is_copy for node in sent for value in node.outputs)
    return gathered + saved_bytes(segment, remat) * (gathered > 0)


@kept_with
def left_bytes(segment: Segment) -> int:
    """Bytes of x and of dy of every product y = x W with a deferred dW.

    Each x counts separately, also if several products read it or it is saved: JAX's loops over layers use
    separate arrays. Experts' gradients are not deferred (nn/pipeline/stage_programs.py).
    """
    products = (node for node in segment.nodes if node.kind == "matmul" and node.weight_gradient)
    parted = (node for node in products if not any(work.routed for work in node.weight_gradient))
    return sum(value.memory_bytes for node in parted for value in (node.inputs[0], *node.outputs))


@kept_with
def saved_bytes(segment: Segment, remat: str) -> int:
    """Bytes of activations that one run keeps; a gathered weight that it keeps is a buffer.

    Operands of products and gates may be kept in a narrower type (DeepSeek-V3, 2024, section 3.3.3), with its
    scales. Values for later layers are kept by the later layers as separate arrays.
    """
    weights = {id(value) for node in segment.nodes if node.kind == "gather" for value in node.outputs}
    values = [value for value in saved_values(segment, remat) if id(value) not in weights]
    kept = (segment.narrowed.get(id(value), value.memory_bytes) for value in values)
    return sum(kept) + _bytes(segment.handed_on)


@kept_with
def alive_bytes(segment: Segment, remat: str) -> Any:
    """Peak bytes of the backward pass of one run in addition to saved values.

    Weights are gathered and values recomputed in order, before the first cotangent. A value is alive until
    its last reader, a cotangent from its first term until its producer has run. Terms of several products in
    one cotangent are separate arrays until all exist. Elementwise results reuse the memory of their last-read
    inputs, except for rows of experts. If experts may take several passes, the peak is in a pass after the
    first.
    """
    carried = sum(node.carried for node in segment.nodes)
    if is_zero(carried):
        return _alive_bytes(segment, remat, further_passes=False)
    one_pass = _alive_bytes(segment, remat, further_passes=False)
    further = _alive_bytes(segment, remat, further_passes=True)
    return carried + (carried == 0) * one_pass + (carried > 0) * further


def _alive_bytes(segment: Segment, remat: str, *, further_passes: bool) -> Any:
    """`alive_bytes` without `Node.carried`. further_passes: in a pass after the first."""
    saved = {id(value) for value in saved_values(segment, remat)}
    made = {id(value) for node in segment.nodes if node.kind != "gather" for value in node.outputs}
    made |= {id(value) for value in (segment.source, *segment.shared)}
    steps = _backward_steps(segment, remat)
    last = {
        id(value): _end_of(steps, place, further_passes=further_passes)
        for place, step in enumerate(steps)
        for value in step.reads
    }
    values, cotangents = _Alive(), _Alive()
    most = 0
    for place, (node, recomputes, _) in enumerate(steps):
        copied, in_place = node.outputs[0].is_copy, _is_in_place(node)
        if in_place:
            _end_of_use(values, segment, last, place)
        if recomputes:
            for value in _new_arrays(node):
                values.add(value, value.memory_bytes * copied if id(value) not in saved else 0)
        else:
            # In layouts without a move, the cotangents of result and input are one array.
            passed = [cotangents.end(value) for value in node.outputs]
            waits = 0 if in_place else sum(passed) * copied
            for value in node.inputs:
                if id(value) in made:
                    cotangents.add(value, value.memory_bytes * copied + passed[0] * (1 - copied))
            made_here = waits + _weight_gradient(node) + node.scratch
            most = larger(most, values.total + cotangents.total + made_here)
        most = larger(most, values.total + cotangents.total)
        _end_of_use(values, segment, last, place)
    return most


@kept_with
def alive_in_inference(segment: Segment) -> Any:
    """Peak bytes of one run that saves nothing: its input and the values that it makes.

    A value is alive until its last reader. Weights count if they are gathered.
    """
    last = {id(value): place for place, node in enumerate(segment.nodes) for value in node.inputs}
    values = _Alive()
    if segment.source:
        values.add(segment.source, segment.source.memory_bytes)
    most = values.total
    for place, node in enumerate(segment.nodes):
        if _is_in_place(node):
            _end_of_use(values, segment, last, place)
        for value in _new_arrays(node):
            values.add(value, value.memory_bytes * value.is_copy)
        most = larger(most, values.total + node.scratch)
        _end_of_use(values, segment, last, place)
    return most


def _is_in_place(node: Node) -> bool:
    """Whether results reuse the memory of inputs.

    Rows of experts do not if loops or kernels make them.
    """
    return node.kind == "elementwise" and (node.fixed_rows or "C" not in node.outputs[0].array.dims)


class _Alive:
    """Bytes of each live value, and their total."""

    def __init__(self) -> None:
        self.of: dict[int, Any] = {}
        self.total: Any = 0

    def add(self, value: Value, num_bytes: Numeric) -> None:
        self.of[id(value)] = self.of.get(id(value), 0) + num_bytes
        self.total = self.total + num_bytes

    def end(self, value: Value) -> Any:
        """Remove a value; returns its bytes."""
        num_bytes = self.of.pop(id(value), 0)
        self.total = self.total - num_bytes
        return num_bytes


def _end_of_use(values: _Alive, segment: Segment, last: Mapping[int, int], place: int) -> None:
    """Remove the values that no later step reads.

    In layouts without a move, the value's copies are the same array: its bytes go on to a copy that is still
    read.
    """
    for value in _read_values(segment):
        if id(value) not in values.of or last.get(id(value), -1) > place:
            continue
        left = values.end(value)
        for copy in _copies(segment, value):
            if id(copy) in values.of and last.get(id(copy), -1) > place:
                values.add(copy, left * (1 - copy.is_copy))
                left = left * copy.is_copy  # in layouts that move this copy, the next one may not move


@kept_with
def _read_values(segment: Segment) -> tuple[Value, ...]:
    """Each value that the segment's nodes read, once, in the order of the first reads."""
    return tuple({id(value): value for node in segment.nodes for value in node.inputs}.values())


def _copies(segment: Segment, value: Value) -> Iterator[Value]:
    """The results of nodes that only move a value."""
    made = (node.outputs[0] for node in segment.nodes if node.inputs and node.inputs[0] is value)
    return (copy for copy in made if copy.is_copy is not True)


class _BackwardStep(NamedTuple):
    """A node that the backward pass of a layer recomputes or differentiates.

    reads: the values that it reads then.
    """

    node: Node
    recomputes: bool
    reads: tuple[Value, ...]


def _end_of(steps: Sequence[_BackwardStep], place: int, *, further_passes: bool) -> int:
    """The last step that needs the values of a step.

    XLA computes the gradient of experts' second weight, a loop over rows, after the gradients of its
    operands. In a further pass it computes the gradients of all weights of experts after the cotangents of
    their rows are sent.
    """
    node, recomputes, _ = steps[place]
    dims = set(node.inputs[0].array.dims)
    if recomputes or not node.weight_gradient or "C" not in dims:
        return place
    later = range(place + 1, len(steps))
    if further_passes:
        return next(at for at in later if steps[at].node.kind in ("move", "exchange"))
    return next(at for at in later if steps[at].node.kind == "elementwise") if "M" in dims else place


def _backward_steps(segment: Segment, remat: str) -> list[_BackwardStep]:
    again = [_BackwardStep(node, True, node.inputs) for node in recomputed_nodes(segment, remat)]
    return again + [_BackwardStep(node, False, node.needs) for node in reversed(segment.nodes)]


def _new_arrays(node: Node) -> Iterator[Value]:
    """The outputs of a node that are new arrays; not a weight that stays where it is stored."""
    moves = node.kind != "gather" or node.forward_transfers or node.outputs[0].dtype != node.inputs[0].dtype
    return (value for value in node.outputs if moves and all(value is not given for given in node.inputs))


def _weight_gradient(node: Node) -> Any:
    """Bytes of a product's weight gradient before its reduction, in the gathered size."""
    return node.inputs[1].memory_bytes if node.weight_gradient else 0


@kept_with
def _beyond_saved(segment: Segment) -> Any:
    """Peak bytes of the embedding or the head in addition to saved values.

    The gradient of capped logits may be an array next to the logits (`Lowering.caps_apart`); both are freed
    before the weight's gradient is made.
    """
    copies = sum(
        value.memory_bytes for node in segment.nodes if node.kind == "loss" for value in node.outputs
    )
    gradient = largest(map(_weight_gradient, segment.nodes))
    of_logits = sum(node.scratch for node in segment.nodes if node.kind == "loss")
    return gathered_weights_bytes(segment) + larger(gradient + copies, of_logits)


@kept_with
def _table(segment: Segment) -> Any:
    """Bytes of the table that a look-up reads, as one device has it."""
    return largest(node.inputs[1].memory_bytes for node in segment.nodes if node.kind == "embed")


def gathered_weights_bytes(segment: Segment) -> int:
    """Bytes of gathered and cast weights; others are read where they are stored."""
    made = [value for node in segment.nodes if node.kind == "gather" for value in _new_arrays(node)]
    return sum({id(value): value.memory_bytes * value.is_copy for value in made}.values())


def _bytes(values: Iterable[Value]) -> int:
    return sum({id(value): value.memory_bytes for value in values}.values())

"""Bytes on one chip at the peak of a training step, itemised.

    weights      stored shards, and a float32 master copy where the layout keeps one
    gradients    as they accumulate: sharded from ZeRO 2 on, and from ZeRO 1 on if there is one microbatch
    optimizer    its state, such as Adam's two moments: sharded from ZeRO 1 on; none where it waits on the
                 host, with the master copy
    activations  what the layers of this stage save for the backward pass, for every microbatch that is
                 in flight, what a split backward pass leaves for gradients of weights, and the head's inputs
                 and logits
    buffers      what else the largest of three phases has at once

The phases:

    head         its gathered weight and that weight's gradient, before it is reduced
    layers       what the backward pass of a layer has alive: its gathered weights, what it recomputes, the
                 cotangents, and the gradient of a weight before it is reduced. The head's weight gradient
                 waits to be reduced; where a compiler may put it off (`Graph.head_waits`) its operands wait
                 instead, if they are larger. The gradients of a microbatch come now; where there are several
                 they lie beside their sum until they are added to it. In a pipeline they are taken to be
                 added as they are made, unless the schedule is SPMD 1F1B
    embedding    the gradient of its table, as scattered and as reduced, and the head's

Of the stages of a pipeline, the first of those that have the same layers is asked: it has the most
microbatches alive.

This is the memory of a program that XLA plans as a whole; eager.py has that of one run operation by
operation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from meshwright.cost.arrays import larger, largest, smaller
from meshwright.cost.graph import (
    Graph,
    Node,
    Segment,
    Value,
    kept_with,
    recomputed_nodes,
    saved_values,
)
from meshwright.cost.pipeline.stages import SegmentRuns, Stage, stages_of_kinds
from meshwright.cost.state import StageState
from meshwright.layout import Layout
from meshwright.layout.pipelines.pipeline import Alive
from meshwright.units import whole

# Layers whose activations are on the chip while the others' wait on the host.
_LAYERS_NOT_OFFLOADED = 2
# Microbatches outside the ring under SPMD 1F1B: one that a forward pass saves, one for a backward pass.
_OFF_RING = Alive(2)


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip by cause.

    host: what waits in the host's memory for this chip; not part of the total.
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
        """(name, bytes) of what takes most of the chip's."""
        parts = {name: size for name, size in asdict(self).items() if name != "host"}
        return max(parts.items(), key=lambda part: part[1])

    def to_dict(self) -> dict[str, int]:
        """The keys of contract.md, and `host` where something is offloaded."""
        items = asdict(self)
        if not self.host:
            del items["host"]
        return {**items, "total": self.total}


def train_memory(graph: Graph, layout: Layout) -> Memory:
    """The peak of a step whose microbatch is `graph`, on the stage that has most."""
    return peak_of(stage_memory(graph, layout, stage) for stage in stages_of_kinds(graph, layout))


def peak_of(found: Iterable[Memory]) -> Memory:
    """The one with the largest total, and the most that any has in the host's memory."""
    of_all = list(found)
    largest = max(of_all, key=lambda memory: memory.total)
    return replace(largest, host=max(memory.host for memory in of_all))


def stage_memory(graph: Graph, layout: Layout, stage: Stage) -> Memory:
    """The peak of one stage."""
    held = held_bytes(graph, stage.counts, layout.schedule.remat)
    state = StageState(graph, layout, stage.number)
    states = state.device_bytes(reduced_at_once=layout.schedule.microbatches == 1)
    found = peak(states, held, stage.alive, layout.schedule.microbatches, layout)
    return replace(found, host=found.host + state.host_bytes)


def peak(
    states: tuple[Any, Any, Any],
    held: "HeldBytes",
    alive: Sequence[Alive],
    microbatches: Any,
    layout: Layout,
) -> Memory:
    """Peak memory of one stage with `alive` microbatches; arguments may be arrays, one entry per layout."""
    weights, gradients, optimizer = states
    saved = held.saved(alive)
    on_chip = held.saved([_OFF_RING]) if layout.spmd_stages else held.on_chip
    kept = smaller(saved, on_chip) if layout.schedule.offload else saved
    buffers = held.buffers(gradients, microbatches, kept, layout.pipe == 1 or layout.schedule.is_spmd)
    over = smaller(buffers, 0)  # of the logits, where they have made way for the gradients at the peak
    return Memory(
        weights, gradients, optimizer, whole(kept + over), whole(buffers - over), whole(saved - kept)
    )


class HeldBytes(NamedTuple):
    """Bytes that the passes of one stage hold.

    a_microbatch: that its layers save for one microbatch. left: that their split backward pass keeps for the
    gradients of weights. once: that the embedding and the head save, which run one at a time, and the last
    layer's output. on_chip: the part of all that stays on the chip where the rest is offloaded. layer: alive
    in the backward pass of a layer. head: beside what it saves. waits: of the head while the layers run,
    beyond what it saves; less than 0 where that is gone. head_gradient: of the head's weight, before it is
    reduced. table: of the embedding, gathered.
    Arrays of bytes where the graph was recorded for many layouts.
    """

    a_microbatch: Any
    left: Any
    once: Any
    on_chip: Any
    layer: Any
    head: Any
    waits: Any
    head_gradient: Any
    table: Any

    def saved(self, alive: Iterable[Alive]) -> Any:
        """Bytes of saved activations, when there are most."""
        each = (one.saved * self.a_microbatch + one.left * self.left for one in alive)
        return largest(each) + self.once

    def buffers(self, gradients: Any, microbatches: Any, kept: Any, apart: bool) -> Any:
        """Bytes beside states, gradients and the saved activations `kept` in the largest phase.

        apart: whether the gradients of a microbatch lie beside their sum before they are added to it. They
        are not there yet when the head runs. Those of a single microbatch are counted as the step's.
        """
        alone = microbatches == 1
        own = gradients * (alone | apart)
        tables = 2 * self.table + self.head_gradient - kept
        return larger(larger(self.layer + self.waits + own, self.head), tables + own) - own * alone


@kept_with
def held_bytes(graph: Graph, counts: SegmentRuns, remat: str) -> HeldBytes:
    """What the passes of a stage with these counts hold under one remat policy."""
    here = [pair for pair in zip(graph.segments, counts, strict=True) if pair[1]]
    layers = [(segment, count) for segment, count in here if segment.source]
    ends = [segment for segment, _ in here if not segment.source]
    last = layers[-1][0].source if layers else None  # a stage may hold the embedding or the head alone
    once = sum(segment.count * saved_bytes(segment, remat) for segment in ends)
    once += last.memory_bytes if last else 0
    head_gradient = largest(_weight_gradient(node) for segment in ends for node in segment.nodes)
    waits = head_gradient - once
    return HeldBytes(
        a_microbatch=sum(count * _kept_bytes(segment, remat) for segment, count in layers),
        left=sum(count * left_bytes(segment) for segment, count in layers),
        once=once,
        on_chip=sum(_LAYERS_NOT_OFFLOADED * saved_bytes(segment, remat) for segment, _ in layers) + once,
        layer=largest(_alive_in_backward(segment, remat) for segment, _ in layers),
        head=largest(map(_beside_saved, ends)),
        waits=larger(waits, 0) if graph.head_waits else waits,
        head_gradient=head_gradient,
        table=largest(_table(segment) for segment in ends),
    )


def _kept_bytes(segment: Segment, remat: str) -> int:
    """Bytes that one run keeps: all that its backward pass reads, where that is recomputed too early."""
    return saved_bytes(segment, "none" if segment.recomputed_early else remat)


@kept_with
def left_bytes(segment: Segment) -> int:
    """Bytes of x and of dy of every product y = x W whose dW is put off.

    Of each by itself, also where several read one x or it is saved: JAX's loops over layers give arrays of
    their own. Experts' gradients are not put off (nn/pipeline/stage_programs.py).
    """
    products = (node for node in segment.nodes if node.kind == "matmul" and node.weight_gradient)
    parted = (node for node in products if not any(work.routed for work in node.weight_gradient))
    return sum(value.memory_bytes for node in parted for value in (node.inputs[0], *node.outputs))


@kept_with
def saved_bytes(segment: Segment, remat: str) -> int:
    """Bytes of activations that one run keeps; a gathered weight that it keeps is a buffer.

    What products and gates read may be kept narrower than it is made (DeepSeek-V3, 2024, section 3.3.3), with
    its scales. What layers after it read is kept by them as an array of their own.
    """
    weights = {id(value) for node in segment.nodes if node.kind == "gather" for value in node.outputs}
    values = [value for value in saved_values(segment, remat) if id(value) not in weights]
    kept = (segment.narrowed.get(id(value), value.memory_bytes) for value in values)
    return sum(kept) + _bytes(segment.handed_on)


@kept_with
def _alive_in_backward(segment: Segment, remat: str) -> Any:
    """The most bytes that the backward pass of one run has at once, besides what was saved.

    Weights are gathered and values recomputed in order, before the first cotangent. Each is alive until
    it is read for the last time, a cotangent from the first that adds to it until its producer has run. What
    several products add to one cotangent are arrays of their own until all are there. What is computed
    element by element takes the place of what it reads last, but for rows of experts.
    """
    saved = {id(value) for value in saved_values(segment, remat)}
    made = {id(value) for node in segment.nodes if node.kind != "gather" for value in node.outputs}
    made |= {id(value) for value in (segment.source, *segment.shared)}
    steps = _backward_steps(segment, remat)
    last = {id(value): _end_of(steps, place) for place, step in enumerate(steps) for value in step.reads}
    values, cotangents = _Alive(), _Alive()
    most = 0
    for place, (node, recomputes, _) in enumerate(steps):
        copied, in_place = node.outputs[0].is_copy, _is_in_place(node)
        if in_place:
            _end_of_use(values, segment, last, place)
        if recomputes:
            for value in _made_anew(node):
                values.add(value, value.memory_bytes * copied if id(value) not in saved else 0)
        else:
            # Of layouts in which nothing moves, the cotangent of the result is that of what it was made of.
            passed = [cotangents.end(value) for value in node.outputs]
            waits = 0 if in_place else sum(passed) * copied
            for value in node.inputs:
                if id(value) in made:
                    cotangents.add(value, value.memory_bytes * copied + passed[0] * (1 - copied))
            most = larger(most, values.total + cotangents.total + waits + _weight_gradient(node))
        most = larger(most, values.total + cotangents.total)
        _end_of_use(values, segment, last, place)
    return most


@kept_with
def alive_in_inference(segment: Segment) -> Any:
    """The most bytes that one run has at once where nothing is saved, of what it is given and makes.

    Each value is alive until it is read for the last time. Weights count where they are gathered.
    """
    last = {id(value): place for place, node in enumerate(segment.nodes) for value in node.inputs}
    values = _Alive()
    if segment.source:
        values.add(segment.source, segment.source.memory_bytes)
    most = values.total
    for place, node in enumerate(segment.nodes):
        if _is_in_place(node):
            _end_of_use(values, segment, last, place)
        for value in _made_anew(node):
            values.add(value, value.memory_bytes * value.is_copy)
        most = larger(most, values.total)
        _end_of_use(values, segment, last, place)
    return most


def _is_in_place(node: Node) -> bool:
    """Whether results take the place of inputs; those of rows of experts do not, made by loops or kernels."""
    return node.kind == "elementwise" and "C" not in node.outputs[0].array.dims


class _Alive:
    """Bytes of the values that are alive, and of all of them."""

    def __init__(self) -> None:
        self.of: dict[int, Any] = {}
        self.total: Any = 0

    def add(self, value: Value, num_bytes: Any) -> None:
        self.of[id(value)] = self.of.get(id(value), 0) + num_bytes
        self.total = self.total + num_bytes

    def end(self, value: Value) -> Any:
        """The bytes that the value had."""
        num_bytes = self.of.pop(id(value), 0)
        self.total = self.total - num_bytes
        return num_bytes


def _end_of_use(values: _Alive, segment: Segment, last: Mapping[int, int], place: int) -> None:
    """Ends the values that no later step reads; of layouts in which nothing moves their copies are they."""
    for node in segment.nodes:
        for value in node.inputs:
            if id(value) in values.of and last.get(id(value), -1) <= place:
                left = values.end(value)
                for copy in _copies(segment, value):
                    if id(copy) in values.of and last.get(id(copy), -1) > place:
                        values.add(copy, left * (1 - copy.is_copy))
                        left = left * copy.is_copy  # of layouts in which this one moves the next may not


def _copies(segment: Segment, value: Value) -> Iterator[Value]:
    """What a node only moves the value into."""
    made = (node.outputs[0] for node in segment.nodes if node.inputs and node.inputs[0] is value)
    return (copy for copy in made if copy.is_copy is not True)


class _BackwardStep(NamedTuple):
    """A node that the backward pass of a layer computes again, or differentiates; reads: values of then."""

    node: Node
    recomputes: bool
    reads: tuple[Value, ...]


def _end_of(steps: Sequence[_BackwardStep], place: int) -> int:
    """The step until which what a step reads is there.

    XLA makes the gradient of experts' second weight, a loop over rows, once those that it reads have theirs.
    """
    node, recomputes, _ = steps[place]
    if recomputes or not node.weight_gradient or not {"C", "M"} <= set(node.inputs[0].array.dims):
        return place
    return next(at for at in range(place + 1, len(steps)) if steps[at].node.kind == "elementwise")


def _backward_steps(segment: Segment, remat: str) -> list[_BackwardStep]:
    again = [_BackwardStep(node, True, node.inputs) for node in recomputed_nodes(segment, remat)]
    return again + [_BackwardStep(node, False, node.needs) for node in reversed(segment.nodes)]


def _made_anew(node: Node) -> Iterator[Value]:
    """The outputs of a node that are arrays of their own; a weight that stays where it is stored is not."""
    moves = node.kind != "gather" or node.forward_transfers or node.outputs[0].dtype != node.inputs[0].dtype
    return (value for value in node.outputs if moves and all(value is not given for given in node.inputs))


def _weight_gradient(node: Node) -> Any:
    """Bytes of the gradient that a product makes of its weight: as large as that is used, not reduced yet."""
    return node.inputs[1].memory_bytes if node.weight_gradient else 0


@kept_with
def _beside_saved(segment: Segment) -> Any:
    """What the embedding or the head has at once besides what it saves."""
    copies = sum(
        value.memory_bytes for node in segment.nodes if node.kind == "loss" for value in node.outputs
    )
    gradient = largest(map(_weight_gradient, segment.nodes))
    return gathered_weights_bytes(segment) + gradient + copies


@kept_with
def _table(segment: Segment) -> Any:
    """Bytes of the rows that a look-up reads; its table as one device has it then."""
    return largest(node.inputs[1].memory_bytes for node in segment.nodes if node.kind == "embed")


def gathered_weights_bytes(segment: Segment) -> int:
    """Bytes of gathered weights and of casts; other weights are read where they are stored."""
    made = [value for node in segment.nodes if node.kind == "gather" for value in _made_anew(node)]
    return sum({id(value): value.memory_bytes * value.is_copy for value in made}.values())


def _bytes(values: Iterable[Value]) -> int:
    return sum({id(value): value.memory_bytes for value in values}.values())

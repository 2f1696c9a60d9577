"""The passes of a table in an order of their dependencies, as arrays of numbers.

The order depends only on the table, so it serves any seconds: a simulation is one run through it.

A joined pair of passes starts once both inputs have arrived, and ends as one. It is three entries: a wait for
the first's input, the first pass, which also waits for the second's input, and the second pass.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from meshwright.layout.pipelines import PassTable

# Kinds of entries: the seconds of depth d are at index 4 d + kind of `Times.flat`.
_FORWARD, _INPUT_GRADIENT, _BACKWARD, _WEIGHT_GRADIENT = range(4)
_NUM_KINDS = 4


class PassSeconds(NamedTuple):
    """Seconds of one microbatch through one chunk.

    backward: the gradient of the input, recomputation included. weight: the gradient of the weights. A whole
    backward pass takes both.
    """

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight


class Times(NamedTuple):
    """Seconds of the passes and hops of one step.

    depths: of a microbatch through the chunk at each depth of the model; the first has the embedding, the
    last the head. hop_seconds: from the end of a pass until the next stage has its result. The sending stage
    computes meanwhile.
    """

    depths: Sequence[PassSeconds]
    hop_seconds: float = 0.0

    def flat(self) -> list[float]:
        """Four figures by depth, in the order of kinds, then 0 for an entry that only waits."""
        figures: list[float] = []
        for depth in self.depths:
            figures += (depth.forward, depth.backward, depth.backward + depth.weight, depth.weight)
        return [*figures, 0.0]


@dataclass
class Order:
    """The entries of a table; entry 0 is the start of the step, which takes no time.

    kinds: index of the entry's seconds in `Times.flat`. before: the entry before it on its stage. needs: the
    entry whose result it waits for; 0 for none. hops: 1 if that result comes from another stage.
    """

    kinds: array = field(default_factory=lambda: array("i", [0]))
    before: array = field(default_factory=lambda: array("i", [0]))
    needs: array = field(default_factory=lambda: array("i", [0]))
    hops: array = field(default_factory=lambda: array("b", [0]))

    def add(self, kind: int, before: int, need: int, hop: int) -> int:
        """Append an entry; returns its number."""
        self.kinds.append(kind)
        self.before.append(before)
        self.needs.append(need)
        self.hops.append(hop)
        return len(self.kinds) - 1

    def run(self, times: Times) -> list[float]:
        """The end of each entry, which starts after its predecessor and its input."""
        seconds = times.flat()
        hop = (0.0, times.hop_seconds)
        ends = [0.0]
        add = ends.append
        entries = zip(self.kinds, self.before, self.needs, self.hops, strict=True)
        next(entries)
        for kind, before, need, lag in entries:
            start = ends[before]
            came = ends[need] + hop[lag]
            add((came if came > start else start) + seconds[kind])
        return ends


# A pass of a row with its dependencies: the result that it waits for; 1 if that comes from another stage; the
# result that it makes; the kind of its entry; whether it is joined with the next pass.
_Step = tuple[int, int, int, int, bool]
# The entry of a result that is not in the order yet.
_NOT_YET = -1


class Ordering:
    """Builds the order of a table.

    A result is a number: its kind and depth's number plus its microbatch's. done: the entry that makes each
    result, or _NOT_YET; the last results have no kind and exist from the start. steps: of each row.
    positions: number of steps of each row in the order. last: each row's latest entry. spans: by row, the
    first and last entry of each pass.
    """

    def __init__(self, table: PassTable) -> None:
        self.table, self.order = table, Order()
        self.steps = _steps(table)
        num_results = 3 * table.num_depths * table.num_microbatches
        self.done = [_NOT_YET] * num_results + [0] * table.num_microbatches
        self.spans: list[list[tuple[int, int]]] = [[] for _ in table.rows]
        self.positions = [0] * table.num_stages
        self.last = [0] * table.num_stages
        self._waiting: dict[int, int] = {}

    def advance(self, limits: Sequence[int]) -> None:
        """Append steps of every row up to `limits`, unless they need a step beyond them.

        A stage stops at a pass whose input is missing; the pass that makes the input wakes the stage.
        """
        awake = list(range(self.table.num_stages))
        while awake:
            awake += self._advance(stage := awake.pop(), limits[stage])

    def whole(self) -> Order:
        """The order of the whole table."""
        lengths = [len(steps) for steps in self.steps]
        self.advance(lengths)
        assert self.positions == lengths, "the table deadlocks"
        return self.order

    def _advance(self, stage: int, limit: int) -> list[int]:
        """Append steps of one row; returns the stages that waited for them."""
        steps, position, entry = self.steps[stage], self.positions[stage], self.last[stage]
        done, waiting, spans, add = self.done, self._waiting, self.spans[stage], self.order.add
        waits = _NUM_KINDS * self.table.num_depths
        woken: list[int] = []
        while position < limit:
            needs, hop, makes, kind, joined = steps[position]
            if (came := done[needs]) < 0:
                waiting[needs] = stage
                break
            if joined:
                other, other_hop, other_makes, other_kind, _ = steps[position + 1]
                if (other_came := done[other]) < 0:
                    waiting[other] = stage
                    break
                start = add(kind, add(waits, entry, came, hop), other_came, other_hop)
                entry = done[makes] = done[other_makes] = add(other_kind, start, 0, 0)
                spans += ((start, entry),) * 2
                if other_makes in waiting:
                    woken.append(waiting.pop(other_makes))
                position += 2
            else:
                entry = done[makes] = add(kind, entry, came, hop)
                spans.append((entry, entry))
                position += 1
            if makes in waiting:
                woken.append(waiting.pop(makes))
        self.positions[stage], self.last[stage] = position, entry
        return woken


def _steps(table: PassTable) -> list[list[_Step]]:
    """The steps of every row."""
    dependencies, by_row = _dependencies(table), []
    for stage, (row, split) in enumerate(zip(table.rows, table.split, strict=True)):
        of_stage, steps = dependencies[stage], []
        for kind, microbatch, chunk, joined in row:
            name = "S" if kind == "B" and (microbatch, chunk) in split else kind
            needs, hop, makes, entry = of_stage[name, chunk]
            steps.append((needs + microbatch, hop, makes + microbatch, entry, joined))
        by_row.append(steps)
    return by_row


def _dependencies(table: PassTable) -> list[dict[tuple[str, int], tuple[int, int, int, int]]]:
    """For each stage, by kind of pass and chunk: (needs, hop, makes, kind) of the pass of microbatch 0.

    The numbers are as in `_Step`. "S" is a B that is split, without the gradient of the weights.
    """
    m, last = table.num_microbatches, table.num_depths - 1
    stages = [place.stage for place in table.routes[0]]
    hops = [0, *(int(before != after) for before, after in pairwise(stages)), 0]
    no_need = 3 * m * (last + 1)  # a result that exists from the start (`Ordering`)
    dependencies: list[dict] = [{} for _ in table.rows]
    for (stage, chunk), depth in table.depths.items():
        forward, entry = m * depth, _NUM_KINDS * depth
        backward, weight = forward + m * (last + 1), forward + 2 * m * (last + 1)
        back = forward if depth == last else backward + m
        dependencies[stage] |= {
            ("F", chunk): (forward - m if depth else no_need, hops[depth], forward, entry + _FORWARD),
            ("B", chunk): (back, hops[depth + 1], backward, entry + _BACKWARD),
            ("S", chunk): (back, hops[depth + 1], backward, entry + _INPUT_GRADIENT),
            ("W", chunk): (no_need, 0, weight, entry + _WEIGHT_GRADIENT),  # its B is before it in the row
        }
    return dependencies

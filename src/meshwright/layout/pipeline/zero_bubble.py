"""Schedules that split the backward pass: B, which the stage before waits for, and W, which nobody does.

W fills what would be idle. Sources: Qi et al., "Zero Bubble Pipeline Parallelism" (2023) for ZB-H1, and
"Pipeline Parallelism with Controllable Memory" (2024) for the V and the repeated building block. The
tables are made for F = B = W; other times give the same order with some bubble.
"""

from collections import deque
from dataclasses import dataclass, field

from meshwright.layout.pipeline.schedule import Pass

# Passes that one microbatch makes on one stage of the V: F, B and W of two chunks.
_PERIOD = 6


def zb_h1(p: int, m: int) -> list[list[Pass]]:
    """1F1B with W s microbatches late on stage s: a third of its bubble, p microbatches alive everywhere.

    The first stage has no time to spare, since every W there lets the next F in; the last stage hands
    its first p backward passes on at once and makes up for their W when the forward passes are over.
    """
    rows: list[list[Pass]] = []
    for s in range(p):
        row = [Pass("F", i, 0) for i in range(min(m, p - s))]
        for i in range(m):
            row.append(Pass("B", i, 0))
            row += [Pass("W", i - s, 0)] if i >= s else []
            row += [Pass("F", i + p - s, 0)] if i + p - s < m else []
        rows.append([*row, *(Pass("W", i, 0) for i in range(max(m - s, 0), m))])
    return rows


def zb_v(p: int, m: int) -> list[list[Pass]]:
    """Two chunks a stage in a V: no stage idles between its first pass and its last; 2p chunks alive.

    Depth goes down the stages and up again, so that the first stage has the embedding and the head,
    and its backward passes begin when the last stage's only would. F and B come in the order of a
    building block that repeats every 6 passes; W goes where the next of them cannot start yet.
    """
    stages = [_Stage(s, _forwards_and_backwards(s, p, m), 2 * p) for s in range(p)]
    finished: set[tuple[str, int, int]] = set()
    while any(not stage.done for stage in stages):
        # One slot of time: what a pass of this slot makes is there in the next.
        passes = [stage.take(finished, p) for stage in stages]
        finished.update(
            (one.kind, one.microbatch, _depth(s, one.chunk, p)) for s, one in enumerate(passes) if one
        )
    return [stage.row for stage in stages]


def _depth(stage: int, chunk: int, p: int) -> int:
    return 2 * p - 1 - stage if chunk else stage


def _forwards_and_backwards(s: int, p: int, m: int) -> list[Pass]:
    """F and B of stage s by their place in the building block.

    A microbatch goes down the first chunks in steps of 1 slot and up the second in steps of 5; so does
    its backward pass. 1 and -5 are the same modulo the period of 6, so its four passes take the same
    four places on every stage and those of other microbatches never collide. A chunk's activations
    then live 12 (p - 1) slots in all on any stage: 2p chunks alive, 1F1B's memory. The F that stage s
    has time for before the first microbatch returns go first.
    """
    turn = 6 * (p - 1)
    offsets = {
        ("F", 0): s,
        ("F", 1): turn + 1 - 5 * s,
        ("B", 1): turn + 2 + s,
        ("B", 0): 2 * turn + 3 - 5 * s,
    }
    slots = {Pass(k, i, c): slot + _PERIOD * i for (k, c), slot in offsets.items() for i in range(m)}
    for i in range(min(m, 2 * (p - s) - 1)):
        slots[Pass("F", i, 0)] = i - 2 * p
    return sorted(slots, key=slots.__getitem__)


@dataclass
class _Stage:
    """A stage while its row is made: what is left of its order, what is alive, which W are due."""

    number: int
    order: list[Pass]
    limit: int
    row: list[Pass] = field(default_factory=list)
    num_taken: int = 0
    num_alive: int = 0
    due: deque[Pass] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        return self.num_taken == len(self.order) and not self.due

    def take(self, finished: set[tuple[str, int, int]], p: int) -> Pass | None:
        """The pass of this slot: the next of the order if it may start, else the oldest W due, else none."""
        if self.num_taken < len(self.order) and self._ready(self.order[self.num_taken], finished, p):
            one = self.order[self.num_taken]
            self.num_taken += 1
            if one.kind == "F":
                self.num_alive += 1
            else:
                self.due.append(Pass("W", one.microbatch, one.chunk))
        elif self.due:
            one = self.due.popleft()
            self.num_alive -= 1
        else:
            return None
        self.row.append(one)
        return one

    def _ready(self, one: Pass, finished: set[tuple[str, int, int]], p: int) -> bool:
        depth = _depth(self.number, one.chunk, p)
        if one.kind == "F":
            given = depth == 0 or ("F", one.microbatch, depth - 1) in finished
            return given and self.num_alive < self.limit
        if depth == 2 * p - 1:
            return ("F", one.microbatch, depth) in finished
        return ("B", one.microbatch, depth + 1) in finished

"""ZB-V: two chunks a stage placed as a V, and gradients of weights in idle slots."""

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from meshwright.errors import LayoutError
from meshwright.layout.pipeline.schedule import PipelineSchedule
from meshwright.layout.pipeline.table import Place, StageRoute, TablePass

# Passes that one microbatch makes on one stage of the V: F, B and W of two chunks.
_PERIOD = 6


def zb_v(p: int, m: int, v: int) -> list[list[TablePass]]:
    """Two chunks a stage in a V: no stage idles between its first pass and its last; 2p chunks alive.

    Depth goes down the stages and up again, so that the first stage has the embedding and the head,
    and its backward passes begin when the last stage's only would. F and B come in the order of a
    building block that repeats every 6 passes; W goes where the next of them cannot start yet. The table
    is made for F = B = W; other times give the same order with some bubble.
    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), the V and the building block.
    """
    finished = _Finished([[0] * m for _ in range(2 * p)], [[0] * m for _ in range(2 * p)])
    stages = [_Filling(s, _forwards_and_backwards(s, p, m), 2 * p) for s in range(p)]
    slot, busy = 0, stages
    while busy:
        slot += 1
        for stage in busy:
            stage.take(finished, slot)
        busy = [stage for stage in busy if not stage.done]
    return [stage.row for stage in stages]


def _forwards_and_backwards(s: int, p: int, m: int) -> list[TablePass]:
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
    early = min(m, 2 * (p - s) - 1)
    slots = [
        (i - 2 * p if (kind, chunk) == ("F", 0) and i < early else slot + _PERIOD * i, kind, i, chunk)
        for (kind, chunk), slot in offsets.items()
        for i in range(m)
    ]
    return [TablePass(kind, i, chunk) for _, kind, i, chunk in sorted(slots)]


class _Finished(NamedTuple):
    """The slot in which each pass ran, by depth and microbatch; 0 before it has."""

    forward: list[list[int]]
    backward: list[list[int]]


@dataclass
class _Filling:
    """A stage while its row is made: what is left of its order, what is alive, which W are due."""

    number: int
    order: list[TablePass]
    limit: int
    row: list[TablePass] = field(default_factory=list)
    num_taken: int = 0
    num_alive: int = 0
    due: deque[TablePass] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        return self.num_taken == len(self.order) and not self.due

    def take(self, finished: _Finished, slot: int) -> None:
        """The pass of this slot: the next of the order if it may start, else the oldest W due, else none.

        What a pass makes is there from the next slot on.
        """
        one = self.order[self.num_taken] if self.num_taken < len(self.order) else None
        if one and self._starts(one, finished, slot):
            self.num_taken += 1
            self.row.append(one)
        elif self.due:
            self.num_alive -= 1
            self.row.append(self.due.popleft())

    def _starts(self, one: TablePass, finished: _Finished, slot: int) -> bool:
        """Whether a pass has its input and room for its activations; then it runs in this slot."""
        kind, i, chunk, _ = one
        last = self.limit - 1
        depth = last - self.number if chunk else self.number
        forward, backward = finished
        if kind == "F":
            if self.num_alive == self.limit or (depth and not 0 < forward[depth - 1][i] < slot):
                return False
            forward[depth][i] = slot
            self.num_alive += 1
            return True
        given = forward[last][i] if depth == last else backward[depth + 1][i]
        if not 0 < given < slot:
            return False
        backward[depth][i] = slot
        self.due.append(TablePass("W", i, chunk))
        return True


@lru_cache(maxsize=256)
def _turning(p: int, v: int) -> tuple[StageRoute, ...]:
    """Down the stages and up again: the first stage has the embedding and the head."""
    down = (Place(stage, 0) for stage in range(p))
    return ((*down, *(Place(stage, 1) for stage in reversed(range(p)))),)


def _alive(p: int, m: int, v: int, stage: int) -> int:
    return min(2 * m, 2 * p)


def _check(p: int, m: int) -> None:
    if m < p:
        raise LayoutError(
            f"layout: schedule = zb-v needs a microbatch for each stage, and {m} are fewer than pipe = {p}; "
            f"fits: microbatches of {p} or more, or pipe of {m} or less"
        )


ZB_V = PipelineSchedule(
    name="zb-v",
    words="two chunks a stage in a V, the gradients of weights in idle slots (zero bubble, ZB-V)",
    rows=zb_v,
    most_alive=_alive,
    num_chunks=2,
    routes=_turning,
    splits_backward=True,
    least_stages=2,
    check_numbers=_check,
)

"""ZB-V: two chunks a stage placed as a V, and gradients of weights in idle slots."""

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from meshwright.errors import LayoutError
from meshwright.layout.pipelines.pass_table import Place, StageRoute, TablePass, table_pass
from meshwright.layout.pipelines.pipeline import PipelineSchedule

# Passes that one microbatch makes on one stage of the V: F, B and W of two chunks.
_PERIOD = 6
# The slot of a pass that has not run.
_NOT_YET = inf


def zb_v(p: int, m: int, v: int) -> list[list[TablePass]]:
    """Two chunks a stage in a V: no stage idles between its first pass and its last; 2p chunks alive.

    Depth goes down the stages and up again, so that the first stage has the embedding and the head,
    and begins its backward passes as early as the last stage of 1F1B. F and B follow a building block that
    repeats every 6 passes; W fills slots in which the next F or B cannot start. The table assumes that F, B
    and W take the same time; with other times the order stays, and stages idle.
    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), the V and the building block.
    """
    # By depth and microbatch: the slot in which each pass runs, and the slot that makes its input.
    forward, backward = ([[_NOT_YET] * m for _ in range(2 * p)] for _ in range(2))
    needed = {"F": [[0] * m, *forward], "B": [*backward[1:], forward[-1]]}
    ran = {"F": forward, "B": backward}
    stages = []
    for s in range(p):
        places = [(kind, chunk, depth) for kind in "FB" for chunk, depth in enumerate((s, 2 * p - 1 - s))]
        slots = {(kind, chunk): (needed[kind][depth], ran[kind][depth]) for kind, chunk, depth in places}
        order = [(one, *slots[one.kind, one.chunk]) for one in _forwards_and_backwards(s, p, m)]
        stages.append(_Filling(deque(order), 2 * p))
    slot, busy = 0, stages
    while busy:
        slot += 1
        for stage in busy:
            stage.take(slot)
        busy = [stage for stage in busy if stage.order or stage.due]
    return [stage.row for stage in stages]


def _forwards_and_backwards(s: int, p: int, m: int) -> list[TablePass]:
    """F and B of stage s by their place in the building block.

    A microbatch goes down the first chunks in steps of 1 slot and up the second in steps of 5; so does
    its backward pass. 1 and -5 are the same modulo the period of 6, so its four passes take the same
    four slots on every stage and never collide with passes of other microbatches. Activations of a
    stage's two chunks then live for 12 (p - 1) slots in total: 2p chunks alive, 1F1B's memory. Stage s
    begins with all F that fit before the first microbatch returns.
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
    return [table_pass(kind, i, chunk) for _, kind, i, chunk in sorted(slots)]


@dataclass(slots=True)
class _Filling:
    """The row of a stage as it is filled.

    order: the remaining F and B; each with the slots that make the inputs of its kind and chunk, and the
    slots in which they run, both by microbatch. limit: the most chunks whose activations fit in memory.
    num_alive: chunks with activations. due: the W that may run.
    """

    order: deque[tuple[TablePass, list[float], list[float]]]
    limit: int
    row: list[TablePass] = field(default_factory=list)
    num_alive: int = 0
    due: deque[TablePass] = field(default_factory=deque)

    def take(self, slot: int) -> None:
        """Fill one slot: the next pass in order, or the oldest W due, or none.

        The next pass starts if an earlier slot made its input and its activations fit in memory.
        """
        if self.order:
            passed, needed, ran = self.order[0]
            kind, i, chunk, _ = passed
            if needed[i] < slot and (kind == "B" or self.num_alive < self.limit):
                ran[i] = slot
                self.row.append(passed)
                self.order.popleft()
                if kind == "F":
                    self.num_alive += 1
                else:
                    self.due.append(table_pass("W", i, chunk))
                return
        if self.due:
            self.num_alive -= 1
            self.row.append(self.due.popleft())


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
    words="two chunks per stage in a V, gradients of weights in idle slots (zero bubble, ZB-V)",
    rows=zb_v,
    most_alive=_alive,
    num_chunks=2,
    routes=_turning,
    splits_backward=True,
    least_stages=2,
    check_numbers=_check,
)

"""DualPipe: microbatches enter at both ends, and a stage joins the F of one with the B of another."""

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

from meshwright.errors import LayoutError
from meshwright.layout.pipelines.pass_table import Place, StageRoute, TablePass, table_pass
from meshwright.layout.pipelines.pipeline import PipelineSchedule, fitting


def dualpipe(p: int, m: int, v: int) -> list[list[TablePass]]:
    """DualPipe: half of the microbatches from each end, with two copies of the weights.

    Each stage keeps p + 1 microbatches alive. Stage s holds depth s as chunk 0, for microbatches that enter
    at stage 0, and depth p - 1 - s as chunk 1, for microbatches that enter at the last stage. In the middle
    of the step each F is joined with a B of the other direction, and the communication of one can hide under
    the other. Bubble (p/2 - 1) (F&B + B - 3 W); B: the whole backward pass. F&B: a joined pair.
    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.2.1.
    """
    return [_row(s, p, m) for s in range(p)]


def _row(s: int, p: int, m: int) -> list[TablePass]:
    """The eight phases of stage s; distance: from the nearer end.

    `near` are the microbatches that reach this stage first.
    """
    half, distance = p // 2, min(s, p - 1 - s)
    near, far = (0, 1) if s < half else (1, 0)
    inner, outer = half - 1 - distance, distance + 1
    row = _Filling(m // 2)
    for _ in range(2 * inner):
        row.forward(near)
    for _ in range(outer):
        row.forward(near)
        row.forward(far)
    for _ in range(inner):
        row.backward(far, split=True)
        row.weights()
        row.forward(far)
    for number in range(m // 2 - p + outer):
        # The middle stages would wait for the first B that their first F is joined with.
        row.forward(near, joined=number > 0 or inner > 0)
        row.backward(far)
        row.forward(far, joined=True)
        row.backward(near)
    for _ in range(inner):
        row.backward(far)
        row.forward(far, joined=True)
        row.backward(near)
    for number in range(outer):
        # From here on the last backward passes are split: their W fill the way out.
        row.backward(far, split=2 * number >= outer)
        row.backward(near, split=2 * number + 1 >= outer)
    for _ in range(inner):
        row.weights()
        row.backward(near, split=True)
    for _ in range(outer):
        row.weights()
    return row.passes


@dataclass
class _Filling:
    """A row while it is made: each direction's microbatches in order, half of them from each end."""

    half: int
    passes: list[TablePass] = field(default_factory=list)
    num_forward: list[int] = field(default_factory=lambda: [0, 0])
    num_backward: list[int] = field(default_factory=lambda: [0, 0])
    due: deque[TablePass] = field(default_factory=deque)

    def forward(self, chunk: int, *, joined: bool = False) -> None:
        self.passes.append(table_pass("F", chunk * self.half + self.num_forward[chunk], chunk, joined))
        self.num_forward[chunk] += 1

    def backward(self, chunk: int, *, split: bool = False) -> None:
        microbatch = chunk * self.half + self.num_backward[chunk]
        self.passes.append(table_pass("B", microbatch, chunk))
        self.num_backward[chunk] += 1
        if split:
            self.due.append(table_pass("W", microbatch, chunk))

    def weights(self) -> None:
        self.passes.append(self.due.popleft())


@lru_cache(maxsize=256)
def _both_ways(p: int, v: int) -> tuple[StageRoute, ...]:
    """Down the stages through the first copy of the weights, and up through the second."""
    down = tuple(Place(stage, 0) for stage in range(p))
    return (down, tuple(Place(stage, 1) for stage in reversed(range(p))))


def _alive(p: int, m: int, v: int, stage: int) -> int:
    return min(m, p + 1)


def _check(p: int, m: int) -> None:
    if p % 2:
        raise LayoutError(
            f"layout: schedule = dualpipe pairs its stages, and pipe = {p} is odd; "
            f"fits: pipe in {fitting(p - 1, p + 1)}"
        )
    if m < 2 * p or m % 2:
        fits = f"microbatches of {2 * p} or more" if m < 2 * p else f"microbatches in {fitting(m - 1, m + 1)}"
        raise LayoutError(
            f"layout: schedule = dualpipe fills pipe = {p} stages from both ends with an even number of at "
            f"least {2 * p} microbatches, not {m}; fits: {fits}"
        )


DUALPIPE = PipelineSchedule(
    name="dualpipe",
    words="microbatches enter at both ends (DualPipe)",
    rows=dualpipe,
    most_alive=_alive,
    routes=_both_ways,
    splits_backward=True,
    least_stages=2,
    check_numbers=_check,
)

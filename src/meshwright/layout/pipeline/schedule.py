"""What a pipeline schedule is: for every stage, the list of passes that it makes, in order.

A stage is a rank of the `pipe` axis. It holds chunks of the model, and a microbatch visits chunks in
the order of its route: from depth 0, which has the embedding, to the last, which has the vocabulary
head, and back. A table says only the order; when each pass starts follows from its dependencies
(`simulate`).

    F  forward pass of one microbatch through one chunk
    B  its backward pass: the gradient of the input alone where a W of the same microbatch and chunk
       stands later in the row, else the whole backward pass
    W  the gradient of the weights, which nobody waits for
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from meshwright.errors import LayoutError, nearest

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe")
# Both hold two chunks a stage by construction; `interleave` does not apply to them.
TWO_CHUNKS = ("zb-v", "dualpipe")


class Pass(NamedTuple):
    """One pass; joined: it runs together with the next of its row, as DualPipe joins an F and a B."""

    kind: str
    microbatch: int
    chunk: int
    joined: bool = False


class Place(NamedTuple):
    """Where a chunk of the model lies."""

    stage: int
    chunk: int


Route = tuple[Place, ...]
Row = tuple[Pass, ...]


@dataclass(frozen=True)
class Schedule:
    """The table of one step: rows[stage] is what the stage does, in order.

    routes: for each direction, the place of every depth. All but DualPipe have one direction; DualPipe
    sends the second half of the microbatches from the last stage to the first, through its second
    copy of the weights.
    """

    name: str
    num_microbatches: int
    routes: tuple[Route, ...]
    rows: tuple[Row, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rows)

    @property
    def num_depths(self) -> int:
        """Chunks that one microbatch visits."""
        return len(self.routes[0])

    @property
    def num_chunks(self) -> int:
        """Chunks that one stage holds."""
        return len(self.routes) * self.num_depths // self.num_stages

    @property
    def weight_copies(self) -> int:
        """Copies of the model that the stages hold together: one a direction."""
        return len(self.routes)

    @cached_property
    def depths(self) -> dict[tuple[int, int], int]:
        """The depth of the model that lies at each (stage, chunk)."""
        return {place: depth for route in self.routes for depth, place in enumerate(route)}

    @cached_property
    def split(self) -> tuple[frozenset[tuple[int, int]], ...]:
        """For each stage, (microbatch, chunk) whose backward pass is split into B and W."""
        return tuple(frozenset((p.microbatch, p.chunk) for p in row if p.kind == "W") for row in self.rows)


@lru_cache(maxsize=1024)
def routes(name: str, num_stages: int, num_chunks: int = 1) -> tuple[Route, ...]:
    """The places of every depth, for each direction of the schedule.

    In a loop depth d lies on stage d mod p: from the last stage a microbatch returns to the first. In a
    V it turns at the last stage. In DualPipe the second direction is the first reversed.
    """
    down = tuple(Place(stage, 0) for stage in range(num_stages))
    up = tuple(Place(stage, 1) for stage in reversed(range(num_stages)))
    if name == "zb-v":
        return ((*down, *up),)
    if name == "dualpipe":
        return (down, up)
    return (tuple(Place(stage, chunk) for chunk in range(num_chunks) for stage in range(num_stages)),)


def check_schedule(name: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raises LayoutError where the schedule does not exist for these numbers, with those that fit."""
    if name not in SCHEDULES:
        raise LayoutError(f"layout: schedule = {name!r}; {nearest(name, list(SCHEDULES))}")
    counts = {"pipe": num_stages, "microbatches": num_microbatches, "interleave": num_chunks}
    for field, value in counts.items():
        if value < 1:
            raise LayoutError(f"layout: {field} = {value}; it must be a positive integer")
    _check_chunks(name, num_chunks)
    _check_stages(name, num_stages)
    _check_microbatches(name, num_stages, num_microbatches)


def _check_chunks(name: str, num_chunks: int) -> None:
    if name == "interleaved":
        if num_chunks < 2:
            raise LayoutError(
                "layout: schedule = interleaved with interleave = 1 is 1f1b; "
                "fits: interleave of 2 or more, or schedule = 1f1b"
            )
    elif name in TWO_CHUNKS:
        if num_chunks > 2:
            raise LayoutError(
                f"layout: schedule = {name} places 2 chunks on a stage, not interleave = {num_chunks}; "
                "fits: interleave in {1, 2}, or schedule = interleaved"
            )
    elif num_chunks > 1:
        raise LayoutError(
            f"layout: schedule = {name} has one chunk a stage, not interleave = {num_chunks}; "
            "fits: interleave = 1, or schedule = interleaved"
        )


def _check_stages(name: str, num_stages: int) -> None:
    if name in ("interleaved", *TWO_CHUNKS) and num_stages < 2:
        raise LayoutError(
            f"layout: schedule = {name} needs two stages, not pipe = 1; fits: pipe of 2 or more"
        )
    if name == "dualpipe" and num_stages % 2:
        raise LayoutError(
            f"layout: schedule = dualpipe pairs its stages, and pipe = {num_stages} is odd; "
            f"fits: pipe in {{{num_stages - 1}, {num_stages + 1}}}"
        )


def _check_microbatches(name: str, num_stages: int, num_microbatches: int) -> None:
    p, m = num_stages, num_microbatches
    if name == "interleaved" and m % p:
        raise LayoutError(
            f"layout: schedule = interleaved runs microbatches in groups of pipe = {p}, and {m} do not "
            f"divide; fits: microbatches in {_set(m // p * p, (m // p + 1) * p)}"
        )
    if name == "zb-v" and m < p:
        raise LayoutError(
            f"layout: schedule = zb-v needs a microbatch for each stage, and {m} are fewer than pipe = {p}; "
            f"fits: microbatches of {p} or more, or pipe of {m} or less"
        )
    if name == "dualpipe" and (m < 2 * p or m % 2):
        fits = f"microbatches of {2 * p} or more" if m < 2 * p else f"microbatches in {_set(m - 1, m + 1)}"
        raise LayoutError(
            f"layout: schedule = dualpipe fills pipe = {p} stages from both ends with an even number of at "
            f"least {2 * p} microbatches, not {m}; fits: {fits}"
        )


def _set(*values: int) -> str:
    return f"{{{', '.join(str(value) for value in values if value > 0)}}}"

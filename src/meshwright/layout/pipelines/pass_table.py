"""The table of a pipeline schedule: the passes of every stage, in order.

A stage is a rank of the `pipe` axis. It holds chunks of the model, and a microbatch visits the chunks in
the order of its route: from depth 0, which has the embedding, to the last, which has the vocabulary
head, and back. A table gives only the order. The times follow from the dependencies between passes
(cost/pipeline/simulate.py).

    F  forward pass of one microbatch through one chunk
    B  its backward pass: only the gradient of the input if a W of the same microbatch and chunk
       follows in the row, otherwise the whole backward pass
    W  the gradient of the weights; no other pass waits for it
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple


class TablePass(NamedTuple):
    """One pass; joined: it runs together with the next of its row, as DualPipe joins an F and a B."""

    kind: str
    microbatch: int
    chunk: int
    joined: bool = False


# Makes a TablePass, one for all rows that have it: the passes of a table are many more than its microbatches.
table_pass = lru_cache(maxsize=2**16)(TablePass)


class Place(NamedTuple):
    """The stage of a chunk of the model, and the chunk's number on that stage."""

    stage: int
    chunk: int


# The place of every depth, in the order of a microbatch's visits.
StageRoute = tuple[Place, ...]
_Row = tuple[TablePass, ...]


@dataclass(frozen=True)
class PassTable:
    """The table of one step: rows[stage] holds the stage's passes, in order.

    routes: the route of each direction. All schedules but DualPipe have one direction. DualPipe sends the
    second half of the microbatches from the last stage to the first, through its second copy of the
    weights.
    """

    name: str
    num_microbatches: int
    routes: tuple[StageRoute, ...]
    rows: tuple[_Row, ...]

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
        """Copies of the model that the stages hold together: one for each direction."""
        return len(self.routes)

    @cached_property
    def depths(self) -> dict[tuple[int, int], int]:
        """The depth of the model at each (stage, chunk)."""
        return {place: depth for route in self.routes for depth, place in enumerate(route)}

    @cached_property
    def split(self) -> tuple[frozenset[tuple[int, int]], ...]:
        """(microbatch, chunk) of each stage whose backward pass is split into B and W."""
        return tuple(frozenset((p.microbatch, p.chunk) for p in row if p.kind == "W") for row in self.rows)

    def in_order(self) -> Iterator[tuple[int, tuple[TablePass, ...]]]:
        """All passes as (stage, pass or joined pair), each after its dependencies.

        The order is by turns. In each turn, every stage whose dependencies are done makes one step.

        >>> from meshwright.layout.pipelines import pass_table
        >>> [f"{one.kind}{one.microbatch} on {s}" for s, (one,) in pass_table("1f1b", 2, 2).in_order()]
        ['F0 on 0', 'F1 on 0', 'F0 on 1', 'B0 on 1', 'B0 on 0', 'F1 on 1', 'B1 on 1', 'B1 on 0']
        """
        done: set[tuple[str, int, Place]] = set()
        left = [list(row) for row in self.rows]
        while any(left):
            turn = [
                (stage, tuple(row[: 2 if row[0].joined else 1]))
                for stage, row in enumerate(left)
                if row and self._is_ready(stage, row, done)
            ]
            assert turn, f"the table of {self.name} deadlocks"
            for stage, passes in turn:
                del left[stage][: len(passes)]
                yield stage, passes
            done |= {(one.kind, one.microbatch, Place(s, one.chunk)) for s, passes in turn for one in passes}

    def _is_ready(self, stage: int, row: Sequence[TablePass], done: Container[tuple]) -> bool:
        """Whether the passes of other depths that the stage's next passes depend on are done.

        Dependencies on the same depth come earlier in the row.
        """
        for passed in row[: 2 if row[0].joined else 1]:
            before, after = self.neighbours(Place(stage, passed.chunk))
            place = {"F": before, "B": after, "W": None}[passed.kind]
            if place and (passed.kind, passed.microbatch, place) not in done:
                return False
        return True

    def neighbours(self, place: Place) -> tuple[Place | None, Place | None]:
        """The places of the depths before and after the depth at `place`; None at the ends."""
        depth = self.depths[place]
        route = next(route for route in self.routes if route[depth] == place)
        before = route[depth - 1] if depth else None
        return before, route[depth + 1] if depth + 1 < self.num_depths else None

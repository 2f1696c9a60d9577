"""The record of a pipeline schedule; each file of this folder defines one.

Letters: p stages, m microbatches, v chunks a stage.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.errors import LayoutError
from meshwright.layout.pipelines.pass_table import PassTable, Place, StageRoute, TablePass


@lru_cache(maxsize=256)
def loop(p: int, v: int = 1) -> tuple[StageRoute, ...]:
    """The places of p v depths in a loop: depth d is chunk d // p of stage d mod p."""
    return (tuple(Place(stage, chunk) for chunk in range(v) for stage in range(p)),)


def any_numbers(p: int, m: int) -> None:
    """Refuses nothing: the schedule exists for any numbers of stages and microbatches."""


def one_chunk(p: int, num_layers: int, every: bool) -> list[int]:
    """The chunks to try of a schedule that leaves no choice."""
    return [1]


class Alive(NamedTuple):
    """Microbatch-chunks with activations on a stage at one time.

    saved: everything that F saved, until its B has run. left: arrays that a B leaves for its W.
    """

    saved: float
    left: float = 0.0


@dataclass(frozen=True)
class PipelineSchedule:
    """One pipeline schedule: its limits, its table of passes and its memory.

    words: the passes of a stage, as a clause for `--explain`.
    rows(p, m, v): the passes of every stage, in order.
    most_alive(p, m, v, stage): maximum microbatch-chunks with live activations on a stage.
    num_chunks: chunks of one stage that a microbatch visits; None if `interleave` gives their number.
    routes(p, v): the places of every depth, for each direction of microbatches.
    splits_backward: whether gradients of weights are separate passes, W.
    least_stages: the minimum number of stages.
    check_numbers(p, m): raises LayoutError if the schedule does not exist for p stages and m microbatches.
    spmd: whether all stages run one program, idle passes included. Each stage then has a share of the
    vocabulary and stores the weights of its layers (L over `pipe`). Otherwise each stage has its own
    programs, and one process dispatches them in the order of the table.
    searched_from: the minimum number of stages in a search; None: no search tries the schedule.
    only_if_run: whether a search of all plannable layouts tries the schedule only if conditions name stages
    or schedules, because another schedule is faster.
    tried_chunks(p, num_layers, every): numbers of chunks to try; every: all of them, not only the usual.
    """

    name: str
    words: str
    rows: Callable[[int, int, int], list[list[TablePass]]]
    most_alive: Callable[[int, int, int, int], int]
    num_chunks: int | None = 1
    routes: Callable[[int, int], tuple[StageRoute, ...]] = loop
    splits_backward: bool = False
    least_stages: int = 1
    check_numbers: Callable[[int, int], None] = any_numbers
    spmd: bool = False
    searched_from: int | None = 2
    only_if_run: bool = False
    tried_chunks: Callable[[int, int, bool], list[int]] = one_chunk

    def check(self, stages: int, microbatches: int, chunks: int = 1) -> None:
        """Raise LayoutError, with numbers that fit, if the schedule does not exist."""
        counts = {"pipe": stages, "microbatches": microbatches, "interleave": chunks}
        for field, value in counts.items():
            if value < 1:
                raise LayoutError(f"layout: {field} = {value}; it must be a positive integer")
        self._check_chunks(chunks)
        if stages < self.least_stages:
            raise LayoutError(
                f"layout: schedule = {self.name} needs two stages, not pipe = {stages}; "
                "fits: pipe of 2 or more"
            )
        self.check_numbers(stages, microbatches)

    def _check_chunks(self, chunks: int) -> None:
        if self.num_chunks is None:
            if chunks < 2:
                raise LayoutError(
                    f"layout: schedule = {self.name} with interleave = 1 is 1f1b; "
                    "fits: interleave of 2 or more, or schedule = 1f1b"
                )
            return
        held = self.num_chunks * len(self.routes(2, 1))
        if chunks not in (1, held):
            has = f"places {held} chunks on a stage" if held > 1 else "has one chunk a stage"
            fits = f"in {{1, {held}}}" if held > 1 else "= 1"
            raise LayoutError(
                f"layout: schedule = {self.name} {has}, not interleave = {chunks}; "
                f"fits: interleave {fits}, or schedule = interleaved"
            )

    def exists(self, stages: int, microbatches: int, chunks: int = 1) -> bool:
        """Whether the schedule has a table of this size."""
        try:
            self.check(stages, microbatches, chunks)
        except LayoutError:
            return False
        return True

    def searched(self, stages: int, num_layers: int, *, every: bool = False) -> list[int]:
        """Numbers of chunks that a search tries, given `stages`."""
        if self.searched_from is None or stages < self.searched_from:
            return []
        return self.tried_chunks(stages, num_layers, every)

    def runs_on(self, num_hosts: int) -> bool:
        """Whether steps run on this number of hosts: one process dispatches programs of several stages."""
        return self.spmd or num_hosts == 1

    def chunks(self, interleave: int) -> int:
        """Chunks of one stage that a microbatch visits."""
        return interleave if self.num_chunks is None else self.num_chunks

    def table(self, stages: int, microbatches: int, chunks: int = 1) -> PassTable:
        """The table of a step; raises LayoutError if the schedule does not exist."""
        self.check(stages, microbatches, chunks)
        chunks = self.chunks(chunks)
        rows = tuple(map(tuple, self.rows(stages, microbatches, chunks)))
        return PassTable(self.name, microbatches, self.routes(stages, chunks), rows)

    def num_passes(self, stages: int, microbatches: int) -> int:
        """Forward passes of one chunk on a stage, idle ones included; equal to its backward passes."""
        return microbatches + (stages - 1 if self.spmd else 0)

    def in_flight(self, stages: int, microbatches: int, chunks: int = 1, stage: int = 0) -> int:
        """Maximum microbatch-chunks with live activations on the stage.

        A chunk is one of `self.chunks(chunks)` parts of the stage's layers. Raises LayoutError if the
        schedule does not exist.
        """
        self.check(stages, microbatches, chunks)
        return self.most_alive(stages, microbatches, self.chunks(chunks), stage)

    def alive(self, stages: int, microbatches: int, chunks: int = 1, stage: int = 0) -> tuple[Alive, ...]:
        """Live activations of the stage at each time of a possible memory peak.

        No other time of the step exceeds one of them in every kind. Raises LayoutError if the schedule does
        not exist.
        """
        most = self.in_flight(stages, microbatches, chunks, stage)
        if not self.splits_backward:
            return (Alive(most),)
        # A stage that has had several rounds of microbatches repeats itself.
        return _alive_in(self, stages, min(microbatches, _ROUNDS * stages), chunks, stage)


_ROUNDS = 4


@lru_cache(maxsize=16)  # a search asks for the stages of a table in turn
def _table(schedule: PipelineSchedule, stages: int, microbatches: int, chunks: int) -> PassTable:
    return schedule.table(stages, microbatches, chunks)


@lru_cache(maxsize=4096)
def _alive_in(
    schedule: PipelineSchedule, stages: int, microbatches: int, chunks: int, stage: int
) -> tuple[Alive, ...]:
    """`PipelineSchedule.alive` by a walk through the stage's row."""
    table = _table(schedule, stages, microbatches, chunks)
    split = table.split[stage]
    most_left: dict[int, int] = {}  # maximum of `left` for each value of `saved`
    saved = left = 0
    for kind, microbatch, chunk, _ in table.rows[stage]:
        if kind == "F":
            saved += 1
        elif kind == "B" and (microbatch, chunk) in split:
            left += 1
        most_left[saved] = max(left, most_left.get(saved, 0))
        saved -= kind == "B"
        left -= kind == "W"
    peaks: list[Alive] = []
    for saved, left in sorted(most_left.items(), reverse=True):
        if not peaks or left > peaks[-1].left:
            peaks.append(Alive(saved, left))
    return tuple(reversed(peaks))


def fitting(*values: int) -> str:
    """The positive values, written as a set.

    >>> fitting(0, 4)
    '{4}'
    """
    return f"{{{', '.join(str(value) for value in values if value > 0)}}}"

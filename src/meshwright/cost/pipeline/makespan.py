"""The exact makespan of a schedule, without a simulation of every microbatch.

A long table repeats: with p more microbatches, one for each stage, every row grows by the same passes at the
same place. A step therefore runs in rounds of p microbatches. A round passes on when each stage is free, and
when each result that is still needed was made. Once every such time is later by the same amount than in
the round before, every further round takes this amount, and so does the end of the step. The makespan is
the short table's makespan plus the further rounds. If short tables do not repeat, or if the whole table is
not longer than the three short ones together, the whole table is simulated.
"""

from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.pipeline.order import Order, Ordering, Times
from meshwright.layout.pipelines import SCHEDULES, PassTable, pipeline_schedule

# Rounds of the short tables.
_SHORT = (2, 4, 8)
# Tables in a comparison, each one round longer than the one before.
_NUM_COMPARED = 3
# Rounds take equal time if they differ by less than this share of the step.
_ROUNDING = 1e-12
# Passes of the longest tables whose orders are kept; an entry has 13 bytes.
_MOST_KEPT = 100_000


def makespan(name: str, stages: int, microbatches: int, chunks: int, times: Times) -> float:
    """Seconds of one step of the schedule without the optimizer, as `simulate` returns.

    Raises LayoutError for numbers that the schedule does not support.
    """
    return _makespan(name, stages, microbatches, chunks, Times(tuple(times.depths), times.hop_seconds))


@lru_cache(maxsize=128)  # a search prices its ranked plans again
def _makespan(name: str, stages: int, microbatches: int, chunks: int, times: Times) -> float:
    schedule = pipeline_schedule(name)
    schedule.check(stages, microbatches, chunks)
    for rounds in _SHORT:
        short = rounds * stages + microbatches % stages
        if microbatches <= _NUM_COMPARED * (short + stages):
            break
        repeated = repeating(name, stages, short, chunks)
        if repeated and (seconds := repeated.seconds(microbatches, times)):
            return seconds
    small = stages * microbatches * schedule.chunks(chunks) <= _MOST_KEPT
    order = (_kept_order if small else _order)(name, stages, microbatches, chunks)
    return max(order.run(times))


def _order(name: str, stages: int, microbatches: int, chunks: int) -> Order:
    return Ordering(SCHEDULES[name].table(stages, microbatches, chunks)).whole()


_kept_order = lru_cache(maxsize=64)(_order)


class Repeating(NamedTuple):
    """A short table that grows by repetition.

    round: microbatches of one round. frontier: (entry, entry one round later) of everything that a round
    passes on.
    """

    order: Order
    microbatches: int
    round: int
    frontier: tuple[tuple[int, int], ...]

    def seconds(self, microbatches: int, times: Times) -> float | None:
        """The makespan of more microbatches; None if the short table's rounds differ."""
        ends = self.order.run(times)
        whole = max(ends)
        rounds = [ends[later] - ends[earlier] for earlier, later in self.frontier]
        if max(rounds) - min(rounds) > _ROUNDING * whole:
            return None
        return whole + (microbatches - self.microbatches) // self.round * rounds[0]


@lru_cache(maxsize=64)
def repeating(name: str, stages: int, microbatches: int, chunks: int) -> Repeating | None:
    """The table of one round more than `microbatches`; None if tables do not repeat from there.

    Three tables are compared, each one round longer. In each row the second must add some passes to the
    first, and the third must add the same passes again.
    """
    schedule = SCHEDULES[name]
    tables = [
        schedule.table(stages, microbatches + rounds * stages, chunks) for rounds in range(_NUM_COMPARED)
    ]
    ordering = Ordering(tables[1])
    # Advance through the part that the first two tables share and that needs no later pass.
    numbered = [_numbered(table) for table in tables]
    ordering.advance([_num_shared(*rows) for rows in zip(*numbered[:2], strict=True)])
    cuts, later = list(ordering.positions), stages // len(tables[1].routes)
    rows_at_cuts = zip(zip(*numbered, strict=True), cuts, strict=True)
    if not all(_repeats(rows, cut, later) for rows, cut in rows_at_cuts):
        return None
    here, done = list(ordering.last), list(ordering.done)
    beyond = (needs for cut, steps in zip(cuts, ordering.steps, strict=True) for needs, *_ in steps[cut:])
    handed_on = {result for result in beyond if done[result] > 0}
    grown = zip(cuts, *numbered[:2], strict=True)
    ordering.advance([cut + len(longer) - len(shorter) for cut, shorter, longer in grown])
    frontier = list(zip(here, ordering.last, strict=True))
    frontier += [(done[result], ordering.done[result + later]) for result in handed_on]
    return Repeating(ordering.whole(), microbatches + stages, stages, tuple(frontier))


# (kind of a pass, number among the microbatches of its direction, chunk, whether it is joined).
_Numbered = tuple[str, int, int, bool]


def _numbered(table: PassTable) -> list[list[_Numbered]]:
    each = table.num_microbatches // len(table.routes)
    return [[(kind, i % each, chunk, joined) for kind, i, chunk, joined in row] for row in table.rows]


def _num_shared(first: list[_Numbered], second: list[_Numbered]) -> int:
    """Passes of two rows before the first that differs; a joined pair stays together."""
    pairs = enumerate(zip(first, second, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
    return shared - (shared > 0 and first[shared - 1][3])


def _repeats(rows: tuple[list[_Numbered], ...], cut: int, later: int) -> bool:
    """Whether three rows grow by the same passes.

    Each must be the one before with some passes added at `cut`, and the rest `later` microbatches later.
    """
    short, middle, long = rows
    unit = len(middle) - len(short)
    return (
        middle[cut + unit :] == _shifted(short[cut:], later)
        and long[: cut + unit] == middle[: cut + unit]
        and long[cut + unit :] == _shifted(middle[cut:], later)
    )


def _shifted(passes: list[_Numbered], later: int) -> list[_Numbered]:
    """The same passes, `later` microbatches later."""
    return [(kind, number + later, chunk, joined) for kind, number, chunk, joined in passes]

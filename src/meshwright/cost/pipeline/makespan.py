"""The makespan of a schedule, exactly, without a simulation of every microbatch.

A long table repeats itself: with p more microbatches, one for each stage, every row grows by the same passes
at the same place. So a step runs in rounds of p microbatches. Once all that a round hands to the next - when
each stage is free, and when each result that is still needed was made - is later by the same time than one
round before, every round after it takes that time, too, and the end of the step is later by as much. The
makespan is then that of a short table and so many rounds. Where that does not show in a short table, or
the whole one is not longer than the three short ones that would have to be compared, the whole is simulated.
"""

from functools import lru_cache
from typing import NamedTuple

from meshwright.cost.pipeline.order import Order, Ordering, Times
from meshwright.layout.pipelines import SCHEDULES, PassTable, pipeline_schedule

# Rounds of the short tables that are tried.
_SHORT = (2, 4, 8)
# Tables that show whether they grow by repetition; the second has a round more than the short one.
_NUM_COMPARED = 3
# Rounds are as long as each other if they differ by less than this share of the step.
_ROUNDING = 1e-12
# Passes of the longest tables whose orders are kept; an entry has 13 bytes.
_MOST_KEPT = 100_000


def makespan(name: str, stages: int, microbatches: int, chunks: int, times: Times) -> float:
    """Seconds of one step of the schedule, without the optimizer: those of `simulate`.

    Raises LayoutError for numbers with which the schedule does not exist.
    """
    return _makespan(name, stages, microbatches, chunks, Times(tuple(times.depths), times.hop_seconds))


@lru_cache(maxsize=128)  # what a search ranks is priced again
def _makespan(name: str, stages: int, microbatches: int, chunks: int, times: Times) -> float:
    schedule = pipeline_schedule(name)
    schedule.check(stages, microbatches, chunks)
    for rounds in _SHORT:
        short = rounds * stages + microbatches % stages
        if microbatches <= _NUM_COMPARED * (short + stages):
            break
        found = repeating(name, stages, short, chunks)
        if found and (seconds := found.seconds(microbatches, times)):
            return seconds
    small = stages * microbatches * schedule.chunks(chunks) <= _MOST_KEPT
    order = (_kept_order if small else _order)(name, stages, microbatches, chunks)
    return max(order.run(times))


def _order(name: str, stages: int, microbatches: int, chunks: int) -> Order:
    return Ordering(SCHEDULES[name].table(stages, microbatches, chunks)).whole()


_kept_order = lru_cache(maxsize=64)(_order)


class Repeating(NamedTuple):
    """A short table, from which those with some rounds more follow.

    round: microbatches of one. frontier: for all that one round hands to the next, its entry, and the entry
    of the same one round later.
    """

    order: Order
    microbatches: int
    round: int
    frontier: tuple[tuple[int, int], ...]

    def seconds(self, microbatches: int, times: Times) -> float | None:
        """The makespan of more microbatches; None where the rounds of the short table differ."""
        ends = self.order.run(times)
        whole = max(ends)
        rounds = [ends[later] - ends[one] for one, later in self.frontier]
        if max(rounds) - min(rounds) > _ROUNDING * whole:
            return None
        return whole + (microbatches - self.microbatches) // self.round * rounds[0]


@lru_cache(maxsize=64)
def repeating(name: str, stages: int, microbatches: int, chunks: int) -> Repeating | None:
    """The table of one round more than `microbatches`, if tables grow from there by repetition.

    Three tables are compared, each of a round more: the second has to have some passes more than the first in
    each row, and the third the same again.
    """
    schedule = SCHEDULES[name]
    tables = [
        schedule.table(stages, microbatches + rounds * stages, chunks) for rounds in range(_NUM_COMPARED)
    ]
    ordering = Ordering(tables[1])
    # Up to here the first two tables are the same, and nothing waits for a pass beyond.
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


# The kind of a pass, its number among the microbatches of its direction, its chunk and whether it is joined.
_Numbered = tuple[str, int, int, bool]


def _numbered(table: PassTable) -> list[list[_Numbered]]:
    each = table.num_microbatches // len(table.routes)
    return [[(kind, i % each, chunk, joined) for kind, i, chunk, joined in row] for row in table.rows]


def _num_shared(one: list[_Numbered], two: list[_Numbered]) -> int:
    """How many passes two rows share before the first that differs; a joined pair is kept together."""
    pairs = enumerate(zip(one, two, strict=False))
    shared = next((place for place, (a, b) in pairs if a != b), min(len(one), len(two)))
    return shared - (shared > 0 and one[shared - 1][3])


def _repeats(rows: tuple[list[_Numbered], ...], cut: int, later: int) -> bool:
    """Whether each of three rows is the one before with some passes more at `cut`, and what follows later."""
    short, middle, long = rows
    unit = len(middle) - len(short)
    return (
        middle[cut + unit :] == _shifted(short[cut:], later)
        and long[: cut + unit] == middle[: cut + unit]
        and long[cut + unit :] == _shifted(middle[cut:], later)
    )


def _shifted(passes: list[_Numbered], later: int) -> list[_Numbered]:
    """The same passes of microbatches that come `later`."""
    return [(kind, number + later, chunk, joined) for kind, number, chunk, joined in passes]

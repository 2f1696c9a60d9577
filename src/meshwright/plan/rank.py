"""The order of candidates: by step time; among ties the simplest layout is first."""

from collections.abc import Iterable

from meshwright.layout import DEGREES, REMATS, Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.plan.candidate import Candidate

# Step times that differ by less are ties: prices are not that exact (README, "Predicted and measured").
TIE = 0.02


def ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates, best first: ties with the fastest by plainness, the others by time.

    Candidates that do not fit come last, by the memory that they lack.
    """
    candidates_list = list(candidates)
    equals = ties(candidates_list)
    same = {id(candidate) for candidate in equals}

    def key(candidate: Candidate) -> tuple:
        over = candidate.lacking_bytes
        plain = plainness(candidate.layout) if id(candidate) in same else ()
        return (over, id(candidate) not in same, plain, candidate.step_seconds)

    return sorted(candidates_list, key=key)


def ties(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that fit and are within TIE of the fastest one's step time."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    least = min((candidate.step_seconds for candidate in fitting), default=0.0)
    return [candidate for candidate in fitting if candidate.step_seconds <= (1 + TIE) * least]


def structure(layout: Layout) -> tuple[int, bool]:
    """The number of axes and whether layers are split into stages, which need a schedule.

    >>> structure(Layout.of(fsdp=8, context=2)) < structure(Layout.of(pipe=8, context=2, microbatches=8))
    True
    """
    return sum(layout.word(axis) > 1 for axis in DEGREES), layout.pipe > 1


def plainness(layout: Layout) -> tuple[int, ...]:
    """A key to sort by simplicity: structure, schedule, sharded state, recomputation.

    >>> plainness(Layout.of(data=8)) < plainness(Layout.of(fsdp=8)) < plainness(Layout.of(data=4, tensor=2))
    True
    """
    return (
        *structure(layout),
        list(SCHEDULES).index(layout.schedule.pipeline),  # from simple schedules to split passes
        layout.schedule.interleave,
        layout.rules.zero_stage,
        layout.word("zero_context"),
        layout.word("inner") is not None,
        layout.word("sequence_parallel"),
        layout.schedule.grouped,
        layout.schedule.offload,
        layout.schedule.microbatches,
        REMATS.index(layout.schedule.remat),
    )

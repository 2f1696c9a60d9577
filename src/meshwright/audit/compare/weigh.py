"""The differences that are too small to matter, by their seconds in a step over all runs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright.audit.compare.line_up import DIFFERENT, Row
from meshwright.audit.compare.words import summed_whole
from meshwright.audit.facts.emitted import SINGLE_NUMBER
from meshwright.audit.facts.prices import Prices

# Of the planned step, and at most: all negligible differences together.
NEGLIGIBLE_SHARE = 1e-3
NEGLIGIBLE_SECONDS = 5e-4


def weighed(rows: Sequence[Row], prices: Prices, step_seconds: float) -> list[Row]:
    """The rows, with `negligible` in place of differences that cost next to nothing.

    What is summed over fewer axes than planned, or not at all, gives other numbers, and is never negligible
    unless it is a single number, which compilers sum under another's name.
    """
    limit = min(NEGLIGIBLE_SHARE * step_seconds, NEGLIGIBLE_SECONDS)
    small: dict[int, float] = {}
    for seconds, i in sorted((_small(row, prices), i) for i, row in enumerate(rows)):
        if sum(small.values()) + seconds <= limit:
            small[i] = seconds
    return [_negligible(row, small[i]) if i in small else row for i, row in enumerate(rows)]


def extra_seconds(row: Row, prices: Prices) -> float | None:
    """Seconds a step beyond the planned, hidden or not; None where the devices that talk follow no axes."""
    known = [prices.seconds(e) for e in row.emitted]
    if None in known:
        return None
    return sum(s for s in known if s is not None) - sum(p.step_seconds for p in row.planned)


def _small(row: Row, prices: Prices) -> float:
    """The seconds that a difference may be dismissed for; infinite where it may not."""
    seconds = extra_seconds(row, prices) if row.status in DIFFERENT else None
    if seconds is None:
        return float("inf")
    singles = all(p.gathered_bytes <= SINGLE_NUMBER for p in row.planned)
    if not singles and not _axes(row.planned) <= _axes(row.emitted):
        return float("inf")
    return abs(seconds) if not (singles and not row.emitted) else 0.0


def _axes(side: Iterable) -> set[str]:
    return {axis for one in side for axis in one.axes}


def _negligible(row: Row, seconds: float) -> Row:
    what = summed_whole(row)
    return replace(
        row, status="negligible", note=f"{seconds * 1e6:.1f} us a step: {what[0] if what else row.note}"
    )

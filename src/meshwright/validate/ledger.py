"""The ledger of first looks: how far predictions were off when a source was met, before anything was changed.

Every line is a source's figure with the version that met it first: time or memory, or a figure of load tests
(`load_test_scores.errors_by_source`), whose sources are named with engine and pools. A new table is scored,
and its lines go to benchmarks/ledger.csv, before anything is changed; a line's first errors never change.
Sources without first errors were met while constants were fitted on them.

    error = predicted / measured - 1
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import NamedTuple

from meshwright.plan.spread import quantile
from meshwright.validate.published import MEMORY, PublishedRow
from meshwright.validate.score import Prediction

_IN_CHECKOUT = Path(__file__).parents[3] / "benchmarks" / "ledger.csv"


@dataclass(frozen=True)
class FirstLook:
    """A line of the ledger. signed: of time or memory, positive if the prediction is too slow or too large.

    first_*, met: errors at the first look, None if none was recorded, and the version and date. today_*: now.
    """

    source: str
    figure: str
    rows: int
    met: str
    first_median: float | None = None
    first_p90: float | None = None
    first_signed: float | None = None
    today_median: float | None = None
    today_p90: float | None = None
    covered: float | None = None


def first_looks() -> list[FirstLook]:
    """The recorded lines (ledger.csv), without today's errors."""
    packaged = resources.files("meshwright.validate") / "ledger.csv"
    text = (packaged if packaged.is_file() else _IN_CHECKOUT).read_text(encoding="utf-8")
    return [
        FirstLook(
            cells["source"],
            cells["figure"],
            int(cells["rows"]),
            cells["met"],
            *(float(cells[key]) if cells[key] else None for key in ("median", "p90", "signed")),
        )
        for cells in csv.DictReader(text.splitlines())
    ]


class Today(NamedTuple):
    """Today's errors of a source's figure, without their signs; None without rows.

    covered: share of rows inside their ranges, None if none has a range.
    """

    num_rows: int
    median: float | None
    p90: float | None
    covered: float | None


def ledger(predictions: Sequence[Prediction]) -> list[FirstLook]:
    """The lines with today's errors of these rows, by source."""
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in predictions:
        if (
            prediction.predicted is not None
            and isinstance(prediction.row, PublishedRow)
            and not prediction.row.ran_out
        ):
            figure = "memory" if prediction.row.metric == MEMORY else "time"
            groups.setdefault((prediction.row.source, figure), []).append(prediction)
    return with_today({key: _today(group) for key, group in groups.items()})


def with_today(today: Mapping[tuple[str, str], Today]) -> list[FirstLook]:
    """The lines with today's errors, given by source and figure; sources without a line come last."""
    recorded = {(line.source, line.figure): line for line in first_looks()}
    lines = [*recorded, *(key for key in today if key not in recorded)]
    return [_line(key, recorded.get(key), today.get(key)) for key in lines]


def _line(key: tuple[str, str], recorded: FirstLook | None, today: Today | None) -> FirstLook:
    line = recorded or FirstLook(*key, today.num_rows if today else 0, "not recorded")
    if today is None:
        return line
    return replace(line, today_median=today.median, today_p90=today.p90, covered=today.covered)


def _today(group: Sequence[Prediction]) -> Today:
    errors = sorted(map(_error, group))
    return Today(len(errors), quantile(errors, 0.5), quantile(errors, 0.9), covered(group))


def _error(prediction: Prediction) -> float:
    assert isinstance(prediction.row, PublishedRow) and prediction.predicted is not None
    if prediction.row.metric == MEMORY:
        return abs(prediction.predicted / prediction.row.value - 1)
    return abs(prediction.row.seconds(prediction.predicted) / prediction.row.seconds() - 1)


def covered(predictions: Iterable[Prediction]) -> float | None:
    """The share of rows inside their ranges; None if none has a range."""
    inside = [one.range[0] <= one.row.value <= one.range[1] for one in predictions if one.range]
    return sum(inside) / len(inside) if inside else None


def first_look_medians(lines: Iterable[FirstLook]) -> dict[str, float | int | None]:
    """Medians over sources of the recorded first looks at times."""
    known = [line for line in lines if line.figure == "time" and line.first_median is not None]
    return {
        "sources": len(known),
        "rows": sum(line.rows for line in known),
        "first_median": median(line.first_median or 0 for line in known) if known else None,
        "first_p90": median(line.first_p90 or 0 for line in known) if known else None,
    }

"""Errors of a source's other rows before and after two of its own runs correct the price.

    python benchmarks/anchoring.py > benchmarks/results/anchoring.json

Every row's error is without its source (plan/out_of_sample.csv), as a user meets it. The two runs on a chip
correct every other row as far as it is like them (validate/alike.py). All pairs of a source's rows are
anchors in turn. A source counts with the median error of its other rows, as its mean over pairs.
"""

import json
import platform
from itertools import combinations
from math import expm1
from pathlib import Path
from statistics import mean, median

from meshwright.plan.spread import outside_rows
from meshwright.validate.alike import TRUST, Traits, expected_error
from meshwright.validate.published import PublishedRow, read_rows

TABLE = Path(__file__).parent / "published/training.csv"
TRUSTS = (0.3, 0.5, 0.7, TRUST, 0.8, 0.9)
LEAST_OTHERS = 3  # rows that are scored
# Pairs of a large source that are tried.
_MOST_PAIRS = 400


# A row's traits, and the log error of its step time.
Run = tuple[Traits, float]


def main() -> None:
    published = {row.id: row for row in read_rows(TABLE) if isinstance(row, PublishedRow)}
    sources: dict[str, list[Run]] = {}
    for row in outside_rows():
        if row.figure == "time" and row.id in published:
            sources.setdefault(row.source, []).append((Traits.of(published[row.id]), row.log_error))
    sources = {name: rows for name, rows in sources.items() if len(rows) >= 2 + LEAST_OTHERS}
    document = {
        "benchmark": "anchoring",
        "machine": {"python": platform.python_version(), "cpu": platform.machine()},
        "sources": len(sources),
        "trusts": {str(trust): summary(sources, trust) for trust in TRUSTS},
    }
    print(json.dumps(document, indent=1))


def summary(sources: dict[str, list[Run]], trust: float) -> dict:
    """Errors over sources, and the share of sources whose median falls."""
    found = {name: anchored(rows, trust) for name, rows in sources.items()}
    return {
        "share_of_sources_with_a_smaller_median": mean(
            one["after"] < one["before"] for one in found.values()
        ),
        "median_before": median(one["before"] for one in found.values()),
        "median_after": median(one["after"] for one in found.values()),
        "by_source": found,
    }


def anchored(rows: list[Run], trust: float) -> dict[str, float]:
    """The median error of other rows before and after, in the mean over pairs of anchors."""
    chips = [traits.words[0] for traits, _ in rows]
    pairs = [pair for pair in combinations(range(len(rows)), 2) if chips[pair[0]] == chips[pair[1]]]
    pairs = pairs[:: max(1, len(pairs) // _MOST_PAIRS)]
    before, after = [], []
    for pair in pairs:
        anchors = [rows[place] for place in pair]
        others = [run for place, run in enumerate(rows) if place not in pair]
        shifts = [expected_error(anchors, traits, trust) for traits, _ in others]
        before.append(median(abs(expm1(error)) for _, error in others))
        after.append(
            median(abs(expm1(error - shift)) for (_, error), shift in zip(others, shifts, strict=True))
        )
    return {"rows": len(rows), "before": round(mean(before), 4), "after": round(mean(after), 4)}


if __name__ == "__main__":
    main()

"""Errors of a source's other rows before and after two of its own runs anchor the price.

    python benchmarks/anchoring.py > benchmarks/results/anchoring.json

Every row's error is without its source (plan/out_of_sample.csv), as a user meets it. Two runs on a chip give
a factor of all step times: the part of their log errors that both share (none if one is too slow and the
other too fast), times a trust. All pairs of a source's rows are anchors in turn. A source counts with the
median error of its other rows, as its mean over pairs.
"""

import json
import platform
from itertools import combinations
from math import expm1
from statistics import mean, median

from meshwright.plan.spread import Outside, outside_rows

TRUSTS = (0.3, 0.5, 1.0)
LEAST_OTHERS = 3  # rows that are scored
# Pairs of a large source that are tried.
_MOST_PAIRS = 400


def main() -> None:
    sources: dict[str, list[Outside]] = {}
    for row in outside_rows():
        if row.figure == "time":
            sources.setdefault(row.source, []).append(row)
    sources = {name: rows for name, rows in sources.items() if len(rows) >= 2 + LEAST_OTHERS}
    document = {
        "benchmark": "anchoring",
        "machine": {"python": platform.python_version(), "cpu": platform.machine()},
        "sources": len(sources),
        "trusts": {str(trust): summary(sources, trust) for trust in TRUSTS},
    }
    print(json.dumps(document, indent=1))


def summary(sources: dict[str, list[Outside]], trust: float) -> dict:
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


def anchored(rows: list[Outside], trust: float) -> dict[str, float]:
    """The median error of other rows before and after, in the mean over pairs of anchors."""
    pairs = [pair for pair in combinations(range(len(rows)), 2) if rows[pair[0]].chip == rows[pair[1]].chip]
    pairs = pairs[:: max(1, len(pairs) // _MOST_PAIRS)]
    before, after = [], []
    for pair in pairs:
        shift = trust * shared(*(rows[place].log_error for place in pair))
        others = [row.log_error for place, row in enumerate(rows) if place not in pair]
        before.append(median(abs(expm1(error)) for error in others))
        after.append(median(abs(expm1(error - shift)) for error in others))
    return {"rows": len(rows), "before": round(mean(before), 4), "after": round(mean(after), 4)}


def shared(one: float, other: float) -> float:
    """The part that two errors share: the smaller of one sign, otherwise 0."""
    return min(one, other, key=abs) if one * other > 0 else 0.0


if __name__ == "__main__":
    main()

"""The planner beside what others measured: every score of a table of published results in one JSON.

    python benchmarks/published.py benchmarks/published/training.csv > benchmarks/results/published.json

Scores free and anchored with the baselines of one MFU, by source, rows of memory, regret, and from
results/fit_published.json what is left of it where the constants are fitted without each source.
"""

import argparse
import json
import platform
import time
from pathlib import Path

from meshwright.cli.validate import validation_document
from meshwright.validate.alike import TRUST
from meshwright.validate.published import read_rows
from meshwright.validate.score import anchored_by_source, predict

FITTED = Path(__file__).parent / "results/fit_published.json"
# The bars: (median, 90th percentile) of the scores, and single figures.
BARS = {
    "free": (0.07, 0.25),
    "anchored": (0.05, 0.20),
    "leave_one_source_out": 0.10,
    "memory": 0.10,
    "regret": 0.03,
}


def leave_one_source_out() -> dict:
    """The scores that the last fit recorded, without its rows."""
    found = json.loads(FITTED.read_text(encoding="utf-8"))["leave_one_source_out"]
    return {key: value for key, value in found.items() if key != "rows"}


def within(document: dict) -> dict[str, bool]:
    """Which bars are met."""
    met = {name: document[name]["median_abs_error"] <= BARS[name][0] for name in ("free", "anchored")}
    met |= {f"{name} p90": document[name]["p90_abs_error"] <= BARS[name][1] for name in ("free", "anchored")}
    met["leave_one_source_out"] = document["leave_one_source_out"]["median"] <= BARS["leave_one_source_out"]
    met["memory"] = document["memory"]["median_abs_error"] <= BARS["memory"]
    met["regret"] = document["regret"] <= BARS["regret"]
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    start = time.perf_counter()
    found = predict(read_rows(file))
    seconds = time.perf_counter() - start
    free, anchor = (
        validation_document(found, anchor=False),
        validation_document(anchored_by_source(found), anchor=True),
    )
    shared = ("memory", "regret", "rankings", "ranking", "skipped", "rows")
    document = {
        "benchmark": "published",
        "command": f"python benchmarks/published.py {file.name}",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "seconds": seconds,
        "trust": TRUST,
        "bars": BARS,
        "free": {key: value for key, value in free.items() if key not in shared},
        "anchored": {key: value for key, value in anchor.items() if key not in shared},
        "leave_one_source_out": leave_one_source_out(),
        **{key: free[key] for key in shared},
    }
    document["met"] = within(document)
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()

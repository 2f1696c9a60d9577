"""The compiled schedule's price of published TPU steps, beside what was measured and planned.

    python benchmarks/scheduled.py published/training.csv   # writes results/scheduled.json; needs [tpu]

The rows are those that this program runs as published, with float32 weights, and that its compiler fits into
the chips. `share_without` is `timeline.TPU_SHARE` as the rows of all other chips would have it.
"""

import importlib.metadata
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from meshwright.audit.compile.compile import compile_plan
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.facts.compiled_schedule import TPU_SHARE
from meshwright.audit.plan_audit import judged
from meshwright.files import write_whole
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.plan_file import Plan
from meshwright.validate.published import PublishedRow, read_rows
from meshwright.validate.reproduce import reproduce

RESULTS = Path(__file__).parent / "results/scheduled.json"
ROWS = ("T0467", "T0469", "T0533")


def plan_of(row: PublishedRow) -> Plan:
    """The published step as it runs here."""
    case = reproduce(row)
    degrees = f"data={row.data},fsdp={row.fsdp},tensor={row.tensor},remat={row.remat}"
    return Plan(case.config, case.hardware.spec, case.workload, Layout.parse(f"{degrees},weights_dtype=f32"))


def prices(plan: Plan) -> Mapping[str, float]:
    """Seconds of a step, planned and scheduled."""
    target = choose_target(plan.hardware, plan.layout, "tpu")
    return judged(plan, target, compile_plan(plan, target))["step_seconds"]


def scored(found: list[dict]) -> list[dict]:
    """The rows with their errors, also with the share that the other chips' rows give."""
    for one in found:
        others = [o["measured"] / (o["scheduled"] / TPU_SHARE) for o in found if o["chip"] != one["chip"]]
        one["share_without"] = median(others)
        left_out = one["scheduled"] / TPU_SHARE * one["share_without"]
        one |= {
            "planned_error": one["planned"] / one["measured"] - 1,
            "scheduled_error": one["scheduled"] / one["measured"] - 1,
            "left_out_error": left_out / one["measured"] - 1,
        }
    return found


def main(file: Path) -> None:
    rows = {row.id: row for row in read_rows(file) if isinstance(row, PublishedRow)}
    found = []
    for name in ROWS:
        plan = plan_of(rows[name])
        chip = load(plan.hardware).chip.name
        row = {"id": name, "chip": chip, "layout": str(plan.layout), "measured": rows[name].value}
        found.append(row | dict(prices(plan)))
        print(name, found[-1], file=sys.stderr, flush=True)
    versions = {package: importlib.metadata.version(package) for package in ("jax", "libtpu")}
    write_whole(RESULTS, json.dumps({"versions": versions, "rows": scored(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

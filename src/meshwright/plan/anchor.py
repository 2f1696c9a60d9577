"""How a user's own run compares with its price: one factor for all steps of the same software.

slowdown = measured step time / predicted step time of the run's plan
"""

from math import isfinite
from pathlib import Path
from statistics import median

from meshwright.errors import PlanError
from meshwright.files import parse_json, read_text
from meshwright.hardware import catalog
from meshwright.plan.train import price
from meshwright.plan_file import load_plan

PLAN = "plan.toml"


def slowdown_of(metrics: Path) -> float:
    """How many times longer than priced the steps of a run took.

    metrics: its metrics.jsonl; plan.toml lies beside it. The median leaves hiccups and compilation out.
    Raises PlanError where there is no plan beside it or no step was timed.
    """
    measured = step_seconds(metrics)
    plan = load_plan(metrics.with_name(PLAN))
    predicted = price(plan.model, catalog.load(plan.hardware), plan.workload, plan.layout)
    return measured / predicted.step_seconds


def step_seconds(metrics: Path) -> float:
    """The median step time of a metrics.jsonl. Raises PlanError for a file that has none."""
    lines = read_text(metrics, PlanError).splitlines()
    found = [seconds for number, line in enumerate(lines, 1) if (seconds := _seconds(metrics, number, line))]
    if not found:
        raise PlanError(f"--anchor {metrics}: no line has step_seconds; name the metrics.jsonl of mw train")
    return median(found)


def _seconds(metrics: Path, number: int, line: str) -> float | None:
    try:
        value = parse_json(line).get("step_seconds")
    except (ValueError, AttributeError) as error:
        raise PlanError(f"--anchor {metrics}: line {number} is no JSON object") from error
    usable = isinstance(value, int | float) and isfinite(value) and value > 0
    return float(value) if usable else None

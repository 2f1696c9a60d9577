"""How a user's own runs compare with their prices, and the constants that they move.

One run tells one factor for all steps:  slowdown = measured step time / predicted step time of its plan.

Several tell what they depend on. A few constants of the step (the shares of products, attention and links,
and what a host takes to launch) and the factor move to where

    sum over runs (log(predicted / measured) / RUN)^2  +  sum over constants ((moved - catalog) / spread)^2

is least, shares in logits and times in logarithms. Where the runs, each left out in turn, are not predicted
any better so, nothing moves.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from pathlib import Path
from statistics import median
from typing import NamedTuple

from meshwright.cost.ops import record_training
from meshwright.cost.recorder import Shape
from meshwright.cost.step import StepPricer
from meshwright.errors import PlanError
from meshwright.files import parse_json, read_text
from meshwright.hardware import catalog
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.train import price
from meshwright.plan_file import PLAN_FILE, load_plan
from meshwright.programs.efficiency import StepEfficiency
from meshwright.programs.program import at_odds
from meshwright.units import format_seconds

# The spread of a run about its price that no constant explains: of rows of one source, fitted with it.
RUN = 0.06
# Spreads of the constants about the catalog's, as between the chips and software of the published rows.
_SPREADS = {
    "matmul": 0.25,
    "attention": 0.4,
    "links": 0.3,
    "kernel_seconds": 0.4,
    "host_seconds": 0.4,
    "slowdown": 0.15,
}
_STEP_SIZE = 1e-3


class MeasuredRun(NamedTuple):
    """A measured step: of this model and workload, on this machine, under this layout."""

    config: ModelConfig
    hardware: Hardware
    workload: Workload
    layout: Layout
    seconds: float


@dataclass(frozen=True)
class Anchored:
    """What runs of one's own say. step: the constants that follow them. words: what moved, how far."""

    step: StepEfficiency
    words: tuple[str, ...]


def slowdown_of(run: MeasuredRun) -> float:
    """How many times longer than priced the steps of a run took."""
    return run.seconds / price(*run[:4]).step_seconds


def run_of(metrics: Path) -> MeasuredRun:
    """The run whose metrics.jsonl this is; plan.toml lies beside it.

    Its step is the median one, which leaves hiccups and compilation out. Raises PlanError where there is no
    plan beside it or no step was timed.
    """
    seconds = step_seconds(metrics)
    plan = load_plan(metrics.with_name(PLAN_FILE))
    return MeasuredRun(plan.model, catalog.load(plan.hardware), plan.workload, plan.layout, seconds)


def anchored(machine: Hardware, runs: Sequence[MeasuredRun]) -> Anchored:
    """The constants of `machine` as several runs on its chips tell them.

    Raises PlanError for a run on other chips.
    """
    for run in runs:
        if run.hardware.chip.name != machine.chip.name:
            raise PlanError(
                f"--anchor: a run on {run.hardware.chip.name} does not anchor {machine.chip.name}; "
                "leave it out"
            )
    step = machine.chip.step
    names = [name for name in _SPREADS if _moved(step, {name: 1.0}) != step]
    errors = [_log_error(run, step) for run in runs]
    pairs = zip(runs, errors, strict=True)
    slopes = [[_slope(run, step, name, own) for name in names] for run, own in pairs]
    left_out = []
    for place, run in enumerate(runs):
        others = [i for i in range(len(runs)) if i != place]
        by = _solve([errors[i] for i in others], [slopes[i] for i in others], names)
        left_out.append(_log_error(run, _moved(step, by)))
    before, after = (median(map(abs, some)) for some in (errors, left_out))
    said = f"{len(runs)} runs are {before:.1%} off their prices, and {after:.1%} each anchored by the others"
    if after >= before:
        return Anchored(step, (f"{said} (medians): no constant moves",))
    moved = _solve(errors, slopes, names)
    found = _moved(step, moved)
    return Anchored(found, (f"{said} (medians)", *_words(step, found, names)))


def _log_error(run: MeasuredRun, step: StepEfficiency) -> float:
    hardware = replace(run.hardware, chip=replace(run.hardware.chip, step=step))
    shape = Shape.of_microbatch(run.workload, run.layout)
    graph = record_training(run.config, hardware, run.layout, shape)
    return log(StepPricer(graph, run.layout, hardware).cost().seconds / run.seconds)


def _slope(run: MeasuredRun, step: StepEfficiency, name: str, error: float) -> float:
    return (_log_error(run, _moved(step, {name: _STEP_SIZE})) - error) / _STEP_SIZE


def _moved(step: StepEfficiency, by: dict[str, float]) -> StepEfficiency:
    """`step` with some constants moved in logits or logarithms; what is ideal stays so."""
    figures: dict[str, object] = {}
    for name, distance in by.items():
        value = getattr(step, name)
        if name in ("matmul", "links"):
            figures[name] = {key: at_odds(share, exp(distance)) for key, share in value.items()}
        elif name == "attention":
            figures[name] = at_odds(value, exp(distance))
        else:
            figures[name] = value * exp(distance)
    return replace(step, **figures)


def _solve(
    errors: Sequence[float], slopes: Sequence[Sequence[float]], names: Sequence[str]
) -> dict[str, float]:
    """How far each constant moves."""
    import numpy as np  # a tenth of a second, which the price of a single layout need not take

    matrix = np.array(slopes, dtype=float).reshape(len(errors), len(names)) / RUN
    prior = np.diag([1 / _SPREADS[name] ** 2 for name in names])
    found = np.linalg.solve(matrix.T @ matrix + prior, -matrix.T @ (np.array(errors) / RUN))
    return dict(zip(names, found.tolist(), strict=True))


def _words(before: StepEfficiency, after: StepEfficiency, names: Iterable[str]) -> Iterable[str]:
    """What moved so far that its digits tell."""
    for name in names:
        one, other = getattr(before, name), getattr(after, name)
        if isinstance(one, float):
            pairs = [(name, one, other)]
        else:
            pairs = [(f"{name}.{key}", one[key], other[key]) for key in one if one[key] != other[key]]
        show: Callable[[float], str] = format_seconds if name.endswith("_seconds") else "{:.3g}".format
        yield from (
            f"{key} moved from {show(was)} to {show(now)}"
            for key, was, now in pairs
            if show(was) != show(now)
        )


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
        raise PlanError(f"--anchor {metrics}: line {number} is not a JSON object") from error
    usable = isinstance(value, int | float) and isfinite(value) and value > 0
    return float(value) if usable else None

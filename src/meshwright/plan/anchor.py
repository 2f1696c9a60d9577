"""Fit a few constants of a chip's step to a user's own runs.

One run gives one factor for all steps:  slowdown = measured step time / predicted step time of its plan.

Several runs move a few constants of the step (the shares of products, attention and links, and a host's
launch times) and the factor. They take the values with the least

    sum over runs (log(predicted / measured) / RUN)^2  +  sum over constants ((moved - catalog) / spread)^2

with shares in logits and times in logarithms. If this does not predict each run better from the other runs,
the constants keep their values.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from pathlib import Path
from statistics import median
from typing import NamedTuple

from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.step_cost import StepPricer
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

# The spread of a run about its price that no constant explains, from published rows of one source.
RUN = 0.06
# Spreads of the constants about the catalog's, from the chips and software of the published rows.
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
    """A measured step of a model and workload, on a machine, under a layout."""

    config: ModelConfig
    hardware: Hardware
    workload: Workload
    layout: Layout
    seconds: float


@dataclass(frozen=True)
class Anchored:
    """Constants fitted to a user's runs. words: the constants that moved, and how far."""

    step: StepEfficiency
    words: tuple[str, ...]


def slowdown_of(run: MeasuredRun) -> float:
    """Measured over predicted step time of a run."""
    return run.seconds / price(*run[:4]).step_seconds


def run_of(metrics: Path) -> MeasuredRun:
    """Read the run of a metrics.jsonl and of the plan.toml in its folder.

    Takes the median step, which leaves out stalls and compilation. Raises PlanError if the folder has no plan
    or no step was timed.
    """
    seconds = step_seconds(metrics)
    plan = load_plan(metrics.with_name(PLAN_FILE))
    return MeasuredRun(plan.model, catalog.load(plan.hardware), plan.workload, plan.layout, seconds)


def anchored(machine: Hardware, runs: Sequence[MeasuredRun]) -> Anchored:
    """The constants of `machine`, fitted to several runs on its chips.

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
    summary = (
        f"{len(runs)} runs are {before:.1%} off their prices, and {after:.1%} each anchored by the others"
    )
    if after >= before:
        return Anchored(step, (f"{summary} (medians): no constant moves",))
    moved = _solve(errors, slopes, names)
    anchored = _moved(step, moved)
    return Anchored(anchored, (f"{summary} (medians)", *_words(step, anchored, names)))


def _log_error(run: MeasuredRun, step: StepEfficiency) -> float:
    hardware = replace(run.hardware, chip=replace(run.hardware.chip, step=step))
    shape = PassShape.of_microbatch(run.workload, run.layout)
    graph = record_training(run.config, hardware, run.layout, shape)
    return log(StepPricer(graph, run.layout, hardware).cost().seconds / run.seconds)


def _slope(run: MeasuredRun, step: StepEfficiency, name: str, error: float) -> float:
    return (_log_error(run, _moved(step, {name: _STEP_SIZE})) - error) / _STEP_SIZE


def _moved(step: StepEfficiency, by: dict[str, float]) -> StepEfficiency:
    """`step` with some constants moved in logits or logarithms; ideal values do not move."""
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
    """The distance that each constant moves."""
    # Imported here: it takes a tenth of a second, and the price of a single layout does not need it.
    import numpy as np

    matrix = np.array(slopes, dtype=float).reshape(len(errors), len(names)) / RUN
    prior = np.diag([1 / _SPREADS[name] ** 2 for name in names])
    solution = np.linalg.solve(matrix.T @ matrix + prior, -matrix.T @ (np.array(errors) / RUN))
    return dict(zip(names, solution.tolist(), strict=True))


def _words(before: StepEfficiency, after: StepEfficiency, names: Iterable[str]) -> Iterable[str]:
    """The constants whose printed figures changed."""
    for name in names:
        first, other = getattr(before, name), getattr(after, name)
        if isinstance(first, float):
            pairs = [(name, first, other)]
        else:
            pairs = [(f"{name}.{key}", first[key], other[key]) for key in first if first[key] != other[key]]
        show: Callable[[float], str] = format_seconds if name.endswith("_seconds") else "{:.3g}".format
        yield from (
            f"{key} moved from {show(was)} to {show(now)}"
            for key, was, now in pairs
            if show(was) != show(now)
        )


def step_seconds(metrics: Path) -> float:
    """The median step time of a metrics.jsonl. Raises PlanError for a file that has none."""
    lines = read_text(metrics, PlanError).splitlines()
    times = [seconds for number, line in enumerate(lines, 1) if (seconds := _seconds(metrics, number, line))]
    if not times:
        raise PlanError(f"--anchor {metrics}: no line has step_seconds; name the metrics.jsonl of mw train")
    return median(times)


def _seconds(metrics: Path, number: int, line: str) -> float | None:
    try:
        value = parse_json(line).get("step_seconds")
    except (ValueError, AttributeError) as error:
        raise PlanError(f"--anchor {metrics}: line {number} is not a JSON object") from error
    usable = isinstance(value, int | float) and isfinite(value) and value > 0
    return float(value) if usable else None

"""Machines corrected by measured runs."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.hardware.topology import Hardware
from meshwright.plan.anchor import anchored, run_of, slowdown_of


def anchored_by(machine: Hardware, files: Sequence[str | Path]) -> tuple[Hardware, tuple[str, ...]]:
    """The machine corrected by measured runs, and sentences about the corrections.

    files: each a run's metrics.jsonl with plan.toml next to it, or a CSV of runs. Raises PlanError for a file
    without a run, and for runs on other chips.
    """
    from meshwright.validate.anchor_runs import runs_of

    paths = [Path(file) for file in files]
    if not paths:
        return machine, ()
    runs = [run for path in paths for run in (runs_of(path) if path.suffix == ".csv" else [run_of(path)])]
    if len(runs) == 1:
        return machine.slowed(slowdown_of(runs[0])), ()
    correction = anchored(machine, runs)
    return machine.with_step(correction.step), correction.words

"""The machine that a user of the library or of the command line means."""

from collections.abc import Sequence
from pathlib import Path

from meshwright.hardware.chip import Chip
from meshwright.hardware.topology import Hardware
from meshwright.layout import DTYPES
from meshwright.plan.anchor import anchored, run_of, slowdown_of


def anchored_by(machine: Hardware, files: Sequence[str | Path]) -> tuple[Hardware, tuple[str, ...]]:
    """`machine` as runs of one's own were, and what they moved.

    files: each a run's metrics.jsonl with plan.toml beside it, or a CSV of runs. Raises PlanError for a file
    that has no run, and for runs on other chips.
    """
    from meshwright.validate.anchor_runs import runs_of

    paths = [Path(file) for file in files]
    if not paths:
        return machine, ()
    runs = [run for path in paths for run in (runs_of(path) if path.suffix == ".csv" else [run_of(path)])]
    if len(runs) == 1:
        return machine.slowed(slowdown_of(runs[0])), ()
    found = anchored(machine, runs)
    return machine.with_step(found.step), found.words


def default_dtypes(
    chip: Chip, weights_dtype: str | None, compute_dtype: str | None
) -> tuple[str, tuple[str, ...]]:
    """The type of the weights, and those to compute in. What a CPU is fast in only its figures know."""
    on_cpu = chip.kind == "cpu"
    weights = weights_dtype or ("f32" if on_cpu else "bf16")
    if compute_dtype:
        return weights, (compute_dtype,)
    if not on_cpu:
        return weights, ("bf16",)
    return weights, tuple(dtype for dtype in DTYPES if dtype in chip.flops_per_second)

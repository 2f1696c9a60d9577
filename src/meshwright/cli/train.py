"""mw train: runs a plan."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import Json, count_option, emit, note, progress
from meshwright.errors import PlanError
from meshwright.hardware import catalog
from meshwright.nn.devices import use_devices_of
from meshwright.plan_file import load_plan

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_INTERRUPTED = 130


@app.command()
def train(
    data: Annotated[str, typer.Option(help="A folder, a .txt, .py, .jsonl or .parquet file, or stdlib.")],
    plan_path: Annotated[
        Path | None, typer.Argument(metavar="[PLAN.toml]", help="From mw plan. Without: that of the run.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="The run's folder. [runs/MODEL]")] = None,
    steps: Annotated[int | None, count_option("--steps", help="Train up to this step. [one epoch]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    learning_rate: Annotated[float, typer.Option(help="At its peak, after the warm-up.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, help="Of the parameters and the order of the data.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a model with a plan's layout; the run's folder gets checkpoints and metrics.

    SIGINT and SIGTERM end it after the step at hand, with a checkpoint.

    \b
    mw train plan.toml --data stdlib --run runs/demo --steps 300
    """
    path = _plan_path(plan_path, run)
    plan, beside = load_plan(path), path.with_suffix(".json")
    figures = beside.read_text(encoding="utf-8") if beside.is_file() else None
    folder = run or Path("runs") / plan.model.name
    use_devices_of(catalog.load(plan.hardware))
    from meshwright.train.run import TrainingJob, carry_out

    job = TrainingJob(plan, figures, folder, data, steps, resume, learning_rate, seed)
    with progress() as report:
        result = carry_out(job, report)
    if as_json:
        emit(result.line)
    else:
        for sentence in result.sentences():
            print(sentence)
    if not result.finished:
        note(f"mw: stopped at step {result.line['step']}; go on with --resume")
        raise typer.Exit(_INTERRUPTED)


def _plan_path(path: Path | None, run: Path | None) -> Path:
    if path is not None:
        return path
    if run is None or not (run / "plan.toml").is_file():
        raise PlanError("no plan: name a PLAN.toml (mw plan train ... -o PLAN.toml), or a --run that has one")
    return run / "plan.toml"

"""mw train: training with a plan."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.command_options import OptionsOf, command
from meshwright.cli.console import JSON, emit, note, progress, show
from meshwright.cli.train_text import continue_text, of_checkpoint, of_text
from meshwright.errors import CheckpointError, DeviceError, MeshwrightError, PlanError
from meshwright.files import check_writable, held
from meshwright.hardware import catalog
from meshwright.native.processor import keep_freed_memory
from meshwright.nn.start.devices import use_devices_of
from meshwright.nn.start.processes import is_first, num_processes
from meshwright.options import flag_of, option
from meshwright.plan_file import PLAN_FILE, load_plan
from meshwright.reinforcement.settings import RL_SETTINGS, RlSettings, check_learns, rl_settings
from meshwright.train.documents import STDLIB, STORIES
from meshwright.train.job import RunOptions, TrainingJob, prepare_job
from meshwright.train.of_text import is_text
from meshwright.train.settings import Settings

if TYPE_CHECKING:
    from meshwright.audit.profile import OperationTime
    from meshwright.train.run import TrainingResult

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_INTERRUPTED = 130


@command(app)
def train(
    *,
    plan_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="[PLAN.toml|TEXT]",
            help="The plan, from mw plan, or a text to train a small model on here. [default: the run's]",
        ),
    ] = None,
    given: Annotated[dict[str, object], OptionsOf(Settings, given=True)],
    options: RunOptions,
    rl: bool = option(False, help="Learn from rewards of rollouts; --data has the prompts."),
    given_rl: Annotated[dict[str, object], OptionsOf(RlSettings, given=True)],
    as_json: bool = JSON,
) -> None:
    """Train a model with a plan's layout; write checkpoints and metrics to the run's folder.

    Checkpoints are written in the background. On SIGINT or SIGTERM the command finishes the current step,
    writes a checkpoint and ends. A resumed run keeps its plan, data and settings; it reports options that
    differ.

    \b
    mw train my.txt
    mw train plan.toml --data stdlib --run runs/demo --steps 300
    mw train --run runs/demo --resume
    mw train --from llama/ --lora 16 --base-dtype nf4 --data chats.jsonl --run runs/tuned
    mw train plan.toml --rl --from llama/ --data prompts.jsonl --reward rewards.py:score
    """
    if plan_path is not None and str(plan_path) in (STDLIB, STORIES) and not plan_path.exists():
        raise PlanError(f"{plan_path} is a corpus; write mw train plan.toml --data {plan_path}")
    text = plan_path if plan_path is not None and is_text(plan_path) else None
    if text is not None:
        plan_path = None
        plan, options = of_text(text, options, given)
    else:
        plan = load_plan(plan_path) if plan_path is not None else None
        if plan is None and (base := _new_base(options, given)) is not None:
            plan = of_checkpoint(base, options)
    job = prepare_job(plan, _plan_json(plan_path), options, given)
    learning = _rl_settings(job, plan_path, rl, options.resume, given_rl)
    check_writable(job.run / "settings.json")
    for sentence in job.notes:
        note(f"mw: {sentence}")
    # Processes of one run share its folder.
    with _own_stdout(), held(job.run) if is_first() else nullcontext():
        result, prints = _carry_out(job, learning)
    rows = _operations(job) if prints and job.profile is not None else []
    if prints and as_json:
        of_profile = {"operations": [asdict(row) for row in rows]} if rows else {}
        emit(result.line | of_profile, as_line=True)
    elif prints:
        if rows:
            from meshwright.report.terminal.tables import operations_table

            show(operations_table([asdict(row) for row in rows]))
        print("\n".join(result.sentences(*_collectives(rows))))
    if text is not None and prints and result.finished and not as_json:
        continue_text(job.run, text, int(result.line["step"]), result.line["step_seconds"])
    if not result.finished and result.out_of_time:
        note(f"mw: --time is over at step {result.line['step']}; go on with --resume")
    elif not result.finished:
        note(f"mw: stopped at step {result.line['step']}; go on with --resume")
        raise typer.Exit(_INTERRUPTED)


def _new_base(options: RunOptions, given: Mapping[str, object]) -> Path | None:
    """The checkpoint that a new run without a plan begins with; None for a run that has a plan.

    Raises CheckpointError if there is no such folder.
    """
    planned = options.run is not None and (options.run / PLAN_FILE).is_file()
    base = given.get("from_")
    if base is None or planned:
        return None
    if not Path(str(base)).is_dir():
        raise CheckpointError(
            f"--from {base}: there is no such folder; it takes a Hugging Face model with its weights, from "
            "hf download OWNER/NAME --local-dir NAME"
        )
    return Path(str(base))


def _operations(job: TrainingJob) -> list["OperationTime"]:
    """Measured and planned times of operations in the traced steps; none if the run ended before them."""
    from meshwright.audit.profile import operation_times
    from meshwright.train.profiling import FOLDER

    assert job.profile is not None, "only a run that traces steps has their times"
    if not (job.run / FOLDER).is_dir():
        note(f"mw: steps {job.profile[0]} to {job.profile[1]} were not run; nothing was traced")
        return []
    return operation_times(job.run / FOLDER, job.plan)


def _collectives(rows: list["OperationTime"]) -> tuple[float | None, float | None]:
    """Seconds in collectives of a step, measured and planned."""
    moved = [row for row in rows if row.kind == "collective"]
    if not rows:
        return None, None
    return sum(row.measured_seconds for row in moved), sum(row.planned_seconds or 0.0 for row in moved)


def _rl_settings(
    job: TrainingJob, plan_path: Path | None, rl: bool, resumes: bool, given: dict[str, object]
) -> RlSettings | None:
    """The settings of reinforcement learning; None for training on a corpus.

    resumes: whether --resume is given; the run may have no checkpoint yet. Raises MeshwrightError for options
    of --rl without it, and for options of a corpus with it.
    """
    goes_on = resumes and (job.run / RL_SETTINGS).is_file()
    if not (rl or goes_on):
        if given:
            raise MeshwrightError(f"{flag_of(next(iter(given)))} is of --rl, which is not given")
        return None
    if not isinstance(job.settings.data, str) or job.settings.eval:
        raise MeshwrightError("--rl takes one --data, a .jsonl file of prompts, and no --eval")
    generate_plan = plan_path.with_suffix(".generate.toml") if plan_path is not None else None
    if generate_plan is not None and generate_plan.is_file() and not goes_on:
        given = {"generate_plan": str(generate_plan)} | given
    settings = rl_settings(job.run, given, resumes=resumes)
    check_learns(job.plan, settings)
    return settings


def _carry_out(job: TrainingJob, learning: RlSettings | None) -> tuple["TrainingResult", bool]:
    """The result, and whether this process prints it."""
    hardware = catalog.load(job.plan.hardware)
    if hardware.chip.platform.virtual:
        keep_freed_memory()  # before JAX starts its threads
    use_devices_of(hardware)
    import jax

    try:
        with progress() as report:
            if learning is None:
                from meshwright.train.run import carry_out

                return carry_out(job, report), jax.process_index() == 0
            from meshwright.reinforcement.rl_run import carry_out_rl

            return carry_out_rl(job, learning, report), True
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = str(error).splitlines()[0]
        raise DeviceError(f"process {jax.process_index()} lost the others: {reason}") from error


@contextmanager
def _own_stdout() -> Iterator[None]:
    """Keep stdout for the result: gloo (jaxlib 0.10) prints to it, from C++, when processes connect."""
    if num_processes() == 1:
        yield
        return
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(ours, 1)
        os.close(ours)


def _plan_json(plan_path: Path | None) -> str | None:
    """The text of the plan's .json file, which a report reads."""
    path = plan_path.with_suffix(".json") if plan_path is not None else None
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else None

"""mw train: runs a plan."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.common import (
    Json,
    count_option,
    emit,
    note,
    number_option,
    progress,
    show,
    whole_option,
)
from meshwright.errors import DeviceError, MeshwrightError
from meshwright.files import check_writable
from meshwright.hardware import catalog
from meshwright.nn.start.devices import use_devices_of
from meshwright.nn.start.processes import num_processes
from meshwright.plan_file import load_plan
from meshwright.train.job import TrainingJob, prepare_job

if TYPE_CHECKING:
    from meshwright.audit.profile import OperationTime
    from meshwright.train.run import TrainingResult

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_INTERRUPTED = 130


@app.command()
def train(
    plan_path: Annotated[
        Path | None,
        typer.Argument(metavar="[PLAN.toml]", help="The plan, from mw plan. [default: the run's]"),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH[:WEIGHT]",
            help="A folder, a .txt, .py, .jsonl or .parquet file, or stdlib; repeat to mix by weight.",
        ),
    ] = None,
    eval_: Annotated[
        list[str] | None,
        typer.Option("--eval", metavar="NAME=PATH", help="Another evaluation set; repeatable."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer.json or a folder with one. [default: trained on the data]")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="DIR", help="Fine-tune this Hugging Face checkpoint. [default: fresh weights]"
        ),
    ] = None,
    lora: Annotated[
        int | None,
        count_option("--lora", help="Train only LoRA adapters of this rank. [default: all weights]"),
    ] = None,
    lora_alpha: Annotated[
        float | None,
        number_option(
            "--lora-alpha", help="LoRA alpha: adapters add alpha / rank (x A) B. [default: the rank]"
        ),
    ] = None,
    mask_documents: Annotated[
        bool | None,
        typer.Option("--mask-documents", help="Keep attention within each document (chats always do)."),
    ] = None,
    bad_data: Annotated[
        str | None,
        typer.Option(metavar="skip|stop", help="What to do with a damaged file or line. [default: stop]"),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="The run's folder. [default: runs/MODEL]")] = None,
    steps: Annotated[
        int | None, count_option("--steps", help="Train up to this step. [default: one epoch]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint with the run's settings.")
    ] = False,
    learning_rate: Annotated[
        float | None,
        number_option("--learning-rate", help="Peak learning rate after the warm-up. [default: 1e-3]"),
    ] = None,
    schedule_steps: Annotated[
        int | None, count_option("--schedule-steps", help="Step at which the decay ends. [default: --steps]")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="cosine|wsd|constant", help="Learning-rate schedule after the warm-up. [default: cosine]"
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="adamw|adafactor|lion|muon", help="The optimizer. [default: the plan's]"),
    ] = None,
    weight_decay: Annotated[
        float | None,
        number_option(
            "--weight-decay", help="Weight decay of matrices, times the learning rate. [default: 0.1]"
        ),
    ] = None,
    clip_norm: Annotated[
        float | None, number_option("--clip-norm", help="Clip gradients to this global norm. [default: 1]")
    ] = None,
    z_loss: Annotated[
        float | None,
        number_option("--z-loss", help="Weight of log(sum exp(logits))^2 in the loss. [default: 0]"),
    ] = None,
    balance_loss: Annotated[
        float | None,
        number_option(
            "--balance-loss", help="Weight of the load-balancing loss of each router. [default: 0]"
        ),
    ] = None,
    router_z_loss: Annotated[
        float | None,
        number_option("--router-z-loss", help="Weight of the z-loss of each router. [default: 0]"),
    ] = None,
    seed: Annotated[
        int | None,
        whole_option(
            "--seed",
            least=0,
            most=2**32 - 1,
            help="Seed of the parameters and of the order of the data. [default: 0]",
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        count_option("--checkpoint-every", help="Steps between checkpoints. [default: only by time]"),
    ] = None,
    checkpoint_minutes: Annotated[
        float | None,
        number_option(
            "--checkpoint-minutes", metavar="MINUTES", help="Minutes between checkpoints. [default: 10]"
        ),
    ] = None,
    keep: Annotated[
        int | None,
        whole_option(
            "--keep", help="How many of the last checkpoints to keep; the best one stays too. [default: 2]"
        ),
    ] = None,
    on_spike: Annotated[
        str | None,
        typer.Option(
            metavar="skip|stop", help="When the loss spikes: skip the batch, or stop. [default: skip]"
        ),
    ] = None,
    tensorboard: Annotated[
        bool | None, typer.Option("--tensorboard", help="Also write the metrics for TensorBoard.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FIRST:LAST", help="Trace these steps and print where their time went."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model with a plan's layout; write checkpoints and metrics to the run's folder.

    Checkpoints are written in the background. On SIGINT or SIGTERM the command finishes the current step,
    writes a checkpoint and ends. A resumed run keeps its plan, data and settings; it reports options that
    differ.

    \b
    mw train plan.toml --data stdlib --run runs/demo --steps 300
    mw train --run runs/demo --resume
    mw train plan.toml --from llama/ --lora 16 --data chats.jsonl --run runs/tuned
    """
    given = {
        "data": (data[0] if len(data) == 1 else tuple(data)) if data else None,
        "eval": tuple(eval_) if eval_ else None,
        "tokenizer": tokenizer,
        "from_": from_,
        "lora": lora,
        "lora_alpha": lora_alpha,
        "mask_documents": mask_documents,
        "bad_data": bad_data,
        "steps": steps,
        "schedule_steps": schedule_steps,
        "learning_rate": learning_rate,
        "schedule": schedule,
        "optimizer": optimizer,
        "weight_decay": weight_decay,
        "clip_norm": clip_norm,
        "z_loss": z_loss,
        "balance_loss": balance_loss,
        "router_z_loss": router_z_loss,
        "seed": seed,
        "checkpoint_every": checkpoint_every,
        "checkpoint_minutes": checkpoint_minutes,
        "keep": keep,
        "on_spike": on_spike,
        "tensorboard": tensorboard,
    }
    plan = load_plan(plan_path) if plan_path is not None else None
    traced = _steps(profile) if profile is not None else None
    job = prepare_job(plan, _figures(plan_path), run, given, resume=resume, profile=traced)
    check_writable(job.run / "settings.json")
    for sentence in job.notes:
        note(f"mw: {sentence}")
    with _own_stdout():
        result, speaks = _carry_out(job)
    rows = _operations(job) if speaks and traced is not None else []
    if speaks and as_json:
        of_profile = {"operations": [asdict(row) for row in rows]} if rows else {}
        emit(result.line | of_profile, as_line=True)
    elif speaks:
        if rows:
            from meshwright.report.tables import operations_table

            show(operations_table([asdict(row) for row in rows]))
        print("\n".join(result.sentences(*_collectives(rows))))
    if not result.finished:
        note(f"mw: stopped at step {result.line['step']}; go on with --resume")
        raise typer.Exit(_INTERRUPTED)


def _steps(written: str) -> tuple[int, int]:
    """The first and the last step of `FIRST:LAST`. Raises MeshwrightError where it is none."""
    match = re.fullmatch(r"(\d+):(\d+)", written)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 1 <= first <= last:
        raise MeshwrightError(f"--profile {written}: write FIRST:LAST, the steps to trace, such as 10:15")
    return first, last


def _operations(job: TrainingJob) -> list["OperationTime"]:
    """The times of the operations of the traced steps; none where the run had none of those steps."""
    from meshwright.audit.profile import operation_times
    from meshwright.train.profiling import FOLDER

    assert job.profile is not None, "asked of a run that traces"
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


def _carry_out(job: TrainingJob) -> tuple["TrainingResult", bool]:
    """The outcome, and whether this process is the one that prints it."""
    use_devices_of(catalog.load(job.plan.hardware))
    import jax

    from meshwright.train.run import carry_out

    try:
        with progress() as report:
            return carry_out(job, report), jax.process_index() == 0
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = str(error).splitlines()[0]
        raise DeviceError(f"process {jax.process_index()} lost the others: {reason}") from error


@contextmanager
def _own_stdout() -> Iterator[None]:
    """Keeps stdout for the result: gloo (jaxlib 0.10) prints there, from C++, when processes connect."""
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


def _figures(plan_path: Path | None) -> str | None:
    """The text of plan.json beside the plan, which a report reads."""
    beside = plan_path.with_suffix(".json") if plan_path is not None else None
    return beside.read_text(encoding="utf-8") if beside is not None and beside.is_file() else None

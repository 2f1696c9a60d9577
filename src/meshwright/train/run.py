"""Training from a plan, once JAX has its devices: corpus, step, loop, and a folder that can be served.

run/plan.toml        the plan, and plan.json where it lies beside it
run/config.json      the model as Hugging Face writes it
run/tokenizer.json   the corpus's tokenizer
run/data/            the packed corpus
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from meshwright.errors import CheckpointError, PlanError
from meshwright.files import write_whole
from meshwright.hardware import catalog
from meshwright.models.config import ModelConfig
from meshwright.models.hf import to_hf
from meshwright.nn import checkpoint
from meshwright.plan_file import Plan, load_plan, save_plan
from meshwright.train import loop
from meshwright.train.data import Corpus, prepare_corpus
from meshwright.train.metrics import Line
from meshwright.train.optimizer import OptimizerConfig
from meshwright.train.step import CompiledStep
from meshwright.units import format_count, format_seconds

# Shares of the run: a tenth of it warms up; it is validated five times.
_WARMUP_SHARE, _MAX_WARMUP = 0.1, 2000
_NUM_VALIDATIONS = 5
_LOG_EVERY = 10

Progress = Callable[[str, float | None], None]  # (what is being done, fraction done or None)


@dataclass(frozen=True)
class TrainingJob:
    """What to train and where. source: as for `read_documents`. num_steps: None is one epoch.

    figures: the text of the plan's plan.json, if there is one.
    """

    plan: Plan
    figures: str | None
    run: Path
    source: str
    num_steps: int | None
    resume: bool
    peak_learning_rate: float
    seed: int


@dataclass(frozen=True)
class TrainingResult:
    """The last line of the metrics, and what it is to be held against."""

    line: Line
    corpus: Corpus
    run: Path
    finished: bool

    def sentences(self) -> list[str]:
        """The outcome in a few lines for people."""
        measured, planned = self.line["step_seconds"], self.line["planned_step_seconds"]
        found = [f"step {self.line['step']}: training loss {self.line['loss']:.3f} nats a token"]
        if "validation_loss" in self.line:
            found.append(
                f"validation loss {self.line['validation_loss']:.3f} nats a token; "
                f"unigram entropy {self.corpus.unigram_entropy:.3f}"
            )
        if measured:
            speed = f"{format_count(self.line['tokens_per_second'])} tokens/s, MFU {self.line['mfu']:.1%}"
            found.append(f"step time {format_seconds(measured)} measured; {speed}")
        if measured and planned:
            found.append(
                f"step time {format_seconds(planned)} planned; measured / planned {measured / planned:.2f}"
            )
        return [*found, f"run in {self.run}"]


def carry_out(job: TrainingJob, report: Progress) -> TrainingResult:
    """The outcome of training; the run's folder holds all that serving and a report need.

    Raises CheckpointError where the folder holds a run and `resume` is off, PlanError where the run
    is of another model; nothing of an earlier run is touched then.
    """
    _check_folder(job)
    plan, model = job.plan, job.plan.model
    corpus = prepare_corpus(
        job.source,
        job.run / "data",
        vocab_size=model.vocab_size,
        seq_len=plan.workload.seq_len,
        progress=report,
    )
    num_steps = job.num_steps or max(1, corpus.num_train_tokens // plan.workload.num_tokens)
    optimizer = OptimizerConfig(
        peak_learning_rate=job.peak_learning_rate,
        warmup_steps=min(int(num_steps * _WARMUP_SHARE), _MAX_WARMUP),
        total_steps=num_steps,
    )
    chip = catalog.load(plan.hardware).chip
    step = CompiledStep(
        model,
        plan.layout,
        plan.workload,
        optimizer,
        chip_flops_per_second=chip.flops(plan.layout.compute_dtype),
    )
    _describe(job, corpus)
    report("compiling the step", None)
    line = loop.train(
        job.run,
        step,
        corpus,
        optimizer,
        num_steps=num_steps,
        log_every=_LOG_EVERY,
        eval_every=max(num_steps // _NUM_VALIDATIONS, 1),
        resume=job.resume,
        planned_step_seconds=plan.planned_step_seconds,
        on_step=lambda line: report(_status(line, num_steps), line["step"] / num_steps),
        seed=job.seed,
    )
    return TrainingResult(line, corpus, job.run, finished=line["step"] >= num_steps)


def _status(line: Line, num_steps: int) -> str:
    text = f"step {line['step']}/{num_steps}  loss {line['loss']:.3f}"
    if line["step_seconds"]:
        text += f"  {format_seconds(line['step_seconds'])} a step"
    if line["step_seconds"] and line["planned_step_seconds"]:
        text += f" (planned {format_seconds(line['planned_step_seconds'])})"
    return text


def _check_folder(job: TrainingJob) -> None:
    checkpoints = job.run / loop.CHECKPOINTS
    step = checkpoint.latest_step(checkpoints)
    if step is not None and not job.resume:
        raise CheckpointError(
            f"checkpoint: {checkpoints} already holds step {step}; go on from there with --resume, "
            "or name another --run"
        )
    written = job.run / "plan.toml"
    if step is not None and written.is_file():
        _check_same_model(job.run, load_plan(written).model, job.plan.model)


def _check_same_model(run: Path, trained: ModelConfig, planned: ModelConfig) -> None:
    for field in fields(ModelConfig):
        there, here = getattr(trained, field.name), getattr(planned, field.name)
        if there != here:
            raise PlanError(
                f"run {run}: its model has {field.name} = {there} and the plan's has {here}; "
                "name another --run"
            )


def _describe(job: TrainingJob, corpus: Corpus) -> None:
    """Writes what says of which model, layout and tokenizer the checkpoints are."""
    save_plan(job.plan, job.run / "plan.toml")
    if job.figures:
        write_whole(job.run / "plan.json", job.figures)
    written = to_hf(job.plan.model) | {"eos_token_id": corpus.end_of_text_id}
    write_whole(job.run / "config.json", json.dumps(written, indent=2) + "\n")
    shutil.copyfile(corpus.tokenizer_path, job.run / "tokenizer.json")

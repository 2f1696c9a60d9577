"""Training from a plan, after JAX has its devices: corpus, step, loop, and a folder that can be served.

run/plan.toml        the plan, and its figures as plan.json if it has any
run/settings.json    the settings of training
run/config.json      the model in Hugging Face's format, if they have its architecture
run/tokenizer.json   the corpus's tokenizer, with its other files from a fine-tuned checkpoint
run/data/            the packed corpus
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import jax

from meshwright.errors import DataError
from meshwright.files import write_whole
from meshwright.hardware import catalog
from meshwright.models.model_files import config_json
from meshwright.nn.start.processes import wait_for_all
from meshwright.plan_file import PLAN_FILE, save_plan
from meshwright.progress import Progress
from meshwright.train import loop, profiling
from meshwright.train.bpe import BESIDE_TOKENIZER, tokenizer_file
from meshwright.train.corpus import Corpus, prepare_corpus
from meshwright.train.job import TrainingJob
from meshwright.train.metrics_log import Line
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.reasons import Waits, machine_load, why_not_as_planned
from meshwright.train.settings import Settings, evaluation_sets, num_steps, save_settings
from meshwright.train.stage_step import training_step
from meshwright.train.tensorboard_log import Board
from meshwright.units import format_count, format_seconds

# The learning rate warms up over a tenth of the run, and there are five validations.
_WARMUP_SHARE, _MAX_WARMUP = 0.1, 2000
_NUM_VALIDATIONS = 5
_LOG_EVERY = 10


class RunData(loop.Source, Protocol):
    """The examples of a run, with their tokenizer."""

    @property
    def end_of_text_id(self) -> int: ...
    @property
    def tokenizer_path(self) -> Path: ...


@dataclass(frozen=True)
class TrainingResult:
    """The last line of the metrics, with causes of waiting.

    unigram_entropy: of the corpus, in nats. out_of_time: the run has lasted as long as --time allows.
    """

    line: Line
    unigram_entropy: float | None
    run: Path
    finished: bool
    waits: Waits
    out_of_time: bool = False

    def sentences(
        self, collectives: float | None = None, planned_collectives: float | None = None
    ) -> list[str]:
        """The result in a few lines for the user.

        collectives, planned_collectives: seconds in collectives per step, by a profile and as planned.
        """
        measured, planned = self.line["step_seconds"], self.line["planned_step_seconds"]
        unit = "" if "reward" in self.line else " nats per token"
        lines = [f"step {self.line['step']}: training loss {self.line['loss']:.3f}{unit}"]
        if "reward" in self.line:
            lines.append(
                f"reward {self.line['reward']:.3f}; log-probabilities of engine and trainer differ by at "
                f"most {self.line['logprob_difference']:.1e}"
            )
        if "validation_loss" in self.line:
            lines.append(
                f"validation loss {self.line['validation_loss']:.3f} nats per token; "
                f"unigram entropy {self.unigram_entropy or 0:.3f}"
            )
        for name, loss in self.line.get("evaluation_losses", {}).items():
            lines.append(f"{name}: {loss:.3f} nats per token")
        if measured:
            speed = f"{format_count(self.line['tokens_per_second'])} tokens/s, MFU {self.line['mfu']:.1%}"
            lines.append(f"step time {format_seconds(measured)} measured; {speed}")
        if measured and planned:
            lines.append(
                f"step time {format_seconds(planned)} planned; measured / planned {measured / planned:.2f}"
            )
            waits = replace(self.waits, collectives=collectives)
            if why := why_not_as_planned(measured, planned, waits, planned_collectives):
                lines.append(why)
        return [*lines, f"run in {self.run}"]


def carry_out(job: TrainingJob, report: Progress) -> TrainingResult:
    """Train, and leave a folder with all files for serving and a report.

    The folder of a resumed run is written only after its checkpoint is restored and checked. Raises errors of
    `prepare_corpus`, `loop.begin` and `loop.train`.
    """
    corpus = _corpus(job, report)
    plan, settings = job.plan, _with_length(job, corpus)
    step = training_step(
        plan.model,
        plan.layout,
        plan.workload,
        optimizer_config(settings),
        chip_flops_per_second=catalog.load(plan.hardware).chip.flops(plan.layout.precision.compute_dtype),
        options=plan.compiler,
        start_from=Path(settings.from_) if settings.from_ else None,
        masked=corpus.masked,
    )
    return learned(job, settings, step, corpus, report, unigram_entropy=corpus.unigram_entropy)


def optimizer_config(settings: Settings) -> OptimizerConfig:
    """The optimizer of a run whose length is known."""
    schedule_steps = settings.schedule_steps
    assert schedule_steps is not None, "the length is known"
    return OptimizerConfig(
        peak_learning_rate=settings.learning_rate,
        warmup_steps=min(int(schedule_steps * _WARMUP_SHARE), _MAX_WARMUP),
        total_steps=schedule_steps,
        schedule=settings.schedule,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        z_loss=settings.z_loss,
        balance_loss=settings.balance_loss,
        router_z_loss=settings.router_z_loss,
        draft_weight=settings.draft_weight,
    )


def learned(
    job: TrainingJob,
    settings: Settings,
    step: Any,
    corpus: RunData,
    report: Progress,
    *,
    unigram_entropy: float | None = None,
    log_every: int = _LOG_EVERY,
    finds_spikes: bool = True,
    on_begin: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Run the loop of `step` over `corpus`, and write the files of the run's folder.

    settings: with the number of steps. unigram_entropy: of the corpus. finds_spikes: see `loop.Rhythm`.
    on_begin: called when the folder is written.
    """
    plan, last_step, schedule_steps = job.plan, settings.steps, settings.schedule_steps
    assert last_step is not None and schedule_steps is not None, "the length is known"
    start = loop.begin(job.run, step, corpus, seed=settings.seed, resume=job.resume)
    if jax.process_index() == 0:
        _describe(job, settings, corpus)
        on_begin()
    report("compiling the step", None)
    inputs: list[float] = []
    board = Board(job.run, start.step) if settings.tensorboard and jax.process_index() == 0 else None

    def on_step(line: Line) -> None:
        report(_status(line, last_step), line["step"] / last_step)
        if board is not None and (line["step"] % log_every == 0 or "validation_loss" in line):
            board.write(line)

    begun = time.monotonic()
    line = loop.train(
        job.run,
        step,
        corpus,
        start,
        num_steps=last_step,
        rhythm=loop.Rhythm(
            log_every=log_every,
            eval_every=max(schedule_steps // _NUM_VALIDATIONS, 1),
            checkpoint_every=settings.checkpoint_every,
            save_seconds=60 * settings.checkpoint_minutes,
            run_seconds=job.seconds,
            keep=settings.keep,
            on_spike=settings.on_spike if finds_spikes else "stop",
            finds_spikes=finds_spikes,
            profile=job.profile,
        ),
        planned_step_seconds=plan.planned_step_seconds if finds_spikes else None,
        on_step=on_step,
        inputs=inputs,
    )
    if board is not None:
        board.close()
    if job.profile is not None and jax.process_index() == 0 and (job.run / profiling.FOLDER).is_dir():
        report("compiling the step once more, to name the traced operations", None)
        profiling.save_hlo(step.program_texts(), job.run / profiling.FOLDER)
    waits = Waits(median(inputs or [0.0]), step.num_compiled, load=machine_load())
    return TrainingResult(
        line,
        unigram_entropy,
        job.run,
        line["step"] >= last_step,
        waits,
        time.monotonic() - begun >= job.seconds,
    )


def _corpus(job: TrainingJob, report: Progress) -> Corpus:
    """The packed data of a resumed run if present, otherwise packed from the source.

    Process 0 packs and all processes read. Raises DataError if they do not share the folder.
    """
    directory = job.run / "data"
    if not (job.resume and (directory / "corpus.json").is_file()) and jax.process_index() == 0:
        prepare_corpus(
            job.settings.data,
            directory,
            vocab_size=job.plan.model.vocab_size,
            seq_len=job.plan.workload.seq_len,
            tokenizer=given_tokenizer(job.settings),
            bad_data=job.settings.bad_data,
            mask_documents=job.settings.mask_documents,
            evaluations=evaluation_sets(job.settings.eval),
            progress=report,
        )
    wait_for_all("the corpus is packed")
    try:
        return Corpus.load(directory)
    except DataError as error:
        if jax.process_index() == 0 or directory.exists():
            raise
        raise DataError(
            f"run {job.run}: process {jax.process_index()} does not see the folder that process 0 writes;"
            " name a --run on a file system that all share"
        ) from error


def given_tokenizer(settings: Settings) -> Path | None:
    """The tokenizer.json that the settings name; None if it is trained on the data."""
    given = settings.tokenizer or settings.from_
    return tokenizer_file(given) if given else None


def _with_length(job: TrainingJob, corpus: Corpus) -> Settings:
    """The settings with the number of steps."""
    epoch = max(1, corpus.num_train_tokens // job.plan.workload.num_tokens)
    steps = num_steps(job.settings, epoch)
    return replace(job.settings, steps=steps, schedule_steps=job.settings.schedule_steps or steps)


def _status(line: Line, num_steps: int) -> str:
    text = f"step {line['step']}/{num_steps}  loss {line['loss']:.3f}"
    if "reward" in line:
        text += f"  reward {line['reward']:.3f}"
    if line["step_seconds"]:
        text += f"  {format_seconds(line['step_seconds'])} per step"
    if line["step_seconds"] and line["planned_step_seconds"]:
        text += f" (planned {format_seconds(line['planned_step_seconds'])})"
    if line["mfu"]:
        text += f"  MFU {line['mfu']:.1%}"
    return text


def _describe(job: TrainingJob, settings: Settings, corpus: RunData) -> None:
    """Write the plan, settings, model and tokenizer of the checkpoints to the run's folder."""
    save_plan(job.plan, job.run / PLAN_FILE)
    save_settings(settings, job.run)
    if job.figures:
        write_whole(job.run / "plan.json", job.figures)
    written = config_json(job.plan.model.base) | {"eos_token_id": corpus.end_of_text_id}
    write_whole(job.run / "config.json", json.dumps(written, indent=2) + "\n")
    shutil.copyfile(corpus.tokenizer_path, job.run / "tokenizer.json")
    given = given_tokenizer(settings)
    for name in BESIDE_TOKENIZER:
        if given is not None and (given.parent / name).is_file():
            shutil.copyfile(given.parent / name, job.run / name)

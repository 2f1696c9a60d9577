"""The training loop, with steps dispatched one ahead, metrics, validation and checkpoints.

run/metrics.jsonl         see `metrics`
run/checkpoints/<step>/   see `nn.checkpoint`
"""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import numpy as np

from meshwright.errors import CheckpointError, DataError, MeshwrightError
from meshwright.nn.files import checkpoint, checkpoint_files
from meshwright.nn.files.checkpoint_files import CHECKPOINTS
from meshwright.nn.start.device_mesh import default_platform
from meshwright.train import profiling
from meshwright.train.corpus import VALIDATION
from meshwright.train.metrics_log import Line, Reporter, read_lines, truncate
from meshwright.train.profiling import Profiler
from meshwright.train.row_codes import is_counted
from meshwright.train.stopping import Agreement, stop_signals
from meshwright.train.trend import LossTrend

METRICS_FILE = "metrics.jsonl"

# Batches of a validation during the run; the last validation reads the whole split.
_EVAL_BATCHES = 8
# After this number of skipped batches since a checkpoint the run ends: then the data is not the cause.
_MOST_SKIPPED = 5


class Source(Protocol):
    """The examples of a run: a packed corpus, or prompts.

    validations: the splits that a validation reads; the first has the name VALIDATION. evaluations: names of
    the others.
    """

    @property
    def directory(self) -> Path: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def validations(self) -> Sequence[str]: ...
    @property
    def evaluations(self) -> Collection[str]: ...

    def batches(self, batch_sequences: int, seed: int, rows: Sequence[int]) -> "Examples":
        """The batches of a seed; rows: the numbers of a batch's examples that this process takes."""
        ...

    def rows(self, split: str) -> np.ndarray:
        """The rows [n, T+1] of a split."""
        ...


class Examples(Protocol):
    """Batches by the global index of their first example."""

    def at(self, example: int) -> Any: ...


class TrainStep(Protocol):
    """A compiled training step, with figures for the loop.

    tokens_per_step: tokens that one step learns from. flops_per_step: model FLOPs of one step over all
    devices. peak_flops_per_second: of the whole machine. State is a pytree of arrays; `step` may donate it.
    Tokens are int32[n, T+1], the rows of the
    batch that this process's devices hold. own_rows: the numbers of these rows, ascending.
    """

    @property
    def batch_sequences(self) -> int: ...
    @property
    def own_rows(self) -> Sequence[int]: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def tokens_per_step(self) -> int: ...
    @property
    def flops_per_step(self) -> float: ...
    @property
    def peak_flops_per_second(self) -> float: ...

    def init(self, seed: int) -> Any: ...

    def abstract_state(self) -> Any:
        """The saved state as jax.ShapeDtypeStruct with shardings."""
        ...

    def saved(self, state: Any) -> Any:
        """The state to save, with names that are equal under all layouts."""
        ...

    def placed(self, saved: Any) -> Any:
        """The state from a restored one."""
        ...

    def step(self, state: Any, tokens: Any) -> tuple[Any, dict[str, Any]]:
        """(next state, {"loss", "grad_norm", "learning_rate", ...}), dispatched without waiting."""
        ...

    def evaluate(self, state: Any, tokens: np.ndarray) -> jax.Array:
        """Mean nats per token of the batch."""
        ...


@dataclass(frozen=True)
class Start:
    """The start of training: after `step` steps, at the example `next_example` of the data.

    skipped: examples [begin, end) that are left out. trend: of the loss so far. best_loss: the lowest
    validation loss so far.
    """

    state: Any
    step: int
    next_example: int
    seed: int
    trend: LossTrend = field(default_factory=LossTrend)
    skipped: tuple[tuple[int, int], ...] = ()
    best_loss: float = math.inf

    def examples(self, batch_sequences: int) -> Iterator[int]:
        """The first example of each following batch."""
        begin = self.next_example
        while True:
            over = [end for first, end in self.skipped if first < begin + batch_sequences and begin < end]
            if over:
                begin = max(over)
                continue
            yield begin
            begin += batch_sequences


@dataclass(frozen=True)
class Rhythm:
    """Intervals of the loop, in steps; 0 is for the end only.

    save_seconds: time between checkpoints, in addition to checkpoint_every. run_seconds: time after which the
    run ends with a checkpoint. keep: the number of last checkpoints to keep; the one with the lowest
    validation loss is kept too. on_spike: whether the batch of a loss that is not finite, or a spike, is
    skipped, or the run ends. finds_spikes: whether a loss far above its trend is a spike. profile: the first
    and the last step to trace into run/profile.
    """

    log_every: int = 10
    eval_every: int = 0
    checkpoint_every: int = 0
    save_seconds: float = math.inf
    run_seconds: float = math.inf
    keep: int = 2
    on_spike: Literal["skip", "stop"] = "skip"
    finds_spikes: bool = True
    profile: tuple[int, int] | None = None


def begin(run: Path, step: TrainStep, corpus: Source, *, seed: int = 0, resume: bool = False) -> Start:
    """The start of a new run, or with `resume` its last sound checkpoint; writes nothing.

    Raises DataError for a corpus that does not fit the plan or the checkpoint. Raises CheckpointError for a
    new run in a folder with checkpoints, and to resume without a sound one.
    """
    if corpus.seq_len != step.seq_len:
        raise DataError(
            f"corpus {corpus.directory}: its rows are of T = {corpus.seq_len} tokens, the plan's of"
            f" {step.seq_len}; prepare it again with {step.seq_len}"
        )
    if resume:
        return _restored(run, step, corpus)
    existing = checkpoint_files.checkpoint_steps(run / CHECKPOINTS)
    if existing:
        raise CheckpointError(
            f"checkpoint: {run / CHECKPOINTS} already holds step {existing[-1]};"
            " go on from there with --resume, or name another run"
        )
    return Start(step.init(seed), 0, 0, seed)


def train(
    run: Path,
    step: TrainStep,
    corpus: Source,
    start: Start,
    *,
    num_steps: int,
    rhythm: Rhythm | None = None,
    planned_step_seconds: float | None = None,
    on_step: Callable[[Line], None] | None = None,
    inputs: list[float] | None = None,
) -> Line:
    """The last line of run/metrics.jsonl, after training up to step `num_steps`.

    A line: step, loss (nats/token), grad_norm, learning_rate, step_seconds, planned_step_seconds,
    tokens_per_second, mfu, after a validation validation_loss and evaluation_losses, and skipped if there are
    skipped examples. step_seconds is the median wall time of the steps since the last line, without the
    process's first step (it compiles), validation and saving; None without such a step. mfu =
    flops_per_step / (step_seconds * peak_flops_per_second).

    Lines are written every log_every steps, at every validation and at the end; on_step gets one every step.
    inputs: gets the seconds that each step waited for its batch. The validation at the end reads the whole
    split. Checkpoints are written in the background, at the rhythm's times, after the best validation so far,
    and at the end. If the loss is not finite or a spike, training returns to the last checkpoint and skips
    the batch. SIGINT or SIGTERM (to any process) end the run with a checkpoint, and the returned line is of a
    step below num_steps.

    Raises MeshwrightError if the loss is not finite or a spike and may not be skipped, or still is after
    several skipped batches; OutputError if a file cannot be written.
    """
    if start.step >= num_steps:
        return _finished(run, start.step, num_steps)
    if jax.process_index() == 0:
        run.mkdir(parents=True, exist_ok=True)
        checkpoint_files.set_aside(run / CHECKPOINTS, start.step)
        truncate(run / METRICS_FILE, start.step)
    rhythm = rhythm or Rhythm()
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        saver = stack.enter_context(closing(checkpoint.Saver(run / CHECKPOINTS, rhythm.keep)))
        agreement = Agreement(stop, rhythm.save_seconds, rhythm.run_seconds)
        loop = _Loop(run, step, corpus, num_steps, rhythm, saver, agreement, planned_step_seconds, on_step)
        loop.inputs = inputs if inputs is not None else []
        stack.callback(loop.profiler.close)
        while True:
            try:
                return loop.advance(start)
            except _Spike as spike:
                loop.profiler.close()
                start = _back(run, step, corpus, saver, start, spike, rhythm)


class _Spike(Exception):
    """A step whose batch must be skipped. example: the first of its batch."""

    def __init__(self, step: int, fault: str, example: int) -> None:
        super().__init__(fault)
        self.step, self.fault, self.example = step, fault, example


class _Loop:
    """Steps from a start to num_steps. It is kept when training returns to an earlier step."""

    def __init__(
        self,
        run: Path,
        step: TrainStep,
        corpus: Source,
        num_steps: int,
        rhythm: Rhythm,
        saver: checkpoint.Saver,
        agreement: Agreement,
        planned_step_seconds: float | None,
        on_step: Callable[[Line], None] | None,
    ) -> None:
        self.step, self.corpus, self.num_steps, self.rhythm = step, corpus, num_steps, rhythm
        self.saver, self.agreement = saver, agreement
        self.trend = LossTrend()
        self.first_examples: dict[int, int] = {}  # of the batches of steps not yet checked
        self.best_loss = math.inf
        self.inputs: list[float] = []
        self.profiler = Profiler(run / profiling.FOLDER, rhythm.profile)
        self.reporter = Reporter(
            run / METRICS_FILE,
            num_tokens=step.tokens_per_step,
            flops=step.flops_per_step,
            peak_flops_per_second=step.peak_flops_per_second,
            planned_step_seconds=planned_step_seconds,
            log_every=rhythm.log_every,
            on_step=on_step,
            check=self._check,
        )

    def advance(self, start: Start) -> Line:
        """The last line, after num_steps or a signal to stop. Raises _Spike."""
        step, reporter = self.step, self.reporter
        self.trend, self.best_loss = start.trend, start.best_loss
        self.first_examples.clear()
        reporter.begin({"skipped": start.skipped} if start.skipped else {})
        one_in_flight = default_platform().in_turn
        batches = self.corpus.batches(step.batch_sequences, start.seed, step.own_rows)
        examples = start.examples(step.batch_sequences)
        state, example = jax.block_until_ready(start.state), next(examples)
        tokens = batches.at(example)
        for number in range(start.step + 1, self.num_steps + 1):
            self.first_examples[number] = example
            self.profiler.before(number, state)
            state, metrics = step.step(state, tokens)
            # While the devices compute, the next batch is read and the last step reported.
            example = next(examples)
            dispatched = time.perf_counter()
            tokens = batches.at(example)
            read = time.perf_counter()
            reporter.push(number, metrics)
            if one_in_flight:
                jax.block_until_ready((state, metrics))
            self.inputs.append(_input_wait(read - dispatched, time.perf_counter() - read))
            self.profiler.after(number, state)
            if self._pause(number, state, start, example):
                break
        return reporter.line

    def _pause(self, number: int, state: Any, start: Start, next_example: int) -> bool:
        """Validate and save after step `number` if due; returns whether to stop there."""
        rhythm, last = self.rhythm, number == self.num_steps
        self.saver.check()
        stopped, time_to_save = self.agreement.after(number)
        evaluates = last or _due(number, rhythm.eval_every)
        saves = last or stopped or time_to_save or _due(number, rhythm.checkpoint_every)
        if not (evaluates or saves):
            return False
        self.reporter.wait()
        loss, losses = None, {}
        if evaluates:
            losses = self._evaluated(state, last=last)
        if losses:
            loss = losses["validation_loss"]
            saves, self.best_loss = saves or loss < self.best_loss, min(loss, self.best_loss)
        self.reporter.report(always=evaluates, line=losses)
        if saves:
            position = {
                "next_example": next_example,
                "seed": start.seed,
                "corpus": self.corpus.fingerprint,
                "trend": self.trend.to_dict(),
                "skipped": start.skipped,
                "best_loss": self.best_loss,
                "validation_loss": loss,
            }
            self.saver.save(number, self.step.saved(state), position)
            self.agreement.saved()
        self.reporter.restart_clock()
        return stopped

    def _evaluated(self, state: Any, *, last: bool) -> Line:
        """validation_loss, and evaluation_losses by name if there are other sets.

        At the last step they are of whole splits, which may take too long after a signal to stop; then the
        result is empty.
        """
        agreement, counted = self.agreement.anew(), itertools.count(1)

        def stopped() -> bool:
            return last and agreement.after(next(counted))[0]

        losses = []
        for split in self.corpus.validations:
            num_batches = None if last else _EVAL_BATCHES
            loss = validation_loss(self.step, state, self.corpus, num_batches, split, stopped)
            if loss is None:
                if jax.process_index() == 0:
                    warnings.warn(
                        "stopped from outside: the validation of the last step is left out", stacklevel=2
                    )
                return {}
            losses.append(loss)
        if not losses:
            return {}
        validation: Line = {"validation_loss": losses[0]}
        by_name = dict(zip(self.corpus.evaluations, losses[1:], strict=True))
        return validation | ({"evaluation_losses": by_name} if by_name else {})

    def _check(self, line: Line) -> None:
        example = self.first_examples.pop(line["step"])
        trend = self.trend if self.rhythm.finds_spikes else LossTrend()  # no trend: a finite loss is no spike
        fault = trend.fault(line["loss"], line["grad_norm"])
        if fault is not None:
            raise _Spike(line["step"], fault, example)
        self.trend = self.trend.after(line["loss"])


def _input_wait(reading: float, waiting: float) -> float:
    """Seconds that the devices were idle while a batch was read.

    They were idle at its end if the host did not have to wait for them afterwards. The time at which they
    became idle is not known, so all of the reading is counted.
    """
    return reading if waiting < 0.01 * reading else 0.0


def _back(
    run: Path,
    step: TrainStep,
    corpus: Source,
    saver: checkpoint.Saver,
    start: Start,
    spike: _Spike,
    rhythm: Rhythm,
) -> Start:
    """The last checkpoint as a start, or step 0, without the batch of the spike."""
    num_skipped = len(start.skipped)
    saver.wait()
    if checkpoint_files.checkpoint_steps(run / CHECKPOINTS):
        back = _restored(run, step, corpus)
    else:
        back = Start(step.init(start.seed), 0, 0, start.seed)
    if rhythm.on_spike == "stop" or num_skipped - len(back.skipped) >= _MOST_SKIPPED:
        left_out = f"{num_skipped - len(back.skipped)} batches after step {back.step} were left out; "
        raise MeshwrightError(
            f"training diverged: {spike.fault} at step {spike.step}; "
            f"{left_out if rhythm.on_spike == 'skip' else ''}"
            "go on from the last checkpoint, or start again, with a lower learning rate"
        )
    batch = (spike.example, spike.example + step.batch_sequences)
    # The start may have skipped batches and never reached a checkpoint; these are skipped again.
    skipped = tuple(sorted({*start.skipped, *back.skipped, batch}))
    if jax.process_index() == 0:
        truncate(run / METRICS_FILE, back.step)
        warnings.warn(
            f"step {spike.step}: {spike.fault}; back to step {back.step}, without the examples"
            f" {batch[0]} to {batch[1] - 1}",
            stacklevel=2,
        )
    return replace(back, skipped=skipped)


def validation_loss(
    step: TrainStep,
    state: Any,
    corpus: Source,
    num_batches: int | None = None,
    split: str = VALIDATION,
    stopped: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean nats per counted token over the rows of a split, or over the first `num_batches`.

    Each batch has the compiled size B. The last rows are taken d at a time, with d the largest divisor of B
    that they fill, and repeated B / d times, so that each row counts once. stopped: called before each batch;
    if it returns True the result is None.
    """
    batch, own_rows = step.batch_sequences, list(step.own_rows)
    rows = corpus.rows(split)[: None if num_batches is None else num_batches * batch]
    total, num_counted = 0.0, 0
    for begin_, size in _exact_slices(len(rows), batch):
        if stopped():
            return None
        counted = int(np.count_nonzero(is_counted(rows[begin_ : begin_ + size, 1:])))
        tokens = np.tile(rows[begin_ : begin_ + size], (batch // size, 1)).astype(np.int32)
        # Fetched for each batch, since platforms may need steps in turn (see `_Loop.advance`).
        total += counted * float(step.evaluate(state, tokens[own_rows]))
        num_counted += counted
    return total / max(num_counted, 1)


def _exact_slices(num_rows: int, batch: int) -> Iterator[tuple[int, int]]:
    """(begin, size) of slices that cover the rows, each size dividing the batch."""
    begin_ = 0
    while begin_ < num_rows:
        size = min(batch, num_rows - begin_)
        while batch % size:
            size -= 1
        yield begin_, size
        begin_ += size


def _restored(run: Path, step: TrainStep, corpus: Source) -> Start:
    state, position, done = checkpoint.restore(run / CHECKPOINTS, step.abstract_state())
    if position["corpus"] != corpus.fingerprint:
        raise DataError(
            f"corpus {corpus.directory}: is not the one that {run / CHECKPOINTS / str(done)} was trained on;"
            " give that one, or name another run"
        )
    return Start(
        step.placed(state),
        done,
        position["next_example"],
        position["seed"],
        LossTrend(**position["trend"]),
        tuple((first, end) for first, end in position["skipped"]),
        position["best_loss"],
    )


def _finished(run: Path, step: int, num_steps: int) -> Line:
    """The last line of a run resumed at its end; MeshwrightError if it is past that."""
    lines = read_lines(run / METRICS_FILE)
    if step > num_steps or not lines:
        raise MeshwrightError(
            f"run {run}: is at step {step} already, {num_steps} were asked for; ask for more"
        )
    return lines[-1]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

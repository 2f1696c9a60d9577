"""The training loop: batches in, steps dispatched one ahead; metrics, validation and checkpoints out.

run/metrics.jsonl         see `metrics`
run/checkpoints/<step>/   see `checkpoint`
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from meshwright.errors import CheckpointError, DataError, MeshwrightError
from meshwright.nn import checkpoint
from meshwright.train.data import Corpus, batches
from meshwright.train.metrics import Line, Reporter, read_lines, truncate
from meshwright.train.optimizer import OptimizerConfig

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"

# Batches of a validation during the run; the one at the end reads the whole split.
_EVAL_BATCHES = 8


class TrainStep(Protocol):
    """A compiled training step and what the loop must know of it.

    flops_per_step: model FLOPs of one step over all devices. peak_flops_per_second: of the whole
    machine. State is a pytree of arrays; `step` may donate it. Tokens are int32[B, T+1], this
    process's share of the batch.
    """

    @property
    def batch_sequences(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def flops_per_step(self) -> float: ...
    @property
    def peak_flops_per_second(self) -> float: ...

    def init(self, seed: int) -> Any: ...

    def abstract_state(self) -> Any:
        """The state as jax.ShapeDtypeStruct with shardings."""
        ...

    def step(self, state: Any, tokens: np.ndarray) -> tuple[Any, dict[str, jax.Array]]:
        """(next state, {"loss", "grad_norm", "learning_rate"}), dispatched and not waited for."""
        ...

    def evaluate(self, state: Any, tokens: np.ndarray) -> jax.Array:
        """Mean nats per token of the batch."""
        ...


def train(
    run: Path,
    step: TrainStep,
    corpus: Corpus,
    optimizer_config: OptimizerConfig,
    *,
    num_steps: int,
    log_every: int = 10,
    eval_every: int = 0,
    checkpoint_every: int = 0,
    resume: bool = False,
    planned_step_seconds: float | None = None,
    on_step: Callable[[Line], None] | None = None,
    seed: int = 0,
) -> Line:
    """The last line of run/metrics.jsonl, after training up to step `num_steps`.

    A line: step, loss (nats/token), grad_norm, learning_rate, step_seconds, planned_step_seconds,
    tokens_per_second, mfu, and after a validation validation_loss. step_seconds is the median wall
    time of the steps since the last line, without the process's first step (it compiles),
    validation and checkpoints; None where that leaves no step. mfu = flops_per_step / (step_seconds
    * peak_flops_per_second).

    Lines are written every log_every steps, at every validation and checkpoint and at the end;
    on_step gets one every step. 0 for eval_every or checkpoint_every: at the end alone. The
    validation at the end reads the whole split. resume goes on from the last checkpoint, at its
    data position. SIGINT or SIGTERM end the run after the step at hand with a checkpoint, and the
    line returned is of a step below num_steps.

    Raises CheckpointError for a checkpoint in the way, missing or damaged, DataError for a corpus
    that is not the plan's or the checkpoint's, MeshwrightError once the loss is not finite.
    """
    if corpus.seq_len != step.seq_len:
        raise DataError(
            f"corpus {corpus.directory}: its rows are of T = {corpus.seq_len} tokens, the plan's of"
            f" {step.seq_len}; prepare it again with {step.seq_len}"
        )
    start = _resumed(run, step, corpus) if resume else _fresh(run, step, seed)
    if start.step >= num_steps:
        return _finished(run, start.step, num_steps)
    reporter = Reporter(
        run / METRICS,
        num_tokens=step.batch_sequences * step.seq_len,
        flops=step.flops_per_step,
        peak_flops_per_second=step.peak_flops_per_second,
        planned_step_seconds=planned_step_seconds,
        log_every=log_every,
        on_step=on_step,
    )
    stream = batches(
        corpus,
        "train",
        batch_sequences=step.batch_sequences,
        seed=start.seed,
        start_example=start.next_example,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    # XLA's collectives on CPU (jaxlib 0.10.2) hold threads while they wait for each other. Steps of 8
    # virtual devices on 2 busy cores, dispatched without waiting, made XLA abort at its rendezvous
    # time-out in every try; so there a step, and the state it begins with, is waited for.
    one_in_flight = jax.default_backend() == "cpu"
    state, tokens = jax.block_until_ready(start.state), next(stream)
    with _stop_signals() as stop:
        for number in range(start.step + 1, num_steps + 1):
            state, metrics = step.step(state, tokens)
            # The devices now compute; meanwhile the next batch is read and the last step reported.
            tokens = next(stream)
            reporter.push(number, metrics)
            if one_in_flight:
                jax.block_until_ready((state, metrics))
            last, stopped = number == num_steps, stop.is_set()
            evaluates = last or _due(number, eval_every)
            saves = last or stopped or _due(number, checkpoint_every)
            if evaluates or saves:
                reporter.wait()
                num_batches = None if last else _EVAL_BATCHES
                loss = validation_loss(step, state, corpus, num_batches) if evaluates else None
                reporter.report(always=True, validation_loss=loss)
                if saves:
                    position = start.position(number, step.batch_sequences, corpus, optimizer_config)
                    checkpoint.save(run / CHECKPOINTS, number, state, position)
                reporter.restart_clock()
            if stopped:
                break
    return reporter.line


def validation_loss(step: TrainStep, state: Any, corpus: Corpus, num_batches: int | None = None) -> float:
    """Mean nats per token over the validation rows, or over those of the first `num_batches`.

    Every batch has the one compiled size B. Rows left over at the end are taken d at a time, d the
    largest divisor of B that they still fill, each repeated B / d times: so every row counts once.
    """
    num_processes, process = jax.process_count(), jax.process_index()
    batch = step.batch_sequences
    local = batch // num_processes
    rows = corpus.rows("validation")[: None if num_batches is None else num_batches * batch]
    total = 0.0
    for begin, size in _exact_chunks(len(rows), batch):
        tokens = np.tile(rows[begin : begin + size], (batch // size, 1)).astype(np.int32)
        # Fetched one by one, for the reason given in `train`.
        total += size * float(step.evaluate(state, tokens[process * local : (process + 1) * local]))
    return total / len(rows)


def _exact_chunks(num_rows: int, batch: int) -> Iterator[tuple[int, int]]:
    """(begin, size) of chunks that cover the rows, each size dividing the batch."""
    begin = 0
    while begin < num_rows:
        size = min(batch, num_rows - begin)
        while batch % size:
            size -= 1
        yield begin, size
        begin += size


@dataclass(frozen=True)
class _Start:
    """Where training begins: after `step` steps, at the example `next_example` of the data."""

    state: Any
    step: int
    next_example: int
    seed: int

    def position(
        self, step: int, batch_sequences: int, corpus: Corpus, config: OptimizerConfig
    ) -> dict[str, Any]:
        """What a checkpoint after `step` steps keeps beside the state. The optimizer is for the record."""
        return {
            "next_example": self.next_example + (step - self.step) * batch_sequences,
            "seed": self.seed,
            "corpus": corpus.fingerprint,
            "optimizer": asdict(config),
        }


def _fresh(run: Path, step: TrainStep, seed: int) -> _Start:
    existing = checkpoint.latest_step(run / CHECKPOINTS)
    if existing is not None:
        raise CheckpointError(
            f"checkpoint: {run / CHECKPOINTS} already holds step {existing};"
            " go on from there with --resume, or name another run"
        )
    run.mkdir(parents=True, exist_ok=True)
    _truncate_metrics(run, 0)
    return _Start(state=step.init(seed), step=0, next_example=0, seed=seed)


def _resumed(run: Path, step: TrainStep, corpus: Corpus) -> _Start:
    state, position, done = checkpoint.restore(run / CHECKPOINTS, step.abstract_state())
    if position["corpus"] != corpus.fingerprint:
        raise DataError(
            f"corpus {corpus.directory}: is not the one that {run / CHECKPOINTS / str(done)} was trained on;"
            " give that one, or name another run"
        )
    _truncate_metrics(run, done)
    return _Start(state=state, step=done, next_example=position["next_example"], seed=position["seed"])


def _truncate_metrics(run: Path, step: int) -> None:
    if jax.process_index() == 0:
        truncate(run / METRICS, step)


def _finished(run: Path, step: int, num_steps: int) -> Line:
    """The last line of a run that is resumed where it was to end; MeshwrightError if it is past that."""
    lines = read_lines(run / METRICS)
    if step > num_steps or not lines:
        raise MeshwrightError(
            f"run {run}: is at step {step} already, {num_steps} were asked for; ask for more"
        )
    return lines[-1]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second acts as it always did.

    Off the main thread, where Python allows no handlers, it is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(number: int, frame: object) -> None:
        stop.set()
        restore()

    for number in signals:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()

"""The loop's metrics, validation, checkpoints, resumption and end, on a table of bigrams."""

import json
import os
import signal
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.train.bigram import BigramStep

from meshwright.errors import CheckpointError, DataError, MeshwrightError
from meshwright.nn.files.checkpoint_files import checkpoint_steps
from meshwright.train import loop
from meshwright.train.corpus import Batches, Corpus, prepare_corpus
from meshwright.train.loop import Rhythm, Start, _exact_slices, begin, train, validation_loss
from meshwright.train.metrics_log import Reporter, append, read_lines, truncate

KEYS = {
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "step_seconds",
    "planned_step_seconds",
    "tokens_per_second",
    "mfu",
}
RHYTHM = {field.name for field in fields(Rhythm)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A random walk over letters, each followed by one of two: ln 2 = 0.69 nats a byte, ln 26 alone."""
    folder = tmp_path_factory.mktemp("corpus")
    letter, letters = 0, []
    for choice in np.random.default_rng(0).integers(2, size=32_000):
        letter = (5 * letter + 1 + int(choice)) % 26
        letters.append(chr(ord("a") + letter))
    text = folder / "walk.txt"
    text.write_text("".join(letters))
    return prepare_corpus(str(text), folder / "data", vocab_size=257, seq_len=16)


def run_to(run: Path, corpus: Corpus, num_steps: int, step: BigramStep | None = None, **options: Any) -> Any:
    step = step or BigramStep()
    start = begin(run, step, corpus, resume=options.pop("resume", False), seed=options.pop("seed", 0))
    rhythm = Rhythm(**{name: options.pop(name) for name in RHYTHM & options.keys()})
    return train(run, step, corpus, start, num_steps=num_steps, rhythm=rhythm, **options)


def test_learns_more_than_how_often_tokens_occur(tmp_path, corpus):
    line = run_to(tmp_path, corpus, 40)
    assert 0.69 < line["validation_loss"] < 0.6 * corpus.unigram_entropy


def test_lines_are_those_of_the_schedule(tmp_path, corpus):
    seen: list[int] = []
    line = run_to(
        tmp_path,
        corpus,
        11,
        log_every=4,
        eval_every=5,
        planned_step_seconds=0.25,
        on_step=lambda line: seen.append(line["step"]),
    )
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 5, 8, 10, 11]
    assert [line["step"] for line in lines if "validation_loss" in line] == [5, 10, 11]
    assert all(line.keys() - {"validation_loss"} == KEYS for line in lines)
    assert line == lines[-1]
    assert seen == list(range(1, 12))


def test_figures_of_a_line_follow_from_its_step_seconds(tmp_path, corpus):
    line = run_to(tmp_path, corpus, 6, planned_step_seconds=0.25)
    assert line["planned_step_seconds"] == 0.25
    assert line["tokens_per_second"] == pytest.approx(8 * 16 / line["step_seconds"])
    assert line["mfu"] == pytest.approx(1e6 / (line["step_seconds"] * 1e9))


def test_the_compiling_step_has_no_time(tmp_path, corpus):
    line = run_to(tmp_path, corpus, 1)
    assert (line["step_seconds"], line["tokens_per_second"], line["mfu"]) == (None, None, None)


def test_a_run_ends_with_a_checkpoint_after_its_time(tmp_path, corpus):
    line = run_to(tmp_path, corpus, 40, run_seconds=1e-6)
    assert line["step"] < 40
    assert run_to(tmp_path, corpus, line["step"] + 1, resume=True)["step"] == line["step"] + 1


def test_resumed_run_equals_uninterrupted_on_another_mesh_too(tmp_path, corpus):
    whole = run_to(tmp_path / "whole", corpus, 12, log_every=3)
    first, second = BigramStep(), BigramStep()
    run_to(tmp_path / "cut", corpus, 6, first, log_every=3)
    cut = run_to(tmp_path / "cut", corpus, 12, second, log_every=3, resume=True)
    assert (cut["loss"], cut["validation_loss"]) == (whole["loss"], whole["validation_loss"])
    assert [line["step"] for line in read_lines(tmp_path / "cut" / "metrics.jsonl")] == [3, 6, 9, 12]
    # The data went on where it stopped, in the same order.
    stream = Batches(corpus, batch_sequences=8, seed=0)
    for number, tokens in enumerate(first.batches + second.batches):
        np.testing.assert_array_equal(tokens, stream.at(8 * number))

    run_to(tmp_path / "other", corpus, 6)
    other = run_to(tmp_path / "other", corpus, 12, BigramStep(data=2, tensor=1), resume=True)
    # Sums over two devices run in another order than over eight.
    assert other["validation_loss"] == pytest.approx(whole["validation_loss"], rel=1e-5)


def test_the_data_position_counts_examples_not_batches(tmp_path, corpus):
    run_to(tmp_path, corpus, 3, seed=5)
    larger = BigramStep(batch_sequences=16)
    run_to(tmp_path, corpus, 4, larger, resume=True)
    expected = Batches(corpus, batch_sequences=16, seed=5).at(24)
    np.testing.assert_array_equal(larger.batches[0], expected)


def test_lines_past_the_checkpoint_are_written_anew(tmp_path, corpus):
    run_to(tmp_path, corpus, 4, log_every=1)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "loss": 9.0}\n{"step": 6, "lo')
    run_to(tmp_path, corpus, 6, log_every=1, resume=True)
    lines = read_lines(path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[4]["loss"] < 9


def test_checkpoints_are_kept_at_their_steps(tmp_path, corpus):
    run_to(tmp_path, corpus, 7, checkpoint_every=3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["6", "7"]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [7]


def test_resuming_a_finished_run_trains_nothing(tmp_path, corpus):
    line = run_to(tmp_path, corpus, 3)
    again = BigramStep()
    assert run_to(tmp_path, corpus, 3, again, resume=True) == line
    assert again.batches == []
    with pytest.raises(MeshwrightError) as error:
        run_to(tmp_path, corpus, 2, resume=True)
    assert str(error.value) == f"run {tmp_path}: is at step 3 already, 2 were asked for; ask for more"


def test_a_run_is_not_overwritten(tmp_path, corpus):
    run_to(tmp_path, corpus, 2)
    with pytest.raises(CheckpointError) as error:
        run_to(tmp_path, corpus, 2)
    assert str(error.value) == (
        f"checkpoint: {tmp_path}/checkpoints already holds step 2;"
        " go on from there with --resume, or name another run"
    )


def test_resuming_without_a_checkpoint_or_on_another_corpus_is_refused(tmp_path, corpus):
    with pytest.raises(CheckpointError, match=r"holds none; train first, or without --resume"):
        run_to(tmp_path / "absent", corpus, 2, resume=True)
    run_to(tmp_path / "run", corpus, 2)
    (tmp_path / "text.txt").write_text("quite another text, long enough for a row of each split\n" * 50)
    other = prepare_corpus(str(tmp_path / "text.txt"), tmp_path / "data", vocab_size=300, seq_len=16)
    with pytest.raises(DataError) as error:
        run_to(tmp_path / "run", other, 4, resume=True)
    assert str(error.value) == (
        f"corpus {tmp_path}/data: is not the one that {tmp_path}/run/checkpoints/2 was trained on;"
        " give that one, or name another run"
    )


def test_rows_of_another_length_are_refused(tmp_path, corpus):
    with pytest.raises(DataError) as error:
        run_to(tmp_path / "run", corpus, 2, BigramStep(seq_len=32))
    assert str(error.value) == (
        f"corpus {corpus.directory}: its rows are of T = 16 tokens, the plan's of 32;"
        " prepare it again with 32"
    )
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_a_number_stops_the_run_before_it_is_saved(tmp_path, corpus):
    with pytest.raises(MeshwrightError) as error:
        run_to(tmp_path, corpus, 10, BigramStep(fails_at=5), checkpoint_every=3, log_every=1, on_spike="stop")
    assert str(error.value) == (
        "training diverged: loss is nan at step 6;"
        " go on from the last checkpoint, or start again, with a lower learning rate"
    )
    assert checkpoint_steps(tmp_path / "checkpoints") == [3]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


class BadBatch(BigramStep):
    """A batch whose rows are `bad` has a loss that is no number."""

    def __init__(self, bad: np.ndarray) -> None:
        super().__init__()
        self.bad = bad

    def step(self, state: Any, tokens: np.ndarray) -> tuple[Any, dict[str, jax.Array]]:
        state, metrics = super().step(state, tokens)
        return state, metrics | ({"loss": metrics["loss"] * np.nan} if (tokens == self.bad).all() else {})


@pytest.mark.parametrize("checkpoint_every", [0, 3])
def test_a_batch_whose_loss_is_no_number_is_left_out(tmp_path, corpus, checkpoint_every):
    """From step 0 where nothing was saved, else from the checkpoint: the others are all trained on."""
    stream = Batches(corpus, batch_sequences=8, seed=0)
    step = BadBatch(stream.at(40))
    with pytest.warns(UserWarning, match=rf"step 6: loss is nan; back to step {checkpoint_every}, without"):
        line = run_to(tmp_path, corpus, 7, step, log_every=1, checkpoint_every=checkpoint_every)
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert line["skipped"] == [[40, 48]] or line["skipped"] == ((40, 48),)
    for tokens, example in zip(step.batches[-4:], [24, 32, 48, 56], strict=True):
        np.testing.assert_array_equal(tokens, stream.at(example))
    # A run that goes on knows what was left out.
    resumed = begin(tmp_path, BigramStep(), corpus, resume=True)
    assert (resumed.next_example, resumed.skipped) == (64, ((40, 48),))


def test_a_run_whose_every_batch_fails_is_given_up(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(loop, "_MOST_SKIPPED", 2)
    given_up = pytest.raises(MeshwrightError, match="2 batches after step 0 were left out")
    with pytest.warns(UserWarning, match="loss is nan; back to step 0") as warned, given_up:
        run_to(tmp_path, corpus, 7, BigramStep(fails_at=3))
    assert len(warned) == 2


@given(
    next_example=st.integers(0, 50),
    skipped=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=5),
    batch=st.integers(1, 9),
)
def test_no_batch_holds_an_example_left_out_and_no_other_is_lost(next_example, skipped, batch):
    ranges = tuple((first, first + size) for first, size in skipped)
    start = Start(None, 0, next_example, 0, skipped=ranges)
    begins = [begin for begin, _ in zip(start.examples(batch), range(30), strict=False)]
    out = {example for first, end in ranges for example in range(first, end)}
    taken = [example for begin in begins for example in range(begin, begin + batch)]
    assert not out & set(taken) and taken == sorted(set(taken))
    # What is neither taken nor left out is less than a batch before something left out.
    for example in set(range(next_example, taken[-1])) - set(taken) - out:
        assert out & set(range(example, example + batch))


def test_handlers_are_put_back(tmp_path, corpus):
    before = signal.getsignal(signal.SIGTERM)
    run_to(tmp_path, corpus, 1)
    assert signal.getsignal(signal.SIGTERM) is before


@given(num_rows=st.integers(0, 200), batch=st.integers(1, 48))
def test_validation_covers_every_row_once_in_chunks_that_divide_the_batch(num_rows, batch):
    chunks = list(_exact_slices(num_rows, batch))
    rows = [row for begin, size in chunks for row in range(begin, begin + size)]
    assert rows == list(range(num_rows))
    assert all(batch % size == 0 for _, size in chunks)


def test_validation_loss_is_the_mean_over_all_rows(corpus):
    """Against the formula on the host; the rows do not divide by the batch of 8."""
    step = BigramStep()
    state = step.init(0)
    rows = np.asarray(corpus.rows("validation")).astype(int)
    assert len(rows) % 8
    w = np.asarray(state["params"]["w"], np.float64)
    log_probabilities = w - np.log(np.exp(w).sum(1, keepdims=True))
    expected = -log_probabilities[rows[:, :-1], rows[:, 1:]].mean()
    assert validation_loss(step, state, corpus) == pytest.approx(expected, rel=1e-5)
    first = -log_probabilities[rows[:8, :-1], rows[:8, 1:]].mean()
    assert validation_loss(step, state, corpus, num_batches=1) == pytest.approx(first, rel=1e-5)


def test_validation_within_the_run_reads_part_of_the_split_and_all_of_it_at_the_end(tmp_path, corpus):
    within = BigramStep()
    run_to(tmp_path / "within", corpus, 2, within, eval_every=1)
    assert within.num_evaluated == 8 + len(list(_exact_slices(len(corpus.rows("validation")), 8)))


def test_a_signal_in_the_validation_at_the_end_leaves_it_out_and_the_run_is_saved(
    tmp_path, corpus, monkeypatch
):
    """Of a large split it may take longer than the time until the process is killed."""
    step = BigramStep()
    evaluate = step.evaluate

    def evaluated(state: Any, tokens: np.ndarray) -> jax.Array:
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(state, tokens)

    monkeypatch.setattr(step, "evaluate", evaluated)
    with pytest.warns(UserWarning, match="stopped from outside: the validation of the last step is left out"):
        line = run_to(tmp_path, corpus, 2, step)
    assert step.num_evaluated == 1
    assert line["step"] == 2 and "validation_loss" not in line
    assert checkpoint_steps(tmp_path / "checkpoints") == [2]


def test_numbers_of_a_step_are_fetched_after_the_next_is_dispatched(tmp_path, monkeypatch):
    fetched: list[int] = []
    monkeypatch.setattr(jax, "device_get", lambda metrics: fetched.append(metrics["step"]) or metrics)
    reporter = Reporter(
        tmp_path / "metrics.jsonl",
        num_tokens=1,
        flops=1.0,
        peak_flops_per_second=1.0,
        planned_step_seconds=None,
        log_every=1,
        on_step=None,
        check=lambda line: None,
    )
    numbers: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0}
    numbers["step"] = 1
    reporter.push(1, dict(numbers))
    assert fetched == []
    numbers["step"] = 2
    reporter.push(2, dict(numbers))
    assert fetched == [1]
    reporter.wait()
    assert fetched == [1, 2]


def test_step_seconds_is_the_median_without_pauses(tmp_path, monkeypatch):
    """Arrivals at 0 (compiled), 1, 2, then ten seconds of validation, 13, 17: steps of 1, 1, 1, 4."""
    clock = iter([0.0, 1.0, 2.0, 12.0, 13.0, 17.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    reporter = Reporter(
        tmp_path / "metrics.jsonl",
        num_tokens=8,
        flops=6.0,
        peak_flops_per_second=12.0,
        planned_step_seconds=None,
        log_every=100,
        on_step=None,
        check=lambda line: None,
    )
    numbers: dict[str, Any] = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0}
    for step in (1, 2, 3):
        reporter.push(step, numbers)
    reporter.wait()
    reporter.report()
    reporter.restart_clock()
    reporter.push(4, numbers)
    reporter.push(5, numbers)
    reporter.wait()
    assert reporter.line["step_seconds"] == 1.0
    assert (reporter.line["tokens_per_second"], reporter.line["mfu"]) == (8.0, 0.5)


def test_no_step_is_shorter_than_the_devices_take(tmp_path, corpus, monkeypatch):
    """Windows of one step each, ended by a validation: the wait for the devices is in every one."""
    ready = jax.block_until_ready
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: (time.sleep(0.05), ready(tree))[1])
    run_to(tmp_path / "run", corpus, 4, BigramStep(), eval_every=1)
    seconds = [line["step_seconds"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert seconds[0] is None or seconds[0] >= 0.05
    assert all(step >= 0.05 for step in seconds[1:])


def test_truncate_drops_later_and_torn_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 4')
    truncate(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [child.name for child in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_evaluation_sets_have_losses_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "walk.txt").write_text("".join(chr(97 + 5 * n % 26) for n in range(8000)))
    (tmp_path / "other.txt").write_text("zyxwv" * 400)
    corpus = prepare_corpus(
        str(tmp_path / "walk.txt"),
        tmp_path / "data",
        vocab_size=257,
        seq_len=16,
        evaluations={"other": str(tmp_path / "other.txt")},
    )
    assert corpus.evaluations == {"other": str(tmp_path / "other.txt")}
    line = run_to(tmp_path / "run", corpus, 10)
    assert line["evaluation_losses"]["other"] > 2 * line["validation_loss"]
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1] == line

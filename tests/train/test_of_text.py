"""`mw train my.txt`: the model that a text gets, and a run from text to text."""

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.models.count import count_params
from meshwright.train.of_text import (
    is_text,
    largest_trainable,
    most_steps,
    openings,
    plans_for_text,
    small_models,
    steps_in,
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my.txt"
    path.write_text("The cat sat on the mat. The dog ran to the door.\n" * 2000, encoding="utf-8")
    return path


def test_a_text_is_told_from_a_plan(text, tmp_path):
    assert is_text(text) and not is_text(tmp_path / "plan.toml") and is_text(tmp_path)
    (tmp_path / "plan.toml").touch()
    assert not is_text(tmp_path)


def test_a_small_text_gets_a_small_model(text):
    [plan] = plans_for_text(text, "cpu:1")
    assert (plan.model.name, plan.model.vocab_size) == ("my", 1024) and plan.layout.data == 1
    assert count_params(plan.model).total < 1e6 and plan.layout.precision.weights_dtype == "f32"
    assert plans_for_text(text, "h100:8")[0].layout.precision.compute_dtype == "bf16"


def test_a_large_text_and_a_fast_machine_get_a_larger_model(text):
    large = text.with_name("large.txt")
    large.write_bytes(b"word " * 8_000_000)
    models = small_models(large)
    assert {model.vocab_size for model in models} == {4096}
    assert [model.d_model for model in models] == [128, 256, 384]
    assert largest_trainable([0.08, 0.3, 0.9]) == 0 and largest_trainable([0.001, 0.01, 0.05]) == 2


def test_a_sample_begins_as_most_sentences_do(text, tmp_path):
    text.write_text("He ran home. The cat sat on a mat. The cat sat up.\nA dog ran.\n", encoding="utf-8")
    assert openings(text, 1) == ["The cat sat"]
    code = tmp_path / "code.py"
    code.write_text("x = 1\n")
    assert openings(code, 3) == ["The"]
    table = tmp_path / "table.md"
    table.write_text(
        "Layouts by planned step time\n\n| a | b |\n\nA plan is one page\nof words. A plan is short.\n"
    )
    assert openings(table, 1) == ["A plan is"]


def test_a_short_text_is_read_a_few_times(text):
    short = text.with_name("short.txt")
    short.write_bytes(b"word " * 20_000)
    assert most_steps(short, 1024) == 260 and most_steps(short, 10**6) == 200
    assert steps_in(180, 0.01, most_steps(short, 1024)) == 260


def test_steps_fill_the_time_within_bounds():
    assert [steps_in(180, seconds) for seconds in (10, 0.1, 1e-6)] == [200, 1800, 4000]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "stdlib"], "is the data; leave out --data"),
        (["--lora", "8"], "trains a new model; to fine-tune one, name a PLAN.toml"),
    ],
)
def test_options_of_another_model_are_refused(text, options, message, capsys):
    assert main(["train", str(text), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("all_devices")  # the command trains on one
def test_a_text_becomes_text(text, tmp_path, capfd):
    assert main(["train", str(text), "--run", str(tmp_path / "run"), "--steps", "30"]) == 0
    printed = capfd.readouterr()
    assert "step 30: training loss" in printed.out and "parameters with a vocabulary of 1,024" in printed.err
    assert "The cat sat" in printed.out
    longer = printed.err.splitlines()[-1]
    assert longer.startswith("nohup mw train ") and longer.endswith("2>&1 &") and "--steps 180 " in longer
    again = ["train", str(text), "--run", str(tmp_path / "run"), "--resume", "--steps", "32"]
    assert main(again) == 0 and "step 32: training loss" in capfd.readouterr().out

"""`mw train my.txt`: the model that a text gets, and a run from text to text."""

from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.models.count import count_params
from meshwright.train.of_text import is_text, plan_for_text, small_model, steps_in


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
    plan = plan_for_text(text, "cpu:1")
    assert (plan.model.name, plan.model.vocab_size) == ("my", 512) and plan.layout.data == 1
    assert count_params(plan.model).total < 1e6 and plan.layout.precision.weights_dtype == "f32"
    large = text.with_name("large.txt")
    large.write_bytes(b"word " * 5_000_000)
    assert small_model(large).vocab_size == 4096 and small_model(large).d_model == 256
    assert plan_for_text(text, "h100:8").layout.precision.compute_dtype == "bf16"


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
def test_a_text_becomes_text(text, tmp_path, capfd):
    assert main(["train", str(text), "--run", str(tmp_path / "run"), "--steps", "30"]) == 0
    printed = capfd.readouterr()
    assert "step 30: training loss" in printed.out and "parameters with a vocabulary of 512" in printed.err
    assert "The " in printed.out and "--resume --steps N" in printed.err

"""mw fit, by its table and its JSON."""

import json
import shlex
from pathlib import Path

import pytest

from meshwright.cli.fit import MODELS
from meshwright.cli.main import main

ROOT = Path(__file__).parents[2]


def test_fit_prints_a_verdict_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "llama-3-8b", "--hardware", "rtx4090", "--seq-len", "2k"]) == 0
    out = capsys.readouterr().out
    assert "llama-3-8b on rtx4090:1, sequences of 2,048 tokens" in out
    assert "train QLoRA, nf4" in out and "does not run yet" not in out


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["llama-3-8b", "--hardware", "rtx4090"], 0),
        (["llama-3.1-405b", "--hardware", "t4"], 1),
    ],
)
def test_the_next_commands_run(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments, "--json"]) == code
    commands = json.loads(capsys.readouterr().out)["next"]
    assert len(commands) == 2
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "mw"
        assert "--smallest" in words or main([*words, "--json"]) == 0
        capsys.readouterr()


def test_fit_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "gpt2", "--hardware", "h100:1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"], document["hardware"], document["seq_len"]) == ("gpt2", "h100:1", 1024)
    assert all(way["fits"] for way in document["ways"])


def test_without_a_model_those_that_fit_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--hardware", "rtx4090", "--seq-len", "1k", "--json"]) == 0
    ways = {model["model"]: model["ways"] for model in json.loads(capsys.readouterr().out)["models"]}
    assert tuple(ways) == MODELS
    assert main(["fit", "qwen3-14b", "--hardware", "rtx4090", "--seq-len", "1k", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["ways"]
    assert ways["qwen3-14b"] == [verdict["way"] for verdict in verdicts if verdict["fits"]]
    assert ways["deepseek-v3"] == []


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/does-it-fit.md"])
def test_pages_have_the_number_of_models(page: str) -> None:
    assert f" which of {len(MODELS)} models" in (ROOT / page).read_text(encoding="utf-8")


def test_nothing_fits_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "deepseek-v3", "--hardware", "t4"]) == 1
    assert "yes" not in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "message"), [
    (["fit", "llama-9"], "llama-9"),
    (["fit", "llama-3-8b", "--hardware", "rtx9999"], "hardware 'rtx9999' is unknown"),
    (["fit", "llama-3-8b", "--seq-len", "0"], "0"),
])  # fmt: skip
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

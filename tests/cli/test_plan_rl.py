"""mw plan rl, by its table, its files and its page."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.plan_file import load_plan

ASK = [
    "plan", "rl", "--model", "llama-3-8b", "--hardware", "h100:2x8", "--prompts", "16", "--samples", "4",
    "--prompt-tokens", "256", "--output-tokens", "256",
]  # fmt: skip


def test_plans_of_both_phases_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, page = tmp_path / "rl.toml", tmp_path / "rl.html"
    assert main([*ASK, "-o", str(plan), "--html", str(page), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"] == document["forms"][0]["form"]
    assert [form["step_seconds"] for form in document["forms"]] == sorted(
        form["step_seconds"] for form in document["forms"]
    )
    assert set(document) == {
        "model", "hardware", "rollouts", "prompt_tokens", "output_tokens", "longest_answer", "tokens",
        "updates", "forms", "best", "why", "crossover",
    }  # fmt: skip
    for form in document["forms"]:
        assert set(form) == {
            "form", "step_seconds", "idle_share", "staleness", "chips", "price", "currency", "trainer",
            "generator", "move", "bytes_per_chip", "phases",
        }  # fmt: skip
        [moved] = [each for each in form["move"]["moves"] if each["parameter"].endswith("w_out")]
        assert moved["before"].startswith("w_out[L, F")
    assert load_plan(plan).workload.phase == "train"
    assert load_plan(plan.with_suffix(".generate.toml")).workload.phase == "generate"
    html = page.read_text()
    assert "Moving weights, " + document["best"] in html and "w_out[L, F" in html
    assert "Recommended" in html and all(form["form"] in html for form in document["forms"])
    assert main(["report", str(plan), "-o", str(again := tmp_path / "again.html")]) == 0
    assert again.read_text() == html
    assert "<script src" not in html and "http://" not in html.replace("http://www.w3.org", "")


def test_the_best_form_comes_first_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASK, "--reference-model", "none"]) == 0
    out = capsys.readouterr().out
    assert "64 rollouts of 256 tokens, at most 1,024 (2" in out and "chips are idle for" in out
    assert "weights move by" in out and "of weights in place" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--reference-model": "other"}, "fits: same, none"),
        ({"--output-tokens": "8k"}, "exceed llama-3-8b's context of 8,192"),
        ({"--spread": "9"}, "9"),
        ({"--prompts": "0"}, "0 is out of range"),
    ],
)
def test_bad_input_is_one_line(
    change: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = dict(zip(ASK[2::2], ASK[3::2], strict=True)) | change
    assert main([*ASK[:2], *(word for pair in options.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_nothing_fits_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [word if word != "h100:2x8" else "t4:1x1" for word in ASK]
    assert main(asked) == 1
    assert "neither form fits" in capsys.readouterr().err

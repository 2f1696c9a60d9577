"""`mw train --rl` as a process: it learns, both forms agree, and a killed run goes on."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.train.processes import Runs
from tests.train.test_survival import until

from meshwright.cli.main import main
from meshwright.nn.files.checkpoint_files import checkpoint_steps

pytestmark = pytest.mark.sampled(2)

SCORE = """
def score(row, answer):
    right = row["answer"]
    return sum(map(str.__eq__, answer, right)) / len(right) if len(answer) == len(right) else 0.0
"""
# What does not depend on the clock.
EXACT = ("step", "loss", "grad_norm", "reward", "entropy", "logprob_difference", "kl", "answer_tokens")


class RlRuns(Runs):
    """A model that has learnt the form of an answer, two digits, and prompts that ask for digits in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "cpu:1", "data=1")
        self.prompts, self.reward = folder / "prompts.jsonl", folder / "rewards.py"
        self.reward.write_text(SCORE)
        pairs = [f"{a}{b}" for a in range(10) for b in range(10)]
        rows = ({"prompt": f"{pair}>", "answer": "".join(sorted(pair))} for pair in pairs)
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        digits = random.Random(0)
        texts = ("".join(digits.choices("0123456789", k=2)) for _ in range(6000))
        lines = [{"text": f"{next(texts)}>{next(texts)}"} for _ in range(3000)]
        corpus = folder / "form.jsonl"
        corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for name, hardware, layout in (
            ("plan", "cpu:4", "fsdp=4"),
            ("plan.generate", "cpu:4", "data=4"),
        ):
            options = ["--model", "tiny", "--set", "vocab_size=257", "--hardware", hardware]
            work = ["--batch-tokens", "2048", "--seq-len", "16"]
            dtypes = ",weights_dtype=f32,compute_dtype=f32"
            path = folder / f"{name}.toml"
            self.mw("plan", "train", *options, *work, "--layout", layout + dtypes, "-o", str(path))
        start = folder / "start"
        self.mw("train", str(self.plan), "--data", str(corpus), "--run", str(start), "--steps", "60")
        self.mw("export", str(start), "-o", str(folder / "checkpoint"))

    def arguments(self, run: Path, *more: str) -> list[str]:
        return [
            "train", str(self.plan), "--rl", "--from", str(self.folder / "checkpoint"),
            "--data", str(self.prompts), "--reward", f"{self.reward}:score", "--run", str(run),
            "--output-tokens", "4", "--schedule", "constant", "--learning-rate", "1e-3", *more,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> RlRuns:
    return RlRuns(tmp_path_factory.mktemp("rl"))


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def exact(run: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in EXACT if key in line} for line in lines_of(run)]


@pytest.mark.slow
def test_a_model_learns_to_sort_digits(runs: RlRuns, tmp_path: Path) -> None:
    """From a start that fails; the engine samples what the trainer scores, to float32's roundings."""
    out, _ = runs.mw(*runs.arguments(tmp_path / "run", "--prompts", "50", "--samples", "16", "--steps", "45"))
    lines = lines_of(tmp_path / "run")
    rewards = [line["reward"] for line in lines]
    assert rewards[0] < 0.2 and min(rewards[-5:]) > 0.8
    assert max(line["logprob_difference"] for line in lines) < 1e-4
    assert f"reward {rewards[-1]:.3f}; log-probabilities of engine and trainer differ by at most" in out


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["0", "1"])
def test_together_and_apart_agree_and_a_killed_run_goes_on(
    runs: RlRuns, tmp_path: Path, staleness: str
) -> None:
    options = [
        "--prompts", "8", "--samples", "4", "--steps", "12", "--kl", "0.02",
        "--checkpoint-every", "3", "--staleness", staleness,
    ]  # fmt: skip
    runs.mw(*runs.arguments(tmp_path / "together", *options))
    whole = exact(tmp_path / "together")
    assert len(whole) == 12
    runs.mw(*runs.arguments(tmp_path / "apart", *options, "--apart"))
    assert exact(tmp_path / "apart") == whole
    for number, more in enumerate(([], ["--apart"])):
        run = tmp_path / f"killed{number}"
        process = runs.start(*runs.arguments(run, *options, *more))
        until(process, lambda run=run: bool(checkpoint_steps(run / "checkpoints")))
        process.kill()
        process.communicate()
        assert 0 < checkpoint_steps(run / "checkpoints")[-1] < 12
        runs.mw("train", "--run", str(run), "--resume")
        assert exact(run) == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "4"], "--samples is of --rl, which is not given"),
        (["--rl"], "--rl takes one of --reward FILE.py:FUNCTION and --judge URL, and neither is given"),
        (["--rl", "--reward", "a.py:b", "--judge", "http://localhost"], "and both are given"),
        (["--rl", "--reward", "a.py:b", "--eval", "a=b"], "no --eval"),
        (["--rl", "--reward", "a.py:b", "--output-tokens", "32"], "have no place for a prompt"),
    ],
)
def test_bad_input_is_one_line(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, data = tmp_path / "plan.toml", tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "1 >"}\n')
    (tmp_path / "b").write_text("text")
    work = ["--model", "tiny", "--hardware", "cpu:1", "--batch-tokens", "512", "--seq-len", "32"]
    assert main(["plan", "train", *work, "-o", str(plan)]) == 0
    capsys.readouterr()
    more = [word.replace("a=b", f"a={tmp_path / 'b'}") for word in more]
    arguments = ["train", str(plan), "--data", str(data), "--run", str(tmp_path / "run"), *more]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

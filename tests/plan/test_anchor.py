"""mw plan train --anchor: a run of one's own sets how much longer steps take than priced."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.api.machine import anchored_by
from meshwright.cli.main import main
from meshwright.errors import PlanError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.anchor import MeasuredRun, anchored, run_of, slowdown_of, step_seconds
from meshwright.plan.train import price
from meshwright.plan_file import Plan, save_plan
from meshwright.programs.efficiency import StepEfficiency
from meshwright.validate.anchor_runs import runs_of

HARDWARE, WORKLOAD, LAYOUT = "v5e:4x4", Workload(64, 4096), Layout.of(fsdp=16, remat="full")


def run_folder(path: Path, *seconds: float | None) -> Path:
    """A run whose steps took so long; its metrics."""
    save_plan(Plan(load_model("llama-3.2-1b"), HARDWARE, WORKLOAD, LAYOUT), path / "plan.toml")
    lines = [json.dumps({"step": n, "step_seconds": value}) for n, value in enumerate(seconds)]
    metrics = path / "metrics.jsonl"
    metrics.write_text("\n".join(lines) + "\n")
    return metrics


def priced() -> float:
    return price(load_model("llama-3.2-1b"), load(HARDWARE), WORKLOAD, LAYOUT).step_seconds


def test_the_median_step_over_the_price_of_its_plan(tmp_path: Path):
    metrics = run_folder(tmp_path, None, 40.0, 2 * priced(), 2 * priced(), 2 * priced())
    assert step_seconds(metrics) == pytest.approx(2 * priced())
    assert slowdown_of(run_of(metrics)) == pytest.approx(2.0)


def test_every_time_is_scaled_and_nothing_else():
    config, plain = load_model("llama-3.2-1b"), load(HARDWARE)
    one, other = (price(config, machine, WORKLOAD, LAYOUT) for machine in (plain, plain.slowed(1.5)))
    assert other.step_seconds == pytest.approx(1.5 * one.step_seconds)
    assert [t.seconds for t in other.cost.terms] == pytest.approx([1.5 * t.seconds for t in one.cost.terms])
    assert (other.memory, other.cost.bound) == (one.memory, one.cost.bound)


def test_a_search_says_so_and_ranks_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    metrics = run_folder(tmp_path, 3 * priced())
    asked = ["plan", "train", "--model", "llama-3.2-1b", "--hardware", HARDWARE]
    asked += ["--batch-tokens", "256Ki", "--seq-len", "4096", "--json"]
    documents = []
    for more in ([], ["--anchor", str(metrics)]):
        assert main([*asked, *more]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    plain, anchored = documents
    assert anchored["best"]["layout"] == plain["best"]["layout"]
    assert anchored["best"]["step_seconds"] == pytest.approx(3 * plain["best"]["step_seconds"])
    assert "the priced step is multiplied by 3, the factor of the anchoring run" in anchored["assumptions"]


# Runs that rest on products, on attention and on links, in different parts.
LAYOUTS = (
    (8, 2048, "fsdp=16"),
    (16, 32768, "fsdp=16,remat=full"),
    (64, 512, "fsdp=4,tensor=4"),
    (16, 8192, "data=16"),
)


def runs(*slower: float, step: StepEfficiency | None = None) -> list[MeasuredRun]:
    """Runs that take as long as priced with `step`, times `slower`."""
    machine, config = load(HARDWARE), load_model("llama-3.2-1b")
    truth = machine.with_step(step or machine.chip.step)
    found = []
    for (sequences, length, words), factor in zip(LAYOUTS, slower, strict=True):
        layout, workload = Layout.parse(words), Workload(sequences * 16, length)
        seconds = price(replace(config, max_seq_len=length), truth, workload, layout).step_seconds
        found.append(
            MeasuredRun(replace(config, max_seq_len=length), machine, workload, layout, factor * seconds)
        )
    return found


def test_several_runs_move_the_constants_that_they_tell_of():
    step = load(HARDWARE).chip.step
    slow = replace(step, attention=0.5 * step.attention)
    found = anchored(load(HARDWARE), runs(1.0, 1.0, 1.0, 1.0, step=slow))
    assert 0.9 * slow.attention < found.step.attention < 0.9 * step.attention
    assert found.step.matmul["bf16"] == pytest.approx(step.matmul["bf16"], rel=0.1)
    assert any(line.startswith("attention moved from") for line in found.words)


def test_runs_that_do_not_agree_move_nothing():
    one = runs(1.0, 1.0, 1.0, 1.0)[0]
    found = anchored(load(HARDWARE), [one._replace(seconds=k * one.seconds) for k in (1.3, 0.77)])
    assert found.step == load(HARDWARE).chip.step
    assert found.words[0].endswith("no constant moves")


def test_a_run_on_other_chips_is_refused():
    with pytest.raises(PlanError, match="a run on v5e does not anchor h100"):
        anchored(load("h100:8"), runs(1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n', "no line has step_seconds; name the metrics.jsonl of mw train"),
        ("not json\n", "line 1 is not a JSON object"),
        ('{"step_seconds": NaN}\n', "no line has step_seconds"),
    ],
)
def test_a_file_without_steps_is_refused(tmp_path: Path, text: str, message: str):
    metrics = run_folder(tmp_path, 1.0)
    metrics.write_text(text)
    with pytest.raises(PlanError, match=re.escape(message)):
        slowdown_of(run_of(metrics))


def test_a_run_without_a_plan_is_refused(tmp_path: Path):
    metrics = run_folder(tmp_path, 1.0)
    (tmp_path / "plan.toml").unlink()
    with pytest.raises(PlanError, match=r"plan\.toml: cannot be read"):
        slowdown_of(run_of(metrics))
    with pytest.raises(PlanError, match=r"absent: cannot be read"):
        step_seconds(tmp_path / "absent")


def test_one_row_of_a_table_is_one_run(tmp_path: Path):
    """As of one metrics.jsonl: all of its factor, since nothing tells which constant is off."""
    published = Path(__file__).parents[2] / "benchmarks/published/training.csv"
    head, *rows = published.read_text(encoding="utf-8").splitlines()
    [row] = [line for line in rows if line.startswith("M0053,")]
    table = tmp_path / "one.csv"
    table.write_text(f"{head}\n{row}\n")
    machine = load("h100:64").running("megatron-te")
    slowed, said = anchored_by(machine, [table])
    [run] = runs_of(table)
    assert slowed == machine.slowed(slowdown_of(run))
    assert said == ()


def test_also_a_small_move_is_told():
    found = anchored(load(HARDWARE), runs(*[1.01] * 4))
    assert any(line.startswith("slowdown moved from 1 to 1.0") for line in found.words[1:])

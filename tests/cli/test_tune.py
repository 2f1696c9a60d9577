"""mw tune: what is written, and what it exits with."""

import json
from pathlib import Path

import pytest

from meshwright.audit import tuning as tune_module
from meshwright.audit.second_opinion import Figures
from meshwright.cli.main import main
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan, load_plan, save_plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    layout = Layout.parse("fsdp=2,remat=full,weights_dtype=f32")
    save_plan(Plan(load_model("tiny"), "cpu:2", Workload(8, 32), layout), tmp_path / "plan.toml")
    return tmp_path / "plan.toml"


def _compiler(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(
        tune_module,
        "compiled_figures",
        lambda plan, *_, **__: Figures(num_bytes, None, program=str(plan.layout)),
    )


def test_the_best_is_written_with_what_each_change_gave(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    _compiler(monkeypatch, 10**6)
    assert main(["tune", str(plan), "--trials", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first, second = document["trials"]
    assert {"change", "planned_seconds", "scheduled_seconds", "bytes_per_chip"} <= first.keys()
    assert (first["verdict"], second["verdict"], second["scheduled_seconds"]) == (
        "as planned",
        "faster",
        None,
    )
    assert document["best"] == second
    tuned = load_plan(plan)
    assert str(tuned.layout) == second["layout"] and tuned.layout.schedule.remat == "none"
    assert tuned.planned_step_seconds == pytest.approx(second["planned_seconds"])
    assert [one["verdict"] for one in tuned.tuned] == ["as planned", "faster"]


def test_the_table_says_what_ranks(
    plan: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _compiler(monkeypatch, 10**6)
    before = plan.read_text()
    assert main(["tune", str(plan), "--trials", "2", "-o", str(tmp_path / "tuned.toml")]) == 0
    printed = capsys.readouterr()
    assert "remat=none in place of remat=full" in printed.out
    assert "ranked by the plan's step time" in " ".join(printed.out.split())
    assert plan.read_text() == before and load_plan(tmp_path / "tuned.toml").layout.schedule.remat == "none"


def test_nothing_that_fits_exits_1_and_writes_nothing(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    _compiler(monkeypatch, 10**15)
    before = plan.read_text()
    assert main(["tune", str(plan), "--trials", "3"]) == 1
    assert "none of the 3 trials fits" in capsys.readouterr().err and plan.read_text() == before


def test_a_file_that_is_no_plan_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", str(tmp_path / "none.toml")]) == 2
    assert "none.toml: cannot be read" in capsys.readouterr().err

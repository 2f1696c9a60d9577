"""mw bench train: measured steps of plans next to their planned times."""

import json

import pytest

from meshwright.api.inputs import Train
from meshwright.cli.bench import fastest
from meshwright.cli.main import main

SMALL = ["--model", "tiny", "--hardware", "cpu:8", "--batch-tokens", "512", "--seq-len", "64"]


def test_a_step_is_timed_and_priced(capsys):
    assert main(["bench", "train", *SMALL, "--layouts", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hardware"] == "cpu:8"
    [row] = document["results"]
    assert row["layout"].startswith("data=8")
    assert row["seconds"] > 0
    assert row["ratio"] == pytest.approx(row["seconds"] / row["predicted_seconds"])
    assert row["tokens_per_second"] == pytest.approx(512 / row["seconds"])


def test_the_layouts_differ_in_their_axes():
    plans = fastest("tiny", "cpu:4", Train(256, 64), 3)
    axes = [{name for name, degree in plan.layout.mesh.sizes.items() if degree > 1} for plan in plans]
    assert axes[0] == {"data"}
    assert axes[1] != axes[2]
    seconds = [plan.planned_step_seconds for plan in plans if plan.planned_step_seconds]
    assert len(seconds) == len(plans) and seconds == sorted(seconds)


@pytest.mark.slow
def test_a_plan_with_a_program_for_each_stage_is_timed(tmp_path, capsys):
    path = str(tmp_path / "plan.toml")
    pipeline = ["--given", "pipe=2,schedule=zb-v", "-o", path]
    assert main(["plan", "train", *SMALL, *pipeline]) == 0
    capsys.readouterr()
    assert main(["bench", "train", path]) == 0
    shown = capsys.readouterr().out
    assert "pipe=2" in shown
    assert "measured / predicted" in shown


def test_options_that_a_plan_gives_are_refused(tmp_path, capsys):
    path = str(tmp_path / "plan.toml")
    assert main(["plan", "train", *SMALL, "-o", path]) == 0
    capsys.readouterr()
    assert main(["bench", "train", path, "--seq-len", "32"]) == 2
    assert "a plan already gives these; leave out --seq-len" in capsys.readouterr().err


def test_plans_of_two_machines_are_refused(tmp_path, capsys):
    paths = [str(tmp_path / f"{name}.toml") for name in ("a", "b")]
    for path, hardware in zip(paths, ("cpu:2", "cpu:4"), strict=True):
        assert main(["plan", "train", *SMALL[:2], "--hardware", hardware, *SMALL[4:], "-o", path]) == 0
    capsys.readouterr()
    assert main(["bench", "train", *paths]) == 2
    assert "cpu:2 and one for cpu:4" in capsys.readouterr().err

"""What is checked of a training job before JAX or the text is loaded, and how settings are kept."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DataError, LayoutError, MeshwrightError, PlanError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan, save_plan
from meshwright.train.job import RunOptions, prepare_job
from meshwright.train.settings import (
    Settings,
    changed_settings,
    load_settings,
    new_settings,
    num_steps,
    save_settings,
)

MODEL = load_model("tiny")


def plan(layout: Layout | None = None, **changes: Any) -> Plan:
    return Plan(replace(MODEL, **changes), "cpu:1", Workload(16, 32), layout or Layout.of(data=1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was begun and saved step 8."""
    save_plan(plan(), tmp_path / "run" / "plan.toml")
    save_settings(Settings(data="stdlib", steps=20, schedule_steps=20), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "8").mkdir(parents=True)
    return tmp_path / "run"


def test_a_resumed_run_has_its_own_plan_and_settings(run: Path):
    job = prepare_job(None, None, RunOptions(run=run, resume=True), {"data": None, "steps": None})
    assert job.settings == Settings(data="stdlib", steps=20, schedule_steps=20)
    assert (job.plan.model, job.resume, job.notes) == (MODEL, True, [])


def test_a_setting_given_again_is_stated_only_where_it_differs(run: Path):
    given = {"data": "stdlib", "steps": 20, "learning_rate": 5e-4, "keep": 3}
    job = prepare_job(plan(Layout.of(data=1, microbatches=2)), None, RunOptions(run=run, resume=True), given)
    assert job.notes == [
        "--learning-rate: 0.001 until now, 0.0005 from here on",
        "--keep: 2 until now, 3 from here on",
        f"layout: {Layout.of(data=1)} until now, {Layout.of(data=1, microbatches=2)} from here on",
    ]
    assert (job.settings.learning_rate, job.settings.keep, job.settings.schedule_steps) == (5e-4, 3, 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"tokenizer": "t.json"},
            "began with --tokenizer None, not t.json; leave the option out, or name another run",
        ),
        ({"bad_data": "eat"}, "--bad-data 'eat' is unknown; known: skip, stop"),
        ({"seed": 1}, "began with --seed 0, not 1; leave the option out, or name another run"),
        ({"data": "."}, "began with --data stdlib, not .; leave the option out, or name another run"),
        ({"steps": 7}, "is at step 8 already, 7 were asked for; ask for more"),
        ({"keep": 0}, "--keep 0 is below 1"),
        ({"checkpoint_minutes": 0.0}, "--checkpoint-minutes 0 is not above 0"),
        ({"on_spike": "pray"}, "--on-spike 'pray' is unknown; known: skip, stop"),
        ({"learning_rate": 0.0}, "--learning-rate 0 is not above 0"),
        ({"z_loss": -1.0}, "--z-loss -1 is not a number from 0 up"),
        ({"balance_loss": 0.01}, "--balance-loss 0.01: tiny has no experts; fits: 0"),
        ({"draft_weight": 0.5}, "no draft head is trained with the model; add --draft-head joint"),
        (
            {"optimizer": "sgd"},
            "began with --optimizer adamw, not sgd; leave the option out, or name another run",
        ),
    ],
)
def test_what_a_run_cannot_take_is_refused(run: Path, given: dict[str, Any], message: str):
    with pytest.raises(MeshwrightError) as error:
        prepare_job(None, None, RunOptions(run=run, resume=True), given)
    assert str(error.value).endswith(message)


@pytest.mark.parametrize(
    ("broken", "kind", "message"),
    [
        (plan(vocab_size=256), DataError, "needs V >= 257 ids"),
        (
            plan(Layout.of(kv_dtype="int8")),
            LayoutError,
            "kv_dtype=int8 can be planned",
        ),
        (replace(plan(), workload=Workload(16, 32, "prefill")), PlanError, "training takes 'train'"),
    ],
)
def test_what_does_not_run_is_refused(tmp_path: Path, broken: Plan, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        prepare_job(broken, None, RunOptions(run=tmp_path / "run"), {"data": "stdlib"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "no data: give --data"),
        ("nowhere", "corpus nowhere: no such file or folder"),
        (("stdlib:1", "nowhere:2"), "corpus nowhere: no such file or folder"),
    ],
)
def test_data_that_is_not_there_is_refused(tmp_path: Path, data: Any, message: str):
    with pytest.raises(DataError, match=message):
        prepare_job(plan(), None, RunOptions(run=tmp_path / "run"), {"data": data})


def test_the_optimizer_is_the_plans_unless_another_is_asked_for(tmp_path: Path):
    planned = replace(plan(Layout.of(data=1, optimizer="muon")), planned={"step_seconds": 1.0})
    found = []
    for given in ({}, {"optimizer": "lion"}):
        job = prepare_job(planned, None, RunOptions(run=tmp_path / "run"), {"data": "stdlib", **given})
        assert job.settings.optimizer == job.plan.layout.precision.optimizer
        found.append((job.settings.optimizer, job.plan.planned_step_seconds))
    assert found == [("muon", 1.0), ("lion", None)]


def test_a_tokenizer_is_checked_first(tmp_path: Path):
    with pytest.raises(DataError, match=r"tokenizer .*tokenizer\.json: no such file"):
        prepare_job(
            plan(), None, RunOptions(run=tmp_path / "run"), {"data": "stdlib", "tokenizer": str(tmp_path)}
        )


def test_epochs_set_the_steps_of_a_run(run: Path):
    assert num_steps(Settings(data="a.txt", epochs=2.5), steps_of_epoch=4) == 10
    stored = Settings(data="a.txt", steps=10, epochs=2.5)
    assert changed_settings(run, stored, {"epochs": 2.5}) == (stored, [])  # the same command again
    longer, _ = changed_settings(run, stored, {"epochs": 5})
    assert num_steps(longer, steps_of_epoch=4) == 20
    shorter, _ = changed_settings(run, longer, {"steps": 12})
    assert (shorter.steps, shorter.epochs) == (12, None)
    with pytest.raises(MeshwrightError, match="both set the length"):
        new_settings({"data": "a.txt", "steps": 10, "epochs": 2})


def test_settings_that_cannot_be_read_are_named(run: Path):
    for text in ("{", json.dumps({"data": "stdlib", "colour": "red"}), "[]"):
        (run / "settings.json").write_text(text)
        with pytest.raises(MeshwrightError, match=r"settings\.json: cannot be read .*delete it and give"):
            load_settings(run)


def test_a_job_is_checked_without_jax(run: Path):
    program = (
        "import sys; from pathlib import Path; from meshwright.train.job import RunOptions, prepare_job;"
        f"prepare_job(None, None, RunOptions(run=Path({str(run)!r}), resume=True), {{}});"
        "print(sorted({'jax', 'orbax', 'grain'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("code",), "--eval code: write NAME=PATH"),
        (("../up=stdlib",), "a name of letters, digits, - and _"),
        (("code=stdlib", "code=stdlib"), "code is given twice"),
        (("code=nowhere",), "corpus nowhere: no such file"),
    ],
)
def test_evaluation_sets_that_cannot_be_are_refused(tmp_path: Path, sets: tuple[str, ...], message: str):
    with pytest.raises(DataError, match=message):
        prepare_job(plan(), None, RunOptions(run=tmp_path / "run"), {"data": "stdlib", "eval": sets})


def test_settings_of_an_older_version_have_the_defaults_of_newer_options(tmp_path: Path):
    (tmp_path / "settings.json").write_text('{"data": ["a:1", "b:2"], "steps": 20, "z_loss": 0}')
    taken = r"settings\.json leaves out settings, whose defaults hold: .*clip_norm = 1\.0, balance_loss"
    with pytest.warns(UserWarning, match=taken) as warned:
        assert load_settings(tmp_path) == Settings(data=("a:1", "b:2"), steps=20)
    assert len(warned) == 1 and "z_loss = 0.0, b" not in str(warned[0].message)
    (tmp_path / "settings.json").write_text('{"data": "stdlib", "learning_rat": 1e-3}')
    with pytest.raises(MeshwrightError, match="'learning_rat' is unknown; did you mean learning_rate"):
        load_settings(tmp_path)
    (tmp_path / "settings.json").write_text('{"steps": 20}')
    with pytest.raises(MeshwrightError, match=r"cannot be read \(it lacks 'data'\)"):
        load_settings(tmp_path)


def test_settings_come_back_as_they_were_written(tmp_path: Path):
    settings = Settings(data=("a:1", "b:2"), eval=("c=stdlib",), from_="base", tensorboard=True, z_loss=1e-4)
    save_settings(settings, tmp_path)
    assert load_settings(tmp_path) == settings


def test_tensorboard_is_asked_for_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MeshwrightError, match=r"pip install 'meshwright\[tensorboard\]'"):
        prepare_job(plan(), None, RunOptions(run=tmp_path / "run"), {"data": "stdlib", "tensorboard": True})


@pytest.mark.parametrize(
    ("dtype", "hardware", "who"),
    [
        ("fp8", "cpu:1", "CPUs have"),
        ("fp4", "cpu:1", "CPUs have"),
        ("fp8", "h100:1x1", None),
        ("fp4", "h100:1x1", "these chips have"),
        ("fp4", "b200:1x1", None),
    ],
)
def test_products_that_the_machine_has_not_are_said(
    dtype: str, hardware: str, who: str | None, tmp_path: Path
):
    narrow = replace(plan(Layout.of(data=1, matmul_dtype=dtype)), hardware=hardware)
    job = prepare_job(narrow, None, RunOptions(run=tmp_path / "run"), {"data": "stdlib", "steps": 20})
    said = "operands are rounded to it and multiplied in bf16, which saves no time"
    assert job.notes == ([] if who is None else [f"{who} no products of {dtype}: {said}"])

"""`mw tune`: what is tried, what is taken, and what it says of differences that a price cannot tell."""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from meshwright.audit import tuning as tune_module
from meshwright.audit.compile import targets as targets_module
from meshwright.audit.second_opinion import Figures
from meshwright.audit.tuning import neighbours, remats, tune
from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.rank import TIE
from meshwright.plan_file import Plan
from meshwright.platforms import TPU

PLAN = Plan(load_model("llama-3.2-1b"), "v5e:4x4", Workload(32, 2048), Layout.parse("fsdp=16"))
ON_CPU = Plan(load_model("tiny"), "cpu:2", Workload(8, 32), Layout.parse("fsdp=2,weights_dtype=f32"))

Answer = Callable[[Plan], Figures]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answer], list[Plan]]:
    """Stands in for a TPU's compiler: the plans that it was asked for, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(targets_module, "is_installed", lambda name: True)
    monkeypatch.setattr(metadata, "version", lambda name: "1")

    def answers(answer: Answer) -> list[Plan]:
        asked: list[Plan] = []

        def figures(plan: Plan, *_: object, use_cache: bool) -> Figures:
            asked.append(plan)
            return answer(plan)

        monkeypatch.setattr(tune_module, "compiled_figures", figures)
        return asked

    return answers


def _named(plan: Plan) -> str:
    return f"{plan.layout} {sorted(plan.compiler)}"


def _steps(seconds: float, plan: Plan) -> Figures:
    return Figures(10**9, seconds, program=_named(plan))


def test_each_change_is_tried_on_the_best_before_it(compiler: Callable[[Answer], list[Plan]]) -> None:
    """Full recomputation is faster here, and then one option is."""
    option = dict(TPU.compiler.tuned_options[0])

    def answer(plan: Plan) -> Figures:
        seconds = 0.8 if plan.layout.schedule.remat == "full" else 1.0
        return _steps(seconds - 0.1 * (plan.compiler == option), plan)

    asked = compiler(answer)
    found = tune(PLAN)
    verdicts = {one.change: one.verdict for one in found.trials}
    assert verdicts["as planned"] == "as planned"
    assert verdicts["remat=full in place of remat=none"] == "faster"
    assert {plan.layout.schedule.remat for plan in asked if plan.compiler} == {"full"}
    assert (found.plan.layout.schedule.remat, found.plan.compiler) == ("full", option)
    assert found.best.gain == pytest.approx(1 - 0.7 / 0.8)
    assert found.best.over == "remat=full in place of remat=none"
    assert [one["change"] for one in found.plan.tuned] == [one.change for one in found.trials]
    assert found.to_dict()["priced_by"] == "schedule"


def test_a_difference_within_the_prices_resolution_is_none(
    compiler: Callable[[Answer], list[Plan]],
) -> None:
    compiler(lambda plan: _steps(1.0 - TIE / 2 if plan.layout.schedule.remat == "full" else 1.0, plan))
    found = tune(PLAN, num_trials=5)
    verdicts = {one.change: one.verdict for one in found.trials}
    assert verdicts["remat=full in place of remat=none"] == "no difference"
    assert found.best.change == "as planned" and found.plan.layout == PLAN.layout


def test_an_option_that_changes_nothing_is_the_same_program(
    compiler: Callable[[Answer], list[Plan]],
) -> None:
    compiler(lambda plan: Figures(10**9, 1.0, program=str(plan.layout)))
    found = tune(PLAN)
    of_options = {one.verdict for one in found.trials if one.compiler}
    assert of_options == {"same program"} and found.plan.compiler == {}


def test_what_fits_is_taken_although_it_is_slower(compiler: Callable[[Answer], list[Plan]]) -> None:
    def answer(plan: Plan) -> Figures:
        if plan.layout.schedule.remat == "full":
            return _steps(2.0, plan)
        return Figures(10**11, None, "Ran out of memory")

    compiler(answer)
    found = tune(PLAN, num_trials=4)
    assert [one.verdict for one in found.trials] == ["does not fit"] * 3 + ["fits"]
    assert found.best.fits and found.plan.layout.schedule.remat == "full" and found.best.gain is None


def test_a_refusal_is_a_result(compiler: Callable[[Answer], list[Plan]]) -> None:
    refused = Figures(None, None, "it does not compile", is_final=False)
    asked = compiler(lambda plan: refused if plan.layout.schedule.remat == "matmuls" else _steps(1.0, plan))
    assert [one.verdict for one in tune(PLAN, num_trials=2).trials] == ["as planned", "refused"]
    tune(PLAN, num_trials=2)  # what may have been the host's fault is asked again
    assert [plan.layout.schedule.remat for plan in asked] == ["none", "matmuls", "matmuls"]


def test_a_run_that_was_cut_off_goes_on(compiler: Callable[[Answer], list[Plan]]) -> None:
    asked = compiler(lambda plan: _steps(1.0, plan))
    first = tune(PLAN, num_trials=2)
    again = tune(PLAN, num_trials=3)
    assert len(asked) == 3 and again.trials[:2] == first.trials
    tune(PLAN, num_trials=2, use_cache=False)
    assert len(asked) == 5


def test_neighbours_are_one_step_away_and_run(capsys: pytest.CaptureFixture) -> None:
    near = [str(one.layout) for one in neighbours(PLAN)]
    assert "data=2,fsdp=8,remat=none" in near and any("tensor=2" in one for one in near)
    assert all(one.layout.mesh.num_devices == 16 for one in neighbours(PLAN))
    assert not any("pipe" in one for one in near)  # planned, not run
    # Its attention saves no scores, which "attention" would recompute.
    assert [one.layout.schedule.remat for one in remats(PLAN)] == ["matmuls", "alternate", "full"]


def test_only_training_is_tuned() -> None:
    with pytest.raises(PlanError, match="this plan has phase 'generate'"):
        tune(replace(PLAN, workload=Workload(32, 2048, "generate")))


@pytest.mark.slow
def test_by_xla_for_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled in earnest: no schedule has a price there, so the plan's ranks and no option is tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = tune(ON_CPU, "cpu", num_trials=4)
    assert found.to_dict()["priced_by"] == "plan" and not any(one.compiler for one in found.trials)
    assert all(one.program and one.bytes_per_chip for one in found.trials), found.trials
    assert len({one.program for one in found.trials}) == len(found.trials)

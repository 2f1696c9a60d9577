"""The best layouts of a search, ranked again by what the compiler says they take."""

from collections.abc import Callable

import pytest

from meshwright.audit import plan_audit as audit_module
from meshwright.audit import second_opinion as module
from meshwright.audit.compile import targets as targets_module
from meshwright.audit.compile.compile import CompiledProgram, compile_error
from meshwright.audit.second_opinion import MAX_AUDITED, NUM_AUDITED, second_opinion
from meshwright.errors import AuditError, DeviceError
from meshwright.hardware.catalog import load
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.rank import ranked
from meshwright.plan.train import Search, search
from meshwright.plan_file import Plan

CONFIG, HARDWARE, WORKLOAD = load_model("tiny"), load("cpu:8"), Workload(16, 64)


@pytest.fixture(scope="module")
def found() -> Search:
    return search(CONFIG, HARDWARE, WORKLOAD, weights_dtype="f32", compute_dtypes=("f32",))


def _compiler(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], dict[str, int] | None]) -> list[str]:
    """Stands in for the compiler: the memory of the n-th plan that it is asked for; and what was asked."""
    asked: list[str] = []

    def compile_plan(plan: Plan, target: object, progress: object, *, use_cache: bool) -> CompiledProgram:
        asked.append(str(plan.layout))
        return CompiledProgram("", 1.0, answer(len(asked) - 1))

    monkeypatch.setattr(module, "compile_plan", compile_plan)
    return asked


def test_what_fits_keeps_its_rank(found: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _compiler(monkeypatch, lambda n: {"total": 10**6 + n})
    again, opinions = second_opinion(CONFIG, HARDWARE, found)
    assert asked == [str(one.layout) for one in found.candidates[:NUM_AUDITED]]
    assert [one.layout for one in again.candidates] == [one.layout for one in found.candidates]
    assert [one.compiled_bytes for one in opinions] == [10**6, 10**6 + 1, 10**6 + 2]
    assert again.best.to_dict()["compiled_bytes_per_chip"] == 10**6


def test_those_that_fit_are_ranked_by_their_compiled_schedules(
    found: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is the fastest by its schedule, and the first does not fit."""
    _compiler(monkeypatch, lambda n: {"total": 10**15 if n == 0 else 10**6})
    taken = {str(one.layout): 1.0 - 0.1 * n for n, one in enumerate(found.candidates)}
    monkeypatch.setattr(audit_module, "scheduled_seconds", lambda plan, *_: taken[str(plan.layout)])
    again, opinions = second_opinion(CONFIG, HARDWARE, found)
    order = [one.layout for one in again.candidates]
    first, second, third, fourth = (one.layout for one in found.candidates[:4])
    assert order[:3] == [third, second, fourth] and order[-1] == first
    assert [one.scheduled_seconds for one in opinions] == pytest.approx([1.0, 0.9, 0.8])


def test_what_the_compiler_says_does_not_fit_is_refused(
    found: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compiler(monkeypatch, lambda n: {"total": 10**15 if n < 2 else 10**6})
    again, opinions = second_opinion(CONFIG, HARDWARE, found)
    assert again.best.layout == found.candidates[2].layout
    assert [one.fits for one in opinions] == [False, False, True]
    assert {one.layout for one in again.candidates[-2:]} == {one.layout for one in found.candidates[:2]}


def test_more_are_asked_until_one_fits(found: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _compiler(monkeypatch, lambda n: {"total": 10**15 if n < 4 else 10**6})
    again, _ = second_opinion(CONFIG, HARDWARE, found)
    assert (len(asked), again.best.layout) == (5, ranked(found.candidates[4:])[0].layout)
    asked = _compiler(monkeypatch, lambda n: {"total": 10**15})
    second_opinion(CONFIG, HARDWARE, found)
    assert len(asked) == MAX_AUDITED


def test_a_figure_that_is_not_given_is_unavailable(found: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    _compiler(monkeypatch, lambda n: None)
    again, opinions = second_opinion(CONFIG, HARDWARE, found)
    assert {(one.compiled_bytes, one.reason) for one in opinions} == {(None, "XLA for CPU gives no figure")}
    assert again.best.layout == found.best.layout


def test_a_compile_that_runs_out_of_memory_tells_how_much_it_wanted(
    found: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "Ran out of memory in memory space hbm. Used 21.50G of 15.75G hbm. Exceeded"

    def compile_plan(plan: Plan, target: object, progress: object, *, use_cache: bool) -> CompiledProgram:
        raise compile_error(str(plan.layout), f"jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: {message}", 1)

    monkeypatch.setattr(module, "compile_plan", compile_plan)
    _, opinions = second_opinion(CONFIG, HARDWARE, found)
    assert opinions[0].compiled_bytes == round(21.5 * 2**30)
    assert message in opinions[0].reason


def test_another_chips_compiler_is_not_asked(found: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TARGETS", ("cpu", "tpu"))
    with pytest.raises(AuditError, match="--audit has no compiler for gpu; it has compilers for cpu, tpu"):
        second_opinion(CONFIG, load("h100:8"), found)
    monkeypatch.setattr(targets_module, "is_installed", lambda name: False)
    with pytest.raises(DeviceError, match="which is not installed: pip install"):
        second_opinion(CONFIG, load("v5e:2x4"), found)

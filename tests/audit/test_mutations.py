"""Every way to break a step is flagged, and no unbroken step is."""

import random

import pytest
from tests.audit.mutations import (
    CASES,
    EDITS,
    KINDS,
    LAYOUTS,
    SERVING_KINDS,
    SERVING_LAYOUTS,
    broken,
    plan_of,
    unbroken,
)

from meshwright.audit.compile.compile import CompiledProgram
from meshwright.audit.compile.target import Target
from meshwright.audit.plan_audit import judged

pytestmark = pytest.mark.sampled(16)

# By a fixed seed: some that take no compile of their own, and one that does.
_CHANCE = random.Random(1)
SAMPLE = [*_CHANCE.sample([*EDITS], 2), _CHANCE.choice([kind for kind in KINDS if kind not in EDITS])]
SAMPLE_LAYOUT = LAYOUTS[2]


def audited(program: CompiledProgram, layout: str) -> dict:
    return judged(plan_of(layout), Target("cpu"), program)


def missed(kinds: list[str] | tuple[str, ...], layout: str) -> list[str]:
    """The kinds that the audit takes for the planned step."""
    programs = {kind: broken(kind, layout) for kind in kinds}
    return [kind for kind, one in programs.items() if one and audited(one, layout)["verdict"] != "differs"]


def test_there_are_enough_kinds() -> None:
    assert len(KINDS) >= 100 and len(LAYOUTS) == 4 and len(SERVING_KINDS) >= 15


def test_the_unbroken_step_matches_and_broken_ones_do_not() -> None:
    assert audited(unbroken(SAMPLE_LAYOUT), SAMPLE_LAYOUT)["verdict"] == "match"
    assert missed(SAMPLE, SAMPLE_LAYOUT) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *SERVING_LAYOUTS])
def test_unbroken_steps_match(layout: str) -> None:
    found = audited(unbroken(layout), layout)
    assert (found["findings"], found["verdict"]) == ([], "match")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_every_broken_step_differs(kind: str, layout: str) -> None:
    program = broken(kind, layout)
    if program is None:
        pytest.skip(f"{kind} does not apply to {layout}")
    found = audited(program, layout)
    assert found["verdict"] == "differs"
    assert found["findings"] or found["not_understood"]

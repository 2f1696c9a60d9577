"""What a session shows of an object is one short line that says which it is."""

import pytest

from meshwright.hardware.catalog import load
from meshwright.layout.workload import Workload
from meshwright.models.presets import PRESETS, load_model
from meshwright.plan.chosen import plan_of
from meshwright.plan.train import Search, search

MAX_LENGTH = 200


@pytest.fixture(scope="module")
def found() -> Search:
    workload, hardware = Workload(512, 4096), load("h100:2x8")
    return search(
        load_model("llama-3-8b"), hardware, workload, weights_dtype="bf16", compute_dtypes=("bf16",)
    )


def test_results_of_a_search_are_one_short_line_each(found: Search):
    best = found.best
    plan = plan_of(load_model("llama-3-8b"), best.hardware, Workload(512, 4096), best)
    shown = [repr(one) for one in (found, *found.candidates, best.cost, best.placement, best.hardware, plan)]
    for line in shown:
        assert len(line) < MAX_LENGTH and "\n" not in line and line.endswith(")")
    assert all(str(best.layout) in repr(one) for one in (found, best, plan))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_named_with_its_sizes(name: str):
    shown = repr(PRESETS[name])
    assert shown.startswith(f"ModelConfig({name}: L=") and len(shown) < MAX_LENGTH

"""What a session shows of an object is one short line that says which it is."""

import pytest

from meshwright.hardware.catalog import load
from meshwright.layout import Layout
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
    shown = [
        repr(one)
        for one in (found, *found.candidates, best.cost, best.placement, best.layout, best.hardware, plan)
    ]
    for line in shown:
        assert len(line) < MAX_LENGTH and "\n" not in line and line.endswith(")")
    assert all(str(best.layout) in repr(one) for one in (found, best, best.layout, plan))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_named_with_its_sizes(name: str):
    shown = repr(PRESETS[name])
    assert shown.startswith(f"ModelConfig({name}: L=") and len(shown) < MAX_LENGTH


def test_a_layout_shows_what_makes_it_again():
    layout = Layout(fsdp=4, tensor=2, remat="full", weights_dtype="f32", matmul_dtype="fp8", offload=True)
    assert eval(repr(layout), {"Layout": Layout}) == layout

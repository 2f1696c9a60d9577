"""The parts of a step: they add up to it, and are the planner's own terms and transfers."""

from collections import defaultdict

import pytest

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.candidate import Candidate
from meshwright.plan.study.split import split_step
from meshwright.plan.train import price

LAYOUTS = (
    "data=16",
    "fsdp=16,remat=full",
    "data=2,fsdp=2,tensor=4,sequence_parallel=true",
    "pipe=2,data=2,fsdp=2,tensor=2,microbatches=8",
    "context=2,tensor=8",
)


def candidate(layout: str, model: str = "llama-3-8b", machine: str = "v5e:4x4") -> Candidate:
    return price(load_model(model), catalog.load(machine), Workload(64, 2048), Layout.parse(layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_are_the_step(layout):
    found = candidate(layout)
    assert split_step(found).seconds == pytest.approx(found.step_seconds, rel=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_communication_is_what_the_links_are_busy_for(layout):
    found = candidate(layout)
    busy = sum(planned.seconds * planned.count for planned in found.cost.collectives)
    assert split_step(found).communication_seconds == pytest.approx(busy, rel=1e-9)


def test_each_part_is_the_sum_of_its_terms():
    found = candidate("pipe=2,data=2,fsdp=2,tensor=2,microbatches=8")
    split = split_step(found)
    by_bound: defaultdict[str, float] = defaultdict(float)
    for term in found.cost.terms:
        by_bound[term.bound] += term.seconds
    assert split.compute_seconds == pytest.approx(by_bound["compute"])
    assert split.memory_seconds == pytest.approx(by_bound["hbm"])
    assert split.bubble_seconds == pytest.approx(by_bound["bubble"]) and split.bubble_seconds > 0


def test_only_activations_are_waited_for():
    """FSDP moves weights and gradients, tensor parallelism activations."""
    weights, activations = split_step(candidate("fsdp=16")), split_step(candidate("data=2,tensor=8"))
    assert weights.waiting_seconds < 0.01 * weights.communication_seconds
    assert activations.waiting_seconds > 0.9 * (activations.waiting_seconds + activations.exposed_seconds)


def test_one_chip_moves_nothing():
    split = split_step(candidate("data=1", "gpt2", "v5p:1x1x1"))
    assert split.communication_seconds == 0
    assert split.compute_seconds > 0

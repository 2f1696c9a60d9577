"""Timelines of a plan: the schedule that it runs and the others, in the planner's seconds."""

import pytest

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.study.pipelines import shown_microbatches, timelines
from meshwright.plan.train import price

CONFIG, MACHINE, WORKLOAD = load_model("llama-3-8b"), catalog.load("h100:2x8"), Workload(64, 4096)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_the_idle_time_drawn_is_the_bubble_and_the_hops_priced(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout.of(pipe=4, data=2, tensor=2, microbatches=16, remat="full", schedule=schedule)
    candidate = price(CONFIG, MACHINE, WORKLOAD, layout.replace(interleave=chunks))
    timeline = timelines(CONFIG, WORKLOAD, candidate)[schedule]
    bubble = sum(term.seconds for term in candidate.cost.terms if term.bound == "bubble")
    hops = [one for one in candidate.cost.collectives if one.what == "activations between stages"]
    waited = sum(one.exposed_seconds for one in hops)
    idle = timeline.makespan_seconds - max(timeline.busy_seconds)
    slowdown = candidate.hardware.chip.step.slowdown
    assert bubble + waited == pytest.approx(idle * slowdown)
    assert [one.direction for one in hops] == ["forward", "backward"]


def test_every_schedule_that_exists_is_there_the_plan_s_first():
    layout = Layout.of(pipe=4, data=2, tensor=2, microbatches=16, schedule="zb-h1")
    found = timelines(CONFIG, WORKLOAD, price(CONFIG, MACHINE, WORKLOAD, layout))
    assert list(found) == ["zb-h1", "gpipe", "lanes", "1f1b", "interleaved", "zb-v", "dualpipe"]
    assert all(timeline.table.num_microbatches == 16 for timeline in found.values())


def test_what_does_not_exist_is_left_out():
    """Three microbatches do not go round four stages, nor do they enter at both ends in pairs."""
    layout = Layout.of(pipe=4, data=2, tensor=2, microbatches=3)
    workload = Workload(48, 4096)
    found = timelines(CONFIG, workload, price(CONFIG, MACHINE, workload, layout))
    assert "1f1b" in found and "gpipe" in found
    assert "interleaved" not in found and "dualpipe" not in found


@pytest.mark.parametrize(("pipe", "microbatches"), [(4, 16), (8, 4096), (64, 1024), (128, 4096), (2, 1)])
def test_as_many_microbatches_as_a_picture_holds(pipe, microbatches):
    shown = shown_microbatches(pipe, microbatches)
    assert shown == microbatches or (shown % pipe == 0 and shown >= 2 * pipe)

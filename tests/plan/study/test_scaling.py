"""Strategies against the batch: kinds of meshes, and candidates that are the planner's own."""

import pytest

from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.space import Space
from meshwright.plan.study.scaling import (
    BEST,
    STRATEGIES,
    base_of,
    batches,
    machine_sizes,
    meshes,
    rank,
    scaling_sweep,
    without_schedule,
)
from meshwright.plan.train import price, search, well_placed

CONFIG, MACHINE, WORKLOAD = load_model("llama-3-8b"), catalog.load("v5e:4x4"), Workload(48, 2048)


@pytest.fixture(scope="module")
def swept():
    found = search(CONFIG, MACHINE, WORKLOAD, weights_dtype="bf16", compute_dtypes=("bf16",))
    return found, scaling_sweep(
        CONFIG, MACHINE, WORKLOAD, Layout.of(), [one.layout for one in found.candidates[:4]]
    )


def test_every_point_is_what_the_planner_prices(swept):
    _, found = swept
    for point in found.points[::7]:
        workload = Workload(point.num_sequences, 2048)
        again = well_placed(price(CONFIG, MACHINE, workload, point.candidate.layout))
        assert again.step_seconds == pytest.approx(point.candidate.step_seconds, rel=1e-12)
        assert again.memory == point.candidate.memory
        assert again.num_tokens == point.candidate.num_tokens


def test_a_strategy_keeps_to_its_axes(swept):
    _, found = swept
    kinds = {
        "DP": lambda one: one.fsdp == 1 and one.tensor == 1,
        "FSDP": lambda one: one.fsdp > 1 and one.tensor == 1,
        "TP": lambda one: one.fsdp == 1 and one.tensor > 1,
        "FSDP + TP": lambda one: one.fsdp > 1 and one.tensor > 1,
    }
    for strategy in STRATEGIES:
        points = found.of(strategy)
        assert points
        assert all(kinds[strategy](point.candidate.layout) for point in points)
        assert all(point.candidate.layout.pipe == 1 for point in points)


def test_the_best_is_no_worse_than_any_strategy_and_than_the_search(swept):
    searched, found = swept
    for point in found.of(BEST):
        rivals = [other.candidate for other in found.points if other.num_sequences == point.num_sequences]
        assert rank(point.candidate) == min(map(rank, rivals))
    (planned,) = [point for point in found.of(BEST) if point.num_sequences == WORKLOAD.num_sequences]
    assert planned.candidate.step_seconds <= searched.best.step_seconds * (1 + 1e-9)


def test_points_come_by_batch_and_the_planned_one_is_among_them(swept):
    _, found = swept
    numbers = [point.num_sequences for point in found.of("FSDP")]
    assert numbers == sorted(numbers) and WORKLOAD.num_sequences in numbers
    assert found.planned_tokens == WORKLOAD.num_tokens


@pytest.mark.parametrize(("sequences", "chips"), [(48, 16), (1, 1), (3906, 8960), (7, 512), (512, 64)])
def test_batches_span_a_sixteenth_to_sixteen_times(sequences, chips):
    found = batches(sequences, chips)
    assert sequences in found and found == sorted(set(found))
    assert all(number >= 1 and sequences / 16 <= number <= 16 * sequences for number in found)
    # But for the planned one, shards of all chips or a power of two fewer are of whole sequences.
    for number in set(found) - {sequences}:
        assert number % chips == 0 or chips % number == 0


def test_shapes_are_machines_of_the_same_chip_around_the_planned_one():
    own = catalog.load("v5p:16x20x28")
    found = machine_sizes(own)
    assert own in found and 1 < len(found) <= 4
    sizes = [machine.num_chips for machine in found]
    assert sizes == sorted(set(sizes))
    assert {machine.chip.name for machine in found} == {"v5p"}
    # Cubes of four keep their rings closed.
    assert all(all(machine.wraparound) for machine in found)


def test_gpus_grow_by_nodes_and_a_host_does_not_grow():
    sizes = [machine.num_chips for machine in machine_sizes(catalog.load("h100:4x8"))]
    assert sizes == [8, 16, 32, 64]
    assert [machine.spec for machine in machine_sizes(catalog.load("cpu:8"))] == ["cpu:8"]
    assert [machine.spec for machine in machine_sizes(catalog.load("2*v5e:4x4"))] == ["2*v5e:4x4"]


def test_a_strategy_that_cannot_take_the_batch_has_no_point():
    found = scaling_sweep(CONFIG, catalog.load("v5e:8x8"), Workload(8, 2048), Layout.of(), [])
    assert not [point for point in found.of("DP") if point.num_sequences < 64]


def test_an_expert_model_has_its_points_too():
    config = load_model("mixtral-8x7b")
    found = scaling_sweep(config, catalog.load("h100:4x8"), Workload(64, 4096), Layout.of(), [])
    assert {point.strategy for point in found.points} >= {"FSDP", "FSDP + TP", BEST}


def test_meshes_divide_the_model():
    space = Space(CONFIG, catalog.load("v5e:16x16"), WORKLOAD, Layout.of())
    for strategy in STRATEGIES:
        for mesh in meshes(space, strategy):
            assert mesh.mesh.num_devices == 256
            check_fits(mesh, CONFIG, padded=True)


def test_base_and_mesh_of_a_layout():
    layout = Layout.of(
        fsdp=4, tensor=2, microbatches=4, remat="full", weights_dtype="f32", optimizer_dtype="bf16"
    )
    assert base_of(layout) == Layout.of(weights_dtype="f32", optimizer_dtype="bf16")
    assert (
        without_schedule(layout).mesh == layout.mesh and without_schedule(layout).schedule.microbatches == 1
    )

"""Collectives measured: what runs, what is fitted to it, and what the budget leaves out."""

from dataclasses import replace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from meshwright.bench import sweep as sweeping
from meshwright.bench.collective_times import (
    CollectivePoint,
    MeasuredCollective,
    combinations_of,
    operand,
    prepare,
    runs_in_sequence,
)
from meshwright.bench.measured_hardware import predicted, with_collectives
from meshwright.bench.regression import fit_cost
from meshwright.bench.sizes import CALIBRATION, SWEEP, group_mesh
from meshwright.bench.sweep import sweep
from meshwright.bench.timing import Timing
from meshwright.errors import DeviceError, LayoutError
from meshwright.hardware.catalog import dump_toml, load
from meshwright.hardware.chip import COLLECTIVES, LinearCost, Switch, Torus
from meshwright.hardware.topology import Hardware
from meshwright.nn.start.device_mesh import explicit_mesh
from meshwright.notation.mesh import Mesh

MESH = Mesh({"X": 4, "Y": 2})


@pytest.mark.parametrize(
    ("op", "expected"),
    [("all_gather", 4096), ("all_reduce", 4096), ("all_to_all", 1024), ("permute", 1024)],
)
def test_a_point_is_priced_by_what_a_device_writes(op: str, expected: int) -> None:
    assert CollectivePoint(op, MESH, ("X",), 4096).priced_bytes == expected


def test_every_choice_of_axes_is_measured() -> None:
    assert list(combinations_of(MESH)) == [("X",), ("Y",), ("X", "Y")]
    assert list(combinations_of(Mesh({"X": 2, "Y": 1}))) == [("X",)]
    assert (SWEEP[0], SWEEP[-1]) == (1024, 256 * 2**20)


_HLO = {
    "all_gather": "f32[1024]{0} all-gather(",
    "all_reduce": "f32[1024]{0} all-reduce(",
    "reduce_scatter": "f32[1024]{0} all-reduce(",  # and a slice: XLA on CPU (JAX 0.10.2)
    "all_to_all": "all-to-all(",
    "permute": "collective-permute(",
}


@pytest.mark.parametrize("op", COLLECTIVES)
def test_the_loop_runs_the_collective_whole(op: str) -> None:
    """No pass of XLA moves it out of the loop, or cuts it down to the one element that is kept."""
    point = CollectivePoint(op, MESH, ("X",), 4096)
    axes = PartitionSpec(MESH.axes)
    mesh = jax.sharding.Mesh(explicit_mesh(MESH).devices, MESH.axes)
    run = jax.shard_map(runs_in_sequence(point), mesh=mesh, in_specs=axes, out_specs=axes, check_vma=False)
    array = jax.ShapeDtypeStruct((8 * operand(point).shape[0],), "float32")
    program = jax.jit(run).lower(array).compile().as_text()
    assert program is not None
    body = next(part for part in program.split("\n\n") if _HLO[op] in part)
    assert "ENTRY" not in body
    if point.loop_length > 1:
        assert " while(" in program


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11))
def test_an_exact_line_is_found_again(latency: float, bandwidth: float) -> None:
    line, sizes = LinearCost(latency, bandwidth), [float(size) for size in CALIBRATION]
    fitted = fit_cost(sizes, [line.seconds(size) for size in sizes])
    for size in sizes:
        assert fitted.seconds(size) == pytest.approx(line.seconds(size), rel=1e-2)


def test_a_cliff_between_the_caches_is_found_again() -> None:
    """4 GB/s up to 1 MB, a tenth of it beyond: no line says so, the curve does, between sizes too."""
    true = LinearCost(5e-5, 4e9, ((1e6, 1.0), (1.6e7, 0.1)))
    sizes = [float(size) for size in CALIBRATION] * 3
    fitted = fit_cost(sizes, [true.seconds(size) for size in sizes])
    assert fitted.latency_seconds == pytest.approx(5e-5, rel=0.05)
    for size in (131_072, 524_288, 2_097_152, 8_388_608, 25_165_824):
        assert fitted.seconds(size) == pytest.approx(true.seconds(size), rel=0.1)


def _as_on(true: Hardware, mesh: Mesh, sizes: tuple[int, ...]) -> list[MeasuredCollective]:
    """Every collective over `mesh`, as fast as `true` says."""
    asked = [
        MeasuredCollective(CollectivePoint(op, mesh, axes, size), Timing(0.0, 0.0))
        for op in COLLECTIVES
        for axes in combinations_of(mesh)
        for size in sizes
    ]
    return [replace(one, timing=Timing(predicted(true, one).seconds, 0.0)) for one in asked]


@pytest.mark.parametrize(
    ("spec", "mesh"),
    [
        ("h100:8", Mesh({"X": 4, "Y": 2})),
        ("v5e:4x4", Mesh({"X": 4, "Y": 4})),
        ("v5p:4x4x4", Mesh({"X": 16, "Y": 4})),
    ],
)
def test_links_half_as_fast_for_some_sizes_are_found_again(spec: str, mesh: Mesh) -> None:
    plain = load(spec)
    network = plain.chip.network
    assert isinstance(network, Torus | Switch)
    kind = "ici" if isinstance(network, Torus) else "nvlink"
    curve = ((2.0**22, 0.25), (2.0**26, 0.5), (2.0**28, 0.8))
    slow = replace(network, efficiency={kind: dict.fromkeys(COLLECTIVES, curve)})
    latency = "hop_seconds" if isinstance(network, Torus) else "collective_launch_seconds"
    slow = replace(slow, **{latency: 2e-5})
    true = replace(plain, chip=replace(plain.chip, network=slow))

    found = with_collectives(plain, _as_on(true, mesh, (1024, 2**20, 2**22, 2**24, 2**26, 2**28)))
    assert getattr(found.chip.network, latency) == pytest.approx(2e-5, rel=0.05)
    for one in _as_on(true, mesh, (2**23, 2**25, 2**27)):
        assert predicted(found, one).seconds == pytest.approx(one.timing.seconds, rel=0.3)
    dump_toml(found)


def test_a_sweep_reports_every_collective_over_every_choice_of_axes() -> None:
    document = sweep("cpu:8", MESH, sizes=(4096,))
    assert {(r["op"], *r["axes"]) for r in document["results"]} == {
        (op, *axes) for op in COLLECTIVES for axes in combinations_of(MESH)
    }
    for result in document["results"]:
        assert result["ratio"] == pytest.approx(result["seconds"] / result["predicted_seconds"])
        assert result["num_devices"] == MESH.size(tuple(result["axes"]))
    assert len(document["fits"]) == len(document["results"])
    assert (document["processes"], document["left_out"]) == (1, [])


def test_sizes_beyond_the_budget_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "free_bytes", lambda hardware: 1_000_000)
    document = sweep("cpu:8", Mesh({"X": 8}), sizes=(2**30, 4096))
    assert document["left_out"] == [{"bytes": 2**30, "reason": "memory"}]
    document = sweep("cpu:8", Mesh({"X": 8}), sizes=(4096, 8192), max_seconds=1e-9)
    assert document["left_out"] == [{"bytes": 8192, "reason": "time"}]


def test_nothing_to_measure_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"^no size to measure of 64 B: too small to split over Mesh"):
        sweep("cpu:8", Mesh({"X": 8}), sizes=(64,))


def test_a_mesh_of_other_devices_is_refused() -> None:
    with pytest.raises(LayoutError, match="mesh X=4 has 4 devices and cpu:8 has 8 chips"):
        sweep("cpu:8", Mesh({"X": 4}))


def test_programs_of_one_size_share_their_operands() -> None:
    prepared = prepare(group_mesh(8), None, (4096,))
    assert len(prepared.programs) == len(COLLECTIVES) * 3


@pytest.mark.parametrize(
    ("spec", "num_processes", "message"),
    [
        ("cpu:4", 3, "3 processes cannot share the 4 devices of cpu:4 evenly; write cpu:3"),
        ("h100:8", 2, "h100:8: several processes on this machine are a way to measure cpu:2"),
    ],
)
def test_processes_that_cannot_be(spec: str, num_processes: int, message: str) -> None:
    from meshwright.bench.local_processes import sweep_in_processes

    with pytest.raises(DeviceError) as caught:
        sweep_in_processes(spec, {"X": 4}, [1024], 1.0, num_processes)
    assert str(caught.value) == message

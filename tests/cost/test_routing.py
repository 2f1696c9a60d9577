"""The ways that a search finds once for all arrays alike: against a search of each array by itself."""

from math import gcd, prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.notation.devices import Devices, shardings, whole

from meshwright.cost.moves import move, way
from meshwright.cost.resharding import step_price
from meshwright.cost.routing import Ask, cheapest_path, rooms_of, router
from meshwright.errors import NotationError
from meshwright.hardware import catalog
from meshwright.hardware.topology import Placement
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array, parse_mesh
from meshwright.notation.resharding import cheapest_reshard

MACHINES = [
    ("X=2,Y=2,Z=2", "v5p:2x2x2"),
    ("X=4,Y=2", "v5e:4x2"),
    ("X=2,Y=8", "h100:2x8"),
    ("X=2,Y=2", "cpu:4"),
]


def asked(array: ShardedArray, target: ShardedArray, sizes: dict[str, int], mesh: Mesh) -> Ask:
    rooms = rooms_of(array.dims, sizes, mesh.num_devices)
    return Ask(array.axes, array.unreduced, target.axes, target.unreduced, rooms)


def block_bytes(array: ShardedArray, sizes: dict[str, int], mesh: Mesh) -> int:
    return array.bytes_per_device(mesh, sizes, "bf16")


def total(steps: list[Collective], mesh: Mesh, sizes: dict[str, int], placement: Placement) -> float:
    price = step_price(placement)
    return sum(price(s.op, s.axes, s.gathered_bytes(mesh, sizes, "bf16")) for s in steps)


@st.composite
def reshards(draw: st.DrawFn) -> tuple[ShardedArray, ShardedArray, dict[str, int], Mesh, str]:
    text, hardware = draw(st.sampled_from(MACHINES))
    mesh, dims = parse_mesh(text), draw(st.sampled_from(["I", "IJ", "IJK"]))
    array, target = draw(shardings(mesh, dims, unreduced=True)), draw(shardings(mesh, dims))
    kept = tuple(a for a in array.unreduced if a not in target.sharded_axes and draw(st.booleans()))
    target = target.replace(unreduced=kept)
    sizes = {dim: draw(st.sampled_from([1, 3, 8])) * 2 ** draw(st.integers(0, 9)) for dim in dims}
    for one in (array, target):
        try:
            one.local_shape(mesh, sizes)
        except NotationError:
            assume(False)
    return array, target, sizes, mesh, hardware


@settings(deadline=None, max_examples=60)
@given(reshards())
def test_a_shared_way_leads_there_and_costs_as_it_says(
    case: tuple[ShardedArray, ShardedArray, dict[str, int], Mesh, str],
) -> None:
    array, target, sizes, mesh, hardware = case
    placement = catalog.load(hardware).place(mesh)
    ask, block = asked(array, target, sizes, mesh), block_bytes(array, sizes, mesh)
    legs = router(placement).legs(ask, block)
    assume(legs is not None)
    assert legs is not None
    steps = router(placement).path(array, ask, block)
    assert [(step.op, step.axes) for step in steps] == list(legs)
    rules = move(way(array.axes, array.unreduced, target.axes, target.unreduced), block, placement)
    wins = move(legs, block, placement).seconds < rules.seconds
    assert cheapest_path(array, target, mesh, sizes, "bf16", placement) == (tuple(steps) if wins else None)
    assert (steps[-1].result if steps else array).same_layout(target)
    assert move(legs, block, placement).seconds == pytest.approx(
        total(steps, mesh, sizes, placement), rel=1e-3
    )
    if prod(sizes.values()) <= 512:
        values, devices = whole(array, sizes), Devices(mesh)
        devices.assert_holds(devices.run(steps, devices.place(values, array)), values, target)


@settings(deadline=None, max_examples=60)
@given(reshards())
def test_a_shared_way_or_that_of_the_rules_is_nearly_the_cheapest(
    case: tuple[ShardedArray, ShardedArray, dict[str, int], Mesh, str],
) -> None:
    """Bytes within 4 of those searched for may take another way; never a dearer one than the rules."""
    array, target, sizes, mesh, hardware = case
    placement = catalog.load(hardware).place(mesh)
    block = block_bytes(array, sizes, mesh)
    rules = move(way(array.axes, array.unreduced, target.axes, target.unreduced), block, placement)
    legs = router(placement).legs(asked(array, target, sizes, mesh), block)
    found = min(rules.seconds, move(legs, block, placement).seconds) if legs is not None else rules.seconds
    exact = cheapest_reshard(array, target, mesh, sizes, step_price(placement))
    least = total(exact, mesh, sizes, placement)
    assert least <= found * (1 + 1e-3)
    assert found <= 4 * least + 1e-12


def test_axes_with_like_links_share_their_ways() -> None:
    """Three rings of four: what is found for one is known for the others, whatever the letters."""
    mesh, sizes = Mesh({"X": 4, "Y": 4, "Z": 4}), {"I": 64, "J": 64}
    ways = router(catalog.load("v5p:4x4x4").place(mesh))
    before = len(ways._patterns)
    for axis in mesh:
        for text, then in ((f"A[I_{axis}, J]", "A[I, J]"), (f"A[I, J_{axis}]", "A[I, J]")):
            array, target = parse_array(text), parse_array(then)
            legs = ways.legs(asked(array, target, sizes, mesh), 2.0**30)
            assert legs is not None
            assert [op for op, _ in legs] == ["slice", "slice", "all_gather"]
            assert set(legs[-1][1]) == {"X", "Y", "Z"}
    assert len(ways._patterns) <= before + 1


def test_an_axis_on_a_strided_part_stands_for_no_other() -> None:
    ways = router(catalog.load("v5e:16x16").place(Mesh({"X": 4, "Y": 4, "Z": 16})))
    assert len(set(ways.kinds.values())) == 3


def test_one_collective_over_every_axis_is_not_searched() -> None:
    mesh, sizes = Mesh({"X": 4, "Y": 2}), {"I": 64, "J": 64}
    ways = router(catalog.load("v5e:4x2").place(mesh))
    array, target = parse_array("A[I_X, J_Y]"), parse_array("A[I, J_Y]")
    assert ways.legs(asked(array, target, sizes, mesh), 2.0**20) is None
    assert gcd(*rooms_of(("I", "J"), sizes, mesh.num_devices)) == 8


def test_axes_of_one_device_are_left_to_the_rules() -> None:
    """A search leaves them out of its steps, and the target may name them."""
    mesh, sizes = Mesh({"X": 2, "Y": 2, "Z": 1}), {"I": 64, "J": 64}
    ways = router(catalog.load("cpu:4").place(mesh))
    array, target = parse_array("A[I_XZ, J]"), parse_array("A[I_Z, J_Y]")
    assert ways.legs(asked(array, target, sizes, mesh), 2.0**20) is None


def test_a_large_mesh_keeps_to_the_rules() -> None:
    mesh, sizes = Mesh(dict.fromkeys("VWXYZ", 2)), {"I": 64, "J": 64}
    ways = router(catalog.load("h100:4x8").place(mesh))
    assert ways.legs(asked(parse_array("A[I_XY, J]"), parse_array("A[I_Y, J]"), sizes, mesh), 2.0**20) is None

"""reshard(): whatever the two shardings, its collectives leave the right block on every device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.notation.devices import Devices, meshes, shardings, whole

from meshwright.errors import NotationError
from meshwright.notation.collective import Collective, reshard
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array

MESH = Mesh({"X": 2, "Y": 4, "Z": 2})


def _steps(before: str, after: str) -> list[str]:
    return [str(step) for step in reshard(parse_array(before), parse_array(after))]


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ("A[I_X, J]", "A[I_X, J]", []),
        ("A[I_X, J]", "A[I, J]", ["AllGather_{X} A[I_X, J] -> A[I, J]"]),
        ("A[I, J]", "A[I_X, J]", ["Slice_{X} A[I, J] -> A[I_X, J]"]),
        ("A[I, J]{U_X}", "A[I, J]", ["AllReduce_{X} A[I, J]{U_X} -> A[I, J]"]),
        ("A[I, J]{U_X}", "A[I, J_X]", ["ReduceScatter_{X} A[I, J]{U_X} -> A[I, J_X]"]),
        ("A[I_X, J]", "A[I, J_X]", ["AllToAll_{X} A[I_X, J] -> A[I, J_X]"]),
        ("A[I_XY, J]", "A[I_X, J]", ["AllGather_{Y} A[I_XY, J] -> A[I_X, J]"]),
        ("A[I_XY, J]", "A[I_X, J_Y]", ["AllToAll_{Y} A[I_XY, J] -> A[I_X, J_Y]"]),
        # The smaller block is summed: scatter over X first, then all-reduce over Y.
        (
            "A[I, J]{U_XY}",
            "A[I, J_X]",
            [
                "ReduceScatter_{X} A[I, J]{U_XY} -> A[I, J_X]{U_Y}",
                "AllReduce_{Y} A[I, J_X]{U_Y} -> A[I, J_X]",
            ],
        ),
        # Slice before gathering: the gather moves a Y-th of the array.
        (
            "A[I_X, J]",
            "A[I, J_Y]",
            ["Slice_{Y} A[I_X, J] -> A[I_X, J_Y]", "AllGather_{X} A[I_X, J_Y] -> A[I, J_Y]"],
        ),
        # What moves first makes way for a scatter, which is half of an all-reduce and a slice.
        (
            "A[I_X, J]{U_Y}",
            "A[I, J_XY]",
            [
                "AllToAll_{X} A[I_X, J]{U_Y} -> A[I, J_X]{U_Y}",
                "ReduceScatter_{Y} A[I, J_X]{U_Y} -> A[I, J_XY]",
            ],
        ),
        (
            "A[I]{U_YZ}",
            "A[I_ZXY]",
            [
                "ReduceScatter_{Z} A[I]{U_YZ} -> A[I_Z]{U_Y}",
                "Slice_{X} A[I_Z]{U_Y} -> A[I_ZX]{U_Y}",
                "ReduceScatter_{Y} A[I_ZX]{U_Y} -> A[I_ZXY]",
            ],
        ),
        # The major axis cannot leave alone, since blocks are contiguous.
        (
            "A[I_XY, J]",
            "A[I_Y, J]",
            ["AllGather_{X,Y} A[I_XY, J] -> A[I, J]", "Slice_{Y} A[I, J] -> A[I_Y, J]"],
        ),
    ],
)
def test_the_collectives_of_the_notation(before: str, after: str, steps: list[str]) -> None:
    assert _steps(before, after) == steps


@given(st.data())
def test_every_device_ends_with_its_block(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_devices=16))
    before = data.draw(shardings(mesh, "IJK", unreduced=True))
    after = data.draw(shardings(mesh, "IJK"))
    sizes = {"I": mesh.num_devices, "J": mesh.num_devices, "K": mesh.num_devices}
    devices, values = Devices(mesh), whole(before, sizes)
    blocks = devices.place(values, before)
    devices.assert_holds(blocks, values, before)
    devices.assert_holds(devices.run(reshard(before, after), blocks), values, after)


@given(st.data())
def test_partial_sums_that_stay_partial(data: st.DataObject) -> None:
    """Only the axes that the target finishes are reduced; the others stay addends."""
    mesh = data.draw(meshes(max_devices=8))
    before = data.draw(shardings(mesh, "IJ", unreduced=True))
    kept = tuple(axis for axis in before.unreduced if data.draw(st.booleans()))
    after = before.replace(axes=dict.fromkeys("IJ", ()), unreduced=kept)
    sizes = {"I": mesh.num_devices, "J": mesh.num_devices}
    devices, values = Devices(mesh), whole(before, sizes)
    blocks = devices.run(reshard(before, after), devices.place(values, before))
    devices.assert_holds(blocks, values, after)


@given(st.data())
def test_each_axis_is_communicated_over_at_most_twice(data: st.DataObject) -> None:
    """Never worse than gather everything and slice anew: one reduction and one gather an axis."""
    mesh = data.draw(meshes(max_devices=16))
    before = data.draw(shardings(mesh, "IJ", unreduced=True))
    after = data.draw(shardings(mesh, "IJ"))
    moves = [axis for step in reshard(before, after) if step.op != "slice" for axis in step.axes]
    assert all(moves.count(axis) <= 2 for axis in mesh)
    moving_or_partial = {*before.sharded_axes, *before.unreduced}
    assert set(moves) <= moving_or_partial, "only an axis in use needs the network"


def test_a_finished_sum_cannot_become_partial() -> None:
    with pytest.raises(NotationError) as caught:
        reshard(parse_array("A[I_X]"), parse_array("A[I_X]{U_Y}"))
    assert str(caught.value) == "A[I_X] -> A[I_X]{U_Y}: a finished sum cannot become partial again"


def _only(before: str, after: str) -> Collective:
    (step,) = reshard(parse_array(before), parse_array(after))
    return step


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        # V is the gathered array over what stays sharded, whichever way the bytes go.
        ("A[I_X, J]", "A[I, J]", 1),
        ("A[I_X, J_Y]", "A[I, J_Y]", 4),
        ("A[I_XY, J_Z]", "A[I, J_Z]", 2),
        ("A[I, J_Y]{U_X}", "A[I_X, J_Y]", 4),
        ("A[I, J_Y]{U_X}", "A[I, J_Y]", 4),
        ("A[I_X, J]", "A[I, J_X]", 1),
        ("A[I_ZX, J]", "A[I_Z, J_X]", 2),
    ],
)
def test_gathered_bytes(before: str, after: str, share: int) -> None:
    """V of "Sharded Matrices": bf16[1024, 4096] over the axes that stay; X = 2, Y = 4, Z = 2."""
    step = _only(before, after)
    assert step.gathered_bytes(MESH, {"I": 1024, "J": 4096}, "bf16") == 1024 * 4096 * 2 // share

"""Sharded arrays: shapes and bytes of a block, copies, and what may not be written."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.notation.devices import Devices, meshes, shardings, whole

from meshwright.errors import NotationError
from meshwright.notation.array import ShardedArray, dividing_degrees
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array


def test_published_bytes() -> None:
    """int8[128, 2048] A[I_XY, J] on X2 Y8 Z2: 16,384 B a device, 512 KiB in all.

    Source: How to Scale Your Model, "Sharded Matrices", section on notation.
    """
    array, mesh, sizes = parse_array("A[I_XY, J]"), Mesh({"X": 2, "Y": 8, "Z": 2}), {"I": 128, "J": 2048}
    assert array.local_shape(mesh, sizes) == (8, 2048)
    assert array.bytes_per_device(mesh, sizes, "int8") == 16_384
    assert array.bytes_per_device(mesh, sizes, "int8") * mesh.num_devices == 512 * 1024


def test_published_copies() -> None:
    """A[I_X, J, K] on X4 Y8 Z2 stands 16 times; the same source, question 1."""
    mesh = Mesh({"X": 4, "Y": 8, "Z": 2})
    assert parse_array("A[I_X, J, K]").replicas(mesh) == 16
    assert parse_array("A[I_X, J, K]{U_Y}").replicas(mesh) == 2  # partial sums are not copies
    assert parse_array("A[I_XY, J_Z, K]").replicas(mesh) == 1


@given(st.data())
def test_local_shape_times_shards_is_the_whole(data: st.DataObject) -> None:
    mesh = data.draw(meshes(max_devices=16))
    array = data.draw(shardings(mesh, "IJK", unreduced=True))
    sizes = {dim: mesh.num_devices * data.draw(st.integers(1, 3)) for dim in "IJK"}
    local = array.local_shape(mesh, sizes)
    for dim, axes, size in zip(array.dims, array.axes, local, strict=True):
        assert size * mesh.size(axes) == sizes[dim]
    held = prod(local) * mesh.num_devices
    copies = array.replicas(mesh) * mesh.size(array.unreduced)
    assert held == prod(sizes.values()) * copies
    assert array.bytes_per_device(mesh, sizes, "bf16") * mesh.num_devices == 2 * held


@given(st.data())
def test_replicas_hold_equal_blocks(data: st.DataObject) -> None:
    """Counted on devices: as many hold a block as `replicas` says."""
    mesh = data.draw(meshes(max_devices=16))
    array = data.draw(shardings(mesh, "IJ"))
    sizes = {"I": mesh.num_devices, "J": mesh.num_devices}
    values = whole(array, sizes).astype(int) * 0
    values += range(sizes["J"])
    values += [[1000 * row] for row in range(sizes["I"])]  # every element differs
    devices = Devices(mesh)
    blocks = [block.tobytes() for block in devices.place(values, array).values()]
    assert {blocks.count(block) for block in blocks} == {array.replicas(mesh)}


def test_half_bytes_round_up() -> None:
    mesh = Mesh({"X": 2})
    assert parse_array("A[I_X]").bytes_per_device(mesh, {"I": 2}, "int4") == 1
    assert parse_array("A[I]").bytes_per_device(mesh, {"I": 5}, "int4") == 3


@pytest.mark.parametrize(
    ("text", "sizes", "message"),
    [
        (
            "A[I_XY, J]",
            {"I": 12, "J": 8},
            "A[I_XY, J]: I = 12 does not divide over X·Y = 8; fits: 1, 2, 3, 4, 6, 12",
        ),
        ("A[I, J_X]", {"I": 12}, "A[I, J_X]: the size of J is missing; give J=..."),
        ("A[I_W]", {"I": 12}, "mesh axis W is unknown; this mesh has X, Y, Z"),
    ],
)
def test_what_has_no_local_shape(text: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_array(text).local_shape(Mesh({"X": 4, "Y": 2, "Z": 2}), sizes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A[I_X, J_X]", "mesh axis X is used twice at character 10 of 'A[I_X, J_X]'; {}"),
        ("A[I_XX]", "mesh axis X is used twice at character 6 of 'A[I_XX]'; {}"),
        ("A[I_X]{U_X}", "mesh axis X is used twice at character 10 of 'A[I_X]{{U_X}}'; {}"),
        ("A[I_{a,b}, J_a]", "mesh axis a is used twice at character 14 of 'A[I_{{a,b}}, J_a]'; {}"),
        ("A[Iₓ, Jₓ]", "mesh axis x is used twice at character 8 of 'A[Iₓ, Jₓ]'; {}"),
        ("A[I_X, I]", "dimension I is named twice at character 8 of 'A[I_X, I]'"),
    ],
)
def test_an_axis_and_a_dimension_appear_once(text: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        parse_array(text)
    assert str(caught.value) == message.format("an array may use each axis once")


def test_an_array_that_was_not_read_says_the_same() -> None:
    with pytest.raises(NotationError) as caught:
        ShardedArray("A", ("I", "J"), (("X",), ("X",)))
    assert str(caught.value) == "A[I_X, J_X]: mesh axis X is used twice; an array may use each axis once"
    with pytest.raises(NotationError, match=r"^A\[I, I\]: a dimension is named twice$"):
        ShardedArray("A", ("I", "I"), ((), ()))


def test_axes_are_found_both_ways() -> None:
    array = parse_array("x[B_{data,fsdp}, T, D_tensor]{U_context}")
    assert array.axes_of("B") == ("data", "fsdp")
    assert (array.dim_of("fsdp"), array.dim_of("tensor"), array.dim_of("context")) == ("B", "D", None)
    assert array.sharded_axes == ("data", "fsdp", "tensor")


def test_a_layout_is_the_same_whatever_the_name() -> None:
    array = parse_array("A[I_X, J]{U_YZ}")
    assert array.same_layout(parse_array("B[I_X, J]{U_ZY}"))
    assert not array.same_layout(parse_array("A[I_X, J]{U_Y}"))
    assert not array.same_layout(parse_array("A[I, J_X]{U_YZ}"))
    assert not parse_array("A[I_XY]").same_layout(parse_array("A[I_YX]"))  # the order matters


def test_replace_changes_what_it_names() -> None:
    array = parse_array("A[I_X, J]{U_Y}")
    assert str(array.replace(axes={"I": ()}, unreduced=(), name="B")) == "B[I, J]"
    assert str(array.replace(axes={"J": ("Z",)})) == "A[I_X, J_Z]{U_Y}"


@given(st.integers(1, 500), st.integers(1, 64))
def test_dividing_degrees(size: int, limit: int) -> None:
    degrees = dividing_degrees(size, limit)
    assert all(size % degree == 0 and degree <= limit for degree in degrees)
    assert list(degrees) == sorted(set(degrees)) and degrees[0] == 1 and len(degrees) <= 12


class TestMesh:
    def test_sizes(self) -> None:
        mesh = Mesh({"X": 4, "Y": 2})
        assert (mesh.axes, mesh.num_devices, mesh.size(()), mesh.size(("Y", "X"))) == (("X", "Y"), 8, 1, 8)
        assert Mesh({}).num_devices == 1

    def test_equal_meshes_are_one_key(self) -> None:
        assert {Mesh({"X": 4}): "a"}[Mesh({"X": 4})] == "a"

    @pytest.mark.parametrize("size", [0, -2, 2.0])
    def test_a_size_is_a_positive_integer(self, size: int) -> None:
        with pytest.raises(NotationError) as caught:
            Mesh({"X": size})
        assert str(caught.value) == f"mesh axis X = {size}: a size is a positive integer"

    def test_an_unknown_axis(self) -> None:
        with pytest.raises(NotationError, match=r"^mesh axis Z is unknown; this mesh has no axes$"):
            Mesh({}).size("Z")


def test_two_axes_on_one_dimension_are_major_first() -> None:
    """A[I_XY] on X2 Y2: device (x, y) holds rows 2x + y; A[I_YX]: rows 2y + x."""
    devices, rows = Devices(Mesh({"X": 2, "Y": 2})), whole(parse_array("A[I]"), {"I": 4})
    for text, row in (("A[I_XY]", 1), ("A[I_YX]", 2)):
        assert devices.block(rows, parse_array(text), (0, 1)).tolist() == [rows[row]]


def test_rank_is_our_own_invariant() -> None:
    with pytest.raises(AssertionError, match="differ in rank"):
        ShardedArray("A", ("I", "J"), ((),))

"""Which device holds which block: worked by hand, and against NumPy's own indexing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array
from meshwright.report.pictures.block_maps import (
    MAX_PANELS,
    MAX_SHOWN,
    BlockMap,
    Grid,
    block_colour,
    read_block_map,
)
from meshwright.report.pictures.mesh_arrays import blocks_svg, mesh_panel

MESH = Mesh({"data": 1, "fsdp": 4, "tensor": 2})


def test_a_device_holds_the_block_at_its_mesh_coordinates():
    cut = BlockMap(parse_array("wq[D_fsdp, N_tensor, H]"), MESH)
    assert (cut.total_blocks, cut.num_replicas) == (8, 1)
    assert [cut.index({"data": 0, "fsdp": 3, "tensor": 1}, (dim,)) for dim in "DNH"] == [3, 1, 0]


def test_replicas_share_a_block():
    cut = BlockMap(parse_array("x[B_fsdp, T, D]"), MESH)
    assert (cut.total_blocks, cut.num_replicas) == (4, 2)
    held = [cut.index(cell.coordinates, ("B",)) for cell in Grid(MESH).cells()]
    assert held == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_first_of_several_axes_is_major():
    mesh = Mesh({"X": 2, "Y": 3})
    first = BlockMap(parse_array("A[I_XY]"), mesh)
    second = BlockMap(parse_array("A[I_YX]"), mesh)
    assert first.index({"X": 1, "Y": 2}, ("I",)) == 5
    assert second.index({"X": 1, "Y": 0}, ("I",)) == 1


@given(st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_devices_are_numbered_row_major(sizes):
    mesh = Mesh(dict(zip("XYZ", sizes, strict=True)))
    numbers = np.arange(mesh.num_devices).reshape(sizes)
    cells = list(Grid(mesh).cells())
    assert sorted(cell.device for cell in cells) == list(range(mesh.num_devices))
    assert all(cell.device == numbers[tuple(cell.coordinates.values())] for cell in cells)


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_block_has_its_own_colour(rows, columns):
    colours = {block_colour(r, rows, c, columns) for r in range(rows) for c in range(columns)}
    assert len(colours) == rows * columns


def test_text_that_is_no_array_over_the_mesh_is_not_drawn():
    assert read_block_map("y[B_pipe, D]", MESH) is None
    assert read_block_map("not an array", MESH) is None


def test_sharded_dimensions_are_drawn_and_layers_are_not():
    assert BlockMap(parse_array("w[L, D_fsdp, F]"), MESH).drawn_dims == (("D",), ("F",))
    assert BlockMap(parse_array("w[L, D, H, F_tensor]"), MESH).drawn_dims == (("D",), ("F",))
    assert BlockMap(parse_array("norm[L, D]"), MESH).drawn_dims == ((), ("D",))


def test_a_picture_has_a_square_for_each_device():
    assert mesh_panel(MESH).body.count("<title>device ") == 8
    # 8 blocks of the array and 8 devices that hold them.
    assert blocks_svg(BlockMap(parse_array("w[D_fsdp, F_tensor]"), MESH)).count("<rect ") == 16


def test_a_large_mesh_is_drawn_in_part():
    pod = Mesh({"data": 16, "fsdp": 64, "tensor": 8})
    for panel in (mesh_panel(pod), *mesh_panel(pod).narrower):
        assert panel.body.count("<title>device ") == MAX_PANELS**3
    assert mesh_panel(Mesh({"fsdp": 4096})).body.count("<title>device ") == MAX_SHOWN

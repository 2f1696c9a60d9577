"""Splitting and merging dimensions: the same bytes stay on the same devices."""

from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.notation.devices import Devices, meshes, shardings, whole

from meshwright.errors import NotationError
from meshwright.notation.dims import merge_dims, split_dim
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array

MESH = Mesh({"X": 4, "Y": 2, "Z": 3})


@pytest.mark.parametrize(
    ("array", "sizes", "split"),
    [
        ("A[N_X, H]", {"K": 8, "G": 4}, "A[K_X, G, H]"),
        ("A[N_XY, H]", {"K": 8, "G": 4}, "A[K_XY, G, H]"),
        ("A[N_XY, H]", {"K": 4, "G": 4}, "A[K_X, G_Y, H]"),  # K is used up, G takes the rest
        ("A[N_XY, H]", {"K": 1, "G": 16}, "A[K, G_XY, H]"),
        ("A[N, H_X]{U_Y}", {"K": 3, "G": 5}, "A[K, G, H_X]{U_Y}"),
        ("A[H, N_YZ]", {"K": 6, "G": 5, "N": 30}, "A[H, K_YZ, G]"),
    ],
)
def test_split_and_merged_again(array: str, sizes: dict[str, int], split: str) -> None:
    parsed = parse_array(array)
    assert str(split_dim(parsed, "N", ("K", "G"), MESH, sizes)) == split
    assert merge_dims(parse_array(split), ("K", "G"), "N", MESH, sizes) == parsed


@given(st.data())
def test_blocks_stay_where_they_are(data: st.DataObject) -> None:
    """On every device the block of [N, H], reshaped, is its block of [K, G, E, H]."""
    mesh = data.draw(meshes(max_devices=16))
    array = data.draw(shardings(mesh, "NH"))
    sizes = {part: data.draw(st.sampled_from([1, 2, 3, 4, 8])) for part in "KGE"}
    sizes |= {"N": prod(sizes.values()), "H": mesh.num_devices}
    try:
        split = split_dim(array, "N", ("K", "G", "E"), mesh, sizes)
    except NotationError:
        assume(False)
        return
    devices, values = Devices(mesh), whole(array, sizes)
    reshaped = values.reshape([sizes[dim] for dim in split.dims])
    for device, block in devices.place(values, array).items():
        assert devices.block(reshaped, split, device).ravel().tolist() == block.ravel().tolist()
    assert merge_dims(split, ("K", "G", "E"), "N", mesh, sizes) == array


@given(st.data())
def test_one_axis_goes_whole_to_one_part(data: st.DataObject) -> None:
    """N = K·G over one axis needs whole rows: K divides over it, or it is refused."""
    mesh = data.draw(meshes(max_devices=16))
    array = data.draw(shardings(mesh, "N"))
    sizes = {part: data.draw(st.sampled_from([2, 3, 4, 6])) for part in "KG"}
    shards = mesh.size(array.axes[0])
    assume(prod(sizes.values()) % shards == 0 and len(array.axes[0]) < 2)
    fits = sizes["K"] % shards == 0
    try:
        split_dim(array, "N", ("K", "G"), mesh, sizes)
    except NotationError:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(
    ("array", "sizes", "message"),
    [
        (
            "A[N_X]",
            {"K": 6, "G": 4},
            "A[N_X]: N = K·G = 6·4: axis X = 4 does not divide K where 6 of 6 are left; "
            "fits: X in {1, 2, 3, 6}",
        ),
        (
            "A[N_YX]",
            {"K": 4, "G": 4},
            "A[N_YX]: N = K·G = 4·4: axis X = 4 does not divide K where 2 of 4 are left; fits: X in {1, 2}",
        ),
        ("A[N_X]", {"K": 8, "G": 4, "N": 64}, "A[N_X]: N = 64 is not K·G = 8·4; fits: N = 32"),
        ("A[N_X]", {"K": 8}, "A[N_X]: the size of G is missing; give G=..."),
        ("A[M_X]", {"K": 8, "G": 4}, "A[M_X]: there is no dimension N; it has M"),
        ("A[N_W]", {"K": 8, "G": 4}, "mesh axis W is unknown; this mesh has X, Y, Z"),
        ("A[N, K_X]", {"K": 8, "G": 4}, "A[K, G, K]: a dimension is named twice"),
    ],
)
def test_what_does_not_split(array: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(NotationError) as caught:
        split_dim(parse_array(array), "N", ("K", "G"), MESH, sizes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            "A[K_X, G_Y]",
            "A[K_X, G_Y]: a block holds 2 rows of K and a part of each: no shard of N; "
            "fits: K split 8 ways, or what follows it whole",
        ),
        ("A[G, K]", "A[G, K]: K, G do not stand next to each other in this order"),
        ("A[K, H, G]", "A[K, H, G]: K, G do not stand next to each other in this order"),
        ("A[K]", "A[K]: there is no dimension G; it has K"),
    ],
)
def test_what_does_not_merge(array: str, message: str) -> None:
    with pytest.raises(NotationError) as caught:
        merge_dims(parse_array(array), ("K", "G"), "N", MESH, {"K": 8, "G": 4})
    assert str(caught.value) == message

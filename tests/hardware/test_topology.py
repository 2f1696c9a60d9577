"""Which links each axis of a mesh takes."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import LayoutError
from meshwright.hardware.catalog import load
from meshwright.hardware.fold import factorisations, fold, foldings
from meshwright.hardware.links import Link, gather_figure
from meshwright.hardware.orders import choosing_orders
from meshwright.hardware.topology import Placement
from meshwright.notation.mesh import Mesh


@pytest.mark.parametrize(
    ("spec", "wraparound"),
    [
        ("v5p:16x20x28", (True, True, True)),
        ("v4:4x4x8", (True, True, True)),
        ("v5p:2x2x2", (False, False, False)),
        ("v5p:4x4x2", (False, False, False)),  # not a full cube: no optical switch joins its faces
        ("v5e:16x16", (True, True)),
        ("v5e:8x16", (False, True)),
        ("v6e:8x4", (False, False)),
        ("h100:64", (False, False)),
    ],
)
def test_wraparound(spec: str, wraparound: tuple[bool, ...]) -> None:
    assert load(spec).wraparound == wraparound


def _links(spec: str, **sizes: int) -> dict[str, list[tuple]]:
    placement = load(spec).place(Mesh(sizes))
    return {
        axis: [(link.kind, link.size, link.stride, link.ring) for link in links]
        for axis, links in placement.links.items()
    }


def test_an_axis_takes_whole_dimensions_where_it_can() -> None:
    assert _links("v4:4x4x4", data=4, fsdp=4, tensor=4) == {
        axis: [("ici", 4, 1, True)] for axis in ("data", "fsdp", "tensor")
    }
    assert _links("v5p:4x4x4", fsdp=16, tensor=4) == {
        "fsdp": [("ici", 4, 1, True), ("ici", 4, 1, True)],
        "tensor": [("ici", 4, 1, True)],
    }


def test_the_axis_finds_the_dimension_of_its_size() -> None:
    placement = load("v5e:8x4").place(Mesh({"X": 8, "Y": 4}))
    assert [link.dim for link in placement.links["Y"]] == [1]
    placement = load("v5e:8x4").place(Mesh({"X": 4, "Y": 8}))
    assert [link.dim for link in placement.links["Y"]] == [0]


def test_a_small_axis_lies_on_neighbours_and_leaves_strides_to_the_rest() -> None:
    links = _links("v5p:16x16x16", fsdp=1024, tensor=4)
    assert sorted(links["tensor"]) == [("ici", 2, 1, False), ("ici", 2, 1, False)]
    assert sorted(links["fsdp"]) == [("ici", 8, 2, True), ("ici", 8, 2, True), ("ici", 16, 1, True)]


def test_the_outermost_axis_goes_over_slices_first() -> None:
    links = _links("2*v5p:4x4x4", data=4, fsdp=8, tensor=4)
    assert links["data"][-1] == ("dcn", 2, 1, False)
    assert all(kind == "ici" for axis in ("fsdp", "tensor") for kind, *_ in links[axis])
    assert _links("4*v5e:4x4", data=2, fsdp=32)["fsdp"][-1] == ("dcn", 2, 1, False)


def test_the_innermost_axes_fill_the_nvlink_domain() -> None:
    assert _links("h100:64", data=2, fsdp=16, tensor=2) == {
        "data": [("network", 2, 1, False)],
        "fsdp": [("nvlink", 4, 1, False), ("network", 4, 1, False)],
        "tensor": [("nvlink", 2, 1, False)],
    }
    assert _links("h100:8x4", data=8, tensor=4)["tensor"] == [("nvlink", 4, 1, False)]
    assert _links("gb200-nvl72:64", tensor=64)["tensor"] == [("nvlink", 64, 1, False)]


def test_a_size_that_does_not_divide_the_domain_leaves_room_for_one_that_does() -> None:
    assert _links("h100:24", data=8, tensor=3) == {
        "data": [("nvlink", 8, 1, False)],
        "tensor": [("network", 3, 1, False)],
    }


def test_axes_of_one_device_take_nothing() -> None:
    placement = load("cpu:8").place(Mesh({"data": 8, "fsdp": 1}))
    assert placement.links["fsdp"] == ()
    assert placement.stretches(("fsdp",)) == ()


def test_stretches_that_continue_each_other_are_one_ring() -> None:
    placement = load("v5e:16x16").place(Mesh({"X": 4, "Y": 4, "Z": 16}))
    (joined,) = placement.stretches(("X", "Y"))
    assert (joined.size, joined.stride, joined.ring) == (16, 1, True)
    (apart,) = placement.stretches(("X",))
    assert (apart.size, apart.stride, apart.ring) == (4, 4, True)
    assert placement.stretches(("X", "Y")) == placement.stretches(("Y", "X"))


def test_a_mesh_of_another_size_is_refused() -> None:
    message = "mesh data=2, tensor=4 has 8 devices and v5e:4x4 has 16 chips; the axes must multiply to 16"
    for place in (load("v5e:4x4").place, load("v5e:4x4").placements):
        with pytest.raises(LayoutError, match=message):
            place(Mesh({"data": 2, "tensor": 4}))


def test_an_unknown_axis_is_refused() -> None:
    placement = load("cpu:8").place(Mesh({"data": 8}))
    with pytest.raises(LayoutError, match="mesh axis tensor is unknown; this mesh has data"):
        placement.stretches(("tensor",))


def test_equal_meshes_share_a_placement() -> None:
    hardware = load("v5p:4x4x4")
    assert hardware.place(Mesh({"X": 64})) is hardware.place(Mesh({"X": 64}))


@st.composite
def _foldings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions of a torus, and axis sizes with the same product."""
    dims = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 20]), min_size=1, max_size=3)))
    left, sizes = prod(dims), []
    for _ in range(draw(st.integers(0, 3))):
        sizes.append(draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= sizes[-1]
    return dims, (*sizes, left)


@given(_foldings(), st.booleans())
def test_a_folding_uses_every_chip_once(case: tuple[tuple[int, ...], tuple[int, ...]], wraps: bool) -> None:
    dims, sizes = case
    wraparound = tuple(wraps for _ in dims)
    found = list(foldings(sizes, dims, wraparound))
    assert found[0] == fold(sizes, dims, wraparound)
    assert len(found) == len(set(found))
    for folded in found:
        assert [prod(share.size for share in shares) for shares in folded] == list(sizes)
        for dim, length in enumerate(dims):
            parts = sorted((s.stride, s.size) for shares in folded for s in shares if s.dim == dim)
            reach = 1
            for stride, size in parts:
                assert stride == reach
                reach *= size
            assert reach == length


def _kinds(placement: Placement) -> dict[str, list[tuple]]:
    return {
        axis: sorted((link.kind, link.size, link.stride, link.ring) for link in links)
        for axis, links in placement.links.items()
    }


def _placements(spec: str, **sizes: int) -> list[dict[str, list[tuple]]]:
    return [_kinds(placement) for placement in load(spec).placements(Mesh(sizes))]


def test_a_small_axis_may_leave_the_others_whole_rings() -> None:
    found = _placements("v5p:16x16x16", fsdp=1024, tensor=4)
    assert found[0] == {
        "fsdp": [("ici", 8, 2, True), ("ici", 8, 2, True), ("ici", 16, 1, True)],
        "tensor": [("ici", 2, 1, False), ("ici", 2, 1, False)],
    }
    assert found[1:] == [
        {
            "fsdp": [("ici", 4, 4, True), ("ici", 16, 1, True), ("ici", 16, 1, True)],
            "tensor": [("ici", 4, 1, False)],
        },
        {
            "fsdp": [("ici", 4, 1, False), ("ici", 16, 1, True), ("ici", 16, 1, True)],
            "tensor": [("ici", 4, 4, True)],
        },
    ]


def test_the_last_axis_of_the_mesh_takes_the_nvlink_domain() -> None:
    assert _placements("h100:4x8", data=4, tensor=8) == [
        {"data": [("network", 4, 1, False)], "tensor": [("nvlink", 8, 1, False)]}
    ]
    assert _placements("h100:4x8", tensor=8, data=4) == [
        {"tensor": [("network", 4, 1, False), ("nvlink", 2, 1, False)], "data": [("nvlink", 4, 1, False)]}
    ]


def test_another_axis_may_go_between_slices() -> None:
    found = _placements("2*v5e:16x16", data=2, fsdp=16, tensor=16)
    assert found[0] == {
        "data": [("dcn", 2, 1, False)],
        "fsdp": [("ici", 16, 1, True)],
        "tensor": [("ici", 16, 1, True)],
    }
    assert any(("dcn", 2, 1, False) in one["fsdp"] for one in found[1:])


def test_one_placement_where_nothing_is_to_choose() -> None:
    assert _placements("v5e:4x4", data=1, tensor=16) == [_links("v5e:4x4", data=1, tensor=16)]
    assert len(_placements("cpu:8", data=4, tensor=2)) == 1


@pytest.mark.parametrize("spec", ["v5p:4x8x12", "2*v5e:4x16", "h100:16x8", "gb200-nvl72:2x72", "cpu:96"])
@given(st.data())
def test_every_placement_is_worth_pricing(spec: str, data: st.DataObject) -> None:
    hardware = load(spec)
    left, sizes = hardware.num_chips, {}
    for axis in ("pipe", "data", "fsdp", "expert"):
        sizes[axis] = data.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        left //= sizes[axis]
    mesh = Mesh({**sizes, "tensor": left})
    found = hardware.placements(mesh)
    assert found[0] is hardware.place(mesh)
    assert found is hardware.placements(mesh)
    assert 1 <= len(found) <= 24
    figures = [[gather_figure(placement.links[axis]) for axis in mesh.sizes] for placement in found]
    for placement in found:
        taken = {axis: prod(link.size for link in links) for axis, links in placement.links.items()}
        assert taken == dict(mesh.sizes)
    for one in figures[1:]:
        for other in figures:
            assert one is other or any(a < b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("num_axes", range(7))
def test_every_axis_chooses_first_once(num_axes: int) -> None:
    orders = choosing_orders(num_axes)
    assert orders[0] == tuple(reversed(range(num_axes)))
    assert {order[0] for order in orders if order} == set(range(num_axes))
    assert all(sorted(order) == list(range(num_axes)) for order in orders)
    assert len(orders) == len(set(orders))


@given(st.integers(1, 64), st.lists(st.sampled_from([1, 2, 3, 4, 8, 12]), max_size=3).map(tuple))
def test_factorisations_are_all_there(size: int, free: tuple[int, ...]) -> None:
    def brute(size: int, free: tuple[int, ...]) -> set[tuple[int, ...]]:
        if not free:
            return {()} if size == 1 else set()
        return {
            (d, *rest)
            for d in range(1, free[0] + 1)
            if free[0] % d == 0 and size % d == 0
            for rest in brute(size // d, free[1:])
        }

    found = list(factorisations(size, free))
    assert len(found) == len(set(found))
    assert set(found) == brute(size, free)


def test_only_slices_and_domains_are_outer() -> None:
    assert [Link(kind, 2, 1.0, 0.0).is_outer for kind in ("ici", "nvlink", "host", "dcn", "network")] == [
        False, False, False, True, True,
    ]  # fmt: skip

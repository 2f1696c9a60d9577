"""Groups of devices in every form that XLA prints, and the mesh axes that they are."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.audit.facts.groups import (
    DeviceGroups,
    GroupAxes,
    axes_that_change,
    coordinates,
    copied_over,
    copies_of,
    group_axes,
    parse_groups,
    parse_pairs,
    tiles_of,
)
from meshwright.audit.hlo.read import ArrayShape, Instruction
from meshwright.errors import AuditError
from meshwright.notation.mesh import Mesh

MESH = Mesh({"data": 2, "fsdp": 2, "tensor": 2})


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[1,8]<=[8]", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[4,2]<=[8]", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=4,'b'=1,'c'=2] {'a'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", ((3, 2), (1, 0))),
    ],
)
def test_groups_of_each_form(text: str, members: tuple[tuple[int, ...], ...]) -> None:
    assert parse_groups(text, 8).members == members


def test_a_form_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(AuditError, match=r"replica_groups=\[4,2\]: this form is unknown"):
        parse_groups("[4,2]", 8)


@st.composite
def meshes_and_axes(draw: st.DrawFn) -> tuple[Mesh, tuple[str, ...]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = Mesh({f"axis{i}": size for i, size in enumerate(sizes)})
    order = draw(st.permutations(mesh.axes))
    return mesh, tuple(order[: draw(st.integers(0, len(order)))])


def _groups_over(mesh: Mesh, axes: tuple[str, ...]) -> DeviceGroups:
    """One group for each position along the other axes, counted through `axes`, the first slowest."""
    by_position = {tuple(coordinates(d, mesh).values()): d for d in range(mesh.num_devices)}
    others = [axis for axis in mesh if axis not in axes]
    groups = []
    for outer in product(*(range(mesh.size(axis)) for axis in others)):
        fixed = dict(zip(others, outer, strict=True))
        inner = product(*(range(mesh.size(axis)) for axis in axes))
        positions = (fixed | dict(zip(axes, position, strict=True)) for position in inner)
        groups.append(tuple(by_position[tuple(p[axis] for axis in mesh)] for p in positions))
    return DeviceGroups(tuple(groups))


@given(meshes_and_axes())
def test_groups_built_over_axes_give_back_these_axes_in_order(drawn: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = drawn
    expected = tuple(axis for axis in axes if mesh.size(axis) > 1)
    assert group_axes(_groups_over(mesh, axes), mesh) == GroupAxes(expected)


@given(meshes_and_axes())
def test_offsets_that_follow_axes_give_back_these_axes(drawn: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = drawn
    offsets = [tuple(coordinates(device, mesh)[axis] for axis in axes) for device in range(mesh.num_devices)]
    assert set(axes_that_change(offsets, mesh)) == {axis for axis in axes if mesh.size(axis) > 1}


def test_part_of_an_axis_is_noted() -> None:
    groups = parse_groups("{{0,1},{2,3},{4,5},{6,7}}", 8)
    assert group_axes(groups, Mesh({"X": 2, "Y": 4})) == GroupAxes(("Y",), "groups of 2 within Y = 4")


def test_devices_in_no_order_of_their_axes_are_said_to_be_shuffled() -> None:
    shuffled = group_axes(parse_groups("{{1,0},{3,2},{5,4},{7,6}}", 8), MESH)
    assert shuffled == GroupAxes(("tensor",), "devices in no order of the axes", shuffled=True)
    assert group_axes(parse_groups("{{0,2,1,3},{4,6,5,7}}", 8), MESH) == GroupAxes(("tensor", "fsdp"))


def test_groups_that_follow_no_axis_have_none() -> None:
    groups = DeviceGroups(((0, 1), (2, 4), (3, 5), (6, 7)))
    assert group_axes(groups, MESH) == GroupAxes(None, "groups differ: {{0,1},{2,4},{3,5},{6,7}}")
    assert group_axes(DeviceGroups(((0, 9),)), MESH).axes is None


def test_a_permute_has_the_axes_along_which_it_sends() -> None:
    ring = parse_pairs("{{0,2},{2,0},{1,3},{3,1},{4,6},{6,4},{5,7},{7,5}}")
    swap = parse_pairs("{{0,0},{4,4},{2,1},{6,5},{1,2},{5,6},{3,3},{7,7}}")
    assert group_axes(ring, MESH).axes == ("fsdp",)
    assert group_axes(swap, MESH).axes == ("fsdp", "tensor")


# A mesh of 2 x 2 x 2; as XLA of JAX 0.10 prints a sharding, and as that of 0.12 does.
_AXES = "mesh['data'=2,'fsdp'=2,'tensor'=2]"


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("numbered", "named", "tiles", "copies", "over"),
    [
        ("{replicated}", "{mesh[], replicated}", 1, 8, ("data", "fsdp", "tensor")),
        ("{devices=[8,1]<=[8]}", f"{{{_AXES}, [{{'data', 'fsdp', 'tensor'}}, {{}}]}}", 8, 1, ()),
        (
            "{devices=[2,1,4]<=[8] last_tile_dim_replicate}",
            f"{{{_AXES}, [{{'data'}}, {{}}]}}",
            2,
            4,
            ("fsdp", "tensor"),
        ),
        (
            "{devices=[2,2,2]<=[2,2,2]T(2,0,1) last_tile_dim_replicate}",
            f"{{{_AXES}, [{{'tensor'}}, {{'data'}}]}}",
            4,
            2,
            ("fsdp",),
        ),
        (
            "{devices=[2,1,4]<=[2,2,2]T(1,0,2) last_tile_dim_replicate}",
            f"{{{_AXES}, [{{'fsdp'}}, {{}}], replicated={{'data'}}}}",
            2,
            4,
            ("data", "tensor"),
        ),
        # Partial sums are no copies.
        (
            "{devices=[2,1,2,2]<=[8] last_tile_dims={unreduced, replicated}}",
            f"{{{_AXES}, [{{'data'}}, {{}}], unreduced={{'fsdp'}}}}",
            2,
            2,
            ("tensor",),
        ),
        ("{maximal device=0}", "{maximal device=0}", 1, 1, ()),
    ],
)
def test_both_forms_of_a_sharding_say_alike(
    numbered: str, named: str, tiles: int, copies: int, over: tuple[str, ...], by_name: bool
) -> None:
    text = named if by_name else numbered
    given = Instruction("x", ArrayShape("f32", (8, 8)), "parameter", (), {"sharding": text})
    assert (tiles_of(text), copies_of(given, 8), copied_over(given, MESH)) == (tiles, copies, over)

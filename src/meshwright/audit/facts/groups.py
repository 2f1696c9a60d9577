"""Device groups of collectives and of sharded inputs, as mesh axes.

A program states the sharding of its inputs: `sharding={devices=[2,1,4]<=[8] last_tile_dim_replicate}` has two
parts along the first dimension, and four devices hold each part.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, permutations, product
from math import prod
from typing import NamedTuple

from meshwright.audit.hlo.read import Instruction
from meshwright.errors import AuditError
from meshwright.notation.mesh import Mesh

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"\{\s*(?:\{[\d,\s]*\}[,\s]*)*\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_CHOSEN_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class DeviceGroups:
    """Device ids that communicate: disjoint groups, or (source, target) pairs of a permute."""

    members: tuple[tuple[int, ...], ...]
    is_permute: bool = False

    @property
    def size(self) -> int:
        """Devices in one group; 0 if groups differ, 2 for a permute's pairs."""
        sizes = {len(group) for group in self.members}
        return sizes.pop() if len(sizes) == 1 else 0


@dataclass(frozen=True)
class GroupAxes:
    """Mesh axes that groups span, major first; None if they follow no axes of the mesh.

    note: the difference; "" if each group is all of its axes. shuffled: the devices are in no order of the
    axes, so gathered or scattered blocks are not either.
    """

    axes: tuple[str, ...] | None
    note: str = ""
    shuffled: bool = False


@lru_cache(maxsize=1024)  # a program names few groups, in thousands of instructions
def parse_groups(text: str, num_devices: int) -> DeviceGroups:
    """The groups that a `replica_groups=` attribute names.

    Four forms: `{{0,1},{2,3}}`, `{}` (all devices), iota `[4,2]<=[2,4]T(1,0)` (the ids 0..7 reshaped to
    [2,4], transposed, cut to 4 groups of 2), and named axes of a mesh `mesh['a'=2,'b'=4],
    device_ids=([4,2]T(1,0)) {'a'}` (also `'b':(2)2`: the part of b, of size 2, that has 2 parts before it).

    >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4).members
    ((0, 2), (1, 3))
    >>> parse_groups("mesh['a'=2,'b'=2] {'b'}", 4).members
    ((0, 1), (2, 3))
    """
    if text.startswith("mesh["):
        return DeviceGroups(_mesh_groups(text))
    if _LISTED.fullmatch(text):
        groups = tuple(_ints(group) for group in re.findall(r"\{([\d,\s]+)\}", text))
        return DeviceGroups(groups or (tuple(range(num_devices)),))
    iota = _IOTA.fullmatch(text)
    sizes, dims = (_ints(iota[1]), _ints(iota[2] or "")) if iota else ((), ())
    if not iota or len(sizes) != 2 or prod(sizes) != prod(dims):
        raise AuditError(f"replica_groups={text}: this form is unknown")
    _, size = sizes
    ids = _iota_ids(dims, _ints(iota[3] or ""))
    return DeviceGroups(tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size)))


def parse_pairs(text: str) -> DeviceGroups:
    """The pairs of a `source_target_pairs=` attribute."""
    if not _LISTED.fullmatch(text):
        raise AuditError(f"source_target_pairs={text}: this form is unknown")
    return DeviceGroups(tuple(_ints(pair) for pair in re.findall(r"\{([\d,\s]+)\}", text)), is_permute=True)


def group_axes(groups: DeviceGroups, mesh: Mesh) -> GroupAxes:
    """Mesh axes of groups, with a note on groups that are only part of their axes.

    Device ids are row-major over the mesh. Axes of size 1 never vary.

    >>> group_axes(DeviceGroups(((0, 1), (2, 3))), Mesh({"X": 4}))
    GroupAxes(axes=('X',), note='groups of 2 within X = 4', shuffled=False)
    """
    return _group_axes(groups, tuple(mesh.sizes.items()))


@lru_cache(maxsize=256)  # all layers' collectives have the same few groups, of thousands of devices
def _group_axes(groups: DeviceGroups, sizes: tuple[tuple[str, int], ...]) -> GroupAxes:
    mesh = Mesh(dict(sizes))
    outside = [i for group in groups.members for i in group if i >= mesh.num_devices]
    if outside:
        return GroupAxes(None, f"device {outside[0]} is outside the mesh of {mesh.num_devices} devices")
    counting = _counting(mesh)
    varying = [
        {axis for axis, one in counting.items() if len(set(map(one.position, group))) > 1}
        for group in groups.members
    ]
    axes = tuple(axis for axis in mesh if any(axis in found for found in varying))
    if groups.is_permute:
        return GroupAxes(axes)
    if len({len(group) for group in groups.members}) > 1 or any(found != set(axes) for found in varying):
        return GroupAxes(None, f"groups differ: {_shown(groups)}")
    if groups.size < mesh.size(axes):
        return GroupAxes(axes, f"groups of {groups.size} within {_sizes(axes, mesh)}")
    order = _order(groups.members[0], axes, mesh) if groups.members else ()
    return GroupAxes(axes, "devices in no order of the axes", True) if order is None else GroupAxes(order)


def axes_that_change(values: Sequence[object], mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes along which a per-device value changes, in mesh order.

    values: one per device, ids row-major. The offsets of a slice change along the axes that cut it.

    >>> axes_that_change([0, 0, 32, 32], Mesh({"X": 2, "Y": 2}))
    ('X',)
    """
    return tuple(axis for axis in mesh if changes_along(axis, values, mesh))


def changes_along(axis: str, values: Sequence[object], mesh: Mesh) -> bool:
    """Whether devices that differ only along `axis` have different values."""
    counting, first = _counting(mesh)[axis], dict[int, object]()
    numbered = enumerate(values)
    return any(first.setdefault(counting.without(device), value) != value for device, value in numbered)


class _Counting(NamedTuple):
    """The ids along an axis: `size` positions, `stride` ids apart."""

    stride: int
    size: int

    def position(self, device: int) -> int:
        return device // self.stride % self.size

    def without(self, device: int) -> int:
        """The device at position 0 of this axis and at the same position of the others."""
        return device - self.position(device) * self.stride


def _counting(mesh: Mesh) -> dict[str, _Counting]:
    """Stride and size of each axis, ids row-major over the mesh."""
    by_axis, stride = {}, 1
    for axis in reversed(mesh.axes):
        by_axis[axis] = _Counting(stride, mesh.size(axis))
        stride *= mesh.size(axis)
    return {axis: by_axis[axis] for axis in mesh}


def coordinates(device: int, mesh: Mesh) -> dict[str, int]:
    """Position of a device along each axis, ids row-major over the mesh."""
    return {axis: one.position(device) for axis, one in _counting(mesh).items()}


def _order(group: Sequence[int], axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...] | None:
    """`axes` in the order that `group` counts through them; None if it follows none."""
    counting = _counting(mesh)
    positions = [{axis: one.position(device) for axis, one in counting.items()} for device in group]
    for order in permutations(axes):
        counted = [tuple(position[axis] for axis in order) for position in positions]
        if counted == sorted(counted):
            return order
    return None


def _mesh_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Groups of the named-axes form: devices that differ only along the chosen axes."""
    declared, _, chosen = text.rpartition("{")
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(declared)]
    parts = {name: (int(before or 1), int(size or 0)) for name, before, size in _CHOSEN_AXIS.findall(chosen)}
    dims: list[tuple[int, bool]] = []
    for name, size in axes:
        before, part = parts.get(name, (size, 1))
        part = part or size
        dims += [(before, False), (part, name in parts), (size // (before * part), False)]
    ids = _device_ids(declared, prod(size for _, size in axes))
    strides = [prod(size for size, _ in dims[i + 1 :]) for i in range(len(dims))]
    groups = []
    for outer in product(*(range(1 if inside else size) for size, inside in dims)):
        inner = product(*(range(size if inside else 1) for size, inside in dims))
        groups.append(tuple(ids[_offset(outer, strides) + _offset(i, strides)] for i in inner))
    return tuple(groups)


def _device_ids(declared: str, num_devices: int) -> Sequence[int]:
    """Ids in the mesh's order: an iota, a list, or 0, 1, 2 ... if none are given."""
    _, given, listed = declared.partition("device_ids=(")
    if not given:
        return range(num_devices)
    iota = _IOTA.match(listed)
    if iota:
        return _iota_ids(_ints(iota[2] or iota[1]), _ints(iota[3] or ""))
    return _ints(listed.partition(")")[0])


def _iota_ids(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """0, 1, 2, ... reshaped to `dims`, transposed by `order`, flattened."""
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    order = order or range(len(dims))
    positions = product(*(range(dims[i]) for i in order))
    return [_offset(position, [strides[i] for i in order]) for position in positions]


def _offset(position: Iterable[int], strides: Iterable[int]) -> int:
    return sum(p * s for p, s in zip(position, strides, strict=True))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _sizes(axes: tuple[str, ...], mesh: Mesh) -> str:
    return ", ".join(f"{axis} = {mesh.size(axis)}" for axis in axes)


def _shown(groups: DeviceGroups) -> str:
    """The first groups, as HLO lists them."""
    shown = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups.members[:4])
    return "{" + shown + (",..." if len(groups.members) > 4 else "") + "}"


def ring_lengths(pairs: DeviceGroups) -> set[int]:
    """Lengths of the cycles that a permute's (source, target) pairs close; 0 for a chain that stays open.

    >>> ring_lengths(DeviceGroups(((0, 1), (1, 2), (2, 0), (3, 3)), is_permute=True))
    {1, 3}
    """
    targets = {pair[0]: pair[1] for pair in pairs.members if len(pair) == 2}
    lengths, left = set(), set(targets)
    while left:
        start = device = left.pop()
        length = 1
        while (device := targets.get(device, -1)) in left:
            left.remove(device)
            length += 1
        lengths.add(length if device == start else 0)
    return lengths


def inferred_mesh(groups: Iterable[DeviceGroups], num_devices: int) -> Mesh:
    """A mesh of nameless axes (`axis0` outermost) that most of `groups` follow.

    Each group that counts in strides, such as {0,4,8,12}, cuts the devices at its stride and at its stride x
    size; the cuts that divide one another make the axes.

    >>> inferred_mesh([DeviceGroups(((0, 2), (1, 3)))], 4).sizes
    {'axis0': 2, 'axis1': 2}
    """
    cuts = [1, num_devices]
    asked = Counter(cut for one in groups for cut in _cuts(one))
    for cut, _ in asked.most_common():
        if all(max(cut, other) % min(cut, other) == 0 for other in cuts):
            cuts.append(cut)
    ordered = sorted(set(cuts), reverse=True)
    return Mesh({f"axis{i}": a // b for i, (a, b) in enumerate(pairwise(ordered))})


def _cuts(groups: DeviceGroups) -> list[int]:
    """Strides and extents of the first group's devices; none for pairs."""
    if groups.is_permute or not groups.members:
        return []
    first = sorted(groups.members[0])
    offsets, cuts = [device - first[0] for device in first], []
    while len(offsets) > 1:
        stride = offsets[1]
        count = next((i for i, offset in enumerate(offsets) if offset != i * stride), len(offsets))
        cuts += [stride, stride * count]
        offsets = offsets[::count]
    return cuts


_TILES = re.compile(r"devices=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)?")
# mesh['a'=2,'b'=4], then the axes of each dimension, [{'a'}, {}], then other axes: unreduced={'b'}.
_NAMED = re.compile(r"\{(mesh\[[^\]]+\](?:, device_ids=\([^']*\))?), \[([^\]]*)\](.*)\}")


def tiles_of(sharding: str) -> int:
    """Parts into which a sharding cuts a tensor; 1 if it is whole or the form is unknown.

    >>> tiles_of("{devices=[2,1,4]<=[8] last_tile_dim_replicate}")
    2
    >>> tiles_of("{mesh['a'=2,'b'=4], [{'a'}, {}]}")
    2
    """
    if named := _NAMED.search(sharding):
        return _positions(named[2], named[1])
    tiles = _TILES.search(sharding)
    if not tiles:
        return 1
    sizes = [int(size) for size in tiles[1].split(",")]
    kinds = re.search(r"last_tile_dims=\{([^}]*)\}", sharding)
    num_last = 1 if "last_tile_dim_replicate" in sharding else len(kinds[1].split(",")) if kinds else 0
    return prod(sizes[: len(sizes) - num_last])


def _positions(axes: str, declared: str) -> int:
    """Positions along the axes that a text names, in the declared mesh."""
    sizes = dict(_MESH_AXIS.findall(declared))
    return prod(int(part or sizes[name]) for name, _, part in _CHOSEN_AXIS.findall(axes))


def _taken(named: re.Match[str]) -> str:
    """The part of a sharding with the axes along which devices hold different parts."""
    return named[2] + re.sub(r"replicated=\{[^}]*\}", "", named[3])


def _is_whole(sharding: str) -> bool:
    return re.match(r"\{(mesh\[\], )?replicated", sharding) is not None


def copies_of(parameter: Instruction, num_devices: int) -> int:
    """Devices that hold the same part of an input; 1 if the program does not state it."""
    text = parameter.attributes.get("sharding", "")
    if _is_whole(text):
        return num_devices
    if named := _NAMED.match(text):
        return _positions(named[1], named[1]) // _positions(_taken(named), named[1])
    tiles = _TILES.search(text)
    if not tiles:
        return 1
    sizes = [int(size) for size in tiles[1].split(",")]
    if "last_tile_dim_replicate" in text:
        return sizes[-1]
    kinds = re.search(r"last_tile_dims=\{([^}]*)\}", text)
    names = [name.strip() for name in kinds[1].split(",")] if kinds else []
    last = zip(names, sizes[len(sizes) - len(names) :], strict=True)
    return prod(size for name, size in last if name == "replicated")


def copied_over(parameter: Instruction, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes with copies of an input; none if they are unknown."""
    text = parameter.attributes.get("sharding", "")
    if _is_whole(text):
        return tuple(axis for axis, size in mesh.sizes.items() if size > 1)
    groups = _copies(text, copies_of(parameter, mesh.num_devices), mesh.num_devices)
    return group_axes(groups, mesh).axes or () if groups else ()


def split_over(parameter: Instruction, mesh: Mesh) -> frozenset[str]:
    """The mesh axes that split an input; all of them if its copies are unknown."""
    if tiles_of(parameter.attributes.get("sharding", "")) == 1:
        return frozenset()
    copied = copied_over(parameter, mesh)
    return frozenset(axis for axis, size in mesh.sizes.items() if size > 1 and axis not in copied)


def first_split_over(parameter: Instruction, mesh: Mesh) -> frozenset[str]:
    """The mesh axes that split the first of an input's split dimensions; all its axes if that is unknown.

    Of tokens it is the rows; the second is positions, which sequence parallelism splits.
    """
    text = parameter.attributes.get("sharding", "")
    split = split_over(parameter, mesh)
    if not split:
        return split
    if named := _NAMED.match(text):
        first = next((axes for axes in re.findall(r"\{([^{}]*)\}", named[2]) if axes.strip()), "")
        size = _positions(first, named[1])
        taken = {name for name, *_ in _CHOSEN_AXIS.findall(first)}
        others = ",".join(f"'{name}'" for name, _ in _MESH_AXIS.findall(named[1]) if name not in taken)
        groups = parse_groups(f"{named[1]} {{{others}}}", mesh.num_devices)
    else:
        tiles = _TILES.search(text)
        assert tiles, "tiles_of has found tiles"
        size = next(size for size in map(int, tiles[1].split(",")) if size > 1)
        try:
            groups = parse_groups(f"[{size},{mesh.num_devices // size}]{tiles[2] or ''}", mesh.num_devices)
        except AuditError:
            return split
    if size == mesh.size(tuple(split)):
        return split
    same = group_axes(groups, mesh).axes
    return split - {*same} if same is not None else split


def _copies(sharding: str, copies: int, num_devices: int) -> DeviceGroups | None:
    """Groups of `copies` devices that hold the same part; None if the sharding gives none."""
    if "manual" in sharding:
        return None
    if named := _NAMED.match(sharding):
        taken = {name for name, *_ in _CHOSEN_AXIS.findall(_taken(named))}
        free = ",".join(f"'{name}'" for name, _ in _MESH_AXIS.findall(named[1]) if name not in taken)
        groups = parse_groups(f"{named[1]} {{{free}}}", num_devices)
        return groups if groups.size == copies else None
    tiles = _TILES.search(sharding)
    if tiles is None:
        return None
    try:
        return parse_groups(f"[{num_devices // copies},{copies}]{tiles[2] or ''}", num_devices)
    except AuditError:
        return None

"""cheapest_reshard(): its collectives are right on every device, and no sequence of others is cheaper.

The proof draws the graph anew. Which single collective leads from one sharding to another is read off
the blocks that devices hold, by the definition of each operation, and knows nothing of resharding.py. Over
that graph every sequence of any length is relaxed (Bellman and Ford), for every pair of shardings.
"""

import random
from collections.abc import Iterator
from itertools import combinations, permutations, product
from math import inf, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.notation.devices import Device, Devices, meshes, shardings, whole

from meshwright.errors import NotationError
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective, ReshardOp, gathered_of_block, reshard, ring_bytes
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array
from meshwright.notation.resharding import Price, cheapest_reshard, is_searchable, num_shardings

DIMS = "IJK"
Ranges = tuple[tuple[int, int], ...]


def ring_price(mesh: Mesh) -> Price:
    return lambda op, axes, moved: ring_bytes(op, moved, mesh.size(axes))


def random_price(seed: int) -> Price:
    """A price without rhyme or reason, such as no formula would lead the search to guess."""
    return lambda op, axes, moved: random.Random(f"{seed} {op} {axes} {moved}").uniform(1, 20)


def seconds(steps: list[Collective], mesh: Mesh, sizes: dict[str, int], price: Price) -> float:
    return sum(
        price(step.op, tuple(axis for axis in mesh if axis in step.axes), moved)
        for step in steps
        if step.op != "slice"
        for moved in [step.gathered_bytes(mesh, sizes, "bf16")]
    )


# What one collective can do, by definition


def all_shardings(mesh: Mesh, dims: str) -> list[ShardedArray]:
    """Every axis of every mesh on a dimension in every order, partial, or nowhere."""
    found = set()
    for order in permutations(mesh.axes):
        for places in product(range(len(dims) + 2), repeat=len(order)):
            split = [
                tuple(a for a, at in zip(order, places, strict=True) if at == d) for d in range(len(dims))
            ]
            partial = sorted(a for a, at in zip(order, places, strict=True) if at == len(dims))
            found.add(ShardedArray("A", tuple(dims), tuple(split), tuple(partial)))
    return sorted(found, key=str)


def block_ranges(array: ShardedArray, devices: Devices, sizes: dict[str, int]) -> dict[Device, Ranges]:
    def along(dim: str, axes: Axes, device: Device) -> tuple[int, int]:
        length = sizes[dim] // devices.mesh.size(axes)
        return devices.index(device, axes) * length, (devices.index(device, axes) + 1) * length

    pairs = list(zip(array.dims, array.axes, strict=True))
    return {device: tuple(along(*pair, device) for pair in pairs) for device in devices.all()}


def overlap(one: Ranges, other: Ranges) -> int:
    return prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(one, other, strict=True))


def volume(block: Ranges) -> int:
    return prod(stop - start for start, stop in block)


class Oracle:
    """Which collectives lead from one sharding to another."""

    def __init__(self, mesh: Mesh, dims: str, sizes: dict[str, int]) -> None:
        self.mesh, self.devices, self.sizes = mesh, Devices(mesh), sizes
        self.states = all_shardings(mesh, dims)
        self.blocks = {state: block_ranges(state, self.devices, sizes) for state in self.states}
        every = [axes for n in range(1, len(mesh.axes) + 1) for axes in combinations(mesh.axes, n)]
        self.groups = {axes: self.devices.groups(axes) for axes in every}
        self.edges = {
            (before, after): found
            for before, after in permutations(self.states, 2)
            if (found := list(self._between(before, after)))
        }

    def _between(self, before: ShardedArray, after: ShardedArray) -> Iterator[tuple[ReshardOp, Axes, int]]:
        old, new = self.blocks[before], self.blocks[after]
        kept, held = set(after.unreduced), set(before.unreduced)
        first = self.devices.all()[0]
        ratio = volume(new[first]) / volume(old[first])
        if not kept <= held:
            return
        swapped = {"no axes yet"}
        for axes, groups in self.groups.items():
            num_devices = self.mesh.size(axes)
            if set(axes) == held - kept:
                if old == new:
                    yield self._edge("all_reduce", axes, old[first])
                elif ratio * num_devices == 1 and all(_tile(group, new, old) for group in groups):
                    yield self._edge("reduce_scatter", axes, old[first])
            if kept != held or set(axes) & held:
                continue
            if ratio == num_devices and all(_tile(group, old, new) for group in groups):
                yield self._edge("all_gather", axes, old[first])
            if ratio == 1 and not swapped <= set(axes) and all(_swap(g, old, new) for g in groups):
                swapped = set(axes)  # no permute over more axes than it needs
                yield self._edge("permute", axes, old[first])
            if ratio == 1 and all(_exchange(group, old, new) for group in groups):
                yield self._edge("all_to_all", axes, old[first])
        if kept == held and all(overlap(old[device], new[device]) == volume(new[device]) for device in new):
            yield "slice", (), 0

    def _edge(self, op: ReshardOp, axes: Axes, block: Ranges) -> tuple[ReshardOp, Axes, int]:
        return op, axes, gathered_of_block(op, 2 * volume(block), self.mesh.size(axes))

    def cheapest(self, price: Price) -> dict[tuple[ShardedArray, ShardedArray], float]:
        """The least seconds between every two shardings over sequences of any length."""
        cost = {
            pair: min(0.0 if op == "slice" else price(op, axes, moved) for op, axes, moved in found)
            for pair, found in self.edges.items()
        }
        into: dict[ShardedArray, list[tuple[ShardedArray, float]]] = {}
        for (before, after), edge in cost.items():
            into.setdefault(after, []).append((before, edge))
        least: dict[tuple[ShardedArray, ShardedArray], float] = {}
        for start in self.states:
            found = {start: 0.0}
            while True:  # one round more is one collective more
                longer = {
                    after: min([found.get(after, inf), *(found.get(b, inf) + edge for b, edge in edges)])
                    for after, edges in into.items()
                } | {start: 0.0}
                if longer == found:
                    break
                found = longer
            least |= {(start, after): total for after, total in found.items() if total < inf}
        return least


def _tile(group: list[Device], parts: dict[Device, Ranges], wholes: dict[Device, Ranges]) -> bool:
    """Whether every device's whole is made of the parts of its group, each once."""
    whole_block = wholes[group[0]]
    return (
        all(wholes[device] == whole_block for device in group)
        and len({parts[device] for device in group}) == len(group)
        and all(overlap(parts[device], whole_block) == volume(parts[device]) for device in group)
    )


def _swap(group: list[Device], old: dict[Device, Ranges], new: dict[Device, Ranges]) -> bool:
    """Whether the devices want just the blocks that there are."""
    return sorted(old[device] for device in group) == sorted(new[device] for device in group)


def _exchange(group: list[Device], old: dict[Device, Ranges], new: dict[Device, Ranges]) -> bool:
    """Whether every device needs the same share of every device's block, and no two the same."""
    share = volume(old[group[0]]) / len(group)
    distinct = all(len({blocks[device] for device in group}) == len(group) for blocks in (old, new))
    return distinct and all(
        overlap(old[sender], new[receiver]) == share for sender, receiver in product(group, group)
    )


def check_all_pairs(mesh: Mesh, dims: str, price: Price, sample: int | None = None) -> None:
    sizes = dict.fromkeys(dims, mesh.num_devices)
    least = Oracle(mesh, dims, sizes).cheapest(price)
    pairs = sorted(least, key=str)
    assert len(pairs) > 50
    for before, after in random.Random(0).sample(pairs, sample) if sample else pairs:
        steps = cheapest_reshard(before, after, mesh, sizes, price)
        assert seconds(steps, mesh, sizes, price) == pytest.approx(least[before, after], rel=1e-9), (
            f"{before} -> {after}: {', '.join(map(str, steps))}"
        )


SMALL = [(2, 2), (2, 3), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("shape", SMALL)
@pytest.mark.parametrize("dims", ["I", "IJ", "IJK"])
def test_no_sequence_is_cheaper_on_two_axes(shape: tuple[int, int], dims: str) -> None:
    mesh = Mesh(dict(zip("XY", shape, strict=True)))
    check_all_pairs(mesh, dims, ring_price(mesh))
    check_all_pairs(mesh, dims, random_price(sum(shape)))


@pytest.mark.parametrize(("dims", "sample"), [("IJ", 300), ("IJK", 125)])
def test_no_sequence_is_cheaper_on_three_axes(dims: str, sample: int) -> None:
    mesh = Mesh({"X": 2, "Y": 2, "Z": 2})
    check_all_pairs(mesh, dims, ring_price(mesh), sample)


@pytest.mark.slow
@pytest.mark.parametrize("dims", ["IJ", "IJK"])
def test_no_sequence_is_cheaper_on_three_axes_for_all_pairs(dims: str) -> None:
    mesh = Mesh({"X": 2, "Y": 2, "Z": 2})
    check_all_pairs(mesh, dims, ring_price(mesh))
    check_all_pairs(mesh, dims, random_price(3))


def test_dimensions_that_hardly_divide() -> None:
    """I = 2 and J = 4 take few of the axes, so most of the ways are barred."""
    mesh, sizes = Mesh({"X": 2, "Y": 4}), {"I": 2, "J": 4}
    before, after = parse_array("A[I_X, J]"), parse_array("A[I, J_Y]")
    assert _steps(before, after, mesh, sizes) == [
        "Slice_{Y} A[I_X, J] -> A[I_X, J_Y]",
        "AllGather_{X} A[I_X, J_Y] -> A[I, J_Y]",
    ]
    for step in cheapest_reshard(before, after, mesh, sizes, ring_price(mesh)):
        assert step.result.local_shape(mesh, sizes)


def _steps(before: ShardedArray, after: ShardedArray, mesh: Mesh, sizes: dict[str, int]) -> list[str]:
    return [str(step) for step in cheapest_reshard(before, after, mesh, sizes, ring_price(mesh))]


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ("A[I_X, J]", "A[I_X, J]", []),
        ("A[I_X, J]", "A[I, J]", ["AllGather_{X} A[I_X, J] -> A[I, J]"]),
        ("A[I_X, J_Y]", "A[I, J]", ["AllGather_{X,Y} A[I_X, J_Y] -> A[I, J]"]),
        ("A[I, J]{U_X}", "A[I, J]", ["AllReduce_{X} A[I, J]{U_X} -> A[I, J]"]),
        ("A[I, J]{U_XY}", "A[I_Y, J_X]", ["ReduceScatter_{Y,X} A[I, J]{U_XY} -> A[I_Y, J_X]"]),
        ("A[I_X, J]", "A[I, J_X]", ["AllToAll_{X} A[I_X, J] -> A[I, J_X]"]),
        # A block a fourth as large changes hands.
        (
            "A[I_X]",
            "A[I_Z]",
            [
                "Slice_{Z} A[I_X] -> A[I_XZ]",
                "Permute_{Z,X} A[I_XZ] -> A[I_ZX]",
                "AllGather_{X} A[I_ZX] -> A[I_Z]",
            ],
        ),
        ("A[I_XZ]", "A[I_ZX]", ["Permute_{Z,X} A[I_XZ] -> A[I_ZX]"]),
        # The major axis may leave once a permute has made it the minor one.
        (
            "A[I_XZ]",
            "A[I_Z]",
            ["Permute_{Z,X} A[I_XZ] -> A[I_ZX]", "AllGather_{X} A[I_ZX] -> A[I_Z]"],
        ),
        # An axis of size one splits nothing.
        ("A[I_XW, J]", "A[I, J_W]", ["AllGather_{X} A[I_X, J] -> A[I, J]"]),
        ("A[I_W, J]{U_X}", "A[I, J]{U_X}", []),
    ],
)
def test_the_collectives_of_the_notation(before: str, after: str, steps: list[str]) -> None:
    sizes = {"X": 4, "Y": 2, "Z": 4, "W": 1}
    # No idle axes: they would help, see below.
    mesh = Mesh({axis: size for axis, size in sizes.items() if axis in before + after.removeprefix("A")})
    assert _steps(parse_array(before), parse_array(after), mesh, {"I": 64, "J": 64}) == steps


def test_an_idle_axis_spares_a_slow_one() -> None:
    """Where X is slow, a replica over Y is sliced first: X then carries a Y-th."""
    mesh, sizes = Mesh({"X": 2, "Y": 4}), {"I": 64, "J": 64}

    def price(op: ReshardOp, axes: Axes, moved: int) -> float:
        return ring_bytes(op, moved, mesh.size(axes)) * (100 if "X" in axes else 1)

    steps = cheapest_reshard(parse_array("A[I_X, J]"), parse_array("A[I, J]"), mesh, sizes, price)
    assert [str(step) for step in steps] == [
        "Slice_{Y} A[I_X, J] -> A[I_X, J_Y]",
        "AllGather_{X} A[I_X, J_Y] -> A[I, J_Y]",
        "AllGather_{Y} A[I, J_Y] -> A[I, J]",
    ]


def test_an_idle_axis_shares_an_all_reduce() -> None:
    """V/4 over X and V over both, where X alone would move 2 V."""
    mesh = Mesh({"X": 2, "Y": 4})
    assert _steps(parse_array("A[I]{U_X}"), parse_array("A[I]"), mesh, {"I": 64}) == [
        "Slice_{Y} A[I]{U_X} -> A[I_Y]{U_X}",
        "ReduceScatter_{X} A[I_Y]{U_X} -> A[I_YX]",
        "AllGather_{Y,X} A[I_YX] -> A[I]",
    ]


@given(st.data())
@settings(max_examples=150)
def test_every_device_ends_with_its_block(data: st.DataObject) -> None:
    """Run on devices as numpy arrays; the target may keep sums partial, the prices are random."""
    mesh = data.draw(meshes(max_devices=16))
    before = data.draw(shardings(mesh, "IJK", unreduced=True))
    after = data.draw(shardings(mesh, "IJK"))
    free = [axis for axis in before.unreduced if axis not in after.sharded_axes]
    after = after.replace(unreduced=tuple(axis for axis in free if data.draw(st.booleans())))
    sizes = dict.fromkeys("IJK", mesh.num_devices)
    steps = cheapest_reshard(before, after, mesh, sizes, random_price(data.draw(st.integers(0, 9))))
    devices, values = Devices(mesh), whole(before, sizes)
    blocks = devices.run(steps, devices.place(values, before))
    devices.assert_holds(blocks, values, after)


@given(st.data())
@settings(max_examples=60)
def test_never_dearer_than_the_rules(data: st.DataObject) -> None:
    """reshard() takes one fixed order of collectives, each of which the search knows."""
    mesh = data.draw(meshes(max_devices=16))
    before = data.draw(shardings(mesh, "IJ", unreduced=True))
    after = data.draw(shardings(mesh, "IJ"))
    sizes, price = dict.fromkeys("IJ", mesh.num_devices), ring_price(mesh)
    found = cheapest_reshard(before, after, mesh, sizes, price)
    by_rules = [
        step for step in reshard(before, after) if mesh.size(step.axes) > 1
    ]  # a collective over one device is none
    assert seconds(found, mesh, sizes, price) <= seconds(by_rules, mesh, sizes, price) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("before", "after", "sizes", "message"),
    [
        (
            "A[I_X]",
            "A[J_X]",
            {"I": 8, "J": 8},
            "A[I_X] -> A[J_X]: the dimensions differ; a reshard keeps them",
        ),
        (
            "A[I_X]",
            "A[I_X]{U_Y}",
            {"I": 8},
            "A[I_X] -> A[I_X]{U_Y}: a finished sum cannot become partial again",
        ),
        ("A[I_X]", "A[I_V]", {"I": 8}, "mesh axis V is unknown; this mesh has X, Y"),
        ("A[I]{U_V}", "A[I]", {"I": 8}, "mesh axis V is unknown; this mesh has X, Y"),
        ("A[I_X]", "A[I_Y]", {"I": 6}, "A[I_Y]: I = 6 does not divide over Y = 4; fits: 1, 2, 3, 6"),
        ("A[I_X]", "A[I_Y]", {}, "A[I_X]: the size of I is missing; give I=..."),
    ],
)
def test_what_cannot_be_asked(before: str, after: str, sizes: dict[str, int], message: str) -> None:
    mesh = Mesh({"X": 2, "Y": 4})
    with pytest.raises(NotationError) as caught:
        cheapest_reshard(parse_array(before), parse_array(after), mesh, sizes, ring_price(mesh))
    assert str(caught.value) == message


def test_a_large_mesh_is_searched_along_what_changes() -> None:
    mesh, sizes = Mesh(dict.fromkeys("abcdefg", 2)), dict.fromkeys("IJK", 128)
    array, target = parse_array("A[I_a, J_b, K]"), parse_array("A[I_c, J_b, K]")
    assert not is_searchable(mesh, 3, ())
    steps = ["Permute_{c,a} A[I_a, J_b, K] -> A[I_c, J_b, K]"]
    assert _steps(array, target, mesh, sizes) == steps


def test_seven_axes_on_one_dimension_follow_the_rules() -> None:
    mesh, sizes = Mesh(dict.fromkeys("abcdefg", 2)), {"I": 128, "J": 128}
    array, target = parse_array("A[I_{a,b,c,d,e,f,g}, J]"), parse_array("A[I, J_{g,f,e,d,c,b,a}]")
    assert not is_searchable(mesh, 2, ())
    assert _steps(array, target, mesh, sizes) == [str(step) for step in reshard(array, target)]


def test_the_number_of_shardings() -> None:
    mesh = Mesh({"X": 2, "Y": 2, "Z": 2})
    for dims in ("I", "IJ", "IJK"):
        every = all_shardings(mesh, dims)
        assert num_shardings(mesh, len(dims), mesh.axes) == len(every)
        assert num_shardings(mesh, len(dims), ()) == sum(not array.unreduced for array in every)


def test_huge_sizes_do_not_overflow() -> None:
    mesh, sizes = Mesh({"X": 10**30}), {"I": 10**90, "J": 10**60}
    steps = cheapest_reshard(
        parse_array("A[I_X, J]"), parse_array("A[I, J_X]"), mesh, sizes, ring_price(mesh)
    )
    assert [step.op for step in steps] == ["all_to_all"]

"""Devices as numpy arrays: a block each, and what every collective does to a group of them.

Nothing here knows how reshard() or a contraction chooses its steps. A collective is carried out by
its definition, between the devices that differ in its axes alone, and the blocks that come out are
compared with those cut from the whole array. Values are integers, so equal means equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction
from meshwright.notation.mesh import Mesh

Device = tuple[int, ...]
Blocks = dict[Device, np.ndarray]
INT = np.int64


@dataclass(frozen=True)
class Devices:
    """The devices of a mesh, each named by its coordinates."""

    mesh: Mesh

    def all(self) -> list[Device]:
        return list(product(*(range(size) for size in self.mesh.sizes.values())))

    def index(self, device: Device, axes: Axes) -> int:
        """Where `device` stands among the devices along `axes`, the first axis major."""
        index = 0
        for axis in axes:
            index = index * self.mesh.size(axis) + device[self.mesh.axes.index(axis)]
        return index

    def groups(self, axes: Axes) -> list[list[Device]]:
        """Devices that differ in `axes` alone, each group in the order of its index."""
        others = tuple(axis for axis in self.mesh if axis not in axes)
        found: dict[int, list[Device]] = {}
        for device in self.all():
            found.setdefault(self.index(device, others), []).append(device)
        return [sorted(group, key=lambda device: self.index(device, axes)) for group in found.values()]

    def block(self, whole: np.ndarray, array: ShardedArray, device: Device) -> np.ndarray:
        """The part of `whole` that `array` puts on `device`, partial sums aside."""
        for position, axes in enumerate(array.axes):
            parts = np.split(whole, self.mesh.size(axes), axis=position)
            whole = parts[self.index(device, axes)]
        return whole

    def place(self, whole: np.ndarray, array: ShardedArray) -> Blocks:
        """A block on every device; where `array` is unreduced, random addends of it."""
        draw = np.random.default_rng(whole.size)
        blocks: Blocks = {}
        for group in self.groups(array.unreduced):
            block = self.block(whole, array, group[0])
            addends = [draw.integers(-9, 9, block.shape) for _ in group[1:]]
            blocks |= dict(zip(group, [block - sum(addends), *addends], strict=True))
        return blocks

    def assert_holds(self, blocks: Blocks, whole: np.ndarray, array: ShardedArray) -> None:
        """`blocks` are those of `whole` under `array`; unreduced ones add up to them."""
        for group in self.groups(array.unreduced):
            total = sum(blocks[device] for device in group)
            np.testing.assert_array_equal(total, self.block(whole, array, group[0]), err_msg=str(array))

    def run(self, steps: Sequence[Collective], blocks: Blocks) -> Blocks:
        for step in steps:
            blocks = {k: v for group in self.groups(step.axes) for k, v in self._one(step, group, blocks)}
        return blocks

    def _one(self, step: Collective, group: list[Device], blocks: Blocks) -> list[tuple[Device, np.ndarray]]:
        """The blocks of one group after `step`; a gather or a scatter may be along several dimensions."""
        old = {device: blocks[device] for device in group}
        taken = [_gone(before, after) for before, after in _pairs(step)]
        added = [_gone(after, before) for before, after in _pairs(step)]
        total = sum(old.values(), start=np.zeros_like(blocks[group[0]]))
        if step.op != "permute":
            for before, after in _pairs(step):
                short, long = sorted((before, after), key=len)
                assert long[: len(short)] == short, f"{step} moves an axis from within a dimension"
        match step.op:
            case "slice":
                return [(device, self._part(old[device], added, device)) for device in group]
            case "all_gather":
                return [(device, self._joined(old, taken)) for device in group]
            case "all_reduce":
                return [(device, total) for device in group]
            case "reduce_scatter":
                return [(device, self._part(total, added, device)) for device in group]
            case "all_to_all":
                sent = {d: {q: self._part(old[q], added, d) for q in group} for d in group}
                return [(device, self._joined(sent[device], taken)) for device in group]
            case "permute":
                return self._permuted(step, group, old)

    def _part(self, block: np.ndarray, added: list[Axes], device: Device) -> np.ndarray:
        """The part of `block` that `device` keeps where the axes `added` split its dimensions."""
        for position, axes in enumerate(added):
            block = np.split(block, self.mesh.size(axes), axis=position)[self.index(device, axes)]
        return block

    def _joined(self, parts: Mapping[Device, np.ndarray], taken: list[Axes]) -> np.ndarray:
        """The parts put where the axes `taken` off the dimensions had them; they fill the whole once."""
        first = next(iter(parts.values()))
        shape = first.shape
        whole = np.zeros(
            [n * self.mesh.size(axes) for n, axes in zip(shape, taken, strict=True)], first.dtype
        )
        filled = np.zeros(whole.shape, bool)
        for device, part in parts.items():
            starts = [self.index(device, axes) * n for n, axes in zip(shape, taken, strict=True)]
            place = tuple(slice(start, start + n) for start, n in zip(starts, shape, strict=True))
            assert not filled[place].any(), f"{device} brings what another device brought"
            whole[place], filled[place] = part, True
        assert filled.all(), "a part is missing"
        return whole

    def _permuted(
        self, step: Collective, group: list[Device], old: Blocks
    ) -> list[tuple[Device, np.ndarray]]:
        """Every device sends its block to one other that wants it."""
        senders: dict[tuple[int, ...], list[Device]] = {}
        for device in group:
            senders.setdefault(self._numbers(device, step.operand), []).append(device)
        new = [(device, old[senders[self._numbers(device, step.result)].pop()]) for device in group]
        assert not any(senders.values()), f"{step}: a block is left over"
        return new

    def _numbers(self, device: Device, array: ShardedArray) -> tuple[int, ...]:
        """Which block of `array` the device holds, and of how many."""
        return tuple(n for axes in array.axes for n in (self.index(device, axes), self.mesh.size(axes)))


def _pairs(step: Collective) -> list[tuple[Axes, Axes]]:
    return list(zip(step.operand.axes, step.result.axes, strict=True))


def _gone(before: Axes, after: Axes) -> Axes:
    return tuple(axis for axis in before if axis not in after)


def run_contraction(plan: Contraction, devices: Devices, lhs: Blocks, rhs: Blocks) -> Blocks:
    """The product as its steps make it: operands moved, multiplied on each device, finished."""
    lhs, rhs = devices.run(plan.lhs_steps, lhs), devices.run(plan.rhs_steps, rhs)
    local = {d: np.einsum(str(plan.einsum), lhs[d], rhs[d]) for d in devices.all()}
    return devices.run(plan.out_steps, local)


def whole(array: ShardedArray, sizes: Mapping[str, int], seed: int = 0) -> np.ndarray:
    """Random small integers in the shape of the unsharded `array`."""
    shape = tuple(sizes[dim] for dim in array.dims)
    return np.random.default_rng(seed).integers(-9, 9, shape, dtype=INT)


@st.composite
def meshes(draw: st.DrawFn, max_devices: int) -> Mesh:
    """Up to three axes X, Y, Z with at most `max_devices` devices."""
    sizes: dict[str, int] = {}
    left = max_devices
    for axis in "XYZ"[: draw(st.integers(1, 3))]:
        sizes[axis] = draw(st.integers(1, min(4, left)))
        left //= sizes[axis]
    return Mesh(sizes)


@st.composite
def shardings(
    draw: st.DrawFn, mesh: Mesh, dims: str, name: str = "A", *, unreduced: bool = False
) -> ShardedArray:
    """Any sharding of `dims` over `mesh`: each axis on one dimension, a partial sum, or nowhere."""
    places: dict[str, list[str]] = {dim: [] for dim in dims}
    partial: list[str] = []
    for axis in draw(st.permutations(mesh.axes)):
        choice = draw(st.sampled_from([*dims, "nowhere", "partial"][: None if unreduced else -1]))
        places.get(choice, partial if choice == "partial" else []).append(axis)
    return ShardedArray(name, tuple(dims), tuple(tuple(places[dim]) for dim in dims), tuple(partial))

"""Where one collective leads: every sharding that it can make of another.

A sharding is held in numbers: for each dimension the positions (in the mesh) of the axes that split
it, outermost first, and a bit mask of the axes that hold partial sums. The axes in neither are free.
Blocks are contiguous, so an axis joins or leaves its dimension only as the last one:

    all_gather      takes the last axes off one or several dimensions
    reduce_scatter  appends partial axes to dimensions, in any order
    all_reduce      frees partial axes
    all_to_all      takes the last axes off some dimensions and appends them to others
    slice           appends a free axis to a dimension
    permute         hands every device another's block: any axes in any order that give each
                    dimension as many shards as before; partial sums stay where they are
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations_with_replacement, compress, permutations, product
from math import prod
from operator import add, ne

from meshwright.notation.collective import Op

Placed = tuple[tuple[int, ...], ...]
State = tuple[Placed, int]  # axes of every dimension, mask of the partial ones
# What one choice leads to: `placed` with a mask of axes appended to some of its dimensions in every way
# (or, where these are None, permuted), and the mask of the partial axes.
Family = tuple[Placed, int, tuple[int, ...] | None, int]
Choice = tuple[Op, int]  # an operation and the mask of its axes
Position = tuple[int, int] | None  # (dimension, shards that the axes before make of it)


@dataclass(frozen=True)
class Moves:
    """The moves over a mesh with axes of `axis_sizes` devices; `dim_sizes` limit what divides."""

    axis_sizes: tuple[int, ...]
    dim_sizes: tuple[int, ...]

    @cached_property
    def all_axes(self) -> int:
        return (1 << len(self.axis_sizes)) - 1

    @cached_property
    def everything_divides(self) -> bool:
        """Whether every dimension may take any axes."""
        devices = prod(self.axis_sizes)
        return all(size % devices == 0 for size in self.dim_sizes)

    @cached_property
    def num_devices(self) -> list[int]:
        """Devices along the axes of each mask."""
        return [
            prod(size for axis, size in enumerate(self.axis_sizes) if mask >> axis & 1)
            for mask in range(self.all_axes + 1)
        ]

    @cached_property
    def _splits(self) -> dict[tuple[int, int], list[int]]:
        found: dict[tuple[int, int], list[int]] = {}
        for axes in range(self.all_axes + 1):
            for split in subsets(axes):
                found.setdefault((axes, self.num_devices[split]), []).append(split)
        return found

    def splits(self, axes: int, shards: int) -> list[int]:
        """The masks within `axes` that make so many shards."""
        return self._splits[axes, shards]

    def _divides(self, placed: Placed) -> bool:
        return all(
            size % self.num_devices[mask_of(axes)] == 0
            for axes, size in zip(placed, self.dim_sizes, strict=True)
        )

    def all(self, state: State) -> Iterator[tuple[Choice, Family]]:
        """Each operation and set of axes that it can act on, with the family that it leads to."""
        placed, partial = state
        every = tuple(range(len(placed)))
        free = self.all_axes & ~partial & ~mask_of(sum(placed, ()))
        for axis in members(free):
            yield ("slice", 1 << axis), (placed, 1 << axis, every, partial)
        for axes in subsets(partial):
            yield ("reduce_scatter", axes), (placed, axes, every, partial & ~axes)
            yield ("all_reduce", axes), (placed, 0, (), partial & ~axes)
        for kept, whole, axes in _cut(placed):
            yield ("all_to_all", axes), (kept, axes, whole, partial)
            yield ("all_gather", axes), (kept, 0, (), partial)
        for axes in _permutations(placed, self.all_axes & ~partial, self.axis_sizes):
            yield ("permute", axes), (placed, axes, None, partial)

    def spelled_out(self, family: Family) -> list[State]:
        """The shardings of a family that divide."""
        placed, axes, dims, partial = family
        if dims is None:
            swapped = _permutations(placed, self.all_axes & ~partial, self.axis_sizes)
            return [(other, partial) for other in swapped[axes]]
        found = [tuple(map(add, placed, tails)) for tails in _arrangements(axes, dims, len(placed))]
        return [(longer, partial) for longer in found if self.everything_divides or self._divides(longer)]

    def permutable(self, sharded: int, free: int) -> list[int]:
        """The masks of axes that a permute may act on; one axis has no other to change places with."""
        return [axes for axes in subsets(sharded | free) if axes & sharded and axes & (axes - 1)]


@lru_cache(maxsize=65536)
def positions(placed: Placed, axis_sizes: tuple[int, ...]) -> tuple[Position, ...]:
    """Which shards of which dimension each axis makes: no move of other axes changes it."""
    found: list[Position] = [None] * len(axis_sizes)
    for dim, axes in enumerate(placed):
        shards = 1
        for axis in axes:
            found[axis] = (dim, shards)
            shards *= axis_sizes[axis]
    return tuple(found)


@lru_cache(maxsize=4096)
def members(mask: int) -> tuple[int, ...]:
    """The positions of the bits that are set."""
    return tuple(axis for axis in range(mask.bit_length()) if mask >> axis & 1)


def mask_of(axes: Iterable[int]) -> int:
    """The mask with these bits set."""
    return sum([1 << axis for axis in axes])


@lru_cache(maxsize=4096)
def subsets(mask: int) -> tuple[int, ...]:
    """Every mask within `mask` but 0."""
    found, subset = [], mask
    while subset:
        found.append(subset)
        subset = (subset - 1) & mask
    return tuple(found)


@lru_cache(maxsize=65536)
def _cut(placed: Placed) -> list[tuple[Placed, tuple[int, ...], int]]:
    """Every way to take last axes off dimensions: what is left, the dimensions left whole, the axes taken."""
    found: list[tuple[Placed, tuple[int, ...], int]] = []
    for cuts in product(*map(_ends, placed)):
        taken = sum([mask for _, mask in cuts])
        if taken:
            whole = tuple([dim for dim, (_, mask) in enumerate(cuts) if not mask])
            found.append((tuple([kept for kept, _ in cuts]), whole, taken))
    return found


@lru_cache(maxsize=4096)
def _ends(axes: tuple[int, ...]) -> list[tuple[tuple[int, ...], int]]:
    """The axes without their last ones, and the mask of those."""
    return [(axes[:count], mask_of(axes[count:])) for count in range(len(axes), -1, -1)]


@lru_cache(maxsize=65536)
def _permutations(placed: Placed, axes: int, axis_sizes: tuple[int, ...]) -> dict[int, list[Placed]]:
    """Every other way to split the dimensions as before by some of `axes`, by the axes that change."""
    shards = tuple([prod([axis_sizes[axis] for axis in split]) for split in placed])
    before, bits = positions(placed, axis_sizes), [1 << axis for axis in range(len(axis_sizes))]
    found: dict[int, list[Placed]] = {}
    for other, after in _positions_of_equal_splits(axis_sizes, shards, axes):
        changed = sum(compress(bits, map(ne, before, after)))
        if changed:
            found.setdefault(changed, []).append(other)
    return found


@lru_cache(maxsize=4096)
def _positions_of_equal_splits(
    axis_sizes: tuple[int, ...], shards: tuple[int, ...], axes: int
) -> list[tuple[Placed, tuple[Position, ...]]]:
    return [(split, positions(split, axis_sizes)) for split in _equal_splits(axis_sizes, shards, axes)]


@lru_cache(maxsize=4096)
def _arrangements(axes: int, dims: tuple[int, ...], rank: int) -> tuple[Placed, ...]:
    """Every way to lay `axes` out, in any order, over `dims` of an array."""
    found: list[Placed] = []
    for order in permutations(members(axes)):
        for chosen in combinations_with_replacement(dims, len(order)):
            tails: list[tuple[int, ...]] = [()] * rank
            for axis, dim in zip(order, chosen, strict=True):
                tails[dim] += (axis,)
            found.append(tuple(tails))
    return tuple(found)


@lru_cache(maxsize=4096)
def _equal_splits(axis_sizes: tuple[int, ...], shards: tuple[int, ...], axes: int) -> tuple[Placed, ...]:
    """Every way to make `shards` of each dimension out of some of `axes`."""
    if not shards:
        return ((),)
    found: list[Placed] = []
    for subset in (0, *subsets(axes)):
        chosen = members(subset)
        if prod(axis_sizes[axis] for axis in chosen) == shards[0]:
            rest = _equal_splits(axis_sizes, shards[1:], axes & ~subset)
            found += [(order, *others) for order in permutations(chosen) for others in rest]
    return tuple(found)

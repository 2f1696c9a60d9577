"""The cheapest collectives from one sharding of an array to another: a shortest path.

The shardings of an array are the nodes of a graph, each single collective is an edge with its seconds,
and Dijkstra's algorithm finds the path. Blocks are contiguous, so only the last axis of a dimension can be
added or removed:

    all_gather      removes the last axes of one or several dimensions
    reduce_scatter  appends partial axes to dimensions, in any order
    all_reduce      frees partial axes
    all_to_all      moves the last axes of some dimensions to others
    slice           appends a free axis to a dimension
    permute         sends each device another device's block: any axes in any order that keep the number of
                    shards of each dimension; partial sums stay where they are

`notation.collective.reshard` needs neither mesh nor sizes nor prices, and gives one result for all, for the
contractions of a Layout. This search is for a given array on a given machine, and gives the lowest price of
a reshard.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from heapq import heappop, heappush
from itertools import chain, combinations, combinations_with_replacement, permutations, product
from math import comb, perm, prod
from typing import NamedTuple

from meshwright.dtypes import dtype_bytes
from meshwright.errors import NotationError
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective, ReshardOp, gathered_of_block, reshard
from meshwright.notation.mesh import Mesh

Price = Callable[[ReshardOp, Axes, int], float]

# An array of rank 4 on four axes has 1,457 shardings, and its graph takes a quarter of a second. Permutes
# lead from each order of the axes to every other order, so six axes are too many in any case.
MAX_SHARDINGS, MAX_AXES = 2000, 5


def cheapest_reshard(
    array: ShardedArray,
    target: ShardedArray,
    mesh: Mesh,
    sizes: Mapping[str, int],
    price: Price,
    dtype: str = "bf16",
) -> list[Collective]:
    """The collectives from `array` to `target` with the smallest sum of seconds.

    price: seconds of (operation, axes, gathered bytes V); cost.resharding has one for a machine.
    A slice is free. Of paths with equal seconds the one with the fewest steps is taken. Intermediate steps
    may use any axis of the mesh: slicing a replica can halve the bytes over a slow link. Axes of size 1 do
    not appear in the steps. If there are too many shardings (`is_searchable`), unchanged dimensions are left
    out of the search, and then idle axes; if there are still too many, the steps are those of `reshard`.
    Raises NotationError if a dimension does not divide, an axis is unknown, or a finished sum would become
    partial.

    >>> from meshwright.notation.collective import ring_bytes
    >>> from meshwright.notation.parse import parse_array as a
    >>> mesh = Mesh({"X": 4, "Y": 4})
    >>> price = lambda op, axes, v: ring_bytes(op, v, mesh.size(axes))
    >>> print(*cheapest_reshard(a("A[I_XY]"), a("A[I_Y]"), mesh, {"I": 64}, price), sep="; ")
    Permute_{Y,X} A[I_XY] -> A[I_YX]; AllGather_{X} A[I_YX] -> A[I_Y]
    """
    _check(array, target, mesh, sizes)
    array, target = _without_single(array, mesh), _without_single(target, mesh)
    num_bytes = prod(sizes[dim] for dim in array.dims) * dtype_bytes(dtype)
    for part in _parts(array, target, mesh):
        if is_searchable(part.mesh, len(part.array.dims), part.array.unreduced):
            reshards = Reshards(part.array, part.mesh, sizes, num_bytes / part.shards, price)
            return [_on_whole(step, array) for step in reshards.steps(part.target)]
    return reshard(array, target)


class Reshards:
    """The cheapest reshards from the sharding `end` of an array to others, or from others to it.

    towards: the reshards lead to `end`. num_bytes: size of the whole array. partial: the axes of partial sums
    that shardings may have, by default the axes of `end`'s. Paths are computed when they are needed.
    """

    def __init__(
        self,
        end: ShardedArray,
        mesh: Mesh,
        sizes: Mapping[str, int],
        num_bytes: float,
        price: Price,
        *,
        partial: Axes | None = None,
        towards: bool = False,
    ) -> None:
        self._mesh, self._num_bytes, self._price, self._towards = mesh, num_bytes, price, towards
        axes = tuple((axis, size) for axis, size in mesh.sizes.items() if size > 1)
        allowed = tuple(sorted(end.unreduced if partial is None else partial))
        self._graph = graph = _graph(axes, len(end.dims), allowed)
        self._edges = graph.before if towards else graph.after
        self._seconds: list[float | None] = [0.0, *[None] * (len(graph.kinds) - 1)]
        limits = [sizes[dim] for dim in end.dims]
        uneven = any(size % mesh.num_devices for size in limits)
        self._barred = [uneven and _bars(limits, shards) for shards in graph.shards]
        start = graph.number(end)
        self._best: dict[int, tuple[float, int]] = {start: (0.0, 0)}
        self._nearer: dict[int, tuple[int, int]] = {}  # the edge's kind and the previous node
        self._settled: set[int] = set()
        self._queue = [(0.0, 0, start)]

    def seconds(self, other: ShardedArray) -> float:
        """Seconds of the cheapest reshard between the end and `other`."""
        node = self._graph.number(other)
        while node not in self._settled:
            self._settle_next()
        return self._best[node][0]

    def steps(self, other: ShardedArray) -> list[Collective]:
        """The collectives of the cheapest reshard, of arrays with the name of `other`."""
        self.seconds(other)
        node, passed = self._graph.number(other), []
        while node in self._nearer:
            kind, then = self._nearer[node]
            passed.append((node, kind, then))
            node = then
        if not self._towards:
            passed = [(then, kind, node) for node, kind, then in reversed(passed)]
        return list(self._collectives(passed, other))

    def _settle_next(self) -> None:
        seconds, steps, node = heappop(self._queue)
        if node in self._settled:
            return
        self._settled.add(node)
        best, settled, barred, known = self._best, self._settled, self._barred, self._seconds
        for kind, then in self._edges[node]:
            if then in settled or barred[then]:
                continue
            cost = known[kind]
            if cost is None:
                cost = known[kind] = self._kind_seconds(self._graph.kinds[kind])
            reached = (seconds + cost, steps + (kind > 0))
            if then not in best or reached < best[then]:
                best[then] = reached
                self._nearer[then] = kind, node
                heappush(self._queue, (*reached, then))

    def _kind_seconds(self, kind: "_Kind") -> float:
        if kind.op == "slice":
            return 0.0
        block, num_devices = self._num_bytes / self._mesh.size(kind.sharded), self._mesh.size(kind.axes)
        return self._price(kind.op, kind.axes, gathered_of_block(kind.op, block, num_devices))

    def _collectives(self, passed: list[tuple[int, int, int]], like: ShardedArray) -> Iterator[Collective]:
        """The edges between shardings as steps; a step through a hand is two edges."""
        operand, taken = None, 0
        for before, kind, after in passed:
            operand = operand or self._graph.sharding(before, like)
            taken = taken or kind
            result = self._graph.sharding(after, like)
            if result is not None and operand is not None:
                op, axes = self._graph.kinds[taken][:2]
                yield Collective(op, _ordered(axes, operand, result), operand, result)
                operand, taken = result, 0


def is_searchable(mesh: Mesh, rank: int, partial: Axes) -> bool:
    """Whether an array has few enough shardings for a search."""
    num_axes = sum(size > 1 for size in mesh.sizes.values())
    return num_axes <= MAX_AXES and num_shardings(mesh, rank, partial) <= MAX_SHARDINGS


def num_shardings(mesh: Mesh, rank: int, partial: Axes) -> int:
    """The number of shardings of an array that may be partial sums over the axes `partial`.

    >>> num_shardings(Mesh({"X": 2, "Y": 2}), 2, ()), num_shardings(Mesh({"X": 2}), 1, ("X",))
    (11, 3)
    """
    axes = [axis for axis, size in mesh.sizes.items() if size > 1]
    summed = len(set(partial) & set(axes))

    def placed(count: int) -> int:  # each set of axes in each order, divided among the dimensions
        return sum(perm(count, split) * comb(split + rank - 1, rank - 1) for split in range(count + 1))

    return sum(comb(summed, held) * placed(len(axes) - held) for held in range(summed + 1))


def _check(array: ShardedArray, target: ShardedArray, mesh: Mesh, sizes: Mapping[str, int]) -> None:
    if array.dims != target.dims:
        raise NotationError(f"{array} -> {target}: the dimensions differ; a reshard keeps them")
    for given in (array, target):
        given.local_shape(mesh, sizes)
        mesh.size(given.unreduced)
    if not set(target.unreduced) <= set(array.unreduced):
        raise NotationError(f"{array} -> {target}: a finished sum cannot become partial again")


def _without_single(array: ShardedArray, mesh: Mesh) -> ShardedArray:
    """`array` without axes of size 1."""
    axes = [tuple(axis for axis in split if mesh.size(axis) > 1) for split in array.axes]
    partial = tuple(axis for axis in array.unreduced if mesh.size(axis) > 1)
    return array.replace(axes=dict(zip(array.dims, axes, strict=True)), unreduced=partial)


class _Part(NamedTuple):
    """The dimensions and axes of an array that are searched; the others split it into `shards`."""

    array: ShardedArray
    target: ShardedArray
    mesh: Mesh
    shards: int


def _parts(array: ShardedArray, target: ShardedArray, mesh: Mesh) -> Iterator[_Part]:
    """The whole array, then only the dimensions that change, then these without idle axes."""
    yield _Part(array, target, mesh, 1)
    changed = [dim for dim in array.dims if array.axes_of(dim) != target.axes_of(dim)] or [array.dims[0]]
    fixed = {axis for dim in array.dims if dim not in changed for axis in array.axes_of(dim)}
    before, after = (
        ShardedArray(a.name, tuple(changed), tuple(a.axes_of(dim) for dim in changed), a.unreduced)
        for a in (array, target)
    )
    shards, used = mesh.size(tuple(fixed)), {*before.sharded_axes, *before.unreduced, *after.sharded_axes}
    for kept in ([axis for axis in mesh if axis not in fixed], [axis for axis in mesh if axis in used]):
        yield _Part(before, after, Mesh({axis: mesh.size(axis) for axis in kept}), shards)


def _on_whole(step: Collective, array: ShardedArray) -> Collective:
    """The step of the whole `array` for a step of some of its dimensions."""
    operand, result = (
        array.replace(axes=dict(zip(part.dims, part.axes, strict=True)), unreduced=part.unreduced)
        for part in (step.operand, step.result)
    )
    return Collective(step.op, step.axes, operand, result)


def _ordered(axes: Axes, operand: ShardedArray, result: ShardedArray) -> Axes:
    """Axes in the order of the result, then of the operand."""
    known = (*result.sharded_axes, *operand.sharded_axes, *operand.unreduced)
    return tuple(axis for axis in dict.fromkeys(known) if axis in axes)


def _bars(sizes: list[int], shards: tuple[int, ...]) -> bool:
    """Whether some dimension does not divide. A hand has no shards, so it is allowed."""
    return any(size % count for size, count in zip(sizes, shards, strict=False))


# The graph.

_Split = tuple[Axes, ...]
_Partial = frozenset[str]


class _Sharding(NamedTuple):
    split: _Split
    partial: _Partial


class _Hand(NamedTuple):
    """The state within a collective that will append `axes` to some of the dimensions, in any way."""

    split: _Split
    partial: _Partial
    axes: Axes
    dims: tuple[int, ...]


class _Kind(NamedTuple):
    """Collectives with the same price. sharded: the axes that split the operand."""

    op: ReshardOp
    axes: Axes
    sharded: Axes


class _Graph:
    """The shardings of an array of a rank over `axes`, with partial sums over the axes `partial`.

    To keep edges few, a collective that appends axes leads to a hand, which many shardings share, and from
    it free edges (kind 0) lead to all ways of appending them.
    """

    def __init__(self, axes: tuple[tuple[str, int], ...], rank: int, partial: Axes) -> None:
        self._sizes, self._axes = dict(axes), tuple(name for name, _ in axes)
        self._numbers: dict[tuple, int] = {}
        self._nodes: list[_Sharding | _Hand] = []
        self._kinds: dict[_Kind, int] = {_Kind("slice", (), ()): 0}
        self.after: list[list[tuple[int, int]]] = []
        whole = _Sharding(((),) * rank, frozenset(axis for axis in partial if axis in self._sizes))
        self._node(whole)
        for node in self._nodes:  # the list grows in the loop
            self.after.append([(self._kind(kind), self._node(then)) for kind, then in self._edges(node)])
        self.shards = [self._shards(node) for node in self._nodes]
        self._add_permutes()
        self.kinds = list(self._kinds)
        self.before: list[list[tuple[int, int]]] = [[] for _ in self._nodes]
        for number, edges in enumerate(self.after):
            for kind, then in edges:
                self.before[then].append((kind, number))

    def number(self, array: ShardedArray) -> int:
        return self._numbers[array.axes, frozenset(array.unreduced)]

    def sharding(self, number: int, like: ShardedArray) -> ShardedArray | None:
        """The sharding of a node as an array, None for a hand."""
        node = self._nodes[number]
        if isinstance(node, _Hand):
            return None
        known = dict.fromkeys((*like.unreduced, *self._axes))
        partial = tuple([axis for axis in known if axis in node.partial])
        return _array(like.name, like.dims, node.split, partial)

    def _node(self, node: "_Sharding | _Hand") -> int:
        number = self._numbers.setdefault(tuple(node), len(self._nodes))
        if number == len(self._nodes):
            self._nodes.append(node)
        return number

    def _kind(self, kind: _Kind) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))

    def _in_order(self, axes: Collection[str]) -> Axes:
        return tuple([axis for axis in self._axes if axis in axes])

    def _shards(self, node: "_Sharding | _Hand") -> tuple[int, ...]:
        if isinstance(node, _Hand):
            return ()
        return tuple([prod([self._sizes[axis] for axis in axes]) for axes in node.split])

    def _edges(self, node: "_Sharding | _Hand") -> Iterator[tuple[_Kind, "_Sharding | _Hand"]]:
        split, partial = node[:2]
        if isinstance(node, _Hand):
            free = _Kind("slice", (), ())
            for tails in _arrangements(node.axes, node.dims, len(split)):
                yield free, _Sharding(tuple(map(tuple.__add__, split, tails)), partial)
            return
        sharded, everywhere = self._in_order(sum(split, ())), tuple(range(len(split)))
        for axis in self._axes:
            if axis not in sharded and axis not in partial:
                yield _Kind("slice", (axis,), sharded), _Hand(split, partial, (axis,), everywhere)
        for axes in _subsets(self._in_order(partial)):
            rest = partial - set(axes)
            yield _Kind("all_reduce", axes, sharded), _Sharding(split, rest)
            yield _Kind("reduce_scatter", axes, sharded), _Hand(split, rest, axes, everywhere)
        for kept in product(*[[axes[:count] for count in range(len(axes) + 1)] for axes in split]):
            axes = self._in_order(set(sharded) - set(chain.from_iterable(kept)))
            if axes:
                stay = tuple([dim for dim in everywhere if kept[dim] == split[dim]])
                yield _Kind("all_gather", axes, sharded), _Sharding(kept, partial)
                if stay:
                    yield _Kind("all_to_all", axes, sharded), _Hand(kept, partial, axes, stay)

    def _add_permutes(self) -> None:
        """Add reshards between shardings with the same number of shards of each dimension.

        The axes of a permute are the axes that change.
        """
        by_shards: dict[tuple, list[int]] = {}
        for number, node in enumerate(self._nodes):
            if isinstance(node, _Sharding):
                by_shards.setdefault((self.shards[number], node.partial), []).append(number)
        for numbers in by_shards.values():
            positions = {number: self._positions(self._nodes[number].split) for number in numbers}
            for before, after in permutations(numbers, 2):
                old, new = positions[before], positions[after]
                changed = tuple([axis for axis in self._axes if old.get(axis) != new.get(axis)])
                sharded = self._in_order(tuple(old))
                self.after[before].append((self._kind(_Kind("permute", changed, sharded)), after))

    def _positions(self, split: _Split) -> dict[str, tuple[int, int]]:
        """For each axis its dimension and the number of shards by the axes before it."""
        positions = {}
        for dim, axes in enumerate(split):
            shards = 1
            for axis in axes:
                positions[axis] = dim, shards
                shards *= self._sizes[axis]
        return positions


@lru_cache(maxsize=4096)
def _array(name: str, dims: tuple[str, ...], axes: _Split, unreduced: Axes) -> ShardedArray:
    # Cached, since most reshards pass through few shardings.
    return ShardedArray(name, dims, axes, unreduced)


@lru_cache(maxsize=32)
def _graph(axes: tuple[tuple[str, int], ...], rank: int, partial: Axes) -> _Graph:
    return _Graph(axes, rank, partial)


def _subsets(axes: Axes) -> Iterator[Axes]:
    """All choices of at least one axis."""
    return chain.from_iterable(combinations(axes, count) for count in range(1, len(axes) + 1))


@lru_cache(maxsize=1024)
def _arrangements(axes: Axes, dims: tuple[int, ...], rank: int) -> tuple[_Split, ...]:
    """All ways to split `dims` of an array over `axes`, in any order."""
    arrangements: list[_Split] = []
    for order in permutations(axes):
        for chosen in combinations_with_replacement(dims, len(order)):
            tails: list[Axes] = [()] * rank
            for axis, dim in zip(order, chosen, strict=True):
                tails[dim] += (axis,)
            arrangements.append(tuple(tails))
    return tuple(arrangements)

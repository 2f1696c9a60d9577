"""The cheapest collectives from one sharding of an array to another, by search.

The shardings of an array are the points of a graph, every collective of moves.py is an edge with
its seconds, and A* finds the cheapest path under the lower bounds of lower_bound.py.

`notation.collective.reshard` needs neither mesh nor sizes nor prices and gives one answer for all of
them: it serves what is derived once for every size, the contractions of a Layout. This search
serves a given array on a given machine, and is what a reshard can cost at best.
"""

from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count
from math import inf, prod

from meshwright.errors import NotationError
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.collective import Collective, Op, gathered_bytes
from meshwright.notation.lower_bound import LowerBounds, Summary
from meshwright.notation.mesh import Mesh
from meshwright.notation.moves import Choice, Family, Moves, Placed, State, mask_of, members, positions
from meshwright.units import dtype_bytes

Price = Callable[[Op, Axes, int], float]
Path = list[tuple[Choice, State]]

MAX_AXES = 5
_NEVER = (inf, 0)


def cheapest_reshard(
    array: ShardedArray,
    target: ShardedArray,
    mesh: Mesh,
    sizes: Mapping[str, int],
    price: Price,
    dtype: str = "bf16",
    bounds: LowerBounds | None = None,
) -> list[Collective]:
    """The collectives from `array` to `target` that take the least time one after another.

    price: seconds of (operation, axes, gathered bytes V); cost.resharding has one for a machine.
    bounds: what searches of as many bytes on the same mesh at the same price have found, to go on from.
    A slice is free. Among equals the fewest steps are taken. Any axis of the mesh may help on the
    way, so a sliced replica can halve what a slow link carries. Axes of size one split nothing and
    are left out of the steps. Raises NotationError where a dimension does not divide, an axis is
    unknown, or a partial sum is wanted of a finished one.

    >>> from meshwright.notation.collective import ring_bytes
    >>> from meshwright.notation.parse import parse_array as a
    >>> mesh = Mesh({"X": 4, "Y": 4})
    >>> price = lambda op, axes, v: ring_bytes(op, v, mesh.size(axes))
    >>> print(*cheapest_reshard(a("A[I_XY]"), a("A[I_Y]"), mesh, {"I": 64}, price), sep="; ")
    Permute_{Y,X} A[I_XY] -> A[I_YX]; AllGather_{X} A[I_YX] -> A[I_Y]
    """
    problem = _Problem(array, target, mesh, sizes, price, dtype)
    return problem.collectives(_Search(problem, LowerBounds() if bounds is None else bounds).path())


class _Problem:
    """The question in numbers: axes are positions in the mesh, those of size one left out."""

    def __init__(
        self,
        array: ShardedArray,
        target: ShardedArray,
        mesh: Mesh,
        sizes: Mapping[str, int],
        price: Price,
        dtype: str,
    ) -> None:
        _check(array, target, mesh, sizes)
        self.array, self.price = array, price
        self.names = tuple(axis for axis in mesh if mesh.size(axis) > 1)
        self.axis_sizes = tuple(mesh.size(axis) for axis in self.names)
        self.moves = Moves(self.axis_sizes, tuple(sizes[dim] for dim in array.dims))
        self.start, self.goal = self._state(array), self._state(target)
        self._bytes = prod(sizes[dim] for dim in array.dims) * dtype_bytes(dtype)
        self._seconds: dict[tuple[Op, int, int], float] = {}
        self._alike = self._groups_of_dims()
        self._canonical: dict[State, State] = {}
        self._summaries: dict[State, Summary] = {}
        self._bits = [1 << axis for axis in range(len(self.names))]
        self._goal_positions = positions(self.goal[0], self.axis_sizes)

    def _state(self, array: ShardedArray) -> State:
        index = {name: position for position, name in enumerate(self.names)}
        placed = tuple(tuple(index[axis] for axis in axes if axis in index) for axes in array.axes)
        return placed, mask_of(tuple(index[axis] for axis in array.unreduced if axis in index))

    def _groups_of_dims(self) -> list[tuple[int, ...]]:
        """Dimensions that the target leaves whole, those of equal size together."""
        groups: dict[int, list[int]] = {}
        for dim, (axes, size) in enumerate(zip(self.goal[0], self.moves.dim_sizes, strict=True)):
            if not axes:
                groups.setdefault(0 if self.moves.everything_divides else size, []).append(dim)
        return [tuple(group) for group in groups.values() if len(group) > 1]

    def seconds(self, op: Op, axes: int, sharded: int) -> float:
        """The price of `op` over `axes` where the axes in `sharded` split the operand."""
        if op == "slice":
            return 0.0
        key = op, axes, sharded
        if key not in self._seconds:
            num_devices = self.moves.num_devices
            moved = gathered_bytes(op, self._bytes / num_devices[sharded], num_devices[axes])
            self._seconds[key] = self.price(op, self._named(axes), moved)
        return self._seconds[key]

    def summary(self, state: State) -> Summary:
        """What lower_bound.py knows of a sharding."""
        if state not in self._summaries:
            self._summaries[state] = self._summarise(state)
        return self._summaries[state]

    def _summarise(self, state: State) -> Summary:
        right = wrong = 0
        now = positions(state[0], self.axis_sizes)
        for bit, have, want in zip(self._bits, now, self._goal_positions, strict=True):
            if have is not None:
                if have == want:
                    right |= bit
                else:
                    wrong |= bit
        return right, wrong, state[1]

    # Dimensions that the target leaves whole are alike: only one of the shardings that differ by an
    # exchange of them is searched, the one where they are in order.

    def _in_order(self, placed: Placed) -> tuple[int, ...]:
        """The dimensions as they stand in the canonical sharding."""
        order = list(range(len(placed)))
        for alike in self._alike:
            for dim, source in zip(alike, sorted(alike, key=placed.__getitem__), strict=True):
                order[dim] = source
        return tuple(order)

    def canonical(self, state: State) -> State:
        """The sharding that stands for `state`."""
        if state not in self._canonical:
            placed, partial = state
            self._canonical[state] = tuple([placed[dim] for dim in self._in_order(placed)]), partial
        return self._canonical[state]

    def uncanonical(self, path: Path) -> Path:
        """A path of which each step starts from the canonical form of what the one before led to."""
        actual: Path = []
        stands_for = self._in_order(self.start[0])
        for choice, (placed, partial) in path:
            own: list[tuple[int, ...]] = [()] * len(placed)
            for dim, axes in zip(stands_for, placed, strict=True):
                own[dim] = axes
            actual.append((choice, (tuple(own), partial)))
            stands_for = tuple(stands_for[dim] for dim in self._in_order(placed))
        return actual

    def collectives(self, path: Path) -> list[Collective]:
        """The steps of a path in the notation."""
        steps: list[Collective] = []
        operand = self._array(self.start)
        for (op, axes), state in path:
            result = self._array(state)
            steps.append(Collective(op, self._ordered(axes, operand, result), operand, result))
            operand = result
        return steps

    def _named(self, axes: int) -> Axes:
        return tuple(self.names[axis] for axis in members(axes))

    def _ordered(self, axes: int, operand: ShardedArray, result: ShardedArray) -> Axes:
        """Axes as the result has them, or the operand, or the mesh."""
        chosen = self._named(axes)
        known = (*result.sharded_axes, *operand.sharded_axes, *operand.unreduced)
        return tuple(axis for axis in dict.fromkeys(known) if axis in chosen)

    def _array(self, state: State) -> ShardedArray:
        placed, partial = state
        axes = {
            dim: tuple(self.names[axis] for axis in split)
            for dim, split in zip(self.array.dims, placed, strict=True)
        }
        left = self._named(partial)
        return self.array.replace(axes=axes, unreduced=tuple(a for a in self.array.unreduced if a in left))


def _check(array: ShardedArray, target: ShardedArray, mesh: Mesh, sizes: Mapping[str, int]) -> None:
    if array.dims != target.dims:
        raise NotationError(f"{array} -> {target}: the dimensions differ; a reshard keeps them")
    for given in (array, target):
        given.local_shape(mesh, sizes)
        mesh.size(given.unreduced)
    if not set(target.unreduced) <= set(array.unreduced):
        raise NotationError(f"{array} -> {target}: a finished sum cannot become partial again")
    used = sum(size > 1 for size in mesh.sizes.values())
    if used > MAX_AXES:
        raise NotationError(
            f"{array} -> {target}: a mesh of {used} axes is too large to search; fits: up to {MAX_AXES}"
        )


class _Search:
    """A* from the start to the goal.

    The queue holds shardings and whole families of them (an operation over some axes, whatever
    dimensions it appends to), which are spelled out only when their turn comes. Equal seconds are
    told apart by the number of steps.
    """

    def __init__(self, problem: _Problem, bounds: LowerBounds) -> None:
        self._problem, self._moves, self._goal = problem, problem.moves, problem.goal
        start, goal = problem.summary(problem.start), problem.summary(problem.goal)
        self._bounds = bounds.to(goal, start[2], problem.axis_sizes, problem.seconds)
        self._best: dict[State, tuple[float, int]] = {}
        self._spelled: dict[Family, tuple[float, int]] = {}
        self._came: dict[State, tuple[State, Choice, State]] = {}
        self._queue: list[tuple] = []
        self._order = count()
        self._reach(problem.canonical(problem.start), 0.0, 0)

    def path(self) -> Path:
        """The choices on the cheapest way, each with the sharding that it leads to."""
        while self._queue:
            _, steps, _, seconds, state, choice, family = heappop(self._queue)
            if family is not None:
                self._spell_out(state, seconds, steps, choice, family)
            elif state == self._goal:
                return self._way_to(state)
            elif (seconds, steps) == self._best[state]:  # else it was reached more cheaply since
                self._expand(state, seconds, steps)
        raise AssertionError("gathering everything and slicing anew always leads to the target")

    def _reach(self, state: State, seconds: float, steps: int) -> None:
        self._best[state] = seconds, steps
        bound = seconds + self._bounds.seconds(self._problem.summary(state))
        heappush(self._queue, (bound, steps, next(self._order), seconds, state, None, None))

    def _expand(self, state: State, seconds: float, steps: int) -> None:
        costs = self._bounds.costs(self._problem.summary(state))
        limit, _ = self._best.get(self._goal, _NEVER)
        for choice, family in self._moves.all(state):
            choice, cost, cost_to_goal = costs[choice]
            bound, then = seconds + cost_to_goal, (seconds + cost, steps + 1)
            if bound <= limit and bound < inf and then < self._spelled.get(family, _NEVER):
                entry = bound, steps + 1, next(self._order), seconds + cost, state, choice, family
                heappush(self._queue, entry)

    def _spell_out(self, before: State, seconds: float, steps: int, choice: Choice, family: Family) -> None:
        if self._spelled.get(family, _NEVER) <= (seconds, steps):
            return  # another sharding led to the same ones
        self._spelled[family] = seconds, steps
        for result in self._moves.spelled_out(family):
            state = self._problem.canonical(result)
            if (seconds, steps) < self._best.get(state, _NEVER):
                self._came[state] = before, choice, result
                self._reach(state, seconds, steps)

    def _way_to(self, state: State) -> Path:
        steps: Path = []
        while state in self._came:
            state, choice, result = self._came[state]
            steps.append((choice, result))
        return self._problem.uncanonical(steps[::-1])

"""What a reshard costs at least, from the axes that are right, wrong, partial or free.

A price depends on the operation, its axes and the axes that are sharded, not on which dimension they
split. So the shardings of an array can be drawn together: in a summary an axis is right (it makes the
shards of the dimension that the target wants of it), wrong (it splits something else), partial or
free. Every collective between two shardings is one between their summaries with the same price, and
the cheapest path from a summary to the target's is never longer than the true one.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf

from meshwright.notation.collective import Op
from meshwright.notation.moves import Choice, Moves, members, subsets

Summary = tuple[int, int, int]  # masks of the axes that are right, wrong, partial
Price = Callable[[Op, int, int], float]  # operation, mask of its axes, mask of the sharded axes


class LowerBound:
    """Seconds that are left at least, for every summary that can follow `start`."""

    def __init__(self, moves: Moves, price: Price, start: Summary, goal: Summary) -> None:
        self._moves, self._price = moves, price
        self._wanted = goal[0]
        self._edges: dict[Summary, dict[Choice, list[Summary]]] = {}
        self._costs: dict[Summary, dict[Choice, tuple[float, float]]] = {}
        self._explore(start)
        self._seconds = self._solve(goal)

    def seconds(self, summary: Summary) -> float:
        return self._seconds.get(summary, inf)

    def costs(self, summary: Summary) -> dict[Choice, tuple[float, float]]:
        """For each operation and its axes the seconds that it takes, and those to the goal with it."""
        if summary not in self._costs:
            self._costs[summary] = dict(self._priced(summary))
        return self._costs[summary]

    def _priced(self, summary: Summary) -> Iterator[tuple[Choice, tuple[float, float]]]:
        sharded = summary[0] | summary[1]
        for (op, axes), afters in self._edges[summary].items():
            cost = self._price(op, axes, sharded)
            left = min([self.seconds(after) for after in afters], default=inf)
            yield (op, axes), (cost, cost + left)

    def _explore(self, start: Summary) -> None:
        pending = [start]
        while pending:
            summary = pending.pop()
            if summary not in self._edges:
                self._edges[summary] = {
                    (op, axes): list(self._after(op, axes, summary)) for op, axes in self._choices(summary)
                }
                pending += [after for each in self._edges[summary].values() for after in each]

    def _choices(self, summary: Summary) -> Iterator[Choice]:
        right, wrong, partial = summary
        sharded = right | wrong
        free = self._moves.all_axes & ~sharded & ~partial
        for axis in members(free):
            yield "slice", 1 << axis
        for axes in subsets(sharded):
            yield "all_gather", axes
            yield "all_to_all", axes
        for axes in subsets(partial):
            yield "all_reduce", axes
            yield "reduce_scatter", axes
        for axes in subsets(sharded | free):
            if axes & sharded:
                yield "permute", axes

    def _after(self, op: Op, axes: int, summary: Summary) -> Iterator[Summary]:
        """At best: an axis that the target splits by is right as soon as it splits anything anew."""
        right, wrong, partial = (mask & ~axes for mask in summary)
        if op in ("all_gather", "all_reduce"):
            yield right, wrong, partial
            return
        for split in self._equally_many(axes, summary) if op == "permute" else (axes,):
            yield right | split & self._wanted, wrong | split & ~self._wanted, partial

    def _equally_many(self, axes: int, summary: Summary) -> Iterator[int]:
        shards = self._moves.num_devices[axes & (summary[0] | summary[1])]
        return (split for split in subsets(axes) if self._moves.num_devices[split] == shards)

    def _solve(self, goal: Summary) -> dict[Summary, float]:
        """Dijkstra, backwards from the goal."""
        before: dict[Summary, list[tuple[float, Summary]]] = {}
        for summary, moves in self._edges.items():
            sharded = summary[0] | summary[1]
            for (op, axes), afters in moves.items():
                seconds = self._price(op, axes, sharded)
                for after in afters:
                    before.setdefault(after, []).append((seconds, summary))
        found: dict[Summary, float] = {}
        queue = [(0.0, goal)]
        while queue:
            total, summary = heappop(queue)
            if summary not in found:
                found[summary] = total
                for seconds, other in before.get(summary, ()):
                    if other not in found:
                        heappush(queue, (total + seconds, other))
        return found

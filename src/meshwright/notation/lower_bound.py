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
Costs = tuple[Choice, float, float]  # its seconds, and those to the goal with it
Price = Callable[[Op, int, int], float]  # operation, mask of its axes, mask of the sharded axes


class LowerBound:
    """Seconds that are left at least from any summary to `goal`; `start` tells which axes may be partial."""

    def __init__(self, moves: Moves, price: Price, start: Summary, goal: Summary) -> None:
        self._moves, self._price = moves, price
        self._wanted = goal[0]
        self._edges: dict[Summary, dict[Choice, list[Summary]]] = {
            summary: {(op, axes): self._after(op, axes, summary) for op, axes in self._choices(summary)}
            for summary in self._summaries(start[2])
        }
        self._costs: dict[Summary, dict[Choice, Costs]] = {}
        self._seconds = self._solve(goal)

    def seconds(self, summary: Summary) -> float:
        return self._seconds.get(summary, inf)

    def costs(self, summary: Summary) -> dict[Choice, Costs]:
        """What each choice costs."""
        if summary not in self._costs:
            self._costs[summary] = {costs[0]: costs for costs in self._priced(summary)}
        return self._costs[summary]

    def _priced(self, summary: Summary) -> Iterator[Costs]:
        sharded = summary[0] | summary[1]
        for choice, afters in self._edges[summary].items():
            cost = self._price(*choice, sharded)
            left = min([self.seconds(after) for after in afters], default=inf)
            yield choice, cost, cost + left

    def _summaries(self, partial: int) -> Iterator[Summary]:
        """Every summary there can be: an axis that is partial may stay so, be anywhere or be free."""
        for still in (0, *subsets(partial)):
            for right in (0, *subsets(self._wanted & ~still)):
                others = self._moves.all_axes & ~still & ~right
                yield from ((right, wrong, still) for wrong in (0, *subsets(others)))

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
        for axes in self._moves.permutable(sharded, free):
            yield "permute", axes

    def _after(self, op: Op, axes: int, summary: Summary) -> list[Summary]:
        """At best: an axis that the target splits by is right as soon as it splits anything anew."""
        right, wrong, partial = summary
        right, wrong, partial, wanted = right & ~axes, wrong & ~axes, partial & ~axes, self._wanted
        if op in ("all_gather", "all_reduce"):
            return [(right, wrong, partial)]
        if op != "permute":
            return [(right | axes & wanted, wrong | axes & ~wanted, partial)]
        shards = self._moves.num_devices[axes & (summary[0] | summary[1])]
        return [
            (right | split & wanted, wrong | split & ~wanted, partial)
            for split in self._moves.splits(axes, shards)
        ]

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

"""What a reshard costs at least, from the axes that are right, wrong, partial or free.

A price depends on the operation, its axes and the axes that are sharded, not on which dimension they
split. So the shardings of an array can be drawn together: in a summary an axis is right (it makes the
shards of the dimension that the target wants of it), wrong (it splits something else), partial or
free. Every collective between two shardings is one between their summaries with the same price, and
the cheapest path from a summary to the target's is never longer than the true one.

The graph of summaries is the same for every target, size and machine: it is drawn once for a mesh.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.notation.collective import Op
from meshwright.notation.moves import Choice, Moves, members, subsets

Summary = tuple[int, int, int]  # masks of the axes that are right, wrong, partial
Costs = tuple[Choice, float, float]  # its seconds, and those to the goal with it
Kind = tuple[Op, int, int]  # operation, mask of its axes, mask of the sharded axes: what has one price
Price = Callable[[Op, int, int], float]


class Graph(NamedTuple):
    """Summaries by number, and what each choice makes of them.

    choices: for each summary its choices, each with the number of its kind and of the summaries that it
    may lead to. The edges are all of these in the order of the summaries, of which `starts` are the first.
    """

    number: dict[Summary, int]
    kinds: list[Kind]
    choices: list[dict[Choice, tuple[int, list[int]]]]
    edge_kinds: np.ndarray
    edge_ends: np.ndarray
    starts: np.ndarray

    def seconds(
        self, prices: np.ndarray, goals: Sequence[Summary], *, last_gather_is_free: bool = False
    ) -> np.ndarray:
        """Least seconds of every summary to every goal; `prices` are those of the kinds."""
        ends = np.array([self.number[goal] for goal in goals])
        found = np.full((len(self.number), len(goals)), np.inf)
        found[ends, np.arange(len(goals))] = 0.0
        if not len(self.starts):
            return found
        of_edges = prices[self.edge_kinds][:, None]
        if last_gather_is_free:
            gathers = np.array([op == "all_gather" for op, _, _ in self.kinds])[self.edge_kinds]
            of_edges = np.where(gathers[:, None] & (self.edge_ends[:, None] == ends), 0.0, of_edges)
        while True:
            through = np.minimum.reduceat(of_edges + found[self.edge_ends], self.starts)
            nearer = np.minimum(found, through)
            if np.array_equal(nearer, found):
                return found
            found = nearer

    def after_a_scatter(self, seconds: np.ndarray) -> np.ndarray:
        """Least `seconds` that are left once partial sums were scattered; as they are where none can be."""
        scatters = np.array([op == "reduce_scatter" for op, _, _ in self.kinds])[self.edge_kinds]
        left = np.where(scatters[:, None], seconds[self.edge_ends], np.inf)
        return np.minimum(seconds, np.minimum.reduceat(left, self.starts)) if len(self.starts) else seconds


class LowerBound:
    """Seconds that are left at least from any summary to `goal`, at these prices of the kinds."""

    def __init__(self, summaries: Graph, prices: np.ndarray, goal: Summary) -> None:
        self._graph, self._prices = summaries, prices.tolist()
        self._seconds = summaries.seconds(prices, [goal])[:, 0].tolist()
        self._costs: dict[Summary, dict[Choice, Costs]] = {}

    def seconds(self, summary: Summary) -> float:
        return self._seconds[self._graph.number[summary]]

    def costs(self, summary: Summary) -> dict[Choice, Costs]:
        """What each choice costs."""
        if summary not in self._costs:
            choices = self._graph.choices[self._graph.number[summary]]
            self._costs[summary] = {
                choice: (choice, cost, cost + min([self._seconds[end] for end in ends]))
                for choice, (kind, ends) in choices.items()
                for cost in [self._prices[kind]]
            }
        return self._costs[summary]


class LowerBounds:
    """The bounds of arrays of as many bytes on one mesh at one price, found as they are asked for."""

    def __init__(self) -> None:
        self._prices: dict[int, np.ndarray] = {}
        self._found: dict[tuple[int, Summary], LowerBound] = {}

    def to(self, goal: Summary, partial: int, axis_sizes: tuple[int, ...], price: Price) -> LowerBound:
        """The bound to `goal` from summaries whose axes in `partial` may hold partial sums."""
        key = partial, goal
        if key not in self._found:
            summaries = graph(axis_sizes, partial)
            if partial not in self._prices:
                self._prices[partial] = np.array([price(*kind) for kind in summaries.kinds])
            self._found[key] = LowerBound(summaries, self._prices[partial], goal)
        return self._found[key]


@lru_cache(maxsize=256)
def graph(axis_sizes: tuple[int, ...], partial: int) -> Graph:
    """All that collectives can do to axes of these sizes; those in `partial` may hold partial sums."""
    moves = Moves(axis_sizes, ())
    number = {summary: place for place, summary in enumerate(_summaries(moves, partial))}
    kinds: dict[Kind, int] = {}
    choices: list[dict[Choice, tuple[int, list[int]]]] = []
    for summary in number:
        sharded, found = summary[0] | summary[1], {}
        for op, axes in _choices(moves, summary):
            kind = kinds.setdefault((op, axes, sharded), len(kinds))
            found[op, axes] = kind, [number[after] for after in _after(moves, op, axes, summary)]
        choices.append(found)
    edges = [(kind, end) for found in choices for kind, ends in found.values() for end in ends]
    counts = [sum(len(ends) for _, ends in found.values()) for found in choices if found]
    table = np.array(edges, dtype=np.int64).reshape(-1, 2)
    starts = np.cumsum([0, *counts[:-1]]) if edges else np.zeros(0, dtype=np.int64)
    return Graph(number, list(kinds), choices, table[:, 0], table[:, 1], starts)


def _summaries(moves: Moves, partial: int) -> Iterator[Summary]:
    """Every summary there can be: an axis that may be partial is so, anywhere or free."""
    for still in (0, *subsets(partial)):
        for right in (0, *subsets(moves.all_axes & ~still)):
            others = moves.all_axes & ~still & ~right
            yield from ((right, wrong, still) for wrong in (0, *subsets(others)))


def _choices(moves: Moves, summary: Summary) -> Iterator[Choice]:
    right, wrong, partial = summary
    sharded = right | wrong
    free = moves.all_axes & ~sharded & ~partial
    for axis in members(free):
        yield "slice", 1 << axis
    for axes in subsets(sharded):
        yield "all_gather", axes
        yield "all_to_all", axes
    for axes in subsets(partial):
        yield "all_reduce", axes
        yield "reduce_scatter", axes
    for axes in moves.permutable(sharded, free):
        yield "permute", axes


def _after(moves: Moves, op: Op, axes: int, summary: Summary) -> list[Summary]:
    """At best: an axis is right as soon as it splits anything anew, were it only to be taken off again."""
    right, wrong, partial = summary
    right, wrong, partial = right & ~axes, wrong & ~axes, partial & ~axes
    if op in ("all_gather", "all_reduce"):
        return [(right, wrong, partial)]
    if op != "permute":
        return [(right | axes, wrong, partial)]
    shards = moves.num_devices[axes & (summary[0] | summary[1])]
    return [(right | split, wrong, partial) for split in moves.splits(axes, shards)]

"""Orders of choice for the axes of a mesh, and the placements that are worth pricing."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import permutations
from typing import TypeVar

_Option = TypeVar("_Option")


@lru_cache(maxsize=64)
def choosing_orders(num_axes: int) -> tuple[tuple[int, ...], ...]:
    """Orders of the axes: innermost first, then every order with one axis moved to the front, then with two.

    The first axis of an order gets neighbouring chips and fills rings or NVLink domains; the last
    goes between slices or domains. Axes are numbered from the outermost.

    >>> choosing_orders(2)
    ((1, 0), (0, 1))
    """
    innermost_first = tuple(reversed(range(num_axes)))
    orders = [innermost_first]
    for count in (1, 2):
        orders += [
            (*front, *(axis for axis in innermost_first if axis not in front))
            for front in permutations(innermost_first, count)
        ]
    return tuple(dict.fromkeys(orders))


def undominated(options: Iterable[tuple[_Option, Sequence[float]]], most: int) -> Iterator[_Option]:
    """The first option, then each that no other option beats or equals in every figure; at most `most`.

    options: with a figure for each axis; less is better.

    >>> list(undominated([("a", (2, 2)), ("b", (1, 3)), ("c", (2, 3)), ("d", (3, 1))], 3))
    ['a', 'b', 'd']
    """
    kept: list[tuple[_Option, tuple[float, ...]]] = []
    for option, figures in options:
        own_figures = tuple(figures)
        if any(_no_worse(other, own_figures) for _, other in kept):
            continue
        kept = [one for number, one in enumerate(kept) if number == 0 or not _no_worse(own_figures, one[1])]
        kept.append((option, own_figures))
    yield from (option for option, _ in kept[:most])


def _no_worse(first: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b * (1 + 1e-9) for a, b in zip(first, other, strict=True))

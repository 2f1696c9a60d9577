"""Arithmetic on numbers, or on arrays with one number for each of many layouts."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from math import ceil
from typing import Any

from meshwright.units import Numeric


def larger(first: Numeric, other: Numeric) -> Any:
    """The larger of two figures.

    >>> larger(2.0, 3.0)
    3.0
    """
    if isinstance(first, float | int) and isinstance(other, float | int):
        return max(first, other)
    return _numpy().maximum(first, other)


def smaller(first: Numeric, other: Numeric) -> Any:
    """The smaller of two figures.

    >>> smaller(2.0, 3.0)
    2.0
    """
    if isinstance(first, float | int) and isinstance(other, float | int):
        return min(first, other)
    return _numpy().minimum(first, other)


def largest(figures: Iterable[Any]) -> Any:
    """The largest figure; 0 without any.

    >>> largest([2, 3, 1])
    3
    """
    return reduce(larger, figures, 0)


def is_zero(figure: Numeric) -> bool:
    """Whether a figure is 0 in every layout.

    >>> is_zero(0.0)
    True
    """
    return not (figure if isinstance(figure, float | int) else figure.any())


def ceiling(figure: Numeric) -> Any:
    """A figure rounded up.

    >>> ceiling(2.1)
    3
    """
    return ceil(figure) if isinstance(figure, float | int) else _numpy().ceil(figure)


def mapped(function: Callable[[float], float], figure: Numeric) -> Any:
    """`function` of a number, or of each number of an array.

    >>> mapped(abs, -2.0)
    2.0
    """
    if isinstance(figure, float | int):
        return function(figure)
    return _numpy().array([function(number) for number in figure.tolist()])


def weighted(shares: Iterable[float], figures: Iterable[Any]) -> Any:
    """The sum of figures, each multiplied by its share.

    >>> weighted((1, 0, 2), (5.0, 7.0, 0.5))
    6.0
    """
    total: Any = 0.0
    for share, figure in zip(shares, figures, strict=True):
        if share:
            total = total + share * figure
    return total


def place_of_largest(figures: Sequence[Any]) -> Any:
    """The index of the largest figure, the first of equal ones; an array of such if figures are arrays.

    >>> place_of_largest([2.0, 3.0, 3.0])
    1
    """
    if len(figures) == 1:
        return 0
    if all(isinstance(figure, float | int) for figure in figures):
        return figures.index(max(figures))
    np = _numpy()
    return np.argmax(np.broadcast_arrays(*figures), axis=0)


def chosen(place: Any, figures: Sequence[Any]) -> Any:
    """The figure at an index as from `place_of_largest`.

    >>> chosen(1, [2.0, 3.0])
    3.0
    """
    if isinstance(place, int):
        return figures[place]
    np = _numpy()
    return np.take_along_axis(np.array(np.broadcast_arrays(*figures)), place[None], axis=0)[0]


def _numpy() -> Any:
    import numpy as np  # a tenth of a second, which the price of a single layout need not take

    return np

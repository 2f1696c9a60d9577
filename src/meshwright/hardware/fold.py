"""Folds the axes of a mesh over the physical dimensions of a torus."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from meshwright.units import divisors


@dataclass(frozen=True)
class Share:
    """The part of one torus dimension that a mesh axis takes: `size` chips, `stride` chips apart.

    ring: the part is the whole dimension, and its links close.
    whole: no other axis shares the dimension.
    """

    dim: int
    size: int
    stride: int
    ring: bool
    whole: bool


Shares = tuple[Share, ...]


@lru_cache(maxsize=65536)
def fold(sizes: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...]) -> tuple[Shares, ...]:
    """The parts of the torus that each axis takes. sizes: of the axes, in the order of their choice.

    The first to choose (the innermost, `tensor`) gets neighbouring chips. An axis prefers whole
    dimensions, as JAX's own device mesh does, since there XLA knows the rings; then the parts with
    the fastest gather; among equals, the parts that serve the next axis best. The product of the
    sizes must be the number of chips; then prime by prime a folding always exists.
    """
    assert prod(sizes) == prod(dims)
    return _best(sizes, dims, wraparound, tuple(1 for _ in dims))[1]


def foldings(
    sizes: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...]
) -> Iterator[tuple[Shares, ...]]:
    """The folding of `fold`, then one for every other part of the torus that the first axis could take.

    A small axis may take one dimension, or parts of several to leave the others whole lines.
    """
    best = fold(sizes, dims, wraparound)
    yield best
    if len(sizes) > 1:
        untaken = tuple(1 for _ in dims)
        for option in factorisations(sizes[0], dims):
            shares = _shares(option, dims, wraparound, untaken)
            if shares != best[0]:
                yield (shares, *_best(sizes[1:], dims, wraparound, option)[1])


_Key = tuple[float, ...]


@lru_cache(maxsize=65536)
def _best(
    sizes: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...], taken: tuple[int, ...]
) -> tuple[_Key, tuple[Shares, ...]]:
    """The folding with the least sort key, as (key, shares). taken: chips used along each dimension."""
    if not sizes:
        return (), ()
    free = tuple(size // used for size, used in zip(dims, taken, strict=True))
    options = (free,) if len(sizes) == 1 else factorisations(sizes[0], free)
    keys = [_preference(option, dims, wraparound, taken) for option in options]
    best = min(keys)
    candidates: list[tuple[_Key, tuple[Shares, ...]]] = []
    for option, key in zip(options, keys, strict=True):
        if key == best:
            used = tuple(a * b for a, b in zip(taken, option, strict=True))
            rest_key, rest = _best(sizes[1:], dims, wraparound, used)
            candidates.append((key + rest_key, (_shares(option, dims, wraparound, taken), *rest)))
    return min(candidates, key=lambda candidate: candidate[0])


@lru_cache(maxsize=65536)
def factorisations(size: int, free: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every way to write `size` as a product of one divisor of each entry of `free`.

    >>> factorisations(4, (2, 4))
    ((1, 4), (2, 2))
    """
    if not free:
        return ((),) if size == 1 else ()
    return tuple(
        (first, *rest)
        for first in divisors(gcd(size, free[0]))
        for rest in factorisations(size // first, free[1:])
    )


def _shares(
    option: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...], taken: tuple[int, ...]
) -> Shares:
    return tuple(
        Share(dim, size, taken[dim], wraparound[dim] and taken[dim] * size == dims[dim], size == dims[dim])
        for dim, size in enumerate(option)
        if size > 1
    )


def _preference(
    option: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...], taken: tuple[int, ...]
) -> _Key:
    """The sort key of one placement of an axis: whole dimensions first, then the fastest gather.

    A chip receives (n - 1) / n of the gathered array over its inbound links: over both directions of a
    ring, and one of a line, since at its end only one brings anything new. Chips between two neighbours
    of the axis belong to other groups, which use the same links at the same time: each gets 1 / stride.
    """
    size, whole, inbound = 1, 1, 0.0
    for part, length, wraps, stride in zip(option, dims, wraparound, taken, strict=True):
        if part > 1:
            size *= part
            whole *= part if part == length else 1
            inbound += (2 if wraps and stride * part == length else 1) / stride
    return (-whole, (size - 1) / size / inbound if inbound else 0.0)

"""Folds the axes of a mesh over the physical dimensions of a torus."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod


@dataclass(frozen=True)
class Share:
    """The part of one torus dimension that a mesh axis takes: `size` chips, `stride` chips apart.

    ring: the part reaches round the whole dimension, whose links close.
    whole: nothing else shares the dimension.
    """

    dim: int
    size: int
    stride: int
    ring: bool
    whole: bool

    @property
    def inbound(self) -> float:
        """Links over which a chip receives at full speed: both directions of a ring, one of a line.

        At the end of a line only one direction brings anything new. Chips that lie between two
        neighbours of the axis belong to other groups, which use the same links at the same time:
        each gets 1 / stride.
        """
        return (2 if self.ring else 1) / self.stride


Shares = tuple[Share, ...]


@lru_cache(maxsize=65536)
def fold(sizes: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...]) -> tuple[Shares, ...]:
    """For each axis size, innermost first, the parts of the torus that it takes.

    The innermost axis (`tensor`) chooses first and lies on neighbouring chips. An axis prefers whole
    dimensions, as JAX's own device mesh does, since there XLA knows the rings; then the parts over
    which a gather is fastest; among equals, whatever serves the next axis best. The product of the
    sizes must be the number of chips; then prime by prime a folding always exists.
    """
    assert prod(sizes) == prod(dims)
    return _best(sizes, dims, wraparound, tuple(1 for _ in dims))[1]


_Key = tuple[float, ...]


def _best(
    sizes: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...], taken: tuple[int, ...]
) -> tuple[_Key, tuple[Shares, ...]]:
    """The (key, shares) of the folding that sorts first. taken: chips already used along each dimension."""
    if not sizes:
        return (), ()
    free = tuple(size // used for size, used in zip(dims, taken, strict=True))
    options = [free] if len(sizes) == 1 else list(factorisations(sizes[0], free))
    shares = [_shares(option, dims, wraparound, taken) for option in options]
    keys = [_preference(share) for share in shares]
    best = min(keys)
    found: list[tuple[_Key, tuple[Shares, ...]]] = []
    for option, share, key in zip(options, shares, keys, strict=True):
        if key == best:
            used = tuple(a * b for a, b in zip(taken, option, strict=True))
            rest_key, rest = _best(sizes[1:], dims, wraparound, used)
            found.append((key + rest_key, (share, *rest)))
    return min(found, key=lambda one: one[0])


def factorisations(size: int, free: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to write `size` as a product of one divisor of each entry of `free`.

    >>> list(factorisations(4, (2, 4)))
    [(1, 4), (2, 2)]
    """
    if not free:
        if size == 1:
            yield ()
        return
    limit = gcd(size, free[0])
    for divisor in range(1, limit + 1):
        if limit % divisor == 0:
            for rest in factorisations(size // divisor, free[1:]):
                yield (divisor, *rest)


def _shares(
    option: tuple[int, ...], dims: tuple[int, ...], wraparound: tuple[bool, ...], taken: tuple[int, ...]
) -> Shares:
    return tuple(
        Share(dim, size, taken[dim], wraparound[dim] and taken[dim] * size == dims[dim], size == dims[dim])
        for dim, size in enumerate(option)
        if size > 1
    )


def _preference(shares: Shares) -> _Key:
    """Sorts first what an axis likes best: whole dimensions, then the fastest gather.

    A chip receives (n - 1) / n of the gathered array over its inbound links.
    """
    size = prod(share.size for share in shares)
    whole = prod(share.size for share in shares if share.whole)
    inbound = sum(share.inbound for share in shares)
    return (-whole, (size - 1) / size / inbound if shares else 0.0)

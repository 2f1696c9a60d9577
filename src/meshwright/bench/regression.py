"""Fits of measured times: a latency with a bandwidth, or with a bandwidth by size."""

from collections.abc import Callable, Iterable, Sequence
from math import nextafter

import numpy as np

from meshwright.hardware.chip import LinearCost
from meshwright.points import Points

_ROUNDS, _BISECTIONS = 50, 40
_FLOOR = 1e-6  # a point on the line has residual 0 and would have infinite weight
# Times up to this multiple of the shortest are fitted by a line, whose intercept is the latency.
_SMALL = 4.0
# A time of at least this multiple of the latency shows the bandwidth of its size.
_SHOWS_BANDWIDTH = 1.5


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinearCost:
    """The line of least absolute relative error: min sum |(a + b x) / t - 1| with a >= 0, b > 0.

    By iteratively reweighted least squares. Errors are relative to t, since sizes span a factor of a
    thousand and the small sizes determine the latency. They are not squared, so that a point slowed by
    another process does not turn the line. A negative latency is refitted as 0.
    """
    x, t = np.asarray(num_bytes, float), np.asarray(seconds, float)
    basis = np.stack([1 / t, x / t], axis=1)
    latency, per_byte = _least_absolute(basis)
    if latency < 0:
        latency, (per_byte,) = 0.0, _least_absolute(basis[:, 1:])
    if per_byte <= 0:  # the sizes are too small for the bandwidth to show: bound it by the largest
        largest = int(np.argmax(x))
        return LinearCost(float(np.median(t)), float(x[largest] / t[largest]))
    return LinearCost(float(latency), float(1 / per_byte))


def _least_absolute(basis: np.ndarray) -> np.ndarray:
    """The coefficients c of min sum |basis . c - 1|."""
    weights = np.ones(len(basis))
    solution = np.zeros(basis.shape[1])
    for _ in range(_ROUNDS):
        root = np.sqrt(weights)
        solution = np.linalg.lstsq(basis * root[:, None], root, rcond=None)[0]
        weights = 1 / np.maximum(np.abs(basis @ solution - 1), _FLOOR)
    return solution


def fit_cost(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinearCost:
    """Latency, the best bandwidth, and the share of it at each size.

        t = a + x / (W share(x))

    a: intercept of the line through the small sizes. The rate of a size is x / (t - a) at its median t, if
    latency does not hide it; W is the best rate. If fewer than two sizes show a rate, one line fits all.
    On a CPU rates depend on the size, since a collective runs at the speed of the cache that holds its
    buffers.
    """
    x, t = np.asarray(num_bytes, float), np.asarray(seconds, float)
    medians = {size: float(np.median(t[x == size])) for size in np.unique(x)}
    small = [size for size, time in medians.items() if time <= _SMALL * min(medians.values())]
    near = np.isin(x, small)
    latency = fit_line(list(x[near]), list(t[near])).latency_seconds
    rates = {
        size: size / (time - latency) for size, time in medians.items() if time > _SHOWS_BANDWIDTH * latency
    }
    if len(rates) < 2:
        return fit_line(num_bytes, seconds)
    best = max(rates.values())
    return LinearCost(latency, float(best), monotone((size, rate / best) for size, rate in rates.items()))


def monotone(shares: Iterable[tuple[float, float]], most: float = 1.0) -> Points:
    """Points in order of size, lowered so that times do not fall with size.

    most: the largest share; infinity for rates.
    """
    points: list[tuple[float, float]] = []
    slowest = 0.0
    for size, share in sorted(shares):
        rate = min(most, float(share))
        if size / rate < slowest:
            rate = nextafter(size / slowest, 0.0)  # size / (size / slowest) may be a bit less than slowest
        points.append((float(size), rate))
        slowest = size / rate
    return tuple(points)


def rates(sizes: Sequence[float], per_second: Sequence[float]) -> Points:
    """The median rate of each size."""
    by_size = {size: [r for s, r in zip(sizes, per_second, strict=True) if s == size] for size in sizes}
    return monotone(((size, float(np.median(r))) for size, r in by_size.items()), most=float("inf"))


def rate_of_time(price: Callable[[float], float], seconds: float, high: float, least_share: float) -> float:
    """The rate whose price is the given time, by bisection from least_share · high to high.

    price: seconds by rate, falling. If it is at least the given time at `high`, the rate is `high`.
    """
    if price(high) >= seconds:
        return high
    low = least_share * high
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if price(middle) > seconds else (low, middle)
    return high

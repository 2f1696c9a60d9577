"""A straight line through measured times: latency + bytes / bandwidth."""

from collections.abc import Sequence

import numpy as np

from meshwright.hardware.chip import LinearCost

_ROUNDS = 50
_FLOOR = 1e-6  # keeps the weight of a point finite that the line hits


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> LinearCost:
    """The line of least absolute relative error: min sum |(a + b x) / t - 1| with a >= 0, b > 0.

    By iteratively reweighted least squares. Errors count relative to t, since sizes span a factor of
    a thousand and the small ones fix the latency; absolute rather than squared, so that a point hit
    by another process does not turn the line. A negative latency is refitted as none.
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


def predict(line: LinearCost, num_bytes: float) -> float:
    """Seconds on the line: latency + bytes / bandwidth."""
    return line.latency_seconds + num_bytes / line.bytes_per_second

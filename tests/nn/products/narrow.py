"""A narrow product, and what it is rounded to."""

import ml_dtypes
import numpy as np

from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of

LAYOUT = Layout.of(weights_dtype="f32", compute_dtype="f32")
PLAN = contraction_of(LAYOUT, "wq", "BTD,DNH->BTNH")
RANDOM = np.random.default_rng(0)
X, W = RANDOM.normal(size=(2, 3, 16)).astype(np.float32), RANDOM.normal(size=(16, 2, 5)).astype(np.float32)


def rounded(x: np.ndarray, axes: tuple[int, ...], kind: str) -> np.ndarray:
    """What is left of x where each line along `axes` is scaled to the type's largest number."""
    largest = {"fp8": 448.0, "int8": 127.0}[kind]
    scale = np.abs(x).max(axis=axes, keepdims=True) / largest
    values = x / scale
    return scale * (
        np.round(values) if kind == "int8" else values.astype(ml_dtypes.float8_e4m3fn).astype("f4")
    )


def in_tiles(x: np.ndarray, kind: str, high: int) -> np.ndarray:
    """What is left of x[rows, sum] where each tile of `high` by 128 has a scale of its own."""
    found = np.empty_like(x)
    for i in range(0, x.shape[0], high):
        for j in range(0, x.shape[1], 128):
            found[i : i + high, j : j + 128] = rounded(x[i : i + high, j : j + 128], (0, 1), kind)
    return found

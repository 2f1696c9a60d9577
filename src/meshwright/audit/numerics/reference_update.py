"""The formulas of optimizers in plain NumPy, on whole float32 arrays by path.

    g  <- g min(1, clip / |g|)      |g|: of all gradients together
    w  <- w - rate (u + decay w)    only matrices decay, except norms and biases; u as the optimizer says

It shares no code with `train/`, only the record of its constants.
"""

from collections.abc import Callable, Mapping, Sequence
from math import cos, pi, prod
from typing import Any

import numpy as np

from meshwright.models.config import ModelConfig
from meshwright.models.parameters import parameters
from meshwright.optimizers.muon import is_of_matrix, is_orthogonalised
from meshwright.train.optimizers.constants import OptimizerConfig

Array = np.ndarray
Weights = Mapping[str, Any]
# (path, gradients of a weight until now, the weight) -> u
_Direction = Callable[[ModelConfig, OptimizerConfig, str, Sequence[Array], Array], Array]


def updated(
    config: ModelConfig, optimizer: OptimizerConfig, w: Weights, gradients: Sequence[Weights]
) -> dict[str, Array]:
    """The weights after an update. gradients: of every step until this one, unclipped."""
    clipped = [_clipped(g, optimizer.clip_norm) for g in gradients]
    now, after = rate(optimizer, len(gradients) - 1), {}
    for path in clipped[-1]:
        u = _DIRECTIONS[optimizer.optimizer](config, optimizer, path, [g[path] for g in clipped], w[path])
        decays = w[path].ndim >= 2 and "norm" not in path and "bias" not in path
        has_decay = decays and optimizer.optimizer != "adafactor"
        change = now * (u + optimizer.weight_decay * w[path] * has_decay)
        after[path] = np.asarray(w[path] - change, np.float32)
    return {**w, **after}


def gradient_norm(gradients: Weights) -> float:
    """|g|: the root of the sum of all gradients' squares."""
    return float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradients.values())))


def _clipped(gradients: Weights, most: float) -> dict[str, Array]:
    size = gradient_norm(gradients)
    return {path: g * np.float32(min(1.0, most / size)) for path, g in gradients.items()}


def rate(optimizer: OptimizerConfig, number: int) -> float:
    """The learning rate of update `number`, from 0: linear to the peak, then along a cosine."""
    assert optimizer.schedule == "cosine"
    if number < optimizer.warmup_steps:
        return optimizer.peak_learning_rate * (number + 1) / (optimizer.warmup_steps + 1)
    done = (number - optimizer.warmup_steps) / (optimizer.total_steps - optimizer.warmup_steps)
    left = (1 + cos(pi * min(max(done, 0), 1))) / 2
    return optimizer.peak_learning_rate * (optimizer.final_fraction + (1 - optimizer.final_fraction) * left)


def _adam(optimizer: OptimizerConfig, gradients: Sequence[Array], *, nesterov: bool = False) -> Array:
    """m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps); with Nesterov's momentum of the step after."""
    m = v = np.zeros_like(gradients[0])
    for g in gradients:
        m, v = optimizer.b1 * m + (1 - optimizer.b1) * g, optimizer.b2 * v + (1 - optimizer.b2) * g**2
    t = len(gradients)
    mean = m / (1 - optimizer.b1**t)
    if nesterov:
        mean = optimizer.b1 * m / (1 - optimizer.b1 ** (t + 1))
        mean += (1 - optimizer.b1) * gradients[-1] / (1 - optimizer.b1**t)
    return mean / (np.sqrt(v / (1 - optimizer.b2**t)) + optimizer.eps)


def _adamw(
    config: ModelConfig, optimizer: OptimizerConfig, path: str, gradients: Sequence[Array], w: Array
) -> Array:
    return _adam(optimizer, gradients)


def _lion(
    config: ModelConfig, optimizer: OptimizerConfig, path: str, gradients: Sequence[Array], w: Array
) -> Array:
    """sign(0.95 m + 0.05 g), with m of the steps before: m <- 0.98 m + 0.02 g."""
    m = np.zeros_like(w)
    for g in gradients[:-1]:
        m = 0.98 * m + 0.02 * g
    return np.sign(0.95 * m + 0.05 * gradients[-1])


def _adafactor(
    config: ModelConfig, optimizer: OptimizerConfig, path: str, gradients: Sequence[Array], w: Array
) -> Array:
    """max(rms(w), 0.001) u / max(1, rms(u)), u = g / sqrt(v); v whole, as dimensions below 128 keep it."""
    v = np.zeros_like(w)
    for number, g in enumerate(gradients, 1):
        share = 1 - number**-0.8
        v = share * v + (1 - share) * (g**2 + 1e-30)
    u = gradients[-1] / np.sqrt(v)
    size = np.maximum(np.sqrt(np.mean(w**2)), 1e-3)
    return size * u / np.maximum(1.0, np.sqrt(np.mean(u**2)))


def _muon(
    config: ModelConfig, optimizer: OptimizerConfig, path: str, gradients: Sequence[Array], w: Array
) -> Array:
    """0.2 sqrt(max(rows, columns)) U V^T of the momentum of layers' matrices; otherwise Adam, Nesterov's."""
    param = parameters(config)[path]
    if not is_orthogonalised(path, param):
        return _adam(optimizer, gradients, nesterov=True)
    m = np.zeros_like(w)
    for g in gradients:
        m = 0.95 * m + g
    m = gradients[-1] + 0.95 * m
    counted = [dim for dim in range(w.ndim) if not is_of_matrix(param, dim)]
    rows = [dim for dim in range(w.ndim) if dim not in counted and param.letters[dim] in param.fan_in]
    columns = [dim for dim in range(w.ndim) if dim not in counted and dim not in rows]
    order = [*counted, *rows, *columns]
    num_rows, num_columns = (prod(w.shape[dim] for dim in dims) for dims in (rows, columns))
    x = np.reshape(np.transpose(m, order), (-1, num_rows, num_columns))
    x /= np.sqrt(np.sum(x**2, (1, 2), keepdims=True)) + 1e-8
    for _ in range(5):  # Newton and Schulz's iterations
        x = _nearer(x) if num_rows <= num_columns else np.moveaxis(_nearer(np.moveaxis(x, 1, 2)), 1, 2)
    u = np.transpose(np.reshape(x, [w.shape[dim] for dim in order]), [order.index(d) for d in range(w.ndim)])
    return 0.2 * max(num_rows, num_columns) ** 0.5 * u


def _nearer(x: Array) -> Array:
    """3.4445 x - 4.775 (x x^T) x + 2.0315 (x x^T)^2 x, whose singular values are nearer to 1."""
    a = x @ np.moveaxis(x, 1, 2)
    return 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x


_DIRECTIONS: Mapping[str, _Direction] = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
}

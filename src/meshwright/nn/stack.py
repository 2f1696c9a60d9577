"""A stack of layers as one scan. Where local and global layers alternate, a step of it runs one period."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

Window = int | None
Layer = Callable[..., Any]


def scan_layers(layer: Layer, weights: Any, x: Array, windows: Sequence[Window], policy: Callable) -> Array:
    """x after all layers, `layer(x, weights, window)` each, rematerialised by `policy`."""
    period = _period(windows)
    layers = [
        jax.checkpoint(lambda x, w, window=window: layer(x, w, window), policy=policy)
        for window in windows[:period]
    ]

    def body(x: Array, group: Any) -> tuple[Array, None]:
        for run, w in zip(layers, _each(group, period), strict=True):
            x = run(x, w)
        return x, None

    groups, rest = _grouped(weights, len(windows), period)
    x, _ = lax.scan(body, x, groups)
    for run, w in zip(layers, rest, strict=False):
        x = run(x, w)
    return x


def scan_cached_layers(
    layer: Layer, weights: Any, x: Array, cache: Any, windows: Sequence[Window]
) -> tuple[Array, Any]:
    """x after all layers, and the cache; `layer(x, weights, (cache, number), window)` gives both.

    The cache of all layers is carried whole, each layer writing its new positions alone: scanned over,
    every step would copy it once and need its memory twice.
    """
    period = _period(windows)

    def run(x: Array, cache: Any, w: Any, number: Any) -> tuple[Array, Any]:
        for window, one, offset in zip(windows, _each(w, period), range(period), strict=False):
            x, cache = layer(x, one, (cache, number + offset), window)
        return x, cache

    def body(carry: tuple[Array, Any], group: tuple[Any, Array]) -> tuple[tuple[Array, Any], None]:
        return run(*carry, *group), None

    groups, rest = _grouped(weights, len(windows), period)
    num_grouped = len(windows) - len(rest)
    (x, cache), _ = lax.scan(body, (x, cache), (groups, jnp.arange(0, num_grouped, period)))
    for number, (window, w) in enumerate(zip(windows, rest, strict=False), start=num_grouped):
        x, cache = layer(x, w, (cache, jnp.asarray(number)), window)
    return x, cache


def _period(windows: Sequence[Window]) -> int:
    """After how many layers the windows repeat: 1 where all are alike."""
    return next(
        n for n in range(1, len(windows) + 1) if all(w == windows[i % n] for i, w in enumerate(windows))
    )


def _grouped(weights: Any, num_layers: int, period: int) -> tuple[Any, list[Any]]:
    """The stacked weights as [groups, period, ...], and those of the layers that are left over."""
    if period == 1:
        return weights, []
    num_groups = num_layers // period
    num_grouped = num_groups * period

    def grouped(w: Array) -> Array:
        spec = jax.typeof(w).sharding.spec
        split = PartitionSpec(None, None, *spec.partitions[1:], reduced=spec.reduced)
        return jnp.reshape(w[:num_grouped], (num_groups, period, *w.shape[1:]), out_sharding=split)

    rest = [jax.tree.map(lambda w, n=n: w[n], weights) for n in range(num_grouped, num_layers)]
    return jax.tree.map(grouped, weights), rest


def _each(group: Any, period: int) -> list[Any]:
    """The weights of each layer of one period."""
    if period == 1:
        return [group]
    return [jax.tree.map(lambda w, n=n: w[n], group) for n in range(period)]

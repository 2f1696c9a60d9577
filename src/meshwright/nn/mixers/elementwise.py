"""Elementwise functions between a mixer's products and its recurrence, on arrays of one shape.

Exponents and norms are float32. axes: the dimensions over which a function norms.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from meshwright.nn.each_device import partitions_of
from meshwright.nn.remat import OPERATION

# Added to the sum of squares of a query or key, as in the kernels of flash-linear-attention.
_UNIT_EPS = 1e-6


def _unit(x: Array, *, scale: float, axes: Sequence[int]) -> Array:
    """x by its length over the last dimension, times `scale`."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _UNIT_EPS)
    return (wide * inverse * scale).astype(x.dtype)


def _decay(x: Array, log: Array, bias: Array, *, axes: Sequence[int]) -> Array:
    """-exp(log) softplus(x + bias): the logarithm of a decay."""
    wide, log, bias = (each.astype(jnp.float32) for each in (x, log, bias))
    return -jnp.exp(log) * jax.nn.softplus(wide + bias)


def _step(x: Array, bias: Array, *, least: float | None, axes: Sequence[int]) -> Array:
    step = jax.nn.softplus(x.astype(jnp.float32) + bias.astype(jnp.float32))
    return step if least is None else jnp.maximum(step, least)


# The constant c of RG-LRU: its decay is a ** (c r), with r the gate.
_DECAY_EXPONENT = 8.0


def _slow_decay(x: Array, rate: Array, *, axes: Sequence[int]) -> Array:
    """-8 softplus(rate) sigmoid(x): the logarithm of a decay."""
    wide, rate = x.astype(jnp.float32), rate.astype(jnp.float32)
    return -_DECAY_EXPONENT * jax.nn.softplus(rate) * jax.nn.sigmoid(wide)


def _inverse_size(wide: Array, axes: Sequence[int], eps: float) -> Array:
    mean = jnp.mean(wide * wide, axis=tuple(axes), keepdims=True)
    if any(partitions_of(wide)[axis] for axis in axes):
        mean = checkpoint_name(mean, OPERATION)  # to recompute it would take another all-reduce
    return lax.rsqrt(mean + eps)


def _rms(x: Array, *scale: Array, eps: float, axes: Sequence[int]) -> Array:
    wide = x.astype(jnp.float32)
    normed = (wide * _inverse_size(wide, axes, eps)).astype(x.dtype)
    return normed * scale[0].astype(x.dtype) if scale else normed


def _normed_and_gated(
    y: Array, gate: Array, scale: Array, *, eps: float, axes: Sequence[int], shape: Callable = jax.nn.silu
) -> Array:
    normed = _rms(y, scale, eps=eps, axes=axes)
    return (normed.astype(jnp.float32) * shape(gate.astype(jnp.float32))).astype(y.dtype)


def _gated_and_normed(y: Array, gate: Array, scale: Array, *, eps: float, axes: Sequence[int]) -> Array:
    wide = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    return (wide * _inverse_size(wide, axes, eps)).astype(y.dtype) * scale.astype(y.dtype)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "unit": _unit,
    "silu": lambda x, axes: jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype),
    "decay": _decay,
    "step": _step,
    "decayed_step": lambda step, log, axes: -jnp.exp(log.astype(jnp.float32)) * step,
    "sigmoid": lambda x, axes: jax.nn.sigmoid(x.astype(jnp.float32)),
    "times": lambda x, y, axes: (x * y).astype(x.dtype) if x.dtype == y.dtype else _times(x, y),
    "times_sigmoid": lambda x, gate, axes: _times(x, jax.nn.sigmoid(gate.astype(jnp.float32))),
    "slow_decay": _slow_decay,
    "skipped": lambda y, x, skip, axes: y + x * skip.astype(x.dtype),
    "gated": lambda y, gate, axes: y * jax.nn.silu(gate.astype(jnp.float32)).astype(y.dtype),
    "gated_by_gelu": lambda y, gate, axes: y * jax.nn.gelu(gate.astype(jnp.float32)).astype(y.dtype),
    "rms": _rms,
    "normed_by_silu": _normed_and_gated,
    "normed_by_sigmoid": partial(_normed_and_gated, shape=jax.nn.sigmoid),
    "normed_and_gated": _normed_and_gated,
    "gated_and_normed": _gated_and_normed,
}


def _times(x: Array, wide: Array) -> Array:
    return (x.astype(jnp.float32) * wide).astype(x.dtype)


@jax.custom_jvp
def _root(x: Array) -> Array:
    return jnp.sqrt(x)


@_root.defjvp
def _root_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The derivative, at most 1000 as in Griffin: it diverges as the decay nears 1, and so x nears 0."""
    (x,), (d_x,) = primals, tangents
    return jnp.sqrt(x), d_x / jnp.sqrt(jnp.maximum(4 * x, 1e-6))


def unit_inputs(v: Array, decay: Array, is_first: Array) -> Array:
    """sqrt(1 - exp(2 decay)) v, so that states keep the size of v; v at the first position of a document."""
    return _times(v, jnp.where(is_first, 1.0, _root(-jnp.expm1(2 * decay))))


def apply(function: str, *arrays: Array, **constants: object) -> Array:
    """The function of this name; `axes` and its own constants are passed on."""
    return FUNCTIONS[function](*arrays, **constants)

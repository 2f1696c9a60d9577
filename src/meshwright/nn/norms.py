"""Norms, activations and caps on arrays: the forward pass between its products."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.models.config import ModelConfig
from meshwright.nn.each_device import axes_of, partitions_of

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
# gpt-oss's swiglu_limit and swiglu_alpha.
_CLAMP, _SLOPE = 7.0, 1.702
# DeepSeek-V4's swiglu_limit.
_LIMIT = 10.0
_XIELU_SLOPE, _XIELU_MOST = 0.5, -1e-6


def log_sum_exp(x: Array) -> Array:
    """log(sum exp(x)) over the last dimension; if it is split, devices exchange only maxima and sums."""
    peak = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(x - peak), axis=-1)) + peak[..., 0]


def mean_of_last(x: Array, num_dims: int = 1) -> Array:
    """The mean over the last dimensions, which stay with size 1."""
    return jnp.mean(x, axis=tuple(range(-num_dims, 0)), keepdims=True)


def norm(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    kind: str,
    config: ModelConfig,
    mean: Callable[[Array], Array] = mean_of_last,
    eps: float | None = None,
) -> Array:
    """x / rms(x) * scale over the dimensions of `mean`; a layer norm subtracts the mean first.

    Sums stay float32, since bfloat16 stops counting at 256. scale (1 + scale with norm_offset; None for no
    scale) and bias have the last dimensions of x. mean: over the last dimension or more, which keep size 1.
    eps: the model's if None.
    """
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide -= mean(wide)
    inverse = lax.rsqrt(mean(wide * wide) + (config.norm_eps if eps is None else eps))
    if scale is None:
        return (wide * inverse).astype(x.dtype)
    if config.norm_offset:
        # 1 + scale is rounded to bfloat16 after the product, as Gemma does.
        out = (wide * inverse * (1 + along(x, scale.astype(jnp.float32)))).astype(x.dtype)
        return out if bias is None else out + along(x, bias.astype(x.dtype))
    out = (wide * inverse).astype(x.dtype) * along(x, scale.astype(x.dtype))
    return out if bias is None else out + along(x, bias.astype(x.dtype))


def activate(gate: Array, up: Array | None, kind: str, slopes: tuple[Array, Array] | None = None) -> Array:
    """f(gate) * up, or only f(gate) if the feed-forward is not gated.

    clamped_silu: gate sigmoid(1.702 gate) (up + 1), of a gate of at most 7 and an up within +-7.
    limited_silu: silu(gate) up, of a gate of at most 10 and an up within +-10.
    """
    if kind == "clamped_silu":
        assert up is not None, "gpt-oss's activation is of gate and up"
        gate, up = jnp.minimum(gate, _CLAMP), jnp.clip(up, -_CLAMP, _CLAMP)
        return gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)
    if kind == "limited_silu":
        assert up is not None, "DeepSeek-V4's activation is of gate and up"
        return jax.nn.silu(jnp.minimum(gate, _LIMIT)) * jnp.clip(up, -_LIMIT, _LIMIT)
    active = _xielu(gate, *slopes) if slopes else _ACTIVATIONS[kind](gate)
    return active if up is None else active * up


def _xielu(x: Array, up: Array, down: Array) -> Array:
    """xIELU (Huang and Schlag, 2024), in float32, with softplus of two trained numbers as slopes.

        p x^2 + b x   if x > 0,   n (exp(min(x, e)) - 1 - x) + b x   otherwise,   b = 0.5, e = -1e-6

    p = softplus(up), n = b + softplus(down).
    """
    wide = x.astype(jnp.float32)
    p, n = (along(x, jax.nn.softplus(slope.astype(jnp.float32)), ()) for slope in (up, down))
    below = (_XIELU_SLOPE + n) * (jnp.expm1(jnp.minimum(wide, _XIELU_MOST)) - wide)
    return (jnp.where(wide > 0, p * wide * wide, below) + _XIELU_SLOPE * wide).astype(x.dtype)


def clip(x: Array, limit: float) -> Array:
    """x, but at most `limit` and at least -limit."""
    return jnp.clip(x, -limit, limit)


def dot(x: Array, vector: Array) -> Array:
    """The product of x with a vector over the last dimension; sums are float32."""
    return jnp.sum(x.astype(jnp.float32) * along(x, vector.astype(jnp.float32)), axis=-1).astype(x.dtype)


def gated(y: Array, gate: Array) -> Array:
    """y times a sigmoid of `gate`, which has the first dimensions of y."""
    share = jax.nn.sigmoid(gate.astype(jnp.float32)).astype(y.dtype)
    return y * (share if share.ndim == y.ndim else along(y, share, range(share.ndim)))


def softcap(x: Array, cap: float) -> Array:
    """cap tanh(x / cap): about x if it is small, never beyond the cap. In float32."""
    return cap * jnp.tanh(x.astype(jnp.float32) / cap)


def along(x: Array, vector: Array, dims: Sequence[int] | None = None) -> Array:
    """`vector` along the dimensions `dims` of x (None: its last), repeated over the others."""
    dims = tuple(range(x.ndim - vector.ndim, x.ndim)) if dims is None else tuple(dims)
    return repeated(vector, dims, x.shape, partitions_of(x))


def repeated(vector: Array, dims: Sequence[int], shape: Sequence[int], split: Sequence[Any]) -> Array:
    """`vector` along the dimensions `dims` of an array of a given shape, split as `split` over the others.

    Its cotangent is a sum over the other dimensions, and stays partial over the axes of `vector`'s `reduced`
    type: JAX's own rule would finish it. If several devices have the same rows, one has their sum and the
    others have zeros.
    """
    others = tuple(dim for dim in range(len(shape)) if dim not in dims)
    parts, kept = partitions_of(vector), jax.typeof(vector).sharding.spec.reduced
    split_dims = dict(zip(dims, parts, strict=True))
    spec = PartitionSpec(*(split_dims.get(dim, axes) for dim, axes in enumerate(split)))
    summed = {axis for dim in others for axis in axes_of(split[dim])}

    @jax.custom_vjp
    def out(vector: Array) -> Array:
        here = jnp.expand_dims(reshard(vector, PartitionSpec(*parts)), others)
        return jnp.broadcast_to(here, shape, out_sharding=spec)

    def backward(_: None, d_out: Array) -> tuple[Array]:
        partial = PartitionSpec(*parts, unreduced=kept & summed)
        d = lax.reduce_sum(d_out, others, out_sharding=partial)
        return (d if kept <= summed else reshard(d, PartitionSpec(*parts, unreduced=kept)),)

    out.defvjp(lambda vector: (out(vector), None), backward)
    return out(vector)

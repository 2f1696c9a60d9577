"""Norms, activations and caps on arrays: the forward pass between its products."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.models.config import ModelConfig

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
# gpt-oss's swiglu_limit and swiglu_alpha.
_CLAMP, _SLOPE = 7.0, 1.702


def log_sum_exp(x: Array) -> Array:
    """log(sum exp(x)) over the last dimension; if it is split, devices exchange only maxima and sums."""
    peak = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(x - peak), axis=-1)) + peak[..., 0]


def mean_of_last(x: Array) -> Array:
    """The mean over the last dimension, which stays as one of size 1."""
    return jnp.mean(x, axis=-1, keepdims=True)


def norm(
    x: Array,
    scale: Array | None,
    bias: Array | None,
    kind: str,
    config: ModelConfig,
    mean: Callable[[Array], Array] = mean_of_last,
) -> Array:
    """x / rms(x) * scale over the last dimension; a layer norm subtracts the mean first.

    Sums stay float32, since bfloat16 stops counting at 256. scale[D] (1 + scale with norm_offset; None for no
    scale) and bias[D] are whole. mean: over the last dimension, which becomes a dimension of size 1.
    """
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide -= mean(wide)
    inverse = lax.rsqrt(mean(wide * wide) + config.norm_eps)
    if scale is None:
        return (wide * inverse).astype(x.dtype)
    if config.norm_offset:
        # 1 + scale is rounded to bfloat16 after the product, as Gemma does.
        return (wide * inverse * (1 + along(x, scale.astype(jnp.float32)))).astype(x.dtype)
    out = (wide * inverse).astype(x.dtype) * along(x, scale.astype(x.dtype))
    return out if bias is None else out + along(x, bias.astype(x.dtype))


def activate(gate: Array, up: Array | None, kind: str) -> Array:
    """f(gate) * up, or only f(gate) if the feed-forward is not gated.

    clamped_silu: gate sigmoid(1.702 gate) (up + 1), of a gate of at most 7 and an up within +-7.
    """
    if kind == "clamped_silu":
        assert up is not None, "gpt-oss's activation is of gate and up"
        gate, up = jnp.minimum(gate, _CLAMP), jnp.clip(up, -_CLAMP, _CLAMP)
        return gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)
    active = _ACTIVATIONS[kind](gate)
    return active if up is None else active * up


def softcap(x: Array, cap: float) -> Array:
    """cap tanh(x / cap): about x if it is small, never beyond the cap. In float32."""
    return cap * jnp.tanh(x.astype(jnp.float32) / cap)


def along(x: Array, vector: Array, dims: Sequence[int] | None = None) -> Array:
    """`vector` along the dimensions `dims` of x (None: its last), repeated over the others."""
    dims = tuple(range(x.ndim - vector.ndim, x.ndim)) if dims is None else tuple(dims)
    return repeated(vector, dims, x.shape, jax.typeof(x).sharding.spec.partitions)


def repeated(vector: Array, dims: Sequence[int], shape: Sequence[int], split: Sequence[Any]) -> Array:
    """`vector` along the dimensions `dims` of an array of a given shape, split as `split` over the others.

    Its cotangent is a sum over the other dimensions, and stays partial over the axes of `vector`'s `reduced`
    type: JAX's own rule would finish it.
    """
    others = tuple(dim for dim in range(len(shape)) if dim not in dims)
    parts, kept = jax.typeof(vector).sharding.spec.partitions, jax.typeof(vector).sharding.spec.reduced
    own = dict(zip(dims, parts, strict=True))
    spec = PartitionSpec(*(own.get(dim, axes) for dim, axes in enumerate(split)))

    @jax.custom_vjp
    def out(vector: Array) -> Array:
        here = jnp.expand_dims(reshard(vector, PartitionSpec(*parts)), others)
        return jnp.broadcast_to(here, shape, out_sharding=spec)

    def backward(_: None, d_out: Array) -> tuple[Array]:
        return (lax.reduce_sum(d_out, others, out_sharding=PartitionSpec(*parts, unreduced=kept)),)

    out.defvjp(lambda vector: (out(vector), None), backward)
    return out(vector)

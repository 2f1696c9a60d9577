"""Weights in int8, fp8 or int4 with scales: made as a checkpoint is read, widened where they are multiplied.

    int8, fp8    w[F, D] = values[F, D] * scales[F]         a scale for each output
    int4         w[F, D] = values[F, D] * scales[F, D / g]  a scale for g inputs of an output, g <= GROUP

JAX keeps an int4 in a byte of its own on CPUs, and refuses it as an argument of a compiled program (0.10.2).
So on CPUs two inputs share a byte of values i8[F, D / 2], the first of them its lower half.

Scales are float32 and symmetric: the largest magnitude that one stands for is the type's largest number. A
scale for each output is multiplied behind the product, so that no widened copy of a weight is kept; groups
are widened before it. Where `matmul_dtype` is the type of the weights, int8 or fp8, activations are cast to
it too, each device's share of a token with a scale of its own, and products of int8 are summed in int32
(LLM.int8(), Dettmers et al., 2022), of fp8 in float32.

What is quantised, and of int4 the tables as int8: `Layout.stored_dtype`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from meshwright.layout import Layout
from meshwright.layout.precision import DTYPES, GROUP, SCALED_DTYPES
from meshwright.nn.products.narrow import TYPES, as_multiplied, rounded
from meshwright.nn.start.device_mesh import platform

QUANTISED_DTYPES = {name: TYPES[name][0] for name in SCALED_DTYPES}
# The largest number that a scale brings the largest magnitude to.
LARGEST = {name: TYPES[name][1] for name in SCALED_DTYPES} | {"int4": 7.0}


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Quantised:
    """A weight as values, and scales f32 without the dimensions that a product sums over, or by groups."""

    values: Any
    scales: Any

    @property
    def is_grouped(self) -> bool:
        return self.scales.ndim == self.values.ndim

    @property
    def group(self) -> int:
        """Inputs that share a scale of int4; 1 of other types."""
        if not self.is_grouped:
            return 1
        in_values = 2 if self.values.dtype == jnp.int8 else 1
        return in_values * self.values.shape[-1] // self.scales.shape[-1]


def in_pairs(platform: str) -> bool:
    """Whether values of int4 are stored two a byte on devices of this platform, as JAX calls it."""
    return platform == "cpu"


def name_of(dtype: Any) -> str:
    """Our name of one of QUANTISED_DTYPES."""
    return next(name for name, one in QUANTISED_DTYPES.items() if one == dtype)


def as_read(layout: Layout) -> Layout:
    """The layout that a checkpoint is read with: in compute_dtype what is quantised thereafter."""
    return layout if layout.weights_dtype in DTYPES else layout.replace(weights_dtype=layout.compute_dtype)


def group_size(size: int) -> int:
    """Inputs that share a scale of int4, of `size` that one device has.

    >>> group_size(2048), group_size(48)
    (32, 16)
    """
    return gcd(size, GROUP)


def quantise(w: Array, dtype: str, num_summed: int, group: int) -> Quantised:
    """The weight w[..., what is summed over], of whose last dimensions a product sums over `num_summed`."""
    wide = w.astype(jnp.float32)
    if dtype == "int4":
        wide = _in_groups(wide, group)
        axes: tuple[int, ...] = (wide.ndim - 1,)
    else:
        axes = tuple(range(w.ndim - num_summed, w.ndim))
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / LARGEST[dtype], 1e-30)
    scaled = wide / scales
    values = scaled if dtype == "fp8" else jnp.round(scaled)
    if dtype == "int4":
        whole = jnp.reshape(values, w.shape, out_sharding=jax.typeof(w).sharding).astype(jnp.int8)
        values = _paired(whole) if in_pairs(platform()) else whole.astype(jnp.int4)
    else:
        values = values.astype(QUANTISED_DTYPES[dtype])
    return Quantised(values, jnp.squeeze(scales, axes))


def widened(weight: Array | Quantised, dtype: Any) -> Array:
    """The weight as one array."""
    if not isinstance(weight, Quantised):
        return weight.astype(dtype)
    values, scales = weight.values, weight.scales
    if not weight.is_grouped:
        missing = tuple(range(scales.ndim, values.ndim))
        return (values.astype(jnp.float32) * jnp.expand_dims(scales, missing)).astype(dtype)
    whole = _apart(values) if values.dtype == jnp.int8 else values
    wide = _in_groups(whole.astype(jnp.float32), weight.group) * scales[..., None]
    return jnp.reshape(wide, whole.shape, out_sharding=jax.typeof(whole).sharding).astype(dtype)


def _paired(values: Array) -> Array:
    """i8[..., I / 2] of i8[..., I] from -8 to 7: two of a row in a byte."""
    pairs = _in_groups(values, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _apart(pairs: Array) -> Array:
    """i8[..., I] of what `_paired` gives."""
    both = jnp.stack([(pairs << 4) >> 4, pairs >> 4], axis=-1)
    shape = (*pairs.shape[:-1], 2 * pairs.shape[-1])
    return jnp.reshape(both, shape, out_sharding=jax.typeof(pairs).sharding)


def _in_groups(w: Array, group: int) -> Array:
    spec = jax.typeof(w).sharding.spec
    shape = (*w.shape[:-1], w.shape[-1] // group, group)
    return jnp.reshape(w, shape, out_sharding=PartitionSpec(*spec.partitions, None))


def quantised_product(product: Callable[[Array, Array], Array], x: Array, w: Array) -> Array:
    """y f32[R, O] of x[R, I] by w[O, I] in int8 or fp8: `product` of rows in that type, times the scales."""
    narrow = name_of(w.dtype)
    values, scales = rounded(x, (1,), narrow)
    y = product(*(as_multiplied(one, narrow, x.dtype) for one in (values, w)))
    return y.astype(jnp.float32) * scales

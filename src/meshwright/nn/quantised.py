"""Weights in int8, fp8 or int4 with scales: made as a checkpoint is read, widened where they are multiplied.

    int8, fp8    w[F, D] = values[F, D] * scales[F]         a scale for each output
    int4         w[F, D] = values[F, D] * scales[F, D / g]  a scale for g inputs of an output, g <= GROUP

Scales are float32 and symmetric: the largest magnitude that one stands for is the type's largest number. A
scale for each output is multiplied behind the product, so that no widened copy of a weight is kept; groups
are widened before it. With `matmul_dtype=int8` activations are int8 too, with one scale per token, and
products are sums of int32 (LLM.int8(), Dettmers et al., 2022).

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
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.precision import DTYPES, GROUP

QUANTISED_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int4}
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Quantised:
    """A weight as values, and scales f32 without the dimensions that a product sums over, or by groups."""

    values: Any
    scales: Any

    @property
    def is_grouped(self) -> bool:
        return self.scales.ndim == self.values.ndim


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
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / _LARGEST[dtype], 1e-30)
    scaled = wide / scales
    values = (scaled if dtype == "fp8" else jnp.round(scaled)).astype(QUANTISED_DTYPES[dtype])
    if dtype == "int4":
        values = jnp.reshape(values, w.shape, out_sharding=jax.typeof(w).sharding)
    return Quantised(values, jnp.squeeze(scales, axes))


def widened(weight: Array | Quantised, dtype: Any) -> Array:
    """The weight as one array."""
    if not isinstance(weight, Quantised):
        return weight.astype(dtype)
    values, scales = weight.values.astype(jnp.float32), weight.scales
    if not weight.is_grouped:
        missing = tuple(range(scales.ndim, values.ndim))
        return (values * jnp.expand_dims(scales, missing)).astype(dtype)
    group = values.shape[-1] // scales.shape[-1]
    wide = _in_groups(values, group) * scales[..., None]
    return jnp.reshape(wide, values.shape, out_sharding=jax.typeof(values).sharding).astype(dtype)


def _in_groups(w: Array, group: int) -> Array:
    spec = jax.typeof(w).sharding.spec
    shape = (*w.shape[:-1], w.shape[-1] // group, group)
    return jnp.reshape(w, shape, out_sharding=PartitionSpec(*spec.partitions, None))


def int8_product(product: Callable[[Array], Array], x: Array, num_rows: int = 2) -> Array:
    """`product`, i32 of int8, of x, which has a scale for each of its first `num_rows` dimensions."""
    if (spec := jax.typeof(x).sharding.spec).reduced:  # which is of cotangents, and no reduction takes it
        x = reshard(x, PartitionSpec(*spec.partitions))
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=tuple(range(num_rows, x.ndim)), keepdims=True)
    scales = jnp.maximum(largest / _LARGEST["int8"], 1e-30)
    y = product(jnp.round(wide / scales).astype(jnp.int8))
    return y.astype(jnp.float32) * jnp.reshape(scales, (*x.shape[:num_rows], *(1,) * (y.ndim - num_rows)))

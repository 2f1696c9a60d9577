"""Weights in narrow types with scales: quantised as a checkpoint is read, widened as they are multiplied.

    a scale for each output    w[F, D] = values[F, D] * scales[F]         int8, fp8
    a scale for each group     w[F, D] = values[F, D] * scales[F, D / g]  int4: g inputs of an output

JAX keeps an int4 in a byte on CPUs, and refuses it as an argument of a compiled program (0.10.2). So on CPUs
two inputs share a byte of values i8[F, D / 2], the first in its lower half.

Scales are float32 and symmetric: the largest magnitude of a line or group becomes the type's largest number.
A scale for each output is multiplied after the product, so no widened copy of a weight is kept. Groups are
widened before the product. If `matmul_dtype` is the type of the weights, or int8 with weights in int4,
activations are rounded to it too: each device's share of a token has a scale. Products of int8 are summed in
int32 (LLM.int8(), Dettmers et al., 2022), of fp8 in float32.

`Layout.stored_dtype` says which weights are quantised, and the type of embedding tables.
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
from jax.typing import DTypeLike

from meshwright.dtypes import NUMBER_TYPES, number_type
from meshwright.layout import Layout
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.products.narrow import as_multiplied, quantised_lines
from meshwright.nn.start.device_mesh import platform

_NAMES = {
    jax_dtype(record.name): record.name
    for record in NUMBER_TYPES.values()
    if record.has_line_scales and record.served_as
}


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Quantised:
    """A weight as values and float32 scales: for each output, or for each group of inputs."""

    values: Any
    scales: Any

    @property
    def is_grouped(self) -> bool:
        return self.scales.ndim == self.values.ndim

    @property
    def group(self) -> int:
        """Inputs that share a scale; 1 if each output has one."""
        if not self.is_grouped:
            return 1
        in_value = 2 if self.values.dtype == jnp.int8 else 1
        return in_value * self.values.shape[-1] // self.scales.shape[-1]


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether arrays of a JAX type are values of a Quantised with a scale for each line."""
    return dtype in _NAMES


def type_name(dtype: Any) -> str:
    """Our name of a narrow JAX type (see `is_narrow`)."""
    return _NAMES[dtype]


def as_read(layout: Layout) -> Layout:
    """The layout to read a checkpoint with: weights to be quantised are in compute_dtype."""
    if number_type(layout.precision.weights_dtype).scales is None:
        return layout
    return layout.replace(weights_dtype=layout.precision.compute_dtype)


def group_size(size: int, group: int) -> int:
    """Inputs that share a scale: `group`, or the largest divisor of it that divides a device's `size` inputs.

    >>> group_size(2048, 32), group_size(48, 32)
    (32, 16)
    """
    return gcd(size, group)


def quantise(w: Array, dtype: str, num_summed: int, group: int) -> Quantised:
    """The weight w[..., inputs]; a product sums over its last `num_summed` dimensions."""
    record, wide = number_type(dtype), w.astype(jnp.float32)
    if record.group:
        wide = _in_groups(wide, group)
    axes = (wide.ndim - 1,) if record.group else tuple(range(w.ndim - num_summed, w.ndim))
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / record.largest, 1e-30)
    values = jnp.round(wide / scales) if record.is_integer else wide / scales
    if record.group:
        whole = jnp.reshape(values, w.shape, out_sharding=jax.typeof(w).sharding).astype(jnp.int8)
        values = _paired(whole) if platform().packs_int4 else whole.astype(jax_dtype(dtype))
    else:
        values = values.astype(jax_dtype(dtype))
    return Quantised(values, jnp.squeeze(scales, axes))


def widened(weight: Array | Quantised, dtype: DTypeLike) -> Array:
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
    """Pack i8[..., I], from -8 to 7, into i8[..., I / 2]: two neighbours of a row in a byte."""
    pairs = _in_groups(values, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _apart(pairs: Array) -> Array:
    """The i8[..., I] that `_paired` packed."""
    both = jnp.stack([(pairs << 4) >> 4, pairs >> 4], axis=-1)
    shape = (*pairs.shape[:-1], 2 * pairs.shape[-1])
    return jnp.reshape(both, shape, out_sharding=jax.typeof(pairs).sharding)


def _in_groups(w: Array, group: int) -> Array:
    spec = jax.typeof(w).sharding.spec
    shape = (*w.shape[:-1], w.shape[-1] // group, group)
    return jnp.reshape(w, shape, out_sharding=PartitionSpec(*spec.partitions, None))


def rounded_product(product: Callable[[Array, Array], Array], dtype: str, x: Array, w: Array) -> Array:
    """y f32[R, O] of x[R, I] by w[O, I] in the type of x, with x first rounded to the narrow type `dtype`."""
    values, scales = quantised_lines(x, (1,), dtype)
    return product(values.astype(x.dtype), w).astype(jnp.float32) * scales


def quantised_product(product: Callable[[Array, Array], Array], x: Array, w: Array) -> Array:
    """y f32[R, O] of x[R, I] by w[O, I] in a narrow type: `product` of rows in it, times scales."""
    narrow = type_name(w.dtype)
    values, scales = quantised_lines(x, (1,), narrow)
    y = product(*(as_multiplied(one, narrow, x.dtype) for one in (values, w)))
    return y.astype(jnp.float32) * scales

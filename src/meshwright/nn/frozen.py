"""Frozen weights in narrow types, next to adapters that are trained (QLoRA, Dettmers et al. 2023).

    a scale for each output    w[D, F] = values[D, F] * scales[1, F]              int8, fp8
    a scale for each group     w[D, F] = level(codes[D, F]) * scales[D / g, F]    int4, nf4: g inputs

Two neighbouring inputs share a byte of values u8[D / 2, F], the first in its lower half: JAX refuses arrays
of 4-bit types as arguments on CPUs (0.10.2), and checkpoints have no such type.

Each layer widens its weights where it reads them, forward and again in the backward pass, so no wide copy is
kept. Groups do not cross devices, so they are smaller if a device has few inputs. `Precision.stored_dtype`
has the type of each weight.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshwright.dtypes import number_type
from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.models.parameters import Param
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.each_device import partitions_of


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["dtype", "axis"])
@dataclass(frozen=True)
class Frozen:
    """A weight as values in a number type and float32 scales.

    axis: the dimension of groups, counted from the last so that it holds for a layer of a stack, too.
    """

    values: Any
    scales: Any
    dtype: str
    axis: int


def frozen_dtype(layout: Layout, path: str, param: Param) -> str | None:
    """The narrow type of a weight that is not trained; None if it is stored in a wide type."""
    dtype = layout.precision.stored_dtype(path, param)
    return None if number_type(dtype).scales is None else dtype


def frozen_type(wide: jax.ShapeDtypeStruct, dtype: str, path: str, param: Param) -> Frozen:
    """The types of `frozen`. wide: of the weight.

    Raises LayoutError if a device's share of the inputs does not divide into groups.
    """
    assert isinstance(wide.sharding, NamedSharding)
    record, shape, spec = number_type(dtype), list(wide.shape), list(wide.sharding.spec)
    spec += [None] * (len(shape) - len(spec))
    axis = param.letters.index(param.fan_in[-1])

    def typed(sizes: list[int], kind: object, split: list[Any]) -> jax.ShapeDtypeStruct:
        where = NamedSharding(wide.sharding.mesh, PartitionSpec(*split))
        return jax.ShapeDtypeStruct(tuple(sizes), kind, sharding=where)

    if not record.group:
        inputs = [param.letters.index(letter) for letter in param.fan_in]
        lines = [1 if dim in inputs else size for dim, size in enumerate(shape)]
        split = [None if dim in inputs else axes for dim, axes in enumerate(spec)]
        return Frozen(typed(shape, jax_dtype(dtype), spec), typed(lines, jnp.float32, split), dtype, 0)
    size, share = shape[axis], wide.sharding.shard_shape(wide.shape)[axis]
    group = gcd(share, record.group)
    if group % 2:
        raise LayoutError(
            f"{path}[{param.letters}] in {dtype}: a device has {share:,} of {size:,} inputs "
            f"({param.letters[axis]}), an odd number, and two share a byte; store weights in a type of 8 bits"
        )
    codes = [*shape[:axis], size // 2, *shape[axis + 1 :]]
    groups = [*shape[:axis], size // group, *shape[axis + 1 :]]
    return Frozen(typed(codes, jnp.uint8, spec), typed(groups, jnp.float32, spec), dtype, axis - len(shape))


def frozen(weight: Array, types: Frozen) -> Frozen:
    """The weight in the narrow type of `types`, rounded to nearest."""
    record, wide = number_type(types.dtype), weight.astype(jnp.float32)
    if not record.group:
        inputs = tuple(dim for dim, size in enumerate(types.scales.shape) if size != weight.shape[dim])
        scales = _scales(wide, inputs, record.largest)
        values = jnp.round(wide / scales) if record.is_integer else wide / scales
        return Frozen(values.astype(jax_dtype(types.dtype)), scales, types.dtype, types.axis)
    axis = weight.ndim + types.axis
    grouped = _split(wide, axis, types.scales.shape[axis])
    scales = _scales(grouped, (axis + 1,), record.largest)
    numbers = grouped / scales
    if record.levels:
        middles = np.asarray(record.levels)
        codes = jnp.zeros(numbers.shape, jnp.uint8)
        for middle in (middles[1:] + middles[:-1]) / 2:
            codes += (numbers > np.float32(middle)).astype(jnp.uint8)
    else:
        codes = jnp.round(numbers).astype(jnp.int8).astype(jnp.uint8) & 15
    spec = jax.typeof(weight).sharding.spec
    pairs = _split(_joined(codes, axis, spec), axis, weight.shape[axis] // 2)
    first, second = (lax.index_in_dim(pairs, number, axis + 1, keepdims=False) for number in range(2))
    values = first | (second << 4)
    return Frozen(values, jnp.squeeze(scales, axis + 1), types.dtype, types.axis)


def widened(weight: Frozen, dtype: DTypeLike) -> Array:
    """The weight as one array of a JAX type."""
    record, values = number_type(weight.dtype), weight.values
    if not record.group:
        return (values.astype(jnp.float32) * weight.scales).astype(dtype)
    axis = values.ndim + weight.axis
    spec = jax.typeof(values).sharding.spec
    codes = _joined(jnp.stack([values & 15, values >> 4], axis + 1), axis, spec)
    numbers = _levels(codes, record.levels) if record.levels else (codes.astype(jnp.int8) ^ 8) - 8
    grouped = _split(numbers.astype(jnp.float32), axis, weight.scales.shape[axis])
    return _joined(grouped * jnp.expand_dims(weight.scales, axis + 1), axis, spec).astype(dtype)


def as_saved(types: Frozen, saved: tuple[int, ...]) -> Frozen:
    """`types` with scales of the shape that another layout has saved, whole on each device if they are few.

    Values do not depend on the groups.
    """
    axis = len(saved) + types.axis
    spec, few = types.scales.sharding.spec, saved[axis] < types.scales.shape[axis]
    split = [None if few and dim == axis else axes for dim, axes in enumerate(spec)]
    where = NamedSharding(types.scales.sharding.mesh, PartitionSpec(*split))
    return replace(types, scales=jax.ShapeDtypeStruct(saved, jnp.float32, sharding=where))


def regrouped(weight: Frozen, types: Frozen) -> Frozen:
    """The same weight with groups no larger than the groups of `types`: larger groups are cut."""
    axis = weight.values.ndim + types.axis
    times = types.scales.shape[axis] // weight.scales.shape[axis]
    if times <= 1:
        return weight
    where = types.scales.sharding
    with jax.set_mesh(where.mesh):
        cut = jax.jit(lambda scales: jnp.repeat(scales, times, axis), out_shardings=where)
        return replace(weight, scales=cut(weight.scales))


def _scales(wide: Array, inputs: tuple[int, ...], largest: float) -> Array:
    return jnp.maximum(jnp.max(jnp.abs(wide), axis=inputs, keepdims=True) / largest, 1e-30)


def _levels(codes: Array, levels: tuple[float, ...]) -> Array:
    """The level of each code by its bits, since a look-up is a gather, which compilers do not fuse."""
    if len(levels) == 1:
        return jnp.full((), levels[0], jnp.float32)
    half = len(levels) // 2
    lower, upper = _levels(codes, levels[:half]), _levels(codes, levels[half:])
    return jnp.where(codes & half != 0, upper, lower)


def _split(x: Array, axis: int, groups: int) -> Array:
    """x[..., I, ...] as [..., groups, I / groups, ...]; devices have whole groups."""
    parts = list(partitions_of(x))
    shape = (*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :])
    spec = PartitionSpec(*parts[: axis + 1], None, *parts[axis + 1 :])
    return jnp.reshape(x, shape, out_sharding=spec)


def _joined(x: Array, axis: int, spec: PartitionSpec) -> Array:
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return jnp.reshape(x, shape, out_sharding=spec)

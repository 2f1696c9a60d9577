"""An optimizer's moments in 8 bits, with a float32 scale for each block of a row: unpacked for an update.

For a block with scale s and largest magnitude a, a stored number q represents

    int8   m = s q |q|    |q| <= 127        s = a / 127^2
           v = s q^2      0 <= q <= 255     s = a / 255^2
    fp8    m = s q        q in e4m3         s = a / 448
           v = s q^2      q in e4m3         s = a / 448^2

In even steps most of v would be 0, which an update divides by. As roots, numbers span half the decades,
and a v above 0 gets the smallest q at least: too large a v makes an update smaller, never larger. Sources:
blocks, and codes of uneven steps, Dettmers et al., arXiv:2110.02861; v as its root, Gonzalez Ortiz et al.,
arXiv:2602.23349; powers of moments, and fp8 in blocks of 128, Xi et al., arXiv:2410.19313 (FP8-LM,
arXiv:2310.18313, has one scale for all of m, and v in 16 bits); no 0 among the numbers of v, Li et al.,
arXiv:2309.01507. Alternatives that were tried are in docs/log.md.

A device's share of a row, S numbers, is split into n = ceil(S / 128) blocks, as equal as can be: block i of
a whole row begins at floor(i S / n), independent of the devices' shares. So the shape of the scales gives the
blocks, and no scale is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from meshwright.dtypes import NumberType, number_type
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.each_device import axes_of, spec_of
from meshwright.optimizers.optimizer import PACKED_DTYPES, num_scale_blocks


@partial(
    jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["dtype", "of_squares"]
)
@dataclass(frozen=True)
class Packed:
    """A moment x[..., S] as values [..., S] in 8 bits and scales f32[..., n].

    dtype: the number type of values. of_squares: the moment is v, a mean of squares.
    """

    values: Any
    scales: Any
    dtype: str
    of_squares: bool


def is_packed(x: Any) -> bool:
    """Whether a node of an optimizer's state is a moment in 8 bits."""
    return isinstance(x, Packed)


class _Code(NamedTuple):
    """Code of a moment. dtype: of values. most: the largest magnitude of a block, divided by its scale.

    pack, unpack: of numbers over their scale. unpack has no division or root: XLA computes those once and
    keeps the results, so the unpacked moments would stay in memory as float32.
    """

    dtype: Any
    most: float
    pack: Callable[[Array], Array]
    unpack: Callable[[Array], Array]


def _root(x: Array) -> Array:
    return jnp.round(jnp.sign(x) * jnp.sqrt(jnp.abs(x)))


def _square(q: Array) -> Array:
    return q * jnp.abs(q)


def _above_zero(rounded: Callable[[Array], Array], least: float) -> Callable[[Array], Array]:
    """`rounded`, with at least `least` for positive numbers."""
    return lambda x: jnp.where(x > 0, jnp.maximum(rounded(x), least), 0)


def _codes(record: NumberType) -> tuple[_Code, _Code]:
    """The codes of m and of v by the type of values."""
    kind, largest = jax_dtype(record.name), record.largest
    if record.is_integer:
        unsigned = jnp.dtype(f"u{kind}")
        of_squares = _Code(unsigned, (2.0 * largest + 1) ** 2, _above_zero(_root, 1.0), _square)
        return _Code(kind, largest**2, _root, _square), of_squares
    least = float(jnp.finfo(kind).smallest_subnormal)
    of_squares = _Code(kind, largest**2, _above_zero(jnp.sqrt, least), jnp.square)
    return _Code(kind, largest, lambda x: x, lambda q: q), of_squares


# By the type of values: (code of m, code of v).
_CODES = {name: _codes(number_type(name)) for name in PACKED_DTYPES}
# Zeros may have any scale.
_LEAST = 1e-30


def packed(x: Array, dtype: str, *, of_squares: bool) -> Packed:
    """A moment, f32[..., S], in 8 bits of a number type; each device packs its own shard."""
    local = partial(_packed_here, _CODES[dtype][of_squares])
    values, scales = _each_shard(local, spec_of(x), x)
    return Packed(values, scales, dtype, of_squares)


def packed_zeros(like: Array, dtype: str, *, of_squares: bool) -> Packed:
    """A moment of zeros, not by `packed`: XLA would fold the maxima of zeros, number by number."""

    def local(x: Array) -> tuple[Array, Array]:
        scales = jnp.zeros((*x.shape[:-1], num_scale_blocks(x.shape[-1])), jnp.float32)
        return jnp.zeros(x.shape, _CODES[dtype][of_squares].dtype), scales

    values, scales = _each_shard(local, spec_of(like), like)
    return Packed(values, scales, dtype, of_squares)


def unpacked(moment: Packed) -> Array:
    """The moment, f32[..., S], split as its values."""
    local = partial(_unpacked_here, _CODES[moment.dtype][moment.of_squares])
    return _each_shard(local, spec_of(moment.values), moment.values, moment.scales)


def in_blocks(abstract: Packed, count: int) -> Packed:
    """The types of a moment with rows in `count` blocks, as stored by another layout."""
    scales = abstract.scales
    shape, sharding = (*scales.shape[:-1], count), scales.sharding
    if isinstance(sharding, NamedSharding):
        sharding = sharding.update(spec=PartitionSpec(*_whole_rows(sharding.spec, scales.ndim)))
    return replace(abstract, scales=jax.ShapeDtypeStruct(shape, scales.dtype, sharding=sharding))


def repacked(moment: Packed, like: Packed) -> Packed:
    """A moment typed as by `in_blocks`, in the blocks of `like`: equal within half a step."""
    sharding, size = like.values.sharding, moment.values.shape[-1]
    code, count = _CODES[moment.dtype][moment.of_squares], moment.scales.shape[-1]
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    spec = sharding.spec if mesh else PartitionSpec()
    rows = (*spec, *[None] * moment.values.ndim)[moment.values.ndim - 1]

    def local(values: Array, scales: Array) -> tuple[Array, Array]:
        place = lax.axis_index(axes_of(rows)) if axes_of(rows) else 0
        length = values.shape[-1]
        blocks = lax.dynamic_slice_in_dim(jnp.asarray(_block_of_each(size, count)), place * length, length)
        return _packed_here(code, code.unpack(values.astype(jnp.float32)) * scales[..., blocks])

    given = spec, PartitionSpec(*_whole_rows(spec, moment.values.ndim))
    run = jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=spec, check_vma=False) if mesh else local
    # Programs do not read the host's memory.
    shardings = [x.with_memory_kind("device") if mesh else x for x in (sharding, moment.scales.sharding)]
    made = jax.jit(run)(*jax.device_put((moment.values, moment.scales), tuple(shardings)))
    values, scales = jax.device_put(made, (sharding, like.scales.sharding))
    return replace(moment, values=values, scales=scales)


def _whole_rows(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    """The entries of a spec, whose last dimension is split no more."""
    return (*spec, *[None] * ndim)[: ndim - 1]


def _each_shard(local: Callable[..., Any], spec: PartitionSpec, *arrays: Array) -> Any:
    """`local` of every device's shards of arrays with one sharding."""
    if get_abstract_mesh().empty:
        return local(*arrays)
    return jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)(*arrays)


def _packed_here(code: _Code, x: Array) -> tuple[Array, Array]:
    scales = jnp.maximum(_largest(jnp.abs(x), num_scale_blocks(x.shape[-1])), _LEAST) / code.most
    return code.pack(x * _spread(1 / scales, x.shape[-1])).astype(code.dtype), scales


def _unpacked_here(code: _Code, values: Array, scales: Array) -> Array:
    return code.unpack(values.astype(jnp.float32)) * _spread(scales, values.shape[-1])


def _largest(x: Array, count: int) -> Array:
    """The largest numbers [..., n] of the n blocks of x[..., S]."""
    if x.shape[-1] % count:
        # Shorter blocks repeat their last number.
        begins = np.arange(count + 1) * x.shape[-1] // count
        length = int(np.diff(begins).max())
        numbers = np.minimum(begins[:-1, None] + np.arange(length), begins[1:, None] - 1)
        return jnp.max(x[..., numbers], axis=-1)
    return jnp.max(jnp.reshape(x, (*x.shape[:-1], count, -1)), axis=-1)


def _spread(scales: Array, size: int) -> Array:
    """scales[..., n] of the blocks of a row as [..., S], one for each number."""
    count = scales.shape[-1]
    if size % count:
        return scales[..., _block_of_each(size, count)]
    wide = jnp.broadcast_to(scales[..., None], (*scales.shape, size // count))
    return jnp.reshape(wide, (*scales.shape[:-1], size))


def _block_of_each(size: int, count: int) -> np.ndarray:
    """The block of each of a row's numbers; block i begins at floor(i S / n)."""
    return (((np.arange(size, dtype=np.int64) + 1) * count - 1) // size).astype(np.int32)

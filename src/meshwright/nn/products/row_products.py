"""Products of the tokens of a step, each a row, with weights stored with summed dimensions last.

In tiles: compilers loop differently over other numbers of rows, and so may add in another order. If every
product has equally many rows, in one program, a row's result does not depend on the number of other rows.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from meshwright.nn.each_device import each_device, never, spec_of
from meshwright.nn.start.device_mesh import platform


def is_of_rows(spec: str) -> bool:
    """Whether it multiplies x[B, T, I...] by w[O..., I...].

    >>> is_of_rows("BTD,NHD->BTNH"), is_of_rows("BTD,DF->BTF")
    (True, False)
    """
    lhs, rhs, out = spec.replace("->", ",").split(",")
    return rhs.endswith(lhs[2:]) and out == lhs[:2] + rhs.removesuffix(lhs[2:])


def einsum_of_rows(
    product: Callable[[Array, Any], Array], spec: str, x: Array, w: Any, out_sharding: PartitionSpec
) -> Array:
    """y[B, T, O...] of x[B, T, I...] by w[O..., I...], by `product` of each device's rows.

    w: an array, or a tree of arrays that make up the weight, each of that many dimensions.
    """
    assert is_of_rows(spec), spec
    num_summed = len(spec.partition(",")[0]) - 2

    def local(x: Array, w: Any) -> Array:
        first = jax.tree.leaves(w)[0]
        kept = first.shape[: first.ndim - num_summed]
        rows = jnp.reshape(x, (x.shape[0] * x.shape[1], -1))
        y = product(rows, jax.tree.map(lambda part: jnp.reshape(part, (prod(kept), -1)), w))
        return jnp.reshape(y, (*x.shape[:2], *kept))

    return each_device(local, (spec_of(x), jax.tree.map(spec_of, w)), out_sharding)(x, w)


def in_tiles(compute: Callable[[Any], Any], rows: Any) -> Any:
    """`compute` of a device's rows, tile by tile; the last tile is padded with zeros.

    compute: maps each row to one row, by itself. rows: a tree of arrays with equally many rows.
    """
    size, leaves = platform().tile_rows, jax.tree.leaves(rows)
    count = len(leaves[0])
    num_tiles = -(-count // size)
    room = num_tiles + 1  # XLA simplifies a slice of the only tile to the whole array

    def tiled(x: Array) -> Array:
        filled = jnp.pad(x, ((0, room * size - count), *((0, 0),) * (x.ndim - 1)))
        return jnp.reshape(filled, (room, size, *x.shape[1:]))

    tiles = jax.tree.map(tiled, rows)

    def product_of(number: Array) -> Any:
        return compute(jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), tiles))

    def put(number: Array, total: Mapping[str, Any]) -> Any:
        return jax.tree.map(
            lambda x, made: lax.dynamic_update_index_in_dim(x, made, number, 0), total, product_of(number)
        )

    types = jax.eval_shape(product_of, jnp.int32(0))
    nothing = jax.tree.map(lambda made: jnp.zeros((room, *made.shape), made.dtype), types)
    # XLA unrolls a loop of one known trip, and would fuse its body with the code around it, differently for
    # each number of rows.
    more = never(jnp.ravel(leaves[0])[0])
    made = lax.fori_loop(0, num_tiles + more.astype(jnp.int32), put, nothing)
    return jax.tree.map(lambda y: jnp.reshape(y, (-1, *y.shape[2:]))[:count], made)

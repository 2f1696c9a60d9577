"""Small arrays of a step joined into one array, since each transfer to a device takes time."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import reshard


def joined(tree: object) -> np.ndarray:
    """i32[n] of the bits of all arrays of a tree, in order. Their types have 32 bits."""
    return np.concatenate([np.ravel(leaf).view(np.int32) for leaf in map(np.asarray, jax.tree.leaves(tree))])


def joined_type(types: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """The type of `joined` of arrays of these types."""
    size = sum(prod(leaf.shape) for leaf in jax.tree.leaves(types))
    return jax.ShapeDtypeStruct((size,), np.int32, sharding=sharding)


def taken_apart(whole: Array, types: Any) -> Any:
    """The arrays that were joined, with these types and their shardings."""
    leaves, tree = jax.tree.flatten(types)
    arrays, first = [], 0
    for leaf in leaves:
        size = prod(leaf.shape)
        bits = jnp.reshape(lax.slice(whole, (first,), (first + size,)), leaf.shape)
        arrays.append(reshard(lax.bitcast_convert_type(bits, leaf.dtype), leaf.sharding.spec))
        first += size
    return jax.tree.unflatten(tree, arrays)

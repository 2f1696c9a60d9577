"""Blocks of positions of arrays, and the pairs of blocks of queries and keys that a causal mask leaves."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array, lax

from meshwright.layout.attention_kernels import attention_block, visible_pairs, visible_share
from meshwright.models.layer_kinds import Window
from meshwright.models.scopes import at_most_blocks


def visible_scope(
    q: Array,
    k: Array,
    windows: Sequence[Window | None] = (None,),
    size: int = 1,
    num_own: int = 1,
    among: int = 1,
) -> str:
    """The name of a scope whose products run only for pairs of blocks with a visible key.

    It tells an audit the mean number of such pairs. windows: of the layers that share this program. size:
    devices in the ring; their pairs are summed. among: turns of the ring that run in this scope. num_own: how
    many of them have keys of the queries' own device. In the other turns a zigzag gives every device an equal
    part of the visible pairs.
    """
    block = attention_block(k.shape[1])
    num_keys, num_queries = k.shape[1] // block, q.shape[1] // attention_block(q.shape[1])

    def seen(window: Window | None) -> float:
        """Visible pairs of blocks on one device, if its queries are in blocks of the size of keys."""
        if window and window.compressed:
            # k is the keys of `length` positions, then an entry for every `compressed` of them.
            length = k.shape[1] - k.shape[1] // (window.compressed + 1)
            return num_keys**2 * (visible_share(length, window) if length < k.shape[1] else 1.0)
        mine = visible_pairs(num_keys, block, window)
        of_others = visible_pairs(size * num_keys, block, window) / size - mine
        return num_own * mine + (among - num_own) * of_others / max(size - 1, 1)

    visible = size * sum(map(seen, windows)) * num_queries / num_keys
    return at_most_blocks(round(visible), size * among * len(windows) * num_queries * num_keys)


def num_blocks(x: Array) -> int:
    """Number of blocks of x[B, T, ...]; an even T has at least two, the halves of a zigzag."""
    return x.shape[1] // attention_block(x.shape[1])


def block_of(arrays: Any, number: Array, dims: Any = 1) -> Any:
    """Block `number` of each array of a tree. dims: the dim of positions, for all or as a tree."""

    def of_array(x: Array, dim: int) -> Array:
        block = attention_block(x.shape[dim])
        return lax.dynamic_slice_in_dim(x, number * block, block, dim)

    return jax.tree.map(of_array, arrays, _for_each(arrays, dims))


def put(arrays: Any, blocks: Any, number: Array, dims: Any = 1) -> Any:
    """The arrays with block `number` of each replaced by `blocks`."""

    def of_array(x: Array, block: Array, dim: int) -> Array:
        return lax.dynamic_update_slice_in_dim(x, block, number * block.shape[dim], dim)

    return jax.tree.map(of_array, arrays, blocks, _for_each(arrays, dims))


def _for_each(arrays: Any, dims: Any) -> Any:
    return jax.tree.map(lambda _: dims, arrays) if isinstance(dims, int) else dims

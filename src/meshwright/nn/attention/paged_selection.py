"""Sparse attention over pages: the positions that an indexer chooses, and attention to these alone.

All positions of a row are scored, some pages at a time. The chosen latents are then gathered for each query,
so that attention reads `top_k` positions however long the sequence is (DeepSeek-V3.2, 2025).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.layout.page_sizes import TOGETHER
from meshwright.models.transformer import at_most
from meshwright.nn.attention.by_formula import HIDDEN
from meshwright.nn.attention.selection import index_scores

NOT_CHOSEN = -1  # fills the positions of a query that sees fewer than top_k keys
# Queries whose gathered latents are in memory at a time.
_QUERIES = 8


def best_positions(
    q: Array,
    weights: Array,
    positions: Array,
    tables: Array,
    read: Callable[[Array], Array],
    page_size: int,
    top_k: int,
) -> Array:
    """i32[R, Q, k]: the k = min(top_k, P * page_size) positions that each query reads, or NOT_CHOSEN.

    q[R, Q, x, y], weights[R, Q, x]: the indexer's queries and weights. positions i32[R, Q]: of the queries.
    tables i32[R, P]: the pages of each row. read: returns the index's keys [pages * page_size, y] of pages.
    """
    count = min(TOGETHER, tables.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count)))
    num_blocks, size = tables.shape[1] // count, count * page_size
    k = min(top_k, num_blocks * size)

    def of_row(row: tuple[Array, ...]) -> Array:
        q, weights, positions, table = row

        def of_pages(number: Array, scores: Array) -> Array:
            keys = read(lax.dynamic_slice_in_dim(table, number * count, count))
            some = index_scores(q[None], keys[None].astype(q.dtype), weights[None])[0]
            at = number * size + jnp.arange(size, dtype=jnp.int32)
            # Later positions may be of a sequence that failed, and hold any number.
            some = jnp.where(at[None, :] <= positions[:, None], some, -jnp.inf)
            return lax.dynamic_update_slice_in_dim(scores, some, number * size, 1)

        scores = jnp.full((q.shape[0], num_blocks * size), -jnp.inf)
        used = (jnp.max(positions) + size) // size
        with jax.named_scope(at_most(num_blocks)):
            scores = lax.fori_loop(0, used, of_pages, scores)
        best, at = lax.top_k(scores, k)
        return jnp.where(best > -jnp.inf, at.astype(jnp.int32), NOT_CHOSEN)

    return lax.map(of_row, (q, weights, positions, tables))


def attend_to_chosen(
    q: Array,
    chosen: Array,
    tables: Array,
    read: Callable[[Any], tuple[Array, Array]],
    size: int,
    scale: float,
) -> Array:
    """f32[N, heads, R] of q[N, heads, R + A] over the latents at chosen i32[N, k].

    tables i32[N, P]: the pages of each query. size: positions of a page. read: returns the latents and rotary
    keys at (pages, places in them).
    """

    def of_query(query: tuple[Array, ...]) -> Array:
        q, chosen, table = query
        at = jnp.maximum(chosen, 0)
        latent, rope = read((table[at // size], at % size))
        is_chosen = chosen >= 0
        latent = jnp.where(is_chosen[:, None], latent, 0).astype(q.dtype)
        keys = jnp.concatenate([latent, rope.astype(q.dtype)], axis=-1)
        scores = scale * jnp.einsum("hH,kH->hk", q, keys, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(jnp.where(is_chosen[None], scores, HIDDEN), axis=-1)
        return jnp.einsum("hk,kR->hR", shares.astype(q.dtype), latent, preferred_element_type=jnp.float32)

    return lax.map(of_query, (q, chosen, tables), batch_size=_QUERIES)

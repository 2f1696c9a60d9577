"""Sparse attention over pages: the positions that an indexer chooses, and attention to these alone.

All positions of a row are scored, some pages at a time. The chosen latents are then gathered for each query,
so that attention reads `top_k` positions however long the sequence is (DeepSeek-V3.2, 2025).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.layout.page_sizes import KEYS_AT_ONCE, TOGETHER
from meshwright.models.transformer import at_most
from meshwright.nn.attention.by_formula import HIDDEN
from meshwright.nn.attention.selection import index_scores

NOT_CHOSEN = -1  # fills the positions of a query that sees fewer than top_k keys


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


def best_of_tables(
    q: Array, weights: Array, positions: Array, tables: Array, read: Callable[[Array], Array], top_k: int
) -> Array:
    """`best_positions` of rows of one query, many at a time, over all pages of their tables.

    q[R, x, y], weights[R, x], positions i32[R]. A loop over each row's own pages would run its small kernels
    one after another: on H100s they took most of a step of DeepSeek-V3.2 with 64 sequences. read: returns the
    index's keys [R, P * page_size, y].
    """

    def of_rows(row: tuple[Array, ...]) -> Array:
        q, weights, position, table = (each[None] for each in row)
        keys = read(table)
        scores = index_scores(q[:, None], keys.astype(q.dtype), weights[:, None])[:, 0]
        at = jnp.arange(keys.shape[1], dtype=jnp.int32)
        # Later positions may be of a sequence that failed, and hold any number.
        best, chosen = lax.top_k(jnp.where(at[None] <= position[:, None], scores, -jnp.inf), k)
        return jnp.where(best > -jnp.inf, chosen.astype(jnp.int32), NOT_CHOSEN)[0]

    num_keys = jax.eval_shape(read, tables).shape[1]
    k = min(top_k, num_keys)
    return _some_at_a_time(of_rows, (q, weights, positions, tables), max(1, KEYS_AT_ONCE // num_keys))


def _some_at_a_time(of_one: Callable[[Any], Array], rows: tuple[Array, ...], count: int) -> Array:
    """`of_one` of each row, `count` rows side by side."""
    if count >= len(rows[0]):
        return jax.vmap(of_one)(rows)
    return lax.map(of_one, rows, batch_size=count)


def attend_to_chosen(
    q: Array,
    chosen: Array,
    tables: Array,
    read: Callable[[Any], tuple[Array, Array]],
    size: int,
    scale: float,
    at_once: int = KEYS_AT_ONCE,
) -> Array:
    """f32[N, heads, R] of q[N, heads, R + A] over the latents at chosen i32[N, k].

    tables i32[N, P]: the pages of each query. size: positions of a page. read: returns the latents and rotary
    keys at (pages, places in them). at_once: gathered positions of all queries that are computed together.
    """

    def of_query(query: tuple[Array, ...]) -> Array:
        q, chosen, table = query
        # For missing positions the sequence's first is read, with weight 0.
        at = jnp.maximum(chosen, 0)
        latent, rope = (x.astype(q.dtype) for x in read((table[at // size], at % size)))
        of_latents, of_ropes = jnp.split(q, [latent.shape[-1]], axis=-1)
        # Two products, since joined latents and rotary keys would be a copy.
        scores = jnp.einsum("hR,kR->hk", of_latents, latent, preferred_element_type=jnp.float32)
        scores += jnp.einsum("hA,kA->hk", of_ropes, rope, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(jnp.where((chosen >= 0)[None], scale * scores, HIDDEN), axis=-1)
        out = jnp.einsum("hk,kR->hR", shares.astype(q.dtype), latent, preferred_element_type=jnp.float32)
        return jnp.where(jnp.any(chosen >= 0), out, 0.0)

    return _some_at_a_time(of_query, (q, chosen, tables), max(1, at_once // chosen.shape[1]))

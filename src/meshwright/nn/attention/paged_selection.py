"""Sparse attention over pages: the positions that an indexer chooses, and attention to them only.

All positions of a row are scored, some pages at a time. The chosen latents, or keys and values of the chosen
blocks, are then gathered for each query, so that attention reads `top_k` positions however long the sequence
is (DeepSeek-V3.2, 2025).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.layout.page_sizes import KEYS_AT_ONCE, TOGETHER, pages_read
from meshwright.models.config_tables import Indexer
from meshwright.models.layer_kinds import Window
from meshwright.models.scopes import at_most
from meshwright.nn.attention.by_formula import HIDDEN
from meshwright.nn.attention.selection import head_scores, index_scores, local_blocks

NOT_CHOSEN = -1  # fills the choices of a query that sees fewer than top_k keys


def best_positions(
    q: Array,
    weights: Array | None,
    positions: Array,
    tables: Array,
    read: Callable[[Array], Array],
    page_size: int,
    indexer: Indexer,
    stands: tuple[int, int] | None = None,
    every: int = 1,
) -> Array:
    """i32[R, Q, k]: the k = min(top_k, P * page_size) positions that each query reads, or NOT_CHOSEN.

    q[R, Q, x, y], weights[R, Q, x]: the indexer's queries and weights. positions i32[R, Q]: of the queries.
    tables i32[R, P]: the pages of each row. read: returns the index's keys [pages * page_size, y] of pages.
    If the indexer chooses blocks, i32[R, Q, K, k] by q[R, Q, K, y] without weights: the numbers of blocks.
    stands: (queries, positions) of every sequence, if they are known. every: positions that a key compresses.
    """
    count = min(TOGETHER, tables.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count)))
    num_blocks, size = tables.shape[1] // count, count * page_size
    # Blocks that each row of a sequence scores: an audit reads the loop's number of turns from their sum.
    counts = pages_read(*stands, q.shape[1], size * every, None) if stands else (num_blocks,)

    def of_row(row: tuple[Any, ...]) -> Array:
        q, weights, positions, table = row

        def of_pages(number: Array, scores: Array) -> Array:
            keys = read(lax.dynamic_slice_in_dim(table, number * count, count))
            at = number * size + jnp.arange(size, dtype=jnp.int32)
            some = _seen_scores(
                q[None], keys[None], weights if weights is None else weights[None], at[None], positions[None]
            )[0]
            return lax.dynamic_update_slice_in_dim(scores, some, number * size, scores.ndim - 1)

        heads = q.shape[1:2] if indexer.block else ()
        scores = jnp.full((q.shape[0], *heads, num_blocks * size), -jnp.inf)
        used = (jnp.max(positions) + size) // size
        with jax.named_scope(at_most(sum(counts), len(counts))):
            scores = lax.fori_loop(0, used, of_pages, scores)
        return _best(scores, positions, indexer)

    return lax.map(of_row, (q, weights, positions, tables))


def _seen_scores(q: Array, keys: Array, weights: Array | None, at: Array, positions: Array) -> Array:
    """Scores of keys [B, S, y] at positions `at` by queries at `positions`; -inf for later keys.

    Later positions may be of a sequence that failed, and hold any number.
    """
    keys = keys.astype(q.dtype)
    if weights is None:
        return jnp.where((at[:, None] <= positions[..., None])[:, :, None], head_scores(q, keys), -jnp.inf)
    return jnp.where(at[:, None] <= positions[..., None], index_scores(q, keys, weights), -jnp.inf)


def _best(scores: Array, positions: Array, indexer: Indexer) -> Array:
    """The positions with the highest scores[..., S], or blocks by scores[..., K, S], or NOT_CHOSEN."""
    count, block = indexer.top_k // indexer.block_size, indexer.block_size
    if indexer.block:
        padded = [(0, 0)] * (scores.ndim - 1) + [(0, -scores.shape[-1] % block)]
        scores = jnp.pad(scores, padded, constant_values=-jnp.inf)
        scores = jnp.max(jnp.reshape(scores, (*scores.shape[:-1], -1, block)), axis=-1)
        scores = jnp.where(local_blocks(scores, positions, indexer), jnp.inf, scores)
    best, at = lax.top_k(scores, min(count, scores.shape[-1]))
    return jnp.where(best > -jnp.inf, at.astype(jnp.int32), NOT_CHOSEN)


def best_of_tables(
    q: Array,
    weights: Array | None,
    positions: Array,
    tables: Array,
    read: Callable[[Array], Array],
    indexer: Indexer,
) -> Array:
    """`best_positions` of rows of one query, many at a time, over all pages of their tables.

    q[R, x, y], weights[R, x], positions i32[R]. A loop over each row's own pages would run its small kernels
    one after another: on H100s they took most of a step of DeepSeek-V3.2 with 64 sequences. read: returns the
    index's keys [R, P * page_size, y].
    """

    def of_rows(row: tuple[Any, ...]) -> Array:
        q, weights, position, table = jax.tree.map(lambda x: x[None, None], row)
        keys = read(table[0])
        at = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        return _best(_seen_scores(q, keys, weights, at, position), position, indexer)[0, 0]

    num_keys = jax.eval_shape(read, tables).shape[1]
    return _some_at_a_time(of_rows, (q, weights, positions, tables), max(1, KEYS_AT_ONCE // num_keys))


def _some_at_a_time(of_one: Callable[[Any], Array], rows: tuple[Any, ...], count: int) -> Array:
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


def attend_to_blocks(
    q: Array,
    chosen: Array,
    positions: Array,
    tables: Array,
    read: Callable[[Any], tuple[Array, Array]],
    size: int,
    block: int,
    scale: float,
    at_once: int = KEYS_AT_ONCE,
) -> Array:
    """f32[N, K, G, O] of q[N, K, G, H] over the positions of the blocks chosen i32[N, K, k].

    positions i32[N]: of the queries. tables i32[N, P]: the pages of each query. size: positions of a page.
    read: returns keys and values at (pages, KV heads, places). at_once: as in `attend_to_chosen`.
    """

    def of_query(query: tuple[Array, ...]) -> Array:
        q, chosen, position, table = query
        at = chosen[..., None] * block + jnp.arange(block, dtype=jnp.int32)[None, None]
        at = jnp.reshape(at, (chosen.shape[0], -1))
        is_seen = jnp.repeat(chosen >= 0, block, axis=-1) & (at <= position)
        # For missing positions the sequence's first is read, with weight 0.
        at = jnp.where(is_seen, at, 0)
        heads = jnp.arange(len(at), dtype=jnp.int32)[:, None]
        k, v = (x.astype(q.dtype) for x in read((table[at // size], heads, at % size)))
        scores = scale * jnp.einsum("KGH,KSH->KGS", q, k, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(jnp.where(is_seen[:, None], scores, HIDDEN), axis=-1)
        out = jnp.einsum("KGS,KSO->KGO", shares.astype(q.dtype), v, preferred_element_type=jnp.float32)
        return jnp.where(position >= 0, out, 0.0)

    rows = q, chosen, positions, tables
    return _some_at_a_time(of_query, rows, max(1, at_once // (chosen.shape[1] * chosen.shape[2] * block)))


def attend_to_entries(
    q: Array,
    chosen: Array | None,
    positions: Array,
    tables: tuple[Array, Array],
    read: tuple[Callable[[Array, Array], Array], Callable[[Array, Array], Array]],
    sinks: Array | None,
    window: Window,
    scale: float,
    num_entries: int,
    at_once: int = KEYS_AT_ONCE,
) -> Array:
    """f32[N, heads, H] of q[N, heads, H] over the keys in a window and entries, which are values too.

    chosen i32[N, k]: numbers of the entries; None: all that end at or before a query's position. tables: the
    pages of each query, i32[N, P], for keys and for entries. read: functions of a table that return the keys
    at positions, and the entries with numbers. sinks[heads]: another logit. num_entries: of the longest
    sequence.
    """

    def of_query(query: tuple[Any, ...]) -> Array:
        q, chosen, position, near, far = query
        at = position - window.size + 1 + jnp.arange(window.size, dtype=jnp.int32)
        numbers = jnp.arange(num_entries, dtype=jnp.int32) if chosen is None else chosen
        is_read = (numbers >= 0) & (numbers < (position + 1) // window.compressed)
        # For missing positions the sequence's first is read, with weight 0.
        kept = read[0](near, jnp.maximum(at, 0)), read[1](far, jnp.where(is_read, numbers, 0))
        keys = jnp.concatenate([x.astype(q.dtype) for x in kept])
        is_seen = jnp.concatenate([at >= 0, is_read])
        scores = scale * jnp.einsum("hH,SH->hS", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(is_seen[None], scores, HIDDEN)
        peak = jnp.max(scores, axis=-1, keepdims=True)
        peak = peak if sinks is None else jnp.maximum(peak, sinks[:, None])
        raised = jnp.where(is_seen[None], jnp.exp(scores - peak), 0.0)
        total = jnp.sum(raised, axis=-1, keepdims=True)
        total = jnp.maximum(total, 1e-30) if sinks is None else total + jnp.exp(sinks[:, None] - peak)
        shares = (raised / total).astype(q.dtype)
        # Later positions may still hold the numbers, even NaN, of a sequence that failed.
        keys = jnp.where(is_seen[:, None], keys, jnp.zeros((), keys.dtype))
        return jnp.einsum("hS,SH->hH", shares, keys, preferred_element_type=jnp.float32)

    num_keys = window.size + (num_entries if chosen is None else chosen.shape[1])
    queries = q, chosen, positions, *tables
    return _some_at_a_time(of_query, queries, max(1, at_once // num_keys))

"""Causal grouped-query attention and its cache. Heads are split over `tensor`, never T or S."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.layout import Layout
from meshwright.nn.mesh import partition_spec


def attend(q: Array, k: Array, v: Array, positions: Array, layout: Layout) -> Array:
    """out[B, T, N, H] of q[B, T, N, H] over k, v[B, S, K, H].

        softmax(q . k / sqrt(H)) . v, each K serving G = N/K query heads

    positions[B, T] are those of the queries; key s stands at position s, so a query sees the keys
    at s <= its position. Scores and softmax are float32. The backward pass computes the scores
    again rather than keep B N T S of them, as flash attention does (Dao et al., 2022).
    """
    return jax.checkpoint(partial(_attend, layout=layout))(q, k, v, positions)


def _attend(q: Array, k: Array, v: Array, positions: Array, layout: Layout) -> Array:
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    spec = partition_spec(layout.activation("q", "BTKGH"))
    q = jnp.reshape(q, (batch, length, kv_heads, heads // kv_heads, head_dim), out_sharding=spec)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    visible = jnp.arange(k.shape[1])[None, None, :] <= positions[:, :, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)
    return jnp.reshape(
        out, (batch, length, heads, head_dim), out_sharding=partition_spec(layout.activation("a", "BTNH"))
    )


def write_cache(cache: Array, new: Array, positions: Array) -> Array:
    """cache[B, S, K, H] with new[B, T, K, H] written from each row's first position on."""

    def row(row_cache: Array, row_new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(row_cache, row_new.astype(row_cache.dtype), (start, 0, 0))

    return jax.vmap(row)(cache, new, positions[:, 0])

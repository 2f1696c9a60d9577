"""The keys that an indexer chooses for each query of whole sequences (DeepSeek-V3.2, MiniMax-M3).

    score[T, S] = sum over x of weight[T, x] relu(q[T, x, y] . k[S, y])

A query attends to the `top_k` visible keys with the highest scores, or to all if it sees no more than that.
Scores are computed for a block of queries and a block of keys at a time, and kept for one block of queries.
The result is a mask, since attention skips pairs of blocks and not single keys. Source: DeepSeek-AI,
"DeepSeek-V3.2", https://arxiv.org/abs/2512.02556, which masks short prompts in the same way.

An indexer that chooses blocks of keys (`Indexer.block`) has a score q[T, K, y] . k[S, y] for each KV head. A
block of positions scores as its best visible key, so only these are kept, and the mask is of blocks.
"""

from functools import partial
from math import gcd

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.attention_kernels import attention_block
from meshwright.layout.moves.attention import chosen_keys, token_sharding
from meshwright.models.at_layer import Places
from meshwright.models.config_tables import Indexer
from meshwright.nn.attention.blocks import block_of, num_blocks, put, visible_scope
from meshwright.nn.attention.blockwise import dealt_pieces
from meshwright.nn.attention.by_formula import visible
from meshwright.nn.each_device import each_device
from meshwright.nn.start.device_mesh import partition_spec


def choose(
    q: Array,
    k: Array,
    weights: Array | None,
    queries: Places,
    keys: Places,
    indexer: Indexer,
    layout: Layout,
) -> Array:
    """bool[B, T, S]: whether each query of q[B, T, x, y] reads each key of k[B, S, y].

    weights[B, T, x]: of the heads. queries, keys: the places of the positions in q and in k, which has all.
    If the indexer chooses blocks, bool[B, T, K, blocks] by q[B, T, K, y] without weights.
    """
    letter = indexer.head_letter
    of_q, of_k, of_weights = (
        partition_spec(layout.activation(name, letters))
        for name, letters in (("index_q", f"BT{letter}y"), ("index_k", "BTy"), ("index_weights", "BTx"))
    )
    made = chosen_keys(layout, indexer).given
    of_queries = PartitionSpec(*partition_spec(made)[:2])
    inputs = (
        of_q,
        PartitionSpec(of_k[0], None, None),
        None if weights is None else of_weights,
        jax.tree.map(lambda _: of_queries, queries),
        jax.tree.map(lambda _: PartitionSpec(of_queries[0], None), keys),
    )
    queries = jax.tree.map(lambda x: reshard(x, of_queries), queries)
    local = partial(_chosen, indexer=indexer)
    if indexer.block:
        together = 1 if keys.segments is not None else _together(k.shape[1], layout, indexer.block_size)
        local = partial(_chosen_blocks, indexer=indexer, together=together)
    return each_device(local, inputs, partition_spec(made))(q, k, weights, queries, keys)


def _chosen(q: Array, k: Array, weights: Array, queries: Places, keys: Places, indexer: Indexer) -> Array:
    batch, num_queries, num_keys = *q.shape[:2], k.shape[1]
    scope = visible_scope(q, k)

    def of_queries(number: Array, chosen: Array) -> Array:
        block, of_heads = block_of((q, weights), number)
        here = block_of(queries, number)

        def of_keys(column: Array, scores: Array) -> Array:
            mask = visible(here, block_of(keys, column), None).mask

            def scored() -> Array:
                some = index_scores(block, block_of(k, column), of_heads)
                return jnp.where(mask, some, -jnp.inf)

            with jax.named_scope(scope):
                some = lax.cond(jnp.any(mask), scored, lambda: jnp.full(mask.shape, -jnp.inf))
            return put(scores, some, column, 2)

        scores = jnp.full((batch, block.shape[1], num_keys), -jnp.inf)
        scores = lax.fori_loop(0, num_blocks(k), of_keys, scores)
        return put(chosen, highest(scores, indexer.top_k), number)

    return lax.fori_loop(0, num_blocks(q), of_queries, jnp.zeros((batch, num_queries, num_keys), bool))


def _chosen_blocks(
    q: Array, k: Array, weights: None, queries: Places, keys: Places, indexer: Indexer, together: int
) -> Array:
    """bool[B, T, K, blocks]: the blocks that a device's queries read.

    together: number of consecutive keys, from any multiple of it, that are in one block of positions.
    """
    batch, num_queries, heads = q.shape[:3]
    scope = visible_scope(q, k)
    count = -(-k.shape[1] // indexer.block_size)

    def of_queries(number: Array, chosen: Array) -> Array:
        block, here = block_of(q, number), block_of(queries, number)

        def of_keys(column: Array, best: Array) -> Array:
            some = block_of(keys, column)
            mask = visible(here, some, None).mask

            def scored(best: Array) -> Array:
                scores = head_scores(block, block_of(k, column))
                scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
                scores = jnp.max(jnp.reshape(scores, (*scores.shape[:-1], -1, together)), axis=-1)
                of_block = some.positions[:, ::together] // indexer.block_size
                return jax.vmap(lambda best, at, more: best.at[..., at].max(more))(best, of_block, scores)

            with jax.named_scope(scope):
                return lax.cond(jnp.any(mask), scored, lambda best: best, best)

        best = jnp.full((batch, block.shape[1], heads, count), -jnp.inf)
        best = lax.fori_loop(0, num_blocks(k), of_keys, best)
        best = jnp.where(local_blocks(best, here.positions, indexer), jnp.inf, best)
        return put(chosen, highest(best, indexer.top_k // indexer.block_size), number)

    return lax.fori_loop(0, num_blocks(q), of_queries, jnp.zeros((batch, num_queries, heads, count), bool))


def _together(length: int, layout: Layout, block: int) -> int:
    """The greatest common divisor of a piece of the zigzag, a block of keys and a block of positions."""
    num_shards = layout.mesh.size(token_sharding(layout, "tokens").axes_of("T"))
    piece = length // len(dealt_pieces(length, num_shards))
    return gcd(piece, attention_block(length), block)


def local_blocks(scores: Array, positions: Array, indexer: Indexer) -> Array:
    """Blocks that a query reads whatever their scores[..., K, blocks]: its own and those before it."""
    block_of_query = (positions // indexer.block_size)[..., None, None]
    number = lax.broadcasted_iota(
        jnp.int32, (*[1] * (block_of_query.ndim - 1), scores.shape[-1]), block_of_query.ndim - 1
    )
    return (number <= block_of_query) & (number > block_of_query - indexer.local_blocks)


def head_scores(q: Array, k: Array) -> Array:
    """f32[B, T, K, S] of q[B, T, K, y] and k[B, S, y]."""
    return jnp.einsum("BTKy,BSy->BTKS", q, k, preferred_element_type=jnp.float32)


def index_scores(q: Array, k: Array, weights: Array) -> Array:
    """f32[B, T, S] of q[B, T, x, y], k[B, S, y] and weights[B, T, x].

    Positive factors of all scores, such as y ** -0.5, change no choice and are left out.
    """
    products = jnp.einsum("BTxy,BSy->BTxS", q, k, preferred_element_type=jnp.float32)
    return jnp.sum(weights.astype(jnp.float32)[..., None] * jax.nn.relu(products), axis=2)


def highest(scores: Array, top_k: int) -> Array:
    """Whether each of scores[..., S] is among the top_k of its query; of equal scores, the first are."""
    if scores.shape[-1] <= top_k:
        return scores > -jnp.inf
    least = lax.top_k(scores, top_k)[0][..., -1:]
    above, level = scores > least, (scores == least) & (scores > -jnp.inf)
    left = top_k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (level & (jnp.cumsum(level, axis=-1, dtype=jnp.int32) <= left))

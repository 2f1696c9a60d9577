"""The keys that an indexer chooses for each query of whole sequences (DeepSeek-V3.2).

    score[T, S] = sum over x of weight[T, x] relu(q[T, x, y] . k[S, y])

A query attends to the `top_k` visible keys with the highest scores, or to all if it sees no more than that.
Scores are computed for a block of queries and a block of keys at a time, and kept for one block of queries.
The result is a mask, since attention skips pairs of blocks and not single keys. Source: DeepSeek-AI,
"DeepSeek-V3.2", https://arxiv.org/abs/2512.02556, which masks short prompts in the same way.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.moves.attention import chosen_keys
from meshwright.models.transformer import Places
from meshwright.nn.attention.blocks import block_of, num_blocks, put, visible_scope
from meshwright.nn.attention.by_formula import visible
from meshwright.nn.each_device import each_device
from meshwright.nn.start.device_mesh import partition_spec


def choose(
    q: Array, k: Array, weights: Array, queries: Places, keys: Places, top_k: int, layout: Layout
) -> Array:
    """bool[B, T, S]: whether each query of q[B, T, x, y] reads each key of k[B, S, y].

    weights[B, T, x]: of the heads. queries, keys: the places of the positions in q and in k, which has all.
    """
    of_q, of_k, of_weights = (
        partition_spec(layout.activation(name, letters))
        for name, letters in (("index_q", "BTxy"), ("index_k", "BTy"), ("index_weights", "BTx"))
    )
    made = chosen_keys(layout).given
    of_queries = PartitionSpec(*partition_spec(made)[:2])
    inputs = (
        of_q,
        PartitionSpec(of_k[0], None, None),
        of_weights,
        jax.tree.map(lambda _: of_queries, queries),
        jax.tree.map(lambda _: PartitionSpec(of_queries[0], None), keys),
    )
    queries = jax.tree.map(lambda x: reshard(x, of_queries), queries)
    return each_device(partial(_chosen, top_k=top_k), inputs, partition_spec(made))(
        q, k, weights, queries, keys
    )


def _chosen(q: Array, k: Array, weights: Array, queries: Places, keys: Places, top_k: int) -> Array:
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
        return put(chosen, highest(scores, top_k), number)

    return lax.fori_loop(0, num_blocks(q), of_queries, jnp.zeros((batch, num_queries, num_keys), bool))


def index_scores(q: Array, k: Array, weights: Array) -> Array:
    """f32[B, T, S] of q[B, T, x, y], k[B, S, y] and weights[B, T, x].

    Positive factors of all scores, such as y ** -0.5, change no choice and are left out.
    """
    products = jnp.einsum("BTxy,BSy->BTxS", q, k, preferred_element_type=jnp.float32)
    return jnp.sum(weights.astype(jnp.float32)[..., None] * jax.nn.relu(products), axis=2)


def highest(scores: Array, top_k: int) -> Array:
    """Whether each of scores[B, T, S] is among the top_k of its query; of equal scores, the first are."""
    if scores.shape[-1] <= top_k:
        return scores > -jnp.inf
    least = lax.top_k(scores, top_k)[0][..., -1:]
    above, level = scores > least, (scores == least) & (scores > -jnp.inf)
    left = top_k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (level & (jnp.cumsum(level, axis=-1, dtype=jnp.int32) <= left))

"""Causal grouped-query attention and its cache. Heads are split over `tensor`, never T or S."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import cache_arrays, cache_windows
from meshwright.models.parameters import dimensions
from meshwright.models.transformer import Places
from meshwright.nn.elementwise import softcap
from meshwright.nn.mesh import array_type, partition_spec
from meshwright.nn.params import JAX_DTYPES


class Scores(NamedTuple):
    """How a model scores keys. softcap: c in c tanh(x / c); scale: of q . k, H ** -0.5 where None."""

    softcap: float | None = None
    scale: float | None = None


def visible(queries: Places, keys: Places, window: Array | None) -> Array:
    """Whether each query sees each key: bool[B, T, S].

    It sees those of its own segment whose position is not beyond its own, of these the last `window`.
    """
    key, query = keys.positions[:, None, :], queries.positions[:, :, None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    if queries.segments is not None and keys.segments is not None:
        seen &= keys.segments[:, None, :] == queries.segments[:, :, None]
    return seen


def _attend(q: Array, k: Array, v: Array, mask: Array, layout: Layout, how: Scores) -> Array:
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    spec = partition_spec(layout.activation("q", "BTKGH"))
    q = jnp.reshape(q, (batch, length, kv_heads, heads // kv_heads, head_dim), out_sharding=spec)
    with jax.named_scope("k"):
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    scores *= head_dim**-0.5 if how.scale is None else how.scale
    if how.softcap:
        scores = softcap(scores, how.softcap)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    with jax.named_scope("v"):
        out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)
    return jnp.reshape(
        out, (batch, length, heads, v.shape[-1]), out_sharding=partition_spec(layout.activation("a", "BTNH"))
    )


def attend(
    q: Array,
    k: Array,
    v: Array,
    queries: Places,
    keys: Places,
    window: Array | None,
    layout: Layout,
    how: Scores,
) -> Array:
    """out[B, T, N, O] of q[B, T, N, H] over k[B, S, K, H] and v[B, S, K, O].

        softmax(q . k / sqrt(H)) . v, each K serving G = N/K query heads

    queries, keys: where they stand, which says what is visible. Scores and softmax are float32. The backward
    pass computes the scores again rather than keep B N T S of them, as flash attention does (Dao et
    al., 2022).
    """

    @jax.custom_vjp
    def out(q: Array, k: Array, v: Array, mask: Array) -> Array:
        return _attend(q, k, v, mask, layout, how)

    def forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, tuple[Array, ...]]:
        return out(q, k, v, mask), (q, k, v, mask)

    def backward(saved: tuple[Array, ...], d_out: Array) -> tuple[Array | None, ...]:
        *operands, mask = saved
        _, pull_back = jax.vjp(lambda q, k, v: _attend(q, k, v, mask, layout, how), *operands)
        return (*pull_back(d_out), None)

    out.defvjp(forward, backward)
    return out(q, k, v, visible(queries, keys, window))


def cached_places(queries: Places, num_positions: int) -> Places:
    """Where the keys of a cache stand: number s at position s. What is not written yet no query sees."""
    rows = queries.positions.shape[0]
    positions = jnp.arange(num_positions, dtype=queries.positions.dtype)
    return Places(jnp.broadcast_to(positions[None], (rows, num_positions)))


def abstract_cache(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, num_sequences: int, num_positions: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Keys and values [L, B, S, K, H] of every cache, to compile for or to make."""
    sizes = {**dimensions(config), "L": len(cache_windows(config)), "B": num_sequences, "S": num_positions}
    dtype = JAX_DTYPES[layout.compute_dtype]
    return {
        name: array_type(layout.activation("cache", f"L{letters}"), mesh, sizes, dtype)
        for name, letters in cache_arrays(config).items()
    }


def write_cache(cache: Array, new: Array, layer: Array, positions: Array, layout: Layout) -> Array:
    """cache[L, B, S, K, H] with new[B, T, K, H] written at positions[B, T] of one layer.

    Each device writes its own sequences: a scatter over a split B is gathered by XLA's partitioner.
    """
    whole, rows = layout.activation("cache", "LBSKH"), layout.activation("new", "BTKH")
    own, written = partition_spec(whole), partition_spec(rows.replace(axes={"T": ()}))
    numbers = PartitionSpec(written[0], None)

    def local(cache: Array, new: Array, positions: Array, layer: Array) -> Array:
        sequences = jnp.arange(new.shape[0])[:, None]
        return cache.at[layer, sequences, positions].set(
            new.astype(cache.dtype), unique_indices=True, mode="promise_in_bounds"
        )

    write = jax.shard_map(local, in_specs=(own, written, numbers, PartitionSpec()), out_specs=own)
    return write(cache, new, reshard(positions, numbers), layer)


def read_cache(cache: Array, layer: Array) -> Array:
    """One layer's [B, S, K, H]."""
    return lax.dynamic_index_in_dim(cache, layer, keepdims=False)

"""Causal grouped-query attention and its cache. Heads are split over `tensor`, never T or S."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import cache_arrays
from meshwright.models.parameters import dimensions
from meshwright.nn.elementwise import softcap
from meshwright.nn.mesh import array_type, partition_spec
from meshwright.nn.params import JAX_DTYPES


class Scores(NamedTuple):
    """How a layer scores keys: window is how many positions a query sees, its own included (None: all).

    softcap: c in c tanh(x / c); scale: of q . k, H ** -0.5 where None.
    """

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None


def _attend(q: Array, k: Array, v: Array, positions: Array, layout: Layout, how: Scores) -> Array:
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    spec = partition_spec(layout.activation("q", "BTKGH"))
    q = jnp.reshape(q, (batch, length, kv_heads, heads // kv_heads, head_dim), out_sharding=spec)
    with jax.named_scope("k"):
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    scores *= head_dim**-0.5 if how.scale is None else how.scale
    if how.softcap:
        scores = softcap(scores, how.softcap)
    keys, queries = jnp.arange(k.shape[1])[None, None, :], positions[:, :, None]
    visible = keys <= queries
    if how.window:
        visible &= keys > queries - how.window
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    with jax.named_scope("v"):
        out = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v)
    return jnp.reshape(
        out, (batch, length, heads, head_dim), out_sharding=partition_spec(layout.activation("a", "BTNH"))
    )


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(q: Array, k: Array, v: Array, positions: Array, layout: Layout, how: Scores) -> Array:
    """out[B, T, N, H] of q[B, T, N, H] over k, v[B, S, K, H].

        softmax(q . k / sqrt(H)) . v, each K serving G = N/K query heads

    positions[B, T] are those of the queries; key s stands at position s, so a query sees the keys
    at s <= its position, of these the last `how.window`. Scores and softmax are float32. The backward
    pass computes the scores again rather than keep B N T S of them, as flash attention does (Dao et
    al., 2022).
    """
    return _attend(q, k, v, positions, layout, how)


def _attend_forward(
    q: Array, k: Array, v: Array, positions: Array, layout: Layout, how: Scores
) -> tuple[Array, tuple[Array, Array, Array, Array]]:
    return _attend(q, k, v, positions, layout, how), (q, k, v, positions)


def _attend_backward(
    layout: Layout, how: Scores, saved: tuple[Array, Array, Array, Array], d_out: Array
) -> tuple[Array, Array, Array, None]:
    *operands, positions = saved
    _, pull_back = jax.vjp(lambda q, k, v: _attend(q, k, v, positions, layout, how), *operands)
    return (*pull_back(d_out), None)


attend.defvjp(_attend_forward, _attend_backward)


def abstract_cache(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, num_sequences: int, num_positions: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Keys and values [L, B, S, K, H] of every layer, to compile for or to make."""
    sizes = {**dimensions(config), "B": num_sequences, "S": num_positions}
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

"""Causal grouped-query attention and its cache. Heads are split over `tensor`, never T or S."""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
from meshwright.nn.execute import apply_reshard
from meshwright.nn.mesh import array_type, partition_spec
from meshwright.nn.params import JAX_DTYPES


class Scores(NamedTuple):
    """How a model scores keys.

    softcap: c in c tanh(x / c). scale: of q . k, H ** -0.5 where None. slopes: of ALiBi, one a head.
    """

    softcap: float | None = None
    scale: float | None = None
    slopes: tuple[float, ...] | None = None


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """What each head's scores lose a position of distance (Press et al., 2022).

    For n heads, a power of two, 2 ** (-8 i / n), i = 1..n; for others those of the power below, and of twice
    that every other one.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    between = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return tuple(slopes + between[: num_heads - power])


class Seen(NamedTuple):
    """mask: whether each query sees each key, bool[B, T, S]. keys: the positions of the keys, i32[B, S]."""

    mask: Any
    keys: Any


def visible(queries: Places, keys: Places, window: Array | None) -> Seen:
    """What each query sees.

    It sees those of its own segment whose position is not beyond its own, of these the last `window`.
    """
    key, query = keys.positions[:, None, :], queries.positions[:, :, None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    if queries.segments is not None and keys.segments is not None:
        seen &= keys.segments[:, None, :] == queries.segments[:, :, None]
    return Seen(seen, keys.positions)


def _attend(
    q: Array, k: Array, v: Array, sinks: Array | None, seen: Seen, layout: Layout, how: Scores
) -> Array:
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    spec = partition_spec(layout.activation("q", "BTKGH"))
    grouped = batch, length, kv_heads, heads // kv_heads
    q = jnp.reshape(q, (*grouped, head_dim), out_sharding=spec)
    with jax.named_scope("k"):
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    scores *= head_dim**-0.5 if how.scale is None else how.scale
    if how.softcap:
        scores = softcap(scores, how.softcap)
    if how.slopes:
        # Less by the slope for each position between them; what all keys of a query share cancels out.
        slopes = jnp.reshape(jnp.asarray(how.slopes, jnp.float32), grouped[2:])
        slopes = reshard(slopes, PartitionSpec(*spec.partitions[2:4]))[None, :, :, None, None]
        scores += slopes * seen.keys.astype(jnp.float32)[:, None, None, None, :]
    scores = jnp.where(seen.mask[:, None, None], scores, -jnp.inf)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        split = PartitionSpec(*spec.partitions[:4])
        sinks = jnp.transpose(jnp.reshape(sinks, grouped, out_sharding=split), (0, 2, 3, 1))[..., None]
        peak = lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
        raised = jnp.exp(scores - peak)
        weights = raised / (jnp.sum(raised, axis=-1, keepdims=True) + jnp.exp(sinks - peak))
    with jax.named_scope("v"):
        out = jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(v.dtype), v)
    return jnp.reshape(
        out, (batch, length, heads, v.shape[-1]), out_sharding=partition_spec(layout.activation("a", "BTNH"))
    )


def attend(
    q: Array, k: Array, v: Array, sinks: Array | None, seen: Seen, layout: Layout, how: Scores
) -> Array:
    """out[B, T, N, O] of q[B, T, N, H] over k[B, S, K, H] and v[B, S, K, O].

        softmax(q . k / sqrt(H)) . v, each K serving G = N/K query heads

    sinks[B, T, N]: a logit more, which takes weight from all keys. Scores
    and softmax are float32. The backward pass computes the scores again rather than keep B N T S of them, as
    flash attention does (Dao et al., 2022).
    """

    @jax.custom_vjp
    def out(q: Array, k: Array, v: Array, sinks: Array | None, seen: Seen) -> Array:
        return _attend(q, k, v, sinks, seen, layout, how)

    def forward(*operands: Any) -> tuple[Array, tuple[Any, ...]]:
        return out(*operands), operands

    def backward(saved: tuple[Any, ...], d_out: Array) -> tuple[Any, ...]:
        q, k, v, sinks, seen = saved
        _, pull_back = jax.vjp(lambda *x: _attend(x[0], x[1], x[2], x[3], seen, layout, how), q, k, v, sinks)
        return (*pull_back(d_out), Seen(None, None))

    out.defvjp(forward, backward)
    return out(q, k, v, sinks, seen)


def absorbed(
    q: Array,
    latent: Array,
    rope: Array,
    w: Mapping[str, Array],
    seen: Seen,
    layout: Layout,
    dtype: Any,
    scale: float | None,
) -> Array:
    """out[B, T, N, O] of q[B, T, N, H] over latent[B, S, R] and rope[B, S, A], without spelling them out.

        softmax((q_J . wk_up) . latent + q_A . rope) . latent . wv_up

    q_J and q_A: a head's first J elements and its rotary last A. All heads read the same latents, once
    (DeepSeek-V2, 2024). For a step of few queries; keys and values of all positions are never made.
    """
    into, out_of = (
        layout.contraction(name, spec).rhs_reshard
        for name, spec in (("wk_up", "BTR,RNJ->BTNJ"), ("wv_up", "BTR,RNO->BTNO"))
    )
    wk_up, wv_up = (
        apply_reshard(into, w["wk_up"].astype(dtype)),
        apply_reshard(out_of, w["wv_up"].astype(dtype)),
    )
    num_rotary = rope.shape[-1]
    plain, turned = q[..., :-num_rotary], q[..., -num_rotary:]
    with jax.named_scope("k"):
        query = jnp.einsum("BTNJ,RNJ->BTNR", plain, wk_up)
        scores = jnp.einsum("BTNR,BSR->BNTS", query, latent, preferred_element_type=jnp.float32)
        scores += jnp.einsum("BTNA,BSA->BNTS", turned, rope, preferred_element_type=jnp.float32)
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    weights = jax.nn.softmax(jnp.where(seen.mask[:, None], scores, -jnp.inf), axis=-1).astype(dtype)
    with jax.named_scope("v"):
        return jnp.einsum("BTNR,RNO->BTNO", jnp.einsum("BNTS,BSR->BTNR", weights, latent), wv_up)


def cached_places(queries: Places, num_positions: int) -> Places:
    """The positions of a cache's keys: key s is at s. No query sees a key that is not written yet."""
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


def write_cache(
    cache: Array, new: Array, layer: Array, positions: Array, layout: Layout, letters: str
) -> Array:
    """cache[L, B, S, ...] with new[B, T, ...] written at positions[B, T] of one layer.

    letters: of one layer's cache, such as BSKH. Each device writes its own sequences: a scatter over a split
    B is gathered by XLA's partitioner.
    """
    whole, rows = (
        layout.activation("cache", f"L{letters}"),
        layout.activation("new", letters.replace("S", "T")),
    )
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

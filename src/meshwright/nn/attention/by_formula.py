"""Causal grouped-query attention by its formula, and the definition of a model's scores."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.models.at_layer import Places
from meshwright.nn.norms import softcap
from meshwright.nn.start.device_mesh import partition_spec

# Of hidden scores: finite, so that a query without visible keys makes no NaN.
HIDDEN = -1e30


class ScoreForm(NamedTuple):
    """How a model scores keys.

    scale: the factor of q . k. softcap: c in c tanh(x / c). slopes: of ALiBi, one a head. block: positions
    of the blocks that an indexer chooses; None if it chooses keys.
    """

    scale: float
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    block: int | None = None


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slope of each head's scores by distance in positions (ALiBi; Press et al., 2022).

    For n heads, a power of two, 2 ** (-8 i / n), i = 1..n. Otherwise the slopes of the power below n come
    first, then every other slope of twice that power.

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


def visible(queries: Places, keys: Places, first: Array | None) -> Seen:
    """The keys that each query sees.

    They are of its own segment, at positions up to its own, and from first[B, T] on.
    """
    key, query = keys.positions[:, None, :], queries.positions[:, :, None]
    seen = key <= query
    if first is not None:
        seen &= key >= first[:, :, None]
    if queries.segments is not None and keys.segments is not None:
        seen &= keys.segments[:, None, :] == queries.segments[:, :, None]
    return Seen(seen, keys.positions)


def attend(
    q: Array, k: Array, v: Array, sinks: Array | None, seen: Seen, layout: Layout, how: ScoreForm
) -> Array:
    """out[B, T, N, O] of q[B, T, N, H] over k[B, S, K, H] and v[B, S, K, O], by the formula.

        softmax(scale q . k) . v, each K serving G = N/K query heads

    sinks[B, T, N]: a logit more, which takes weight from all keys. Scores and softmax are float32.
    Kernels and blocks are held against it.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    spec = partition_spec(layout.activation("q", "BTKGH"))
    grouped = batch, length, kv_heads, heads // kv_heads
    q = jnp.reshape(q, (*grouped, head_dim), out_sharding=spec)
    with jax.named_scope("k"):
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    scores *= how.scale
    if how.softcap:
        scores = softcap(scores, how.softcap)
    if how.slopes:
        # Minus the slope times the distance, up to a term of the query, which cancels in the softmax.
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

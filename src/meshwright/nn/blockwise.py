"""Attention block by block, in memory linear in the positions, on one device or round a ring of them.

A block of queries meets one block of keys after another and keeps a running maximum, sum and result, so that
no score outlives its block; blocks that no query sees are passed over. For the backward pass the result and
the log-sum-exp of each query are kept, and scores are computed again (FlashAttention-2, Dao 2023).

Where keys are split by position over n devices they go round them (ring attention, Liu et al., 2023): n - 1
transfers forward, each under the product with the block before; backward as many again, and as many of the
gradients of keys and values, which begin at their neighbour and end at home. They go in loops: of steps in a
row a compiler sends the keys of all at once, and a device then holds all keys.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.flash import attention_block, visible_pairs
from meshwright.models.config import Window
from meshwright.models.transformer import Places, at_most_blocks
from meshwright.nn.attention import Scores
from meshwright.nn.each_device import KEPT, each_device, of_cotangent, spec_of
from meshwright.nn.mesh import partition_spec
from meshwright.notation.array import Axes

_HIDDEN = -1e30  # of scores that are not seen: finite, so that a block without any makes no NaN


class _Seen(NamedTuple):
    """What decides which keys a query sees, and how well: arrays, or how they are split.

    queries, keys: the places of a device's own queries, and of all keys. first: the first position that each
    query sees. slopes: of ALiBi, one a head.
    """

    queries: Places
    keys: Places
    first: Any
    slopes: Any


class _Running(NamedTuple):
    """What queries know that have met some keys: largest score, sum of weights, weighted values."""

    peak: Array  # [B, K, G, T]
    total: Array  # [B, K, G, T]
    out: Array  # [B, K, G, T, O]


def blockwise(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    queries: Places,
    keys: Places,
    first: Array | None,
    layout: Layout,
    how: Scores,
    windows: Sequence[Window | None] = (None,),
) -> Array:
    """out[B, T, N, O] of q[B, T, N, H] over k[B, S, K, H] and v[B, S, K, O]: `attend`, without its memory.

    Where S of k and v is split, they pass round a ring. Where they are typed `reduced`, as those that were
    gathered, their cotangents stay partial sums. queries: split as q over T; keys: of all positions.
    first: i32[B, T], split as the queries, the first position that each sees; None where it is the first
    of all. windows: of the layers that this is in turn; they tell an audit how many blocks are met.
    """
    heads, held = layout.activation("q", "BTNH"), layout.activation("k", "BTKH")
    ring = heads.axes_of("T") if layout.passes_keys_round else ()
    reduced = spec_of(k).reduced
    repeated = (axis for axis in heads.axes_of("N") if axis not in held.axes_of("K"))
    shared = tuple(axis for axis in repeated if axis not in reduced)
    own, grouped = partition_spec(layout.tokens("tokens")), partition_spec(layout.activation("q", "BTKGH"))
    of_q = partition_spec(heads)
    of_k = partition_spec(held if ring else held.replace(axes={"T": ()}), tuple(reduced))
    of_log_sum = PartitionSpec(grouped[0], grouped[2], grouped[3], grouped[1])
    of_sinks = None if sinks is None else PartitionSpec(*of_q[:3])
    slopes = None
    if how.slopes:
        slopes = reshard(jnp.asarray(how.slopes, jnp.float32), PartitionSpec(of_q[2]))
    seen = _Seen(queries, keys, first, slopes)
    of_seen = _Seen(
        jax.tree.map(lambda _: own, queries),
        jax.tree.map(lambda _: PartitionSpec(own[0], None), keys),
        None if first is None else own,
        None if slopes is None else PartitionSpec(of_q[2]),
    )
    inputs = (of_q, of_k, of_k, of_sinks, of_seen)

    @jax.custom_vjp
    def attended(*operands: Any) -> Array:
        return forward(*operands)[0]

    def forward(*operands: Any) -> tuple[Array, Any]:
        local = partial(_forward, how=how, ring=ring, windows=windows)
        run = each_device(local, inputs, (of_q, of_log_sum))
        # Named for the policies of remat: with these two the backward pass needs no second ring.
        out, log_sum = (checkpoint_name(x, KEPT) for x in run(*operands))
        return out, (*operands, out, log_sum)

    def backward(saved: Any, d_out: Array) -> tuple[Any, ...]:
        local: Any = partial(_backward, how=how, ring=ring, shared=shared, windows=windows)
        of_d_k = of_cotangent(of_k)
        given, taken = (*inputs, of_q, of_log_sum, of_q), (of_q, of_d_k, of_d_k, of_sinks)
        d_q, d_k, d_v, d_sinks = each_device(local, given, taken)(*saved, d_out)
        with jax.named_scope("k"):  # sums over devices have the names of what they add
            d_k = d_k.astype(k.dtype)
        with jax.named_scope("v"):
            d_v = d_v.astype(v.dtype)
        return d_q, d_k, d_v, d_sinks, jax.tree.map(lambda _: None, seen)

    attended.defvjp(forward, backward)
    return attended(q, k, v, sinks, seen)


def _forward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    seen: _Seen,
    how: Scores,
    ring: Axes,
    windows: Sequence[Window | None],
) -> tuple[Array, Array]:
    """The result, and the log-sum-exp of the scores of each query [B, K, G, T]."""
    grouped = _grouped(q, k.shape[2])
    shape = _scores_shape(grouped)
    if sinks is None:
        peak, total = jnp.full(shape, _HIDDEN), jnp.zeros(shape)
    else:
        peak, total = _by_group(sinks, k.shape[2]), jnp.ones(shape)
    running = _Running(peak, total, jnp.zeros((*shape, v.shape[-1])))

    def met(step: Any, kv: tuple[Array, ...], running: _Running, own: int, among: int = 1) -> _Running:
        here = _of_block(seen, k.shape[1], step, ring)
        with jax.named_scope(_blocks_met(grouped, k, windows, own, among)):
            return _meet(grouped, kv[0], kv[1], running, here, how)

    def sent_on(step: Array, state: Any) -> Any:
        kv, running = state
        return _from_the_one_before(kv, ring), met(step, kv, running, 1, last)

    last = _size(ring) - 1
    state = (k, v), running
    kv, running = lax.fori_loop(0, last, sent_on, state) if last else state
    running = met(last, kv, running, own=int(last == 0))
    out = running.out / running.total[..., None]
    log_sum = running.peak + jnp.log(running.total)
    return _flat(out).astype(q.dtype), log_sum


def _backward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    seen: _Seen,
    out: Array,
    log_sum: Array,
    d_out: Array,
    how: Scores,
    ring: Axes,
    shared: Axes,
    windows: Sequence[Window | None],
) -> tuple[Array, Array, Array, Array | None]:
    """The gradients. shared: axes over which queries of one KV head are split, which add to its own."""
    num_kv, size = k.shape[2], _size(ring)
    grouped = _grouped(q, num_kv), _grouped(d_out, num_kv)
    delta = _by_group(jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1), num_kv)
    home = k, v

    def met(step: Any, kv: tuple[Array, ...], found: Any, own: int = 0) -> Any:
        d_q, d_kv = found
        here = _of_block(seen, k.shape[1], step, ring)
        with jax.named_scope(_blocks_met(grouped[0], k, windows, own)):
            more_q, more_kv = _gradients(*grouped, kv[0], kv[1], log_sum, delta, here, how)
        return d_q + more_q, tuple(a + b for a, b in zip(d_kv, more_kv, strict=True))

    def arrived(found: Any) -> Any:
        d_q, d_kv = found
        return d_q, _from_the_one_before(d_kv, ring)

    def sent_on(step: Any, state: Any) -> Any:
        kv, found = state
        return _from_the_one_before(kv, ring), met(step, kv, arrived(found))

    found = jnp.zeros(grouped[0].shape, jnp.float32), tuple(jnp.zeros(x.shape, jnp.float32) for x in home)
    # Blocks of neighbours first, a device's own last: then the last transfer brings gradients home. Neither
    # the gradients of the first block nor the keys of the last are sent, so both stand beside the loop.
    if size > 1:
        kv = _from_the_one_before(home, ring)
        if size > 2:
            state = _from_the_one_before(kv, ring), met(1, kv, found)
            kv, found = lax.fori_loop(2, size - 1, sent_on, state) if size > 3 else state
            found = arrived(found)
        found = arrived(met(size - 1, kv, found))
    d_q, d_kv = met(size, home, found, own=1)
    d_sinks = None
    if sinks is not None:
        weight = jnp.exp(_by_group(sinks, num_kv) - log_sum)
        d_sinks = _flat((-weight * delta)[..., None])[..., 0].astype(sinks.dtype)
    d_k, d_v = d_kv
    if shared:
        d_k, d_v = lax.psum((d_k, d_v), shared)
    return jnp.reshape(d_q, q.shape).astype(q.dtype), d_k, d_v, d_sinks


# The ring


def zigzag(x: Array, num_shards: int) -> Array:
    """x[B, T] in the order in which shards have alike many early and late positions.

    Of 2n pieces the first shard has the first and the last, the next the second and the one before the last:
    under a causal mask all have as many keys to see.
    """
    return _in_order(x, _dealt(x.shape[1], num_shards), 1)


def dealt_positions(length: int, num_shards: int) -> np.ndarray:
    """The positions as `zigzag` deals them, i32[T]."""
    order = _dealt(length, num_shards)
    pieces = np.split(np.arange(length, dtype=np.int32), len(order))
    return np.concatenate([pieces[piece] for piece in order])


def in_order(x: Array, num_shards: int, dim: int) -> Array:
    """The way back of `zigzag`, of dimension `dim`."""
    dealt = _dealt(x.shape[dim], num_shards)
    return _in_order(x, sorted(range(len(dealt)), key=dealt.__getitem__), dim)


def _dealt(length: int, num_shards: int) -> list[int]:
    """The pieces of so many positions, shard by shard."""
    if num_shards == 1 or length % (2 * num_shards):
        return [0]
    return [piece for i in range(num_shards) for piece in (i, 2 * num_shards - 1 - i)]


def _in_order(x: Array, order: Sequence[int], dim: int) -> Array:
    if len(order) == 1:
        return x
    pieces = jnp.split(x, len(order), axis=dim)
    return jnp.concatenate([pieces[piece] for piece in order], axis=dim)


def _size(ring: Axes) -> int:
    return lax.axis_size(ring) if ring else 1


def _from_the_one_before(arrays: tuple[Array, ...], ring: Axes) -> tuple[Array, ...]:
    """k and v, or their gradients, of the device before in the ring."""
    size = lax.axis_size(ring)
    moved: list[Array] = []
    for name, x in zip("kv", arrays, strict=True):
        with jax.named_scope(name):
            moved.append(lax.ppermute(x, ring, [(i, (i + 1) % size) for i in range(size)]))
    return tuple(moved)


def _of_block(seen: _Seen, length: int, step: int, ring: Axes) -> _Seen:
    """What is seen, with the places of the keys that are here after so many transfers."""
    if not ring:
        return seen
    number = (lax.axis_index(ring) - step) % lax.axis_size(ring)
    keys = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, number * length, length, 1), seen.keys)
    return seen._replace(keys=keys)


# Blocks of queries by blocks of keys, on one device


def _blocks_met(q: Array, k: Array, windows: Sequence[Window | None], own: int, among: int = 1) -> str:
    """The scope of products that run for pairs of blocks of which queries see something.

    own: in how many of `among` turns the keys are of the queries' own positions, or of all. In the others
    they are another device's, and half is seen as a zigzag deals them.
    """
    block = attention_block(k.shape[1])
    num_keys, num_queries = k.shape[1] // block, q.shape[1] // attention_block(q.shape[1])
    seen = sum(own * visible_pairs(num_keys, block, w) + (among - own) * num_keys**2 / 2 for w in windows)
    pairs = among * len(windows) * num_queries * num_keys
    return at_most_blocks(round(seen * num_queries / num_keys), pairs)


def _meet(q: Array, k: Array, v: Array, running: _Running, seen: _Seen, how: Scores) -> _Running:
    """What the queries have after these keys as well."""

    def of_queries(_: None, block: Any) -> tuple[None, _Running]:
        q, of_queries, running = block

        def of_keys(running: _Running, block: Any) -> tuple[_Running, None]:
            k, v, keys = block
            here = seen._replace(**of_queries, keys=keys)

            def more(running: _Running) -> _Running:
                mask, scores, _ = _scored(q, k, here, how)
                peak = jnp.maximum(running.peak, jnp.max(scores, axis=-1))
                weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
                shrink = jnp.exp(running.peak - peak)
                values = jnp.einsum(
                    "BKGTS,BSKO->BKGTO", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
                )
                return _Running(
                    peak,
                    running.total * shrink + jnp.sum(weights, axis=-1),
                    running.out * shrink[..., None] + values,
                )

            return lax.cond(_sees_any(here), more, lambda running: running, running), None

        return None, lax.scan(of_keys, running, keys_in_blocks)[0]

    keys_in_blocks = _blocks(k, 1), _blocks(v, 1), _places_in_blocks(seen.keys)
    parts = _Running(_blocks(running.peak, 3), _blocks(running.total, 3), _blocks(running.out, 3))
    _, found = lax.scan(of_queries, None, (_blocks(q, 1), _queries_in_blocks(seen), parts))
    return _Running(*(_joined(x, 3) for x in found))


def _gradients(
    q: Array,
    d_out: Array,
    k: Array,
    v: Array,
    log_sum: Array,
    delta: Array,
    seen: _Seen,
    how: Scores,
) -> tuple[Array, tuple[Array, ...]]:
    """What these keys add to d_q, and the queries to d_k and d_v."""

    def of_queries(d_kv: Any, block: Any) -> tuple[Any, Array]:
        q, d_out, log_sum, delta, of_queries = block

        def of_keys(d_q: Array, block: Any) -> tuple[Array, Any]:
            k, v, keys = block
            here = seen._replace(**of_queries, keys=keys)

            def more() -> tuple[Array, ...]:
                mask, scores, slope = _scored(q, k, here, how)
                weights = jnp.where(mask, jnp.exp(scores - log_sum[..., None]), 0.0)
                d_v = jnp.einsum(
                    "BKGTS,BTKGO->BSKO", weights.astype(v.dtype), d_out, preferred_element_type=jnp.float32
                )
                d_weights = jnp.einsum("BTKGO,BSKO->BKGTS", d_out, v, preferred_element_type=jnp.float32)
                d_scores = (weights * (d_weights - delta[..., None]) * slope).astype(k.dtype)
                d_q = jnp.einsum("BKGTS,BSKH->BTKGH", d_scores, k, preferred_element_type=jnp.float32)
                d_k = jnp.einsum("BKGTS,BTKGH->BSKH", d_scores, q, preferred_element_type=jnp.float32)
                return d_q, d_k, d_v

            def none() -> tuple[Array, ...]:
                return tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))

            more_q, *more_kv = lax.cond(_sees_any(here), more, none)
            return d_q + more_q, tuple(more_kv)

        d_q, more_kv = lax.scan(of_keys, jnp.zeros(q.shape, jnp.float32), keys_in_blocks)
        return jax.tree.map(jnp.add, d_kv, more_kv), d_q

    keys_in_blocks = _blocks(k, 1), _blocks(v, 1), _places_in_blocks(seen.keys)
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in keys_in_blocks[:2])
    queries_in_blocks = (
        _blocks(q, 1), _blocks(d_out, 1), _blocks(log_sum, 3), _blocks(delta, 3),
        _queries_in_blocks(seen),
    )  # fmt: skip
    d_kv, d_q = lax.scan(of_queries, zeros, queries_in_blocks)
    return _joined(d_q, 1), tuple(_joined(x, 1) for x in d_kv)


def _scored(q: Array, k: Array, seen: _Seen, how: Scores) -> tuple[Array, Array, Array]:
    """(mask, scores, what a score's gradient is multiplied by on its way to q . k), of one pair of blocks."""
    scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
    scores = scale * jnp.einsum("BTKGH,BSKH->BKGTS", q, k, preferred_element_type=jnp.float32)
    slope = jnp.float32(scale)
    if how.softcap:
        tanh = jnp.tanh(scores / how.softcap)
        scores, slope = how.softcap * tanh, scale * (1 - tanh * tanh)
    if seen.slopes is not None:
        steep = jnp.reshape(seen.slopes, (1, *q.shape[2:4], 1, 1))
        scores += steep * seen.keys.positions.astype(jnp.float32)[:, None, None, None, :]
    mask = _mask(seen)[:, None, None]
    return mask, jnp.where(mask, scores, _HIDDEN), slope


def _mask(seen: _Seen) -> Array:
    key, query = seen.keys.positions[:, None, :], seen.queries.positions[:, :, None]
    mask = key <= query
    if seen.first is not None:
        mask &= key >= seen.first[:, :, None]
    if seen.queries.segments is not None and seen.keys.segments is not None:
        mask &= seen.keys.segments[:, None, :] == seen.queries.segments[:, :, None]
    return mask


def _sees_any(seen: _Seen) -> Array:
    return jnp.any(_mask(seen))


def _places_in_blocks(places: Any) -> Any:
    return jax.tree.map(lambda x: _blocks(x, 1), places)


def _queries_in_blocks(seen: _Seen) -> dict[str, Any]:
    """What of `seen` is of queries, by its name."""
    return _places_in_blocks({"queries": seen.queries, "first": seen.first})


def _blocks(x: Array, dim: int) -> Array:
    """x with dimension `dim` cut into blocks, which come first: at least two, as halves of a zig-zag are."""
    length = x.shape[dim]
    block = attention_block(length)
    cut = jnp.reshape(x, (*x.shape[:dim], length // block, block, *x.shape[dim + 1 :]))
    return jnp.moveaxis(cut, dim, 0)


def _joined(x: Array, dim: int) -> Array:
    """The way back of `_blocks`."""
    moved = jnp.moveaxis(x, 0, dim)
    return jnp.reshape(moved, (*moved.shape[:dim], -1, *moved.shape[dim + 2 :]))


def _grouped(x: Array, num_kv: int) -> Array:
    """x[B, T, N, H] as [B, T, K, G, H]."""
    return jnp.reshape(x, (*x.shape[:2], num_kv, -1, x.shape[-1]))


def _by_group(x: Array, num_kv: int) -> Array:
    """x[B, T, N] as [B, K, G, T]."""
    return jnp.transpose(jnp.reshape(x, (*x.shape[:2], num_kv, -1)), (0, 2, 3, 1))


def _flat(x: Array) -> Array:
    """x[B, K, G, T, O] as [B, T, N, O]."""
    moved = jnp.transpose(x, (0, 3, 1, 2, 4))
    return jnp.reshape(moved, (*moved.shape[:2], -1, moved.shape[-1]))


def _scores_shape(q: Array) -> tuple[int, int, int, int]:
    """[B, K, G, T] of q[B, T, K, G, H]."""
    batch, length, num_kv, group, _ = q.shape
    return batch, num_kv, group, length

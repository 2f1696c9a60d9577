"""Attention block by block, in memory linear in the positions, on one device or round a ring of devices.

All blocks of queries attend to one block of keys after another, with a running maximum, sum and result, so
that scores are kept for one block only; blocks that no query sees are skipped. The backward pass reads the
result and the log-sum-exp of each query, and computes scores again (FlashAttention-2, Dao 2023). Loops slice
blocks from whole arrays and update them in place: stacking or regrouping would hold each array twice.

Keys that are split by position over n devices go round them (ring attention, Liu et al., 2023): n - 1
transfers in the forward pass; in the backward pass n - 1 again, and n - 1 of the gradients of keys and
values, which start at the next device and end at the owner. Each block is sent on after queries used it, and
the block received replaces it: a device holds its own keys, the visiting keys, and a block. The turns are a
loop: XLA would start the transfers of unrolled turns together, and a device would then hold all keys.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.attention_kernels import attention_block
from meshwright.layout.moves.attention import token_sharding, uses_ring
from meshwright.models.at_layer import Places
from meshwright.models.layer_kinds import Window
from meshwright.nn.attention.blocks import block_of, num_blocks, put, visible_scope
from meshwright.nn.attention.by_formula import HIDDEN, ScoreForm
from meshwright.nn.each_device import KEPT, each_device, of_cotangent, spec_of
from meshwright.nn.start.device_mesh import partition_spec, sum_named_here
from meshwright.notation.array import Axes


class _Seen(NamedTuple):
    """The inputs of the mask and of ALiBi: arrays, or their shardings.

    queries, keys: the places of a device's own queries, and of all keys. first: the first position that each
    query sees. slopes: of ALiBi, one a head. chosen: the keys that an indexer chose, bool[B, T, S],
    or the blocks of positions that it chose for each KV head, bool[B, T, K, blocks], or None. is_entry:
    bool[S], whether a key is a compressed entry, which windows do not hide; None without entries.
    """

    queries: Places
    keys: Places
    first: Any
    slopes: Any
    chosen: Any = None
    is_entry: Any = None


class _Running(NamedTuple):
    """Running softmax of the queries: largest score, sum of weights, weighted values.

    Holds arrays, or the dimension of positions of each array.
    """

    peak: Any  # [B, K, G, T]
    total: Any  # [B, K, G, T]
    out: Any  # [B, T, N, O]


_RUNNING = _Running(3, 3, 1)  # the dimensions of positions


def blockwise(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    queries: Places,
    keys: Places,
    first: Array | None,
    layout: Layout,
    how: ScoreForm,
    windows: Sequence[Window | None] = (None,),
    chosen: Array | None = None,
    entries: Array | None = None,
) -> Array:
    """out[B, T, N, O] of q[B, T, N, H] over k[B, S, K, H] and v[B, S, K, O]: `attend` in linear memory.

    If S of k and v is split, they pass round a ring. If they are typed `reduced`, as after a gather, their
    cotangents stay partial sums. queries: split as q over T; keys: of all positions. If v is k, their
    cotangents are summed as one. first: i32[B, T], split as the queries, the first position that each sees;
    None if that is position 0 for all. windows: of the layers that share this program; an audit counts blocks
    by them. chosen: the visible keys that count, bool[B, T, S], or their blocks of positions, bool[B, T, K,
    blocks]; split as the queries. entries: compressed keys [B, S, K, H], which are their own values, whole on
    each device. They follow k and v, and `keys` and `chosen` include them.
    """
    assert entries is None or not uses_ring(layout), "entries are whole on each device"
    heads, held = layout.activation("q", "BTNH"), layout.activation("k", "BTKH")
    ring = heads.axes_of("T") if uses_ring(layout) else ()
    reduced = spec_of(k).reduced
    repeated = (axis for axis in heads.axes_of("N") if axis not in held.axes_of("K"))
    shared = tuple(axis for axis in repeated if axis not in reduced)
    spec = partition_spec(token_sharding(layout, "tokens"))
    grouped = partition_spec(layout.activation("q", "BTKGH"))
    of_q = partition_spec(heads)
    of_k = partition_spec(held if ring else held.replace(axes={"T": ()}), tuple(reduced))
    of_kv_heads = partition_spec(held)[2:3]
    of_log_sum = PartitionSpec(grouped[0], grouped[2], grouped[3], grouped[1])
    of_sinks = None if sinks is None else PartitionSpec(*of_q[:3])
    slopes = None
    if how.slopes:
        slopes = reshard(jnp.asarray(how.slopes, jnp.float32), PartitionSpec(of_q[2]))
    is_entry = of_entries = None
    if entries is not None:
        of_entries = spec_of(entries)
        is_entry = jnp.arange(k.shape[1] + entries.shape[1]) >= k.shape[1]
    seen = _Seen(queries, keys, first, slopes, chosen, is_entry)
    of_seen = _Seen(
        jax.tree.map(lambda _: spec, queries),
        jax.tree.map(lambda _: PartitionSpec(spec[0], None), keys),
        None if first is None else spec,
        None if slopes is None else PartitionSpec(of_q[2]),
        None if chosen is None else PartitionSpec(*spec, *(of_kv_heads if how.block else ()), None),
        None if is_entry is None else PartitionSpec(None),
    )
    inputs = (of_q, of_k, of_k, of_sinks, of_entries, of_seen)
    values_are_keys = v is k

    @jax.custom_vjp
    def attended(*operands: Any) -> Array:
        return forward(*operands)[0]

    def forward(*operands: Any) -> tuple[Array, Any]:
        local = partial(_forward, how=how, ring=ring, windows=windows)
        run = each_device(local, inputs, (of_q, of_log_sum))
        # Named for the remat policies: if they are saved, the backward pass needs no second ring.
        out, log_sum = (checkpoint_name(x, KEPT) for x in run(*operands))
        return out, (*operands, out, log_sum)

    def backward(saved: Any, d_out: Array) -> tuple[Any, ...]:
        local: Any = partial(_backward, how=how, ring=ring, shared=shared, windows=windows)
        of_d_k, given = of_cotangent(of_k), (*inputs, of_q, of_log_sum, of_q)
        of_d_entries = None if of_entries is None else (of_cotangent(of_entries),) * 2
        taken = (of_q, of_d_k, of_d_k, of_sinks, of_d_entries)
        d_q, d_k, d_v, d_sinks, d_entries = each_device(local, given, taken)(*saved, d_out)
        with jax.named_scope("k"):
            d_k = sum_named_here(d_k + d_v if values_are_keys else d_k).astype(k.dtype)
        with jax.named_scope("v"):
            d_v = None if values_are_keys else sum_named_here(d_v).astype(v.dtype)
        if entries is not None:
            with jax.named_scope("entries"):  # added in this scope, which names their sum over devices
                d_entries = (d_entries[0] + d_entries[1]).astype(entries.dtype)
        return d_q, d_k, d_v, d_sinks, d_entries, jax.tree.map(lambda _: None, seen)

    attended.defvjp(forward, backward)
    return attended(q, k, v, sinks, entries, seen)


def _forward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    entries: Array | None,
    seen: _Seen,
    how: ScoreForm,
    ring: Axes,
    windows: Sequence[Window | None],
) -> tuple[Array, Array]:
    """The result, and the log-sum-exp of the scores of each query [B, K, G, T]."""
    k, v = _with_entries(k, v, entries)
    last = _size(ring) - 1
    batch, length, heads, _ = q.shape
    shape = batch, k.shape[2], heads // k.shape[2], length
    if sinks is None:
        peak, total = jnp.full(shape, HIDDEN), jnp.zeros(shape)
    else:
        peak, total = _by_group(sinks, k.shape[2]), jnp.ones(shape)
    running = _Running(peak, total, jnp.zeros((*q.shape[:-1], v.shape[-1])))

    def turn(step: Any, state: Any, num_own: int, among: int = 1, *, sends: bool) -> Any:
        scope = visible_scope(q, k, windows, last + 1, num_own, among)

        def of_keys(number: Array, state: Any) -> Any:
            kv, running = state
            of_k, of_v = block_of(kv, number)
            here = _of_block(seen, k.shape[1], step, number, ring, how)
            running = _meet(q, of_k, of_v, running, here, how, scope)
            return _sent_on(kv, number, ring) if sends else kv, running

        return lax.fori_loop(0, num_blocks(k), of_keys, state)

    state = (k, v), running
    if last:
        state = lax.fori_loop(0, last, partial(turn, num_own=1, among=last, sends=True), state)
    _, running = turn(last, state, int(last == 0), sends=False)
    out = running.out / _by_head(running.total)[..., None]
    return out.astype(q.dtype), running.peak + jnp.log(running.total)


def _backward(
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    entries: Array | None,
    seen: _Seen,
    out: Array,
    log_sum: Array,
    d_out: Array,
    how: ScoreForm,
    ring: Axes,
    shared: Axes,
    windows: Sequence[Window | None],
) -> tuple[Array, Array, Array, Array | None, tuple[Array, Array] | None]:
    """The gradients. shared: axes that split the queries of one KV head, to sum its gradients over."""
    num_tokens = k.shape[1]
    k, v = _with_entries(k, v, entries)
    num_kv, size, home = k.shape[2], _size(ring), (k, v)
    arrived, delta = _first_turn(home, out, d_out, ring)

    def turn(step: Any, state: Any, num_own: int = 0, *, sends: bool, adds: bool = True) -> Any:
        """Gradients from the blocks of visiting keys. adds: to gradients from the device before."""
        scope = visible_scope(q, k, windows, size, num_own)

        def of_keys(number: Array, state: Any) -> Any:
            kv, d_q, d_kv = state
            (of_k, of_v), d_block = block_of(kv, number), block_of(d_kv, number)
            here = _of_block(seen, k.shape[1], step, number, ring, how)
            d_q, more = _gradients(q, d_out, of_k, of_v, log_sum, delta, d_q, here, how, scope)
            if adds:
                more = tuple(map(jnp.add, _from_the_one_before(d_block, ring), more))
            return _sent_on(kv, number, ring) if sends else kv, d_q, put(d_kv, more, number)

        return lax.fori_loop(0, num_blocks(k), of_keys, state)

    zeros = jnp.zeros(q.shape, jnp.float32), tuple(jnp.zeros(x.shape, jnp.float32) for x in home)
    # Blocks of neighbours first, a device's own last: then the last transfer brings gradients home. Neither
    # the gradients of the first blocks nor the keys of the last are sent, so both are unrolled.
    state = home, *zeros
    if size > 1:
        state = turn(1, (arrived, *zeros), sends=size > 2, adds=False)
        if size > 3:
            state = lax.fori_loop(2, size - 1, partial(turn, sends=True), state)
        if size > 2:
            state = turn(size - 1, state, sends=False)
    _, d_q, (d_k, d_v) = turn(size, (home, *state[1:]), num_own=1, sends=False, adds=size > 1)
    d_sinks = None
    if sinks is not None:
        weight = jnp.exp(_by_group(sinks, num_kv) - log_sum)
        d_sinks = _by_head(-weight * delta).astype(sinks.dtype)
    d_entries = None
    if entries is not None:
        d_entries = d_k[:, num_tokens:], d_v[:, num_tokens:]
        d_k, d_v = d_k[:, :num_tokens], d_v[:, :num_tokens]
    if shared:
        d_k, d_v = lax.psum((d_k, d_v), shared)
    return d_q.astype(q.dtype), d_k, d_v, d_sinks, d_entries


def _with_entries(k: Array, v: Array, entries: Array | None) -> tuple[Array, Array]:
    """k and v, each followed by the entries."""
    if entries is None:
        return k, v
    return jnp.concatenate([k, entries], axis=1), jnp.concatenate([v, entries], axis=1)


def _first_turn(home: tuple[Array, ...], out: Array, d_out: Array, ring: Axes) -> tuple[Any, Array]:
    """k and v of the device before, and delta[B, K, G, T], the sum over O of out * d_out.

    Both in one loop: XLA for CPU merges loops that only send, of layers that share keys, and keeps the keys
    received from the first such layer to the last.
    """

    def summed(out: Array, d_out: Array) -> Array:
        products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
        return _by_group(jnp.sum(products, axis=-1), home[0].shape[2])

    def of_block(number: Array, state: object) -> Any:
        came, sums = (
            _from_the_one_before(block_of(home, number), ring),
            summed(*block_of((out, d_out), number)),
        )
        return put(state, (came, sums), number, ((1, 1), 3))

    if _size(ring) == 1:
        return home, summed(out, d_out)
    # The loop overwrites each block. XLA for CPU would allocate arrays filled with a constant when a program
    # starts, in addition to the memory of the forward pass (jax 0.10.2).
    late = d_out[(0,) * d_out.ndim]
    made = jax.tree.map(
        lambda x: jnp.full(x.shape, late, x.dtype), (home, jax.eval_shape(summed, out, d_out))
    )
    return lax.fori_loop(0, num_blocks(home[0]), of_block, made)


# The ring


def zigzag(x: Array, num_shards: int, dim: int = 1) -> Array:
    """x[B, T] with positions along `dim` reordered: all shards get equally many early and late ones.

    Of 2n pieces the first shard has the first and the last, the next the second and the one before the last:
    under a causal mask all shards have equally many keys to see.
    """
    return _in_order(x, dealt_pieces(x.shape[dim], num_shards), dim)


def dealt_positions(length: int, num_shards: int) -> np.ndarray:
    """The positions as `zigzag` deals them, i32[T]."""
    order = dealt_pieces(length, num_shards)
    pieces = np.split(np.arange(length, dtype=np.int32), len(order))
    return np.concatenate([pieces[piece] for piece in order])


def in_order(x: Array, num_shards: int, dim: int) -> Array:
    """The inverse of `zigzag`, along dimension `dim`."""
    dealt = dealt_pieces(x.shape[dim], num_shards)
    return _in_order(x, sorted(range(len(dealt)), key=dealt.__getitem__), dim)


def dealt_pieces(length: int, num_shards: int) -> list[int]:
    """The order of the pieces of `length` positions, shard by shard."""
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


def _sent_on(kv: tuple[Array, ...], number: Array, ring: Axes) -> tuple[Array, ...]:
    """k and v after the ring's exchange of one block."""
    return put(kv, _from_the_one_before(block_of(kv, number), ring), number)


def _of_block(seen: _Seen, length: int, step: Any, number: Array, ring: Axes, how: ScoreForm) -> _Seen:
    """The mask's inputs for one block of the visiting keys after `step` transfers.

    length: of all visiting keys.
    """
    holder = (lax.axis_index(ring) - step) % lax.axis_size(ring) if ring else 0
    block = attention_block(length)
    start = holder * length + number * block
    keys = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, block, 1), seen.keys)
    chosen = seen.chosen
    if chosen is not None and not how.block:
        chosen = lax.dynamic_slice_in_dim(chosen, start, block, 2)
    is_entry = seen.is_entry
    if is_entry is not None:
        is_entry = lax.dynamic_slice_in_dim(is_entry, start, block, 0)
    return seen._replace(keys=keys, chosen=chosen, is_entry=is_entry)


# Blocks of queries by blocks of keys, on one device


def _meet(
    q: Array, k: Array, v: Array, running: _Running, seen: _Seen, how: ScoreForm, scope: str
) -> _Running:
    """The running softmax of the queries after this block of keys."""

    def of_queries(number: Array, running: _Running) -> _Running:
        block = _grouped(block_of(q, number), k.shape[2])
        here = _of_queries(seen, number)

        def more(running: _Running) -> _Running:
            mask, scores, _ = _scored(block, k, here, how)
            peak = jnp.maximum(running.peak, jnp.max(scores, axis=-1))
            weights = jnp.where(mask, jnp.exp(scores - peak[..., None]), 0.0)
            shrink = jnp.exp(running.peak - peak)
            values = jnp.einsum(
                "BKGTS,BSKO->BTKGO", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            return _Running(
                peak,
                running.total * shrink + jnp.sum(weights, axis=-1),
                running.out * _by_head(shrink)[..., None] + _flat(values),
            )

        with jax.named_scope(scope):
            attended = lax.cond(
                _sees_any(here, how), more, lambda running: running, block_of(running, number, _RUNNING)
            )
        return put(running, attended, number, _RUNNING)

    return lax.fori_loop(0, num_blocks(q), of_queries, running)


def _gradients(
    q: Array,
    d_out: Array,
    k: Array,
    v: Array,
    log_sum: Array,
    delta: Array,
    d_q: Array,
    seen: _Seen,
    how: ScoreForm,
    scope: str,
) -> tuple[Array, tuple[Array, ...]]:
    """d_q plus this block's part, and the block's own d_k and d_v."""

    def of_queries(number: Array, gradients: Mapping[str, Any]) -> Any:
        d_q, d_kv = gradients
        block, d_block = (_grouped(x, k.shape[2]) for x in block_of((q, d_out), number))
        of_sums = block_of((log_sum, delta), number, 3)
        here = _of_queries(seen, number)

        def more(d_q: Array, d_k: Array, d_v: Array) -> tuple[Array, ...]:
            log_sum, delta = (x[..., None] for x in of_sums)
            mask, scores, slope = _scored(block, k, here, how)
            weights = jnp.where(mask, jnp.exp(scores - log_sum), 0.0)
            d_v += jnp.einsum(
                "BKGTS,BTKGO->BSKO", weights.astype(v.dtype), d_block, preferred_element_type=jnp.float32
            )
            d_weights = jnp.einsum("BSKO,BTKGO->BKGTS", v, d_block, preferred_element_type=jnp.float32)
            d_scores = (weights * (d_weights - delta) * slope).astype(k.dtype)
            of_block = jnp.einsum("BKGTS,BSKH->BTKGH", d_scores, k, preferred_element_type=jnp.float32)
            d_q += _flat(of_block)
            d_k += jnp.einsum("BKGTS,BTKGH->BSKH", d_scores, block, preferred_element_type=jnp.float32)
            return d_q, d_k, d_v

        before = block_of(d_q, number), *d_kv
        with jax.named_scope(scope):
            of_block, *d_kv = lax.cond(_sees_any(here, how), more, lambda *cotangents: cotangents, *before)
        return put(d_q, of_block, number), tuple(d_kv)

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    return lax.fori_loop(0, num_blocks(q), of_queries, (d_q, zeros))


def _scored(q: Array, k: Array, seen: _Seen, how: ScoreForm) -> tuple[Array, Array, Array]:
    """(mask, scores, derivative of a score with respect to q . k) of one pair of blocks."""
    scale = how.scale
    # Keys first: the other way round XLA for CPU transposes every score (jax 0.10.2).
    scores = scale * jnp.einsum("BSKH,BTKGH->BKGTS", k, q, preferred_element_type=jnp.float32)
    slope = jnp.float32(scale)
    if how.softcap:
        tanh = jnp.tanh(scores / how.softcap)
        scores, slope = how.softcap * tanh, scale * (1 - tanh * tanh)
    if seen.slopes is not None:
        steep = jnp.reshape(seen.slopes, (1, *q.shape[2:4], 1, 1))
        scores += steep * seen.keys.positions.astype(jnp.float32)[:, None, None, None, :]
    mask = _mask(seen, how)[:, :, None]
    return mask, jnp.where(mask, scores, HIDDEN), slope


def _mask(seen: _Seen, how: ScoreForm) -> Array:
    """bool[B, 1 or K, T, S]: whether the queries of each KV head see each key."""
    key, query = seen.keys.positions[:, None, :], seen.queries.positions[:, :, None]
    mask = key <= query
    if seen.first is not None:
        is_near = key >= seen.first[:, :, None]
        mask &= is_near if seen.is_entry is None else is_near | seen.is_entry[None, None]
    if seen.queries.segments is not None and seen.keys.segments is not None:
        mask &= seen.keys.segments[:, None, :] == seen.queries.segments[:, :, None]
    mask = mask[:, None]
    if seen.chosen is None:
        return mask
    if not how.block:
        return mask & seen.chosen[:, None]
    of_keys = (seen.keys.positions // how.block)[:, None, None, :]
    return mask & jnp.moveaxis(jnp.take_along_axis(seen.chosen, of_keys, axis=3, mode="clip"), 2, 1)


def _sees_any(seen: _Seen, how: ScoreForm) -> Array:
    return jnp.any(_mask(seen, how))


def _of_queries(seen: _Seen, number: Array) -> _Seen:
    """The mask's inputs for one block of queries."""
    queries, first, chosen = block_of((seen.queries, seen.first, seen.chosen), number)
    return seen._replace(queries=queries, first=first, chosen=chosen)


def _grouped(x: Array, num_kv: int) -> Array:
    """x[B, T, N, H] as [B, T, K, G, H]."""
    return jnp.reshape(x, (*x.shape[:2], num_kv, -1, x.shape[-1]))


def _by_group(x: Array, num_kv: int) -> Array:
    """x[B, T, N] as [B, K, G, T]."""
    return jnp.transpose(jnp.reshape(x, (*x.shape[:2], num_kv, -1)), (0, 2, 3, 1))


def _by_head(x: Array) -> Array:
    """The way back of `_by_group`."""
    moved = jnp.transpose(x, (0, 3, 1, 2))
    return jnp.reshape(moved, (*moved.shape[:2], -1))


def _flat(x: Array) -> Array:
    """The way back of `_grouped`."""
    return jnp.reshape(x, (*x.shape[:2], -1, x.shape[-1]))

"""Attention over pages by an accelerator's kernel, which reads each page of a row once, up to the last used.

    ragged    TPUs: rows of any length, sliding windows. Key and value of each head are side by side:
              kv[B, S, 2K, H]
    decoded   GPUs: one query a row, which sees all before it. k[B, K, S, H] and v; narrow types have scales

`why_no_paged` (layout/attention_kernels.py) gives the reasons for having no kernel.

The TPU's kernel is JAX's, jax.experimental.pallas.ops.tpu.ragged_paged_attention. The GPU's is written here,
in Pallas for Triton: flash decoding (Dao et al. 2023) over pages.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from meshwright.models.layer_kinds import Window
from meshwright.nn.attention.by_formula import HIDDEN, ScoreForm
from meshwright.nn.kernel_names import DECODE_PAGES, JOIN_PARTS

# The kernel's own table of the fastest sizes (v6e) has 4 to 16 pages and 32 queries in nearly all cases.
_PAGES_OF_BLOCK, _QUERIES_OF_BLOCK = 16, 32
# Page numbers of one call: they share the 1 MB of scalar memory with the kernel's own.
_MOST_PAGES = 1 << 17
# For the GPU's kernel: positions that a program reads at once, its warps, and its stages of loads. On an
# H200, 64 rows of 1,024 positions take 93 us, and 121 with JAX's kernel.
_POSITIONS_OF_BLOCK, _WARPS, _STAGES = 64, 4, 3
# Most parts of a sequence that are attended to at once, since each part's sums pass through memory; and parts
# of all sequences and heads that keep a GPU of 100 to 150 processors busy.
_PARTS, _AT_ONCE = 16, 512
# The heads of one group fill at least the rows of a tensor core's tile; the last is repeated.
_HEADS_OF_TILE = 16
_LOG2_E = math.log2(math.e)
_LEAST = 1e-30


def side_by_side(k: Array, v: Array) -> Array:
    """kv[N, 2K, H] of k[N, K, H] and v[N, K, H], in the order of a pool."""
    tokens, heads, width = k.shape
    both = jnp.stack([k, v], axis=2)
    split = jax.typeof(k).sharding.spec
    return jnp.reshape(both, (tokens, 2 * heads, width), out_sharding=split)


def ragged(
    q: Array, positions: Array, tables: Array, pool: Array, window: Window | None, how: ScoreForm
) -> Array:
    """out[R, Q, N, H] of q[R, Q, N, H] over the pages of each row, as `PagedCache.attend` defines it.

    positions i32[R, Q], negative for padding, which comes last; tables i32[R, P].
    """
    num_rows, length = positions.shape
    size = pool.shape[1]
    lengths = jnp.max(positions, axis=1) + 1
    if window is not None:
        # Pages before the window may be reused by other sequences: tables begin at the first visible page.
        begins = jnp.maximum(window.first(positions[:, 0]), 0) // size
        width = min(tables.shape[1], -(-(window.size - 1 + length) // size) + 1)
        seen = begins[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        tables = jnp.take_along_axis(tables, jnp.minimum(seen, tables.shape[1] - 1), axis=1)
        lengths -= begins * size
    # The kernel takes a row's last query for the last token of its sequence, so padding goes first.
    padding = jnp.sum(positions < 0, axis=1)
    turned = q if length == 1 else jax.vmap(partial(jnp.roll, axis=0))(q, padding)
    most = max(1, _MOST_PAGES // tables.shape[1])
    cuts = [slice(first, first + most) for first in range(0, num_rows, most)]
    parts = [_of_rows(turned[cut], lengths[cut], tables[cut], pool, window, how) for cut in cuts]
    out = jnp.concatenate(parts)
    out = out if length == 1 else jax.vmap(partial(jnp.roll, axis=0))(out, -padding)
    return jnp.where((positions >= 0)[..., None, None], out, jnp.zeros((), out.dtype))


def _of_rows(
    q: Array, lengths: Array, tables: Array, pool: Array, window: Window | None, how: ScoreForm
) -> Array:
    """The queries of some rows over the first `lengths` positions of their tables."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    num_rows, length, *heads = q.shape
    out = ragged_paged_attention(
        jnp.reshape(q, (num_rows * length, *heads)),
        pool,
        jnp.maximum(lengths, 1),  # a row of padding reads one key: the kernel supports no row without keys
        tables,
        jnp.arange(num_rows + 1, dtype=jnp.int32) * length,
        jnp.asarray([num_rows], jnp.int32),
        sm_scale=how.scale,
        sliding_window=window.size if window else None,
        soft_cap=how.softcap,
        num_kv_pages_per_block=min(_PAGES_OF_BLOCK, tables.shape[1]),
        num_queries_per_block=min(_QUERIES_OF_BLOCK, num_rows * length),
    )
    return jnp.reshape(out, q.shape)


def decoded(
    q: Array,
    positions: Array,
    tables: Array,
    pools: Sequence[Array],
    scales: Sequence[Array] | None,
    how: ScoreForm,
    *,
    batch_invariant: bool = False,
    interpret: bool = False,
) -> Array:
    """out[R, 1, N, H] of q[R, 1, N, H] over the pages of each row, as in `PagedCache.attend`.

    positions i32[R, 1], negative for padding; tables i32[R, P]; pools, and for narrow types scales f32[B, K,
    S]: of keys, then of values. batch_invariant: the order of sums does not depend on the number of rows.
    interpret: run it in JAX, on any platform.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    num_rows, _, num_heads, width = q.shape
    num_pages, num_kv_heads, size, _ = pools[0].shape
    group = num_heads // num_kv_heads
    together = max(1, _POSITIONS_OF_BLOCK // size)
    parts = min(_PARTS, -(-tables.shape[1] // together))
    if not batch_invariant:
        parts = min(parts, -(-_AT_ONCE // (num_rows * num_kv_heads)))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % (parts * together))))
    pages_of_part, heads = tables.shape[1] // parts, (num_rows, num_kv_heads)
    narrow, num_lines = list(scales or ()), num_pages * num_kv_heads * size
    # A part's result is divided by its total when all parts are joined.
    out_types = [jax.ShapeDtypeStruct((*heads, parts, group, width), q.dtype if parts == 1 else jnp.float32)]
    if parts > 1:
        out_types += [jax.ShapeDtypeStruct((*heads, parts, group), jnp.float32)] * 2
    out, *sums = pl.pallas_call(
        partial(_attend_to_pages, how, (num_kv_heads, size), together, pages_of_part, bool(narrow)),
        name=f"{DECODE_PAGES}_{size}",
        grid=(*heads, parts),
        in_specs=[
            _block(2, group, width),
            *[_block(0, num_lines, width)] * 2,
            *[_block(0, num_lines)] * len(narrow),
            _block(1, tables.shape[1]),
            _block(1, 1),
        ],
        out_specs=[_block(3, *each.shape[3:]) for each in out_types],
        out_shape=out_types,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=interpret,
    )(
        jnp.reshape(q, (*heads, group, width)),
        *(jnp.reshape(pool, (num_lines, width)) for pool in pools),
        *(jnp.reshape(each, (num_lines,)) for each in narrow),
        tables,
        positions,
    )
    if parts > 1:
        out = pl.pallas_call(
            _join_parts,
            name=JOIN_PARTS,
            grid=heads,
            in_specs=[_block(2, *each.shape[2:]) for each in out_types],
            out_specs=_block(2, group, width),
            out_shape=jax.ShapeDtypeStruct((*heads, group, width), q.dtype),
            compiler_params=triton.CompilerParams(num_warps=_WARPS),
            interpret=interpret,
        )(out, *sums)
    return jnp.reshape(out, q.shape)


def _block(num_grid: int, *shape: int) -> Any:
    """The part [*shape] that a program reads of an array whose first `num_grid` dimensions are the grid's."""
    from jax.experimental import pallas as pl

    return pl.BlockSpec(
        (*[None] * num_grid, *shape), lambda *program: (*program[:num_grid], *[0] * len(shape))
    )


def _attend_to_pages(
    how: ScoreForm,
    page: tuple[int, int],
    together: int,
    pages_of_part: int,
    is_narrow: bool,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs: Any,
) -> None:
    """One part of a row's pages, `together` of them at a time: the program of Pallas.

    page: K and S of a pool. q_ref[G, H]: the heads of one group. k_ref, v_ref [B K S, H]. refs: scales [B K
    S] of narrow keys and values; the row's table [P] and position [1]; the result [G, H], and with several
    parts, the peak and total [G] of this one. The result of a single part is divided by its total.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    scales_refs, (tables_ref, position_ref, out_ref, *sums_refs) = (
        refs[: 2 * is_narrow],
        refs[2 * is_narrow :],
    )
    (num_kv_heads, size), width = page, q_ref.shape[1]
    rows_of_page, num_keys = num_kv_heads * size, together * size
    heads = _filled_up(q_ref.shape[0], _HEADS_OF_TILE)
    q = q_ref[heads, :]
    first_page = pl.program_id(2) * pages_of_part
    first_row = pl.program_id(1) * size
    length = jnp.minimum(position_ref[0] + 1, (first_page + pages_of_part) * size)
    num_keys_seen = jnp.maximum(length - first_page * size, 0)

    def one_block(is_whole: bool, number: Array, running: tuple[Array, ...]) -> tuple[Array, ...]:
        peak, total, out = running
        keys = first_page * size + number * num_keys + jnp.arange(num_keys)
        seen = keys < length
        rows = tables_ref[keys // size] * rows_of_page + first_row + keys % size
        k, v = k_ref[rows, :].astype(q.dtype), v_ref[rows, :].astype(q.dtype)
        if not is_whole:  # later positions may be of a sequence that failed, and NaN times zero is NaN
            v = jnp.where(seen[:, None], v, jnp.zeros((), q.dtype))
        logits = triton.dot(q, k, trans_b=True) * how.scale
        if scales_refs:
            logits *= scales_refs[0][rows][None]
        if how.softcap:
            logits = jnp.tanh(logits / how.softcap) * how.softcap
        logits *= _LOG2_E
        if not is_whole:
            logits = jnp.where(seen[None], logits, HIDDEN)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1))
        weights, kept = jnp.exp2(logits - higher[:, None]), jnp.exp2(peak - higher)
        total = total * kept + jnp.sum(weights, axis=1)
        if scales_refs:
            of_values = scales_refs[1][rows]
            weights *= (of_values if is_whole else jnp.where(seen, of_values, 0.0))[None]
        return higher, total, out * kept[:, None] + triton.dot(weights.astype(q.dtype), v)

    count, whole = heads.shape[0], num_keys_seen // num_keys
    running = jnp.full(count, HIDDEN), jnp.zeros(count), jnp.zeros((count, width))
    running = lax.fori_loop(0, whole, partial(one_block, True), running)
    some = (num_keys_seen + num_keys - 1) // num_keys
    peak, total, out = lax.fori_loop(whole, some, partial(one_block, False), running)
    if sums_refs:
        sums_refs[0][heads], sums_refs[1][heads] = peak, total
    else:
        out = out / jnp.maximum(total, _LEAST)[:, None]
    out_ref[heads, :] = out.astype(out_ref.dtype)


def _join_parts(parts_ref: Any, peaks_ref: Any, totals_ref: Any, out_ref: Any) -> None:
    """out[G, H] from the sums [P, G, H] of all parts of a row, and their peaks and totals [P, G]."""
    heads = _filled_up(out_ref.shape[0], 1)

    def one_part(part: Array, running: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, out = running
        higher = jnp.maximum(peak, peaks_ref[part, heads])
        kept, weight = jnp.exp2(peak - higher), jnp.exp2(peaks_ref[part, heads] - higher)
        out = out * kept[:, None] + parts_ref[part, heads, :] * weight[:, None]
        return higher, total * kept + totals_ref[part, heads] * weight, out

    shape = heads.shape[0], out_ref.shape[1]
    start = jnp.full(shape[:1], HIDDEN), jnp.zeros(shape[:1]), jnp.zeros(shape)
    _, total, out = lax.fori_loop(0, parts_ref.shape[0], one_part, start)
    out_ref[heads, :] = (out / jnp.maximum(total, _LEAST)[:, None]).astype(out_ref.dtype)


def _filled_up(count: int, least: int) -> Array:
    """The numbers below `count`, the last repeated until they are a power of two and at least `least`."""
    return jnp.minimum(jnp.arange(max(least, 1 << (count - 1).bit_length())), count - 1)

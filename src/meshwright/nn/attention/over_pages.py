"""Attention of one device's queries over pages: by gathered pages, page by page, and by kernels.

On a CPU attention goes page by page through each row's own pages: nothing is gathered, and the cost of a row
is linear in its sequence (16 rows of 300 positions, six layers of 12 heads of 64, jax 0.10.2 on two shared
cores: 44 ms; with gathered tables of 512 positions 208 ms; with dense caches of 512 positions 42 ms). GPUs
and TPUs have kernels (paged_kernel.py). Other devices, and rows of several queries on GPUs, gather pages by
the tables. A row of one query gathers the pages of its window. Rows of several queries gather TOGETHER pages
at a time, up to the last page that a row of the step sees. Positions of a page beyond its sequence are never
seen: they are padding, or keys of an earlier sequence.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from meshwright.layout.page_sizes import SIDE_BY_SIDE, TOGETHER, most_pages, pages_read
from meshwright.models.layer_kinds import Window
from meshwright.models.scopes import at_most
from meshwright.native import kernels
from meshwright.nn.attention import paged_kernel
from meshwright.nn.attention.by_formula import HIDDEN, ScoreForm
from meshwright.nn.attention.packed_pages import Packed
from meshwright.nn.attention.pools import (
    Pool,
    kv_heads_of,
    num_together,
    page_size_of,
    read_pool,
    value_width,
    values_of,
)
from meshwright.nn.norms import softcap
from meshwright.nn.products.quantised import Quantised
from meshwright.nn.products.row_products import in_tiles
from meshwright.nn.start.device_mesh import platform
from meshwright.notation.array import Axes

_Running = tuple[Array, Array, Array]  # state of a running softmax: maximum, sum and output


class Found(NamedTuple):
    """out[R, Q, N, O], and if devices share positions the log-sum-exp of each query's scores [R, Q, N]."""

    out: Array
    log_sum: Any


class Asked(NamedTuple):
    """The queries of some rows: q[R, Q, N, H], their positions i32[R, Q], and their pages i32[R, P]."""

    q: Array
    positions: Array
    tables: Array


class PagedKeys(NamedTuple):
    """The keys and values that a device's queries attend to, and how they are scored.

    window: positions that a query sees; None for all up to its own. sinks f32[N], slopes f32[N]: of the
    device's heads; None for none. split: axes that split the positions of each page. stands: as in
    `PagedCache`.
    """

    pools: Sequence[Pool]
    window: Window | None
    how: ScoreForm
    sinks: Array | None = None
    slopes: Array | None = None
    split: Axes = ()
    stands: tuple[int, int] | None = None


def _side_by_side(pages: Sequence[Array], pool: Pool) -> Array:
    """x[K, P * S, H] of some pages, or x[P * S, R] of latents.

    XLA's CPU compiler copies slices and joins them run by run; it gathers number by number, then transposes.
    """
    return jnp.concatenate([read_pool(page, pool) for page in pages], axis=-2)


def _keys_and_values(pools: Sequence[Pool], read: Callable[[Pool], Array]) -> tuple[Array, Array]:
    """k[..., K, S, H] and v[..., K, S, O] of pages; latents are one head, with values a part of its keys."""
    first, second = map(read, pools)
    if values_of(pools[0]).ndim == 4:
        return first, second
    return jnp.concatenate([first, second], axis=-1)[..., None, :, :], first[..., None, :, :]


def _scored(scores: Array, queries: Array, keys: Array, paged: PagedKeys) -> Array:
    """Scores [..., K, G, Q, S], hidden if queries[..., Q] does not see keys[..., S] by position."""
    how, window = paged.how, paged.window
    scores *= how.scale
    if how.softcap:
        scores = softcap(scores, how.softcap)
    keys, queries = keys[..., None, None, None, :], queries[..., None, None, :, None]
    if paged.slopes is not None:
        per_head = jnp.reshape(paged.slopes, (*scores.shape[-4:-2], 1, 1))
        scores += lax.expand_dims(per_head, range(scores.ndim - 4)) * keys.astype(jnp.float32)
    seen = keys <= queries
    if window is not None:
        seen &= keys >= window.first(queries)
    return jnp.where(seen, scores, HIDDEN)


def page_by_page(asked: Asked, paged: PagedKeys) -> Found:
    """Attention of each row to its pages in turn, by a running softmax; long rows take several at once."""
    pools, window, sinks, split = paged.pools, paged.window, paged.sinks, paged.split
    num_rows, length, num_heads, _ = asked.q.shape
    page_size, num_kv_heads, width = page_size_of(pools[0]), kv_heads_of(pools), value_width(pools)
    grouped = num_kv_heads, num_heads // num_kv_heads, length
    no_sink = jnp.full(grouped, HIDDEN, jnp.float32)
    size, first = page_size * num_parts(split), page_size * part_number(split)
    start, total = no_sink, jnp.zeros(grouped, jnp.float32)
    if sinks is not None:  # on one device only: several join their sums
        is_first = part_number(split) == 0
        start = jnp.where(is_first, no_sink * 0 + jnp.reshape(sinks, (*grouped[:2], 1)), no_sink)
        total = jnp.where(is_first, jnp.ones_like(total), total)

    def one_row(row: Array, attended: Found) -> Found:
        positions = lax.dynamic_index_in_dim(asked.positions, row, keepdims=False)
        table = lax.dynamic_index_in_dim(asked.tables, row, keepdims=False)
        q = lax.dynamic_index_in_dim(asked.q, row, keepdims=False)
        q = jnp.reshape(jnp.transpose(q, (1, 0, 2)), (*grouped, -1)).astype(jnp.float32)
        last = jnp.max(positions)

        def some_pages(count: int, number: Array, running: _Running) -> _Running:
            """The softmax with `count` more pages, from the row's page `number` on."""
            peak, total, out = running
            pages = lax.dynamic_slice_in_dim(table, number, count)
            k, v = _keys_and_values(pools, partial(_side_by_side, list(pages)))
            begins = (number + jnp.arange(count, dtype=jnp.int32))[:, None] * size
            keys = jnp.reshape(begins + first + jnp.arange(page_size, dtype=jnp.int32)[None], -1)
            # Later positions may be of a sequence that failed, and NaN times zero is NaN.
            v = jnp.where((keys <= last)[None, :, None], v, 0.0).astype(jnp.float32)
            scores = jnp.einsum("KGQH,KSH->KGQS", q, k.astype(jnp.float32))
            scores = _scored(scores, positions, keys, paged)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
            more = jnp.einsum("KGQS,KSO->KGQO", weights, v)
            return higher, total * kept + jnp.sum(weights, axis=-1), out * kept[..., None] + more

        begin = 0 if window is None else jnp.maximum(window.first(positions[0]), 0) // size
        end, num_pages = (last + size) // size, table.shape[0]
        page_counts = pages_read(*paged.stands, length, size, window) if paged.stands else (num_pages,)
        running = start, total, jnp.zeros((*grouped, width), jnp.float32)
        if num_pages >= 2 * TOGETHER:
            groups = (end - begin) // TOGETHER

            def one_group(number: Array, running: _Running) -> _Running:
                for place in range(0, TOGETHER, SIDE_BY_SIDE):
                    running = some_pages(SIDE_BY_SIDE, begin + number * TOGETHER + place, running)
                return running

            with jax.named_scope(at_most(sum(count // TOGETHER for count in page_counts), len(page_counts))):
                running = lax.fori_loop(0, groups, one_group, running)
            begin, page_counts = begin + groups * TOGETHER, tuple(count % TOGETHER for count in page_counts)
        with jax.named_scope(at_most(sum(page_counts), len(page_counts))):
            peak, sums, out = lax.fori_loop(begin, end, partial(some_pages, 1), running)
        sums = jnp.maximum(sums, 1e-30)
        out = jnp.transpose(jnp.reshape(out / sums[..., None], (num_heads, length, width)), (1, 0, 2))
        outs = lax.dynamic_update_index_in_dim(attended.out, out, row, 0)
        if not split:
            return Found(outs, None)
        log_sum = jnp.reshape(peak + jnp.log(sums), (num_heads, length)).T
        return Found(outs, lax.dynamic_update_index_in_dim(attended.log_sum, log_sum, row, 0))

    outs = jnp.zeros((num_rows, length, num_heads, width), jnp.float32)
    return lax.fori_loop(0, num_rows, one_row, Found(outs, outs[..., 0] if split else None))


def natively(asked: Asked, paged: PagedKeys) -> Found:
    """The queries over the pages of each row, by the kernel for CPUs."""
    out = kernels.attention(
        asked.q.astype(jnp.float32),
        asked.positions,
        asked.tables,
        paged.pools,
        scale=paged.how.scale,
        softcap=paged.how.softcap or 0.0,
        window=paged.window.size if paged.window else 0,
        chunked=bool(paged.window and paged.window.chunked),
    )
    return Found(out, None)


def ragged(asked: Asked, paged: PagedKeys) -> Found:
    """The queries over the pages of each row, by the TPU's kernel."""
    [pool] = map(values_of, paged.pools)
    return Found(paged_kernel.ragged(*asked, pool, paged.window, paged.how), None)


def decoded(batch_invariant: bool, asked: Asked, paged: PagedKeys) -> Found:
    """One query a row over its pages, by the GPU's kernel."""
    values, scales = [values_of(pool) for pool in paged.pools], None
    if isinstance(paged.pools[0], Quantised):
        scales = [pool.scales for pool in paged.pools if isinstance(pool, Quantised)]
    out = paged_kernel.decoded(*asked, values, scales, paged.how, batch_invariant=batch_invariant)
    return Found(out, None)


def gathered(asked: Asked, paged: PagedKeys) -> Found:
    """Attention over each row's gathered pages; with a window, only over the pages that the row sees."""
    pools, window, sinks, split = paged.pools, paged.window, paged.sinks, paged.split
    num_rows, length, num_heads, _ = asked.q.shape
    page_size, num_kv_heads = page_size_of(pools[0]), kv_heads_of(pools)
    size = page_size * num_parts(split)
    tables, first = _of_window(asked, window, size)
    together = num_together(pools)
    pages = first[:, None] + jnp.arange(tables.shape[1], dtype=jnp.int32)[None]
    begins = pages * size + page_size * part_number(split)
    # The positions of each part of the keys, one part after another.
    places = jnp.arange(page_size, dtype=jnp.int32).reshape(-1, together).T
    keys = jnp.reshape(begins[:, None, :, None] + places[None, :, None], (len(first), -1))
    # Later positions may be of a sequence that failed; pages before the window may be reused by others.
    seen = keys <= jnp.max(asked.positions, axis=1, keepdims=True)
    if window is not None:
        seen &= keys >= window.first(asked.positions[:, :1])
    parts = _gathered_parts(pools, tables, jnp.split(seen, together, axis=1), asked.q.dtype)
    grouped = num_rows, length, num_kv_heads, num_heads // num_kv_heads, asked.q.shape[-1]
    q = jnp.reshape(asked.q, grouped)
    scores = jnp.concatenate([_products(q, part.keys) for part in parts], axis=-1)
    scores = _scored(scores, asked.positions, keys, paged)
    if sinks is not None:  # on one device only: several join their sums
        sinks = jnp.where(part_number(split) == 0, sinks, HIDDEN)
        sink = jnp.broadcast_to(jnp.reshape(sinks, (1, *grouped[2:4], 1, 1)), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[1]].astype(asked.q.dtype)
    outs = (
        jnp.einsum("RKGQS,RKSO->RQKGO", some, part.values, preferred_element_type=jnp.float32)
        for some, part in zip(jnp.split(weights, together, axis=-1), parts, strict=True)
    )
    out = jnp.reshape(reduce(operator.add, outs), (num_rows, length, num_heads, -1))
    if not split:
        return Found(out, None)
    log_sum = jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), 3, 1)
    return Found(out, jnp.reshape(log_sum, out.shape[:3]))


class _Part(NamedTuple):
    """Keys and values of gathered positions.

    keys: arrays [R, K, S, ...], each with some columns of the keys, in order. values: [R, K, S, O].
    """

    keys: tuple[Array, ...]
    values: Array


def _gathered_parts(
    pools: Sequence[Pool], tables: Array, seen: Sequence[Array], dtype: DTypeLike
) -> list[_Part]:
    """The keys and values of pages, in parts of some positions each; values are zero unless `seen`[R, S].

    Keys of latents are two arrays: the latents, which are also the values, and the rotary keys. One joined
    array would be a copy of both.
    """

    def visible(values: Array, seen: Array) -> Array:
        return jnp.where(seen[:, None, :, None], values, jnp.zeros((), values.dtype))

    if values_of(pools[0]).ndim == 4:
        keys, values = (_by_parts(pool, tables, len(seen), dtype) for pool in pools)
        return [_Part((k,), visible(v, mask)) for k, v, mask in zip(keys, values, seen, strict=True)]
    [mask] = seen
    latent, rope = (_joined(read_pool(tables, pool)[..., None, :, :]).astype(dtype) for pool in pools)
    values = visible(latent, mask)
    # Scores of hidden positions are masked anyway, so their keys may have any values. Both products read the
    # same array: the latents if the compiler fuses the mask into a product, otherwise the masked latents.
    return [_Part((latent if platform().fuses_casts else values, rope), values)]


def _by_parts(pool: Pool, tables: Array, count: int, dtype: DTypeLike) -> list[Array]:
    """x[R, K, S, H] of each of `count` parts of a pool's pages."""
    if isinstance(pool, Packed) and count > 1:
        return [_joined(part).astype(dtype) for part in pool.parts(tables)]
    return [_joined(read_pool(tables, pool)).astype(dtype)]


def _products(q: Array, keys: tuple[Array, ...]) -> Array:
    """Scores [R, K, G, Q, S] of q[R, Q, K, G, H] by keys that have some of its columns each."""
    ends = list(accumulate(part.shape[-1] for part in keys))
    columns = jnp.split(q, ends[:-1], axis=-1)
    products = (
        jnp.einsum("RQKGH,RKSH->RKGQS", some, part, preferred_element_type=jnp.float32)
        for some, part in zip(columns, keys, strict=True)
    )
    return reduce(operator.add, products)


def _of_window(asked: Asked, window: Window | None, size: int) -> tuple[Array, Array]:
    """The pages i32[R, P] that each row may see, and the index in its table of the first, i32[R] or i32[1].

    size: positions of a page, summed over the devices that share it.
    """
    width, length = asked.tables.shape[1], asked.q.shape[1]
    most = width if window is None else most_pages(window, length, size)
    if window is None or most >= width:
        return asked.tables, jnp.zeros(1, jnp.int32)
    first = jnp.maximum(window.first(asked.positions[:, 0]), 0) // size
    # Pages after the table's last begin after the query, which does not see them.
    places = jnp.minimum(first[:, None] + jnp.arange(most, dtype=jnp.int32)[None], width - 1)
    return jnp.take_along_axis(asked.tables, places, axis=1), first


def in_blocks(asked: Asked, paged: PagedKeys) -> Found:
    """`gathered`, TOGETHER pages of all rows at a time, with a running softmax.

    A chunk early in a long table thus reads no later page.
    """
    pools, window, sinks, split = paged.pools, paged.window, paged.sinks, paged.split
    num_rows, length, num_heads, _ = asked.q.shape
    page_size, num_kv_heads, width = page_size_of(pools[0]), kv_heads_of(pools), value_width(pools)
    grouped = num_rows, num_kv_heads, num_heads // num_kv_heads, length
    q = jnp.reshape(asked.q, (num_rows, length, *grouped[1:3], -1))
    count = min(TOGETHER, asked.tables.shape[1])
    tables = jnp.pad(asked.tables, ((0, 0), (0, -asked.tables.shape[1] % count)))
    size = page_size * num_parts(split)
    last = jnp.max(asked.positions, axis=1)

    def one_block(number: Array, running: _Running) -> _Running:
        peak, total, out = running
        pages = lax.dynamic_slice_in_dim(tables, number * count, count, axis=1)
        k, v = (_joined(x).astype(q.dtype) for x in _keys_and_values(pools, partial(read_pool, pages)))
        begins = (number * count + jnp.arange(count, dtype=jnp.int32))[:, None] * size
        first = page_size * part_number(split)
        keys = jnp.reshape(begins + first + jnp.arange(page_size, dtype=jnp.int32)[None], (1, -1))
        # Later positions may be of a sequence that failed, and NaN times zero is NaN.
        v = jnp.where((keys <= last[:, None])[:, None, :, None], v, jnp.zeros((), v.dtype))
        scores = jnp.einsum("RQKGH,RKSH->RKGQS", q, k, preferred_element_type=jnp.float32)
        scores = _scored(scores, asked.positions, keys, paged)
        higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
        more = jnp.einsum("RKGQS,RKSO->RKGQO", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return higher, total * kept + jnp.sum(weights, axis=-1), out * kept[..., None] + more

    begin = jnp.zeros((), jnp.int32)
    if window is not None:
        firsts = jnp.maximum(window.first(asked.positions[:, 0]), 0)
        begin = jnp.min(jnp.where(last >= 0, firsts, jnp.max(last))) // (count * size)
    end = (jnp.max(last) + count * size) // (count * size)
    peak, total = jnp.full(grouped, HIDDEN, jnp.float32), jnp.zeros(grouped, jnp.float32)
    if sinks is not None:  # on one device only: several join their sums
        is_first = part_number(split) == 0
        peak = jnp.where(is_first, peak * 0 + jnp.reshape(sinks, (1, *grouped[1:3], 1)), peak)
        total = jnp.where(is_first, jnp.ones_like(total), total)
    running = peak, total, jnp.zeros((*grouped, width), jnp.float32)
    with jax.named_scope(at_most(tables.shape[1] // count)):
        peak, total, out = lax.fori_loop(begin, end, one_block, running)
    total = jnp.maximum(total, 1e-30)
    out = jnp.reshape(jnp.moveaxis(out / total[..., None], 3, 1), (num_rows, length, num_heads, width))
    if not split:
        return Found(out, None)
    return Found(out, jnp.reshape(jnp.moveaxis(peak + jnp.log(total), 3, 1), out.shape[:3]))


def gathered_in_tiles(asked: Asked, paged: PagedKeys) -> Found:
    """`gathered` in tiles of equally many rows, so that results do not depend on the number of rows."""
    return in_tiles(lambda some: gathered(some, paged), asked)


def weighed(attended: Found, split: Axes) -> Array:
    """out[N, heads, O] of one device's positions as its part of the sum over all."""
    if not split:
        return attended.out
    peak = lax.pmax(attended.log_sum, split)
    weight = jnp.exp(attended.log_sum - peak)
    return attended.out * (weight / lax.psum(weight, split))[..., None]


def num_parts(split: Axes) -> int:
    return lax.axis_size(split) if split else 1


def part_number(split: Axes) -> Any:
    """The index of this device along the axes that share positions."""
    return lax.axis_index(split) if split else 0


def _joined(pages: Array) -> Array:
    """[R, K, P * S, H] of a row's pages [R, P, K, S, H]."""
    rows, count, heads, size, width = pages.shape
    return jnp.reshape(jnp.moveaxis(pages, 1, 2), (rows, heads, count * size, width))

"""A cache of pages: keys and values of sequences of any length, in one pool a layer.

    pool     k[B_data, K_tensor, S, H], and v: B pages of S positions each
    table    i32[R_data, G, P]: the pages of each row of the step, in the order of its positions, for each
             group of layers: layers that see every position, and layers with a window, which may have fewer

A row is some consecutive tokens of one sequence. All tokens of a step are written before any is read, so a
row may read pages that another row of the same step has written. Axes that split B make replicas: each has
its own rows, and pages that it numbers from 0 on. If such axes also split heads (`cache=batch`), they
exchange heads for sequences: one AllToAll brings a device the queries of its own sequences for all the heads
that read its keys, and another returns the results. Axes that split S have a part of the positions of every
page: each device attends to its own positions with the queries of all devices that share the pages, and the
softmaxes are joined by their log-sum-exps (as in flash-decoding; Dao et al., 2023).

On a CPU attention goes page by page through each row's own pages: nothing is gathered, and the cost of a row
is linear in its sequence (16 rows of 300 positions, six layers of 12 heads of 64, jax 0.10.2 on two shared
cores: 44 ms; with gathered tables of 512 positions 208 ms; with dense caches of 512 positions 42 ms). GPUs
and TPUs have kernels (paged_kernel.py). The TPU's reads pools with key and value of a head side by side:

    pool     kv[B_data, S, 2K_tensor, H]

Other pools of TPUs have several positions in a row, if their heads are narrower than a tile
(packed_pages.py). Other devices, and rows of several queries on GPUs, gather pages by the tables. A row of
one query gathers the pages of its window. Rows of several queries gather TOGETHER pages at a time, up to the
last page that a row of the step sees. Positions of a page beyond its sequence are never seen: they are
padding, or keys of an earlier sequence.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard
from jax.typing import DTypeLike

from meshwright.dtypes import number_type
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import why_no_paged
from meshwright.layout.page_sizes import KEYS_AT_ONCE, SIDE_BY_SIDE, TOGETHER, pages_read
from meshwright.models.config import Indexer, ModelConfig, Window
from meshwright.models.count import cache_windows, caches, pool_arrays
from meshwright.models.parameters import dimensions
from meshwright.models.transformer import at_most
from meshwright.native import kernels
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention import paged_kernel
from meshwright.nn.attention.by_formula import HIDDEN, ScoreForm
from meshwright.nn.attention.packed_pages import Packed, positions_together
from meshwright.nn.attention.paged_selection import (
    attend_to_blocks,
    attend_to_chosen,
    attend_to_entries,
    best_of_tables,
    best_positions,
)
from meshwright.nn.norms import softcap
from meshwright.nn.products.quantised import Quantised, quantise, type_name
from meshwright.nn.products.row_products import in_tiles
from meshwright.nn.start.device_mesh import array_type, partition_spec, platform
from meshwright.notation.array import Axes, ShardedArray
from meshwright.platforms import Platform, platform_of

if TYPE_CHECKING:
    from meshwright.nn.mixers.prompt_states import PromptStates
    from meshwright.nn.mixers.state_cache import StateCache

# Quantised if the type needs a scale for each token and head; Packed if heads are narrower than tiles.
Pool = Array | Quantised | Packed
_BITS = jnp.dtype(jnp.uint16)  # of a pool that stores bfloat16 as its bits
Pools = dict[str, list[Pool]]
PADDING = -1  # the position of a token that is padding
_SIDE_BY_SIDE = "kv"  # the pools of the TPU's kernel
INDEX = "index"  # the pools of an indexer's keys
ENTRIES = "entries"  # the pools of compressed keys
# KEYS_AT_ONCE of CPUs, for chosen latents: few enough to stay in the caches of cores.
_CPU_KEYS_AT_ONCE = 1 << 14


class Rows(NamedTuple):
    """`num_rows` consecutive rows of a replica's step, each of `length` tokens, the last may be padding.

    verifies: all tokens after the first are drafts.
    """

    num_rows: int
    length: int
    verifies: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.length


@dataclass(frozen=True)
class PagedCache:
    """The pools of all layers, and the places of this step's tokens in them.

    positions i32[N]: of each token in its sequence, PADDING for padding; split as the pools' pages are.
    tables i32[R, G, P]: a row for each of a replica's `rows`, in order, replica by replica. groups: for each
    cache, its group of page tables. is_fresh: the rows are whole prompts, each from position 0 on, so that
    attention needs no page. stands: (queries, positions) of every sequence, if they are known: its rows are
    the last `queries` of its `positions`. An audit counts by it. with_native: kernels.py is available, and
    attends if it supports the pools; with_kernel: the same of the accelerator's kernel. batch_invariant: a
    query's result depends only on its own position and pages. sharing: axes that split pages over replicas
    that share the step's tokens; each replica has only the positions of its own sequences, PADDING for all
    others.
    """

    pools: Pools
    positions: Array
    tables: Array
    rows: tuple[Rows, ...]
    layout: Layout
    groups: tuple[int, ...]
    is_fresh: bool = False
    stands: tuple[int, int] | None = None
    with_native: bool = False
    with_kernel: bool = False
    batch_invariant: bool = False
    sharing: Axes = ()
    states: "StateCache | PromptStates | None" = None

    @property
    def of_states(self) -> "StateCache | PromptStates":
        assert self.states is not None, "a model whose mixers have states has a cache of them"
        return self.states

    def by_row(self, x: Array) -> Array:
        """x[N, ...] as [R, Q, ...], for rows of one length."""
        [rows] = self.rows
        first, *rest = jax.typeof(x).sharding.spec.partitions
        shape = (x.shape[0] // rows.length, rows.length, *x.shape[1:])
        return jnp.reshape(x, shape, out_sharding=PartitionSpec(first, None, *rest))

    def written(self, number: int, new: Mapping[str, Array], every: int = 1) -> "PagedCache":
        """The cache with the tokens' new[N, ...] in the pools of cache `number`.

        every: positions of an entry of compressed keys, which is written at its last position. Its page is
        one of the whole context.
        """
        pools = {name: list(layers) for name, layers in self.pools.items()}
        tables = self.tables[:, self.groups[number] if every == 1 else 0]
        if _SIDE_BY_SIDE in pools:
            new = {_SIDE_BY_SIDE: paged_kernel.side_by_side(new["k"], new["v"])}
        for name, x in new.items():
            pool = pools[name][number]
            letters = _letters(name, _values(pool).ndim)
            spec, of_size = partition_spec(self.layout.activation(name, letters)), letters.index("S")
            stored = _spec_of(pool, spec)
            apart = tuple(axis for axis in _axes(spec[0]) if axis not in self.sharing)
            rows = PartitionSpec(apart or None, *spec[1:of_size], *spec[of_size + 1 :])
            places = PartitionSpec(spec[0]), PartitionSpec(spec[0], None)
            write = partial(self._write, letters, _axes(spec[of_size]), every)
            local = jax.shard_map(write, in_specs=(stored, rows, *places), out_specs=stored, check_vma=False)
            pools[name][number] = local(pool, reshard(x, rows), self.positions, tables)
        return replace(self, pools=pools)

    def _write(
        self, letters: str, split: Axes, every: int, pool: Any, x: Array, positions: Array, tables: Array
    ) -> Any:
        """A device's pool, of positions split over `split`, with its tokens' x."""
        of_size = letters.index("S")
        num_pages, size = _values(pool).shape[0], _page_size(pool, of_size)
        if every > 1:
            positions = jnp.where((positions + 1) % every == 0, positions // every, PADDING)
        pages, places = self._places(positions, tables, num_pages, size * _count(split))
        places = places - size * _number(split)
        places = jnp.where((places >= 0) & (places < size), places, size)
        if isinstance(pool, Packed):
            return pool.written(pages, places, x)
        at = (pages, *(slice(None),) * (of_size - 1), places)
        return jax.tree.map(partial(_set, at), pool, _as_stored(x, pool))

    def _places(self, positions: Array, tables: Array, num_pages: int, size: int) -> tuple[Array, Array]:
        """The page of every token of a replica, and the place in it; padding gets a page out of range."""
        row_of_token = [row for rows, first in self._numbered() for row in _repeated(rows, first)]
        page = jnp.maximum(positions, 0) // size
        pages = tables[jnp.asarray(row_of_token, jnp.int32), page]
        return jnp.where(positions >= 0, pages, num_pages), positions % size

    def _numbered(self) -> list[tuple[Rows, int]]:
        """The rows with the number of their first."""
        starts = [sum(before.num_rows for before in self.rows[:i]) for i in range(len(self.rows))]
        return list(zip(self.rows, starts, strict=True))

    def choose(self, number: int, q: Array, weights: Array | None, indexer: Indexer, every: int = 1) -> Array:
        """i32[N, k]: the positions that an indexer chooses for each token, none later than its own.

        q[N, x, y], weights[N, x]: the queries and weights of the indexer's heads. If it chooses blocks,
        i32[N, K, k] by q[N, K, y] without weights: the numbers of blocks for each KV head.
        every: positions of a compressed key; if several, the numbers of keys are returned, not positions.
        """
        pool = self.pools[INDEX][number]
        of_pool = partition_spec(self.layout.activation(INDEX, _letters(INDEX, 3)))
        by_replica, heads = of_pool[0], _kv_heads(self.layout) if indexer.block else None

        def local(q: Array, weights: Array | None, positions: Array, tables: Array, pool: Pool) -> Array:
            parts, token, size = [], 0, _page_size(pool)
            if every > 1:
                positions = (positions + 1) // every - 1

            def read(pages: Array) -> Array:
                keys = _read(pages, pool)
                return jnp.reshape(keys, (*pages.shape[:-1], -1, keys.shape[-1]))

            for rows, first in self._numbered():
                mine = slice(token, token + rows.num_tokens)
                token = mine.stop
                of_q, of_weights, at = (
                    None if x is None else jnp.reshape(x[mine], (rows.num_rows, rows.length, *x.shape[1:]))
                    for x in (q, weights, positions)
                )
                assert of_q is not None and at is not None, "queries have positions"
                of_rows = tables[first : first + rows.num_rows]
                if rows.length == 1 and not platform().page_by_page:
                    of_weights = None if of_weights is None else of_weights[:, 0]
                    best = best_of_tables(of_q[:, 0], of_weights, at[:, 0], of_rows, read, indexer)
                else:
                    best = best_positions(
                        of_q, of_weights, at, of_rows, read, size, indexer, self.stands, every
                    )
                of_token = best.shape[-2:] if indexer.block else best.shape[-1:]
                parts.append(jnp.reshape(best, (rows.num_tokens, *of_token)))
            return jnp.concatenate(parts)

        of_q = PartitionSpec(by_replica, heads, None)
        of_weights = None if weights is None else PartitionSpec(by_replica, None)
        places = PartitionSpec(by_replica), PartitionSpec(by_replica, None)
        in_specs = of_q, of_weights, *places, _spec_of(pool, of_pool)
        of_out = PartitionSpec(by_replica, *((heads,) if indexer.block else ()), None)
        run = jax.shard_map(local, in_specs=in_specs, out_specs=of_out, check_vma=False)
        q = reshard(q, of_q)
        weights = None if weights is None else reshard(weights, of_weights)
        tables = self.tables[:, self.groups[number] if every == 1 else 0]
        return run(q, weights, self.positions, tables, pool)

    def attend_with_entries(
        self,
        number: int,
        q: Array,
        window: Window,
        how: ScoreForm,
        sinks: Array | None,
        chosen: Array | None = None,
    ) -> Array:
        """out f32[N, heads, H] of q[N, heads, H] over the keys in `window` and compressed entries.

        chosen: i32[N, k], the numbers of the entries that are read; None: all that end by the token.
        """
        pools = self.pools["k"][number], self.pools[ENTRIES][number]
        heads = partition_spec(self.layout.activation("q", "BTNH"))
        of_keys = partition_spec(self.layout.activation("k", "BKSH"))
        of_entries = partition_spec(self.layout.activation(ENTRIES, "BSH"))
        of_pools = _spec_of(pools[0], of_keys), _spec_of(pools[1], of_entries)
        by_replica = of_keys[0]
        at_once = _CPU_KEYS_AT_ONCE if platform().page_by_page else KEYS_AT_ONCE

        def local(
            q: Array, positions: Array, near: Array, far: Array, sinks: Any, chosen: Any, *pools: Pool
        ) -> Array:
            row_of_token = [row for rows, first in self._numbered() for row in _repeated(rows, first)]
            of_token = jnp.asarray(row_of_token, jnp.int32)
            keys, entries = pools
            size, num_entries = _page_size(keys), _page_size(entries)

            def read_keys(table: Array, at: Array) -> Array:
                page = table[at // size]
                return _read((page, jnp.zeros_like(page), at % size), keys)

            def read_entries(table: Array, at: Array) -> Array:
                return _read((table[at // num_entries], at % num_entries), entries)

            return attend_to_entries(
                q,
                chosen,
                positions,
                (near[of_token], far[of_token]),
                (read_keys, read_entries),
                sinks,
                window,
                1.0 if how.scale is None else how.scale,
                far.shape[1] * num_entries,
                at_once,
            )

        rows = PartitionSpec(by_replica, None)
        of_q = PartitionSpec(by_replica, heads[2], None)
        of_sinks, of_chosen = (
            None if sinks is None else PartitionSpec(heads[2]),
            None if chosen is None else rows,
        )
        in_specs = of_q, PartitionSpec(by_replica), rows, rows, of_sinks, of_chosen, *of_pools
        run = jax.shard_map(local, in_specs=in_specs, out_specs=of_q, check_vma=False)
        sinks = None if sinks is None else reshard(sinks.astype(jnp.float32), PartitionSpec(heads[2]))
        near, far = self.tables[:, self.groups[number]], self.tables[:, 0]
        return run(reshard(q, of_q), self.positions, near, far, sinks, chosen, *pools)

    def attend(
        self,
        number: int,
        q: Array,
        window: Window | None,
        how: ScoreForm,
        sinks: Array | None,
        chosen: Array | None = None,
    ) -> Array:
        """out f32[N, heads, O] of q[N, heads, H] over the pages of each token's sequence.

        A token sees the positions up to its own, within `window`. sinks[heads]: an additional logit, which
        takes weight from all keys. chosen: the result of `choose`, the only positions that are read.
        """
        names = [name for name in self.pools if name not in (INDEX, ENTRIES)]
        names *= 2 if names == ["k"] else 1  # values are keys
        pools = [self.pools[name][number] for name in names]
        heads = partition_spec(self.layout.activation("q", "BTNH"))
        letters = [_letters(name, _values(pool).ndim) for name, pool in zip(names, pools, strict=True)]
        of_values = [
            partition_spec(self.layout.activation(name, array))
            for name, array in zip(names, letters, strict=True)
        ]
        of_pools = [_spec_of(pool, spec) for pool, spec in zip(pools, of_values, strict=True)]
        split, by_replica = _axes(of_values[0][letters[0].index("S")]), of_values[0][0]
        sequences = tuple(axis for axis in _axes(by_replica) if axis not in _axes(heads[0]))
        over = tuple(axis for axis in _axes(heads[2]) if axis not in (*split, *sequences)) or None
        of_q, of_heads = PartitionSpec(by_replica, over, None), PartitionSpec(over)
        slopes = None if how.slopes is None else jnp.asarray(how.slopes, jnp.float32)
        is_native = self.with_native and not split and sinks is None and slopes is None
        is_native = is_native and kernels.attends(pools)
        kernel, several = self._forms(names, is_native=is_native)
        # If each query has to be a row by itself; the native kernel computes each by itself anyway.
        is_alone = self.batch_invariant and not is_native

        def local(
            q: Array, positions: Array, tables: Array, sinks: Any, slopes: Any, chosen: Any, *pools: Pool
        ) -> Array:
            outs, token = [], 0
            if chosen is not None:
                return self._sparse(q, positions, tables, chosen, pools, how)
            for rows, first in self._numbered():
                mine = slice(token, token + rows.num_tokens)
                token = mine.stop
                tables_local, length = tables[first : first + rows.num_rows], rows.length
                if is_alone:
                    tables_local, length = jnp.repeat(tables_local, length, axis=0), 1
                asked = _Asked(
                    jnp.reshape(q[mine], (-1, length, *q.shape[1:])),
                    jnp.reshape(positions[mine], (-1, length)),
                    tables_local,
                )
                run = kernel if length == 1 or kernel is _ragged else several
                attended = run(asked, pools, window, how, sinks, slopes, split)
                outs.append(
                    jax.tree.map(lambda x, n=rows.num_tokens: jnp.reshape(x, (n, *x.shape[2:])), attended)
                )
            out = _weighed(jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs), split)
            if not split:
                return out
            with jax.named_scope("from_attention"):
                return lax.psum_scatter(out, split, scatter_dimension=1, tiled=True)

        specs = (of_q, PartitionSpec(by_replica), PartitionSpec(by_replica, None))
        optional = tuple(None if x is None else of_heads for x in (sinks, slopes))
        of_kv = (_kv_heads(self.layout),) if how.block else ()
        of_chosen = None if chosen is None else PartitionSpec(by_replica, *of_kv, None)
        in_specs = (*specs, *optional, of_chosen, *of_pools)
        of_out = PartitionSpec(by_replica, over if sequences else heads[2], None)
        attend = jax.shard_map(local, in_specs=in_specs, out_specs=of_out, check_vma=False)
        if sinks is not None:
            sinks = reshard(sinks.astype(jnp.float32), of_heads)
        if slopes is not None:
            slopes = reshard(slopes, of_heads)
        with jax.named_scope("to_attention"):
            q = _exchanged(q, of_q, sequences)
        tables = self.tables[:, self.groups[number]]
        out = attend(q, self.positions, tables, sinks, slopes, chosen, *pools)
        if not sequences:
            return out
        with jax.named_scope("from_attention"):
            return _exchanged(out.astype(q.dtype), PartitionSpec(heads[0], heads[2], None), sequences)

    def _forms(self, names: Sequence[str], *, is_native: bool) -> tuple[Any, Any]:
        """The functions of attention for rows of one query, and for rows of several. names: of the pools."""
        if is_native:
            form = _natively
        elif platform().page_by_page:
            form = partial(_page_by_page, stands=self.stands)
        else:
            form = _gathered_in_tiles if self.batch_invariant else _gathered
        several = _in_blocks if form is _gathered else form
        if not self.with_kernel:
            return form, several
        return _ragged if names == [_SIDE_BY_SIDE] else partial(_decoded, self.batch_invariant), several

    def _sparse(
        self,
        q: Array,
        positions: Array,
        tables: Array,
        chosen: Array,
        pools: Sequence[Pool],
        how: ScoreForm,
    ) -> Array:
        """A device's tokens over the latents at their chosen positions, or over their chosen blocks."""
        row_of_token = [row for rows, first in self._numbered() for row in _repeated(rows, first)]
        of_token = tables[jnp.asarray(row_of_token, jnp.int32)]
        size = _page_size(pools[0])

        def read(at: Any) -> tuple[Array, Array]:
            first, second = (_read(at, pool) for pool in pools)
            return first, second

        scale = 1.0 if how.scale is None else how.scale
        at_once = _CPU_KEYS_AT_ONCE if platform().page_by_page else KEYS_AT_ONCE
        if how.block:
            by_group = jnp.reshape(q, (len(q), chosen.shape[1], -1, q.shape[-1]))
            out = attend_to_blocks(
                by_group, chosen, positions, of_token, read, size, how.block, scale, at_once
            )
            return jnp.reshape(out, (*q.shape[:2], -1))
        return attend_to_chosen(q, chosen, of_token, read, size, scale, at_once)


def _letters(name: str, ndim: int) -> str:
    """The dimensions of a pool; K is 2K if keys and values are side by side."""
    if name == _SIDE_BY_SIDE:
        return "BSKH"
    return "BKSH" if ndim == 4 else "BSH" if name == ENTRIES else "BSR"


def _kv_heads(layout: Layout) -> Any:
    """The axes that split the KV heads of pools."""
    return partition_spec(layout.activation("k", "BKSH"))[1]


def _exchanged(x: Array, spec: PartitionSpec, axes: Axes) -> Array:
    """x[N, heads, ...] as `spec` splits it; `axes` move from one dimension to the other."""
    if not axes:
        return reshard(x, spec)
    given = jax.typeof(x).sharding.spec
    joined, cut = (1, 0) if set(axes) <= set(_axes(given[1])) else (0, 1)

    def local(x: Array) -> Array:
        return lax.all_to_all(x, axes, cut, joined, tiled=True)

    return jax.shard_map(local, in_specs=given, out_specs=spec, check_vma=False)(x)


def _repeated(rows: Rows, first: int) -> list[int]:
    return [first + row for row in range(rows.num_rows) for _ in range(rows.length)]


def page_groups(config: ModelConfig, *, has_windows: bool) -> tuple[int, ...]:
    """The group of page tables of each cache: 1 for a window with tables of its own, otherwise 0."""
    return tuple(int(has_windows and window is not None) for window in cache_windows(config))


def _joins_heads(platform: Platform, config: ModelConfig, layout: Layout) -> bool:
    """Whether pools store a head's key next to its value, as the platform's kernel reads them."""
    joins = platform.paged is not None and platform.paged.joined_heads
    return joins and why_no_paged(platform, config, layout) is None


def abstract_pools(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    num_pages: Sequence[int],
    page_size: int,
    num_whole: int = 0,
) -> dict[str, list[Any]]:
    """The types of all layers' pools. num_pages: of each cache; num_whole: pages for its compressed keys.

    None in place of the index or entries of a layer that has none of its own. A page has an entry for each
    `config.compressed` of its positions.
    """
    platform, lanes = platform_of(mesh), platform_of(mesh).lanes
    variants = [config.at(cache.variant) for cache in caches(config)]
    dims = {letter: size for one in (*variants, config) for letter, size in dimensions(one).items()}
    of_caches = [pool_arrays(one) for one in variants]
    arrays = {name: order for of_cache in of_caches for name, order in of_cache.items()}
    letters = {name: "BKSH" if "K" in order else order for name, order in arrays.items()}
    if _joins_heads(platform, config, layout):
        letters, dims = {_SIDE_BY_SIDE: _letters(_SIDE_BY_SIDE, 4)}, {**dims, "K": 2 * dims["K"]}

    def pool(array: ShardedArray, count: int, page_size: int) -> Any:
        sizes = {**dims, "B": count, "S": page_size}
        dtype = jax_dtype(layout.precision.cache_dtype)
        if number_type(layout.precision.cache_dtype).scales is None:
            if platform.cache_as_bits and dtype == jnp.bfloat16:
                dtype = _BITS
            width, of_device = dims[array.dims[-1]], page_size // layout.mesh.size(array.axes_of("S"))
            together = positions_together(lanes, width, of_device)
            if together == 1:
                return array_type(array, mesh, sizes, dtype)
            sizes |= {"S": page_size // together, array.dims[-1]: lanes}
            return Packed(array_type(array, mesh, sizes, dtype), width)
        scales = ShardedArray(array.name, array.dims[:-1], array.axes[:-1])
        return Quantised(array_type(array, mesh, sizes, dtype), array_type(scales, mesh, sizes, jnp.float32))

    def of_layer(name: str, order: str, count: int, variant: ModelConfig, arrays: Mapping[str, str]) -> Any:
        if name in (INDEX, ENTRIES) and name not in arrays:
            return None
        if variant.compressed and name in (INDEX, ENTRIES):
            return pool(layout.activation(name, order), num_whole, page_size // variant.compressed)
        return pool(layout.activation(name, order), count, page_size)

    return {
        name: [of_layer(name, order, *each) for each in zip(num_pages, variants, of_caches, strict=True)]
        for name, order in letters.items()
    }


def _values(pool: Pool) -> Array:
    if isinstance(pool, Packed):
        return pool.rows
    return pool.values if isinstance(pool, Quantised) else pool


def _page_size(pool: Pool, of_size: int = -2) -> int:
    """Positions of a page on a device. of_size: the dimension of positions."""
    return pool.page_size if isinstance(pool, Packed) else _values(pool).shape[of_size]


def _spec_of(pool: Pool, values: PartitionSpec) -> Any:
    """The sharding of a pool: scales are split as values, without the last dimension."""
    if isinstance(pool, Packed):
        return Packed(values, pool.width)
    return Quantised(values, PartitionSpec(*values[:-1])) if isinstance(pool, Quantised) else values


def _as_stored(x: Array, pool: Pool) -> Pool:
    if _values(pool).dtype == _BITS:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), _BITS)
    if not isinstance(pool, Quantised):
        return x
    return quantise(x, type_name(pool.values.dtype), 1, 1)


def _set(at: tuple[Any, ...], pool: Array, x: Array) -> Array:
    return pool.at[at].set(x.astype(pool.dtype), mode="drop")


def _read(at: Any, pool: Pool) -> Array:
    """The pages `at`, or the positions at (pages, places in them)."""
    if isinstance(pool, Packed):
        return pool.position(*at) if isinstance(at, tuple) else pool.page(at)
    if not isinstance(pool, Quantised):
        return lax.bitcast_convert_type(pool[at], jnp.bfloat16) if pool.dtype == _BITS else pool[at]
    return pool.values[at].astype(jnp.float32) * pool.scales[at][..., None]


_Running = tuple[Array, Array, Array]  # state of a running softmax: maximum, sum and output


class _Found(NamedTuple):
    """out[R, Q, N, O], and if devices share positions the log-sum-exp of each query's scores [R, Q, N]."""

    out: Array
    log_sum: Any


class _Asked(NamedTuple):
    """The queries of some rows: q[R, Q, N, H], their positions i32[R, Q], and their pages i32[R, P]."""

    q: Array
    positions: Array
    tables: Array


def _side_by_side(pages: Sequence[Array], pool: Pool) -> Array:
    """x[K, P * S, H] of some pages, or x[P * S, R] of latents.

    XLA's CPU compiler copies slices and joins them run by run; it gathers number by number, then transposes.
    """
    return jnp.concatenate([_read(page, pool) for page in pages], axis=-2)


def _keys_and_values(pools: Sequence[Pool], read: Callable[[Pool], Array]) -> tuple[Array, Array]:
    """k[..., K, S, H] and v[..., K, S, O] of pages; latents are one head, with values a part of its keys."""
    first, second = map(read, pools)
    if _values(pools[0]).ndim == 4:
        return first, second
    return jnp.concatenate([first, second], axis=-1)[..., None, :, :], first[..., None, :, :]


def _scored(
    scores: Array, queries: Array, keys: Array, window: Window | None, how: ScoreForm, slopes: Array | None
) -> Array:
    """Scores [..., K, G, Q, S], hidden if queries[..., Q] does not see keys[..., S] by position."""
    scores *= 1.0 if how.scale is None else how.scale
    if how.softcap:
        scores = softcap(scores, how.softcap)
    keys, queries = keys[..., None, None, None, :], queries[..., None, None, :, None]
    if slopes is not None:
        per_head = jnp.reshape(slopes, (*scores.shape[-4:-2], 1, 1))
        scores += lax.expand_dims(per_head, range(scores.ndim - 4)) * keys.astype(jnp.float32)
    seen = keys <= queries
    if window is not None:
        seen &= keys >= window.first(queries)
    return jnp.where(seen, scores, HIDDEN)


def _page_by_page(
    asked: _Asked,
    pools: Sequence[Pool],
    window: Window | None,
    how: ScoreForm,
    sinks: Array | None,
    slopes: Array | None,
    split: Axes = (),
    stands: tuple[int, int] | None = None,
) -> _Found:
    """Attention of each row to its pages in turn, by a running softmax; long rows take several at once."""
    num_rows, length, num_heads, _ = asked.q.shape
    page_size, num_kv_heads, width = _page_size(pools[0]), _num_kv_heads(pools), _value_width(pools)
    grouped = num_kv_heads, num_heads // num_kv_heads, length
    no_sink = jnp.full(grouped, HIDDEN, jnp.float32)
    size, first = page_size * _count(split), page_size * _number(split)
    start, total = no_sink, jnp.zeros(grouped, jnp.float32)
    if sinks is not None:  # on one device only: several join their sums
        is_first = _number(split) == 0
        start = jnp.where(is_first, no_sink * 0 + jnp.reshape(sinks, (*grouped[:2], 1)), no_sink)
        total = jnp.where(is_first, jnp.ones_like(total), total)

    def one_row(row: Array, attended: _Found) -> _Found:
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
            scores = _scored(scores, positions, keys, window, how, slopes)
            higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
            weights, kept = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
            more = jnp.einsum("KGQS,KSO->KGQO", weights, v)
            return higher, total * kept + jnp.sum(weights, axis=-1), out * kept[..., None] + more

        begin = 0 if window is None else jnp.maximum(window.first(positions[0]), 0) // size
        end, num_pages = (last + size) // size, table.shape[0]
        page_counts = pages_read(*stands, length, size, window) if stands else (num_pages,)
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
            return _Found(outs, None)
        log_sum = jnp.reshape(peak + jnp.log(sums), (num_heads, length)).T
        return _Found(outs, lax.dynamic_update_index_in_dim(attended.log_sum, log_sum, row, 0))

    outs = jnp.zeros((num_rows, length, num_heads, width), jnp.float32)
    return lax.fori_loop(0, num_rows, one_row, _Found(outs, outs[..., 0] if split else None))


def _natively(
    asked: _Asked, pools: Sequence[Pool], window: Window | None, how: ScoreForm, *_: Array | Axes | None
) -> _Found:
    """The queries over the pages of each row, by the kernel for CPUs."""
    out = kernels.attention(
        asked.q.astype(jnp.float32),
        asked.positions,
        asked.tables,
        pools,
        scale=1.0 if how.scale is None else how.scale,
        softcap=how.softcap or 0.0,
        window=window.size if window else 0,
        chunked=bool(window and window.chunked),
    )
    return _Found(out, None)


def _ragged(
    asked: _Asked, pools: Sequence[Pool], window: Window | None, how: ScoreForm, *_: Array | Axes | None
) -> _Found:
    """The queries over the pages of each row, by the TPU's kernel."""
    [pool] = map(_values, pools)
    return _Found(paged_kernel.ragged(*asked, pool, window, how), None)


def _decoded(
    batch_invariant: bool,
    asked: _Asked,
    pools: Sequence[Pool],
    window: Window | None,
    how: ScoreForm,
    *_: Array | Axes | None,
) -> _Found:
    """One query a row over its pages, by the GPU's kernel."""
    values, scales = [_values(pool) for pool in pools], None
    if isinstance(pools[0], Quantised):
        scales = [pool.scales for pool in pools if isinstance(pool, Quantised)]
    out = paged_kernel.decoded(*asked, values, scales, how, batch_invariant=batch_invariant)
    return _Found(out, None)


def _gathered(
    asked: _Asked,
    pools: Sequence[Pool],
    window: Window | None,
    how: ScoreForm,
    sinks: Array | None,
    slopes: Array | None,
    split: Axes = (),
) -> _Found:
    """Attention over each row's gathered pages; with a window, only over the pages that the row sees."""
    num_rows, length, num_heads, _ = asked.q.shape
    page_size, num_kv_heads = _page_size(pools[0]), _num_kv_heads(pools)
    size = page_size * _count(split)
    tables, first = _of_window(asked, window, size)
    together = _positions_together(pools)
    pages = first[:, None] + jnp.arange(tables.shape[1], dtype=jnp.int32)[None]
    begins = pages * size + page_size * _number(split)
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
    scores = _scored(scores, asked.positions, keys, window, how, slopes)
    if sinks is not None:
        sinks = jnp.where(_number(split) == 0, sinks, HIDDEN)  # on one device only: several join their sums
        sink = jnp.broadcast_to(jnp.reshape(sinks, (1, *grouped[2:4], 1, 1)), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : keys.shape[1]].astype(asked.q.dtype)
    outs = (
        jnp.einsum("RKGQS,RKSO->RQKGO", some, part.values, preferred_element_type=jnp.float32)
        for some, part in zip(jnp.split(weights, together, axis=-1), parts, strict=True)
    )
    out = jnp.reshape(reduce(operator.add, outs), (num_rows, length, num_heads, -1))
    if not split:
        return _Found(out, None)
    log_sum = jnp.moveaxis(jax.nn.logsumexp(scores, axis=-1), 3, 1)
    return _Found(out, jnp.reshape(log_sum, out.shape[:3]))


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

    if _values(pools[0]).ndim == 4:
        keys, values = (_by_parts(pool, tables, len(seen), dtype) for pool in pools)
        return [_Part((k,), visible(v, mask)) for k, v, mask in zip(keys, values, seen, strict=True)]
    [mask] = seen
    latent, rope = (_joined(_read(tables, pool)[..., None, :, :]).astype(dtype) for pool in pools)
    values = visible(latent, mask)
    # Scores of hidden positions are masked anyway, so their keys may have any values. Both products read the
    # same array: the latents if the compiler fuses the mask into a product, otherwise the masked latents.
    return [_Part((latent if platform().fuses_casts else values, rope), values)]


def _by_parts(pool: Pool, tables: Array, count: int, dtype: DTypeLike) -> list[Array]:
    """x[R, K, S, H] of each of `count` parts of a pool's pages."""
    if isinstance(pool, Packed) and count > 1:
        return [_joined(part).astype(dtype) for part in pool.parts(tables)]
    return [_joined(_read(tables, pool)).astype(dtype)]


def _products(q: Array, keys: tuple[Array, ...]) -> Array:
    """Scores [R, K, G, Q, S] of q[R, Q, K, G, H] by keys that have some of its columns each."""
    ends = list(accumulate(part.shape[-1] for part in keys))
    columns = jnp.split(q, ends[:-1], axis=-1)
    products = (
        jnp.einsum("RQKGH,RKSH->RKGQS", some, part, preferred_element_type=jnp.float32)
        for some, part in zip(columns, keys, strict=True)
    )
    return reduce(operator.add, products)


def _value_width(pools: Sequence[Pool]) -> int:
    """Columns of a value; those of latents are the latents."""
    pool = pools[1] if _values(pools[0]).ndim == 4 else pools[0]
    return pool.width if isinstance(pool, Packed) else _values(pool).shape[-1]


def _num_kv_heads(pools: Sequence[Pool]) -> int:
    """KV heads on a device; latents are one."""
    values = _values(pools[0])
    return values.shape[1] if values.ndim == 4 else 1


def _positions_together(pools: Sequence[Pool]) -> int:
    """Positions in a row, if keys and values have the same number; 1 otherwise, and for latents."""
    if _values(pools[0]).ndim < 4:
        return 1
    counts = {pool.num_together if isinstance(pool, Packed) else 1 for pool in pools}
    return counts.pop() if len(counts) == 1 else 1


def _of_window(asked: _Asked, window: Window | None, size: int) -> tuple[Array, Array]:
    """The pages i32[R, P] that each row may see, and the index in its table of the first, i32[R] or i32[1].

    size: positions of a page, summed over the devices that share it.
    """
    width, length = asked.tables.shape[1], asked.q.shape[1]
    most = width if window is None else (window.size + length + size - 3) // size + 1
    if window is None or most >= width:
        return asked.tables, jnp.zeros(1, jnp.int32)
    first = jnp.maximum(window.first(asked.positions[:, 0]), 0) // size
    # Pages after the table's last begin after the query, which does not see them.
    places = jnp.minimum(first[:, None] + jnp.arange(most, dtype=jnp.int32)[None], width - 1)
    return jnp.take_along_axis(asked.tables, places, axis=1), first


def _in_blocks(
    asked: _Asked,
    pools: Sequence[Pool],
    window: Window | None,
    how: ScoreForm,
    sinks: Array | None,
    slopes: Array | None,
    split: Axes = (),
) -> _Found:
    """`_gathered`, TOGETHER pages of all rows at a time, with a running softmax.

    A chunk early in a long table thus reads no later page.
    """
    num_rows, length, num_heads, _ = asked.q.shape
    page_size, num_kv_heads, width = _page_size(pools[0]), _num_kv_heads(pools), _value_width(pools)
    grouped = num_rows, num_kv_heads, num_heads // num_kv_heads, length
    q = jnp.reshape(asked.q, (num_rows, length, *grouped[1:3], -1))
    count = min(TOGETHER, asked.tables.shape[1])
    tables = jnp.pad(asked.tables, ((0, 0), (0, -asked.tables.shape[1] % count)))
    size = page_size * _count(split)
    last = jnp.max(asked.positions, axis=1)

    def one_block(number: Array, running: _Running) -> _Running:
        peak, total, out = running
        pages = lax.dynamic_slice_in_dim(tables, number * count, count, axis=1)
        k, v = (_joined(x).astype(q.dtype) for x in _keys_and_values(pools, partial(_read, pages)))
        begins = (number * count + jnp.arange(count, dtype=jnp.int32))[:, None] * size
        first = page_size * _number(split)
        keys = jnp.reshape(begins + first + jnp.arange(page_size, dtype=jnp.int32)[None], (1, -1))
        # Later positions may be of a sequence that failed, and NaN times zero is NaN.
        v = jnp.where((keys <= last[:, None])[:, None, :, None], v, jnp.zeros((), v.dtype))
        scores = jnp.einsum("RQKGH,RKSH->RKGQS", q, k, preferred_element_type=jnp.float32)
        scores = _scored(scores, asked.positions, keys, window, how, slopes)
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
        is_first = _number(split) == 0
        peak = jnp.where(is_first, peak * 0 + jnp.reshape(sinks, (1, *grouped[1:3], 1)), peak)
        total = jnp.where(is_first, jnp.ones_like(total), total)
    running = peak, total, jnp.zeros((*grouped, width), jnp.float32)
    with jax.named_scope(at_most(tables.shape[1] // count)):
        peak, total, out = lax.fori_loop(begin, end, one_block, running)
    total = jnp.maximum(total, 1e-30)
    out = jnp.reshape(jnp.moveaxis(out / total[..., None], 3, 1), (num_rows, length, num_heads, width))
    if not split:
        return _Found(out, None)
    return _Found(out, jnp.reshape(jnp.moveaxis(peak + jnp.log(total), 3, 1), out.shape[:3]))


def _gathered_in_tiles(asked: _Asked, *how: Any) -> _Found:
    """`_gathered` in tiles of equally many rows, so that results do not depend on the number of rows."""
    return in_tiles(lambda some: _gathered(some, *how), asked)


def _weighed(attended: _Found, split: Axes) -> Array:
    """out[N, heads, O] of one device's positions as its part of the sum over all."""
    if not split:
        return attended.out
    peak = lax.pmax(attended.log_sum, split)
    weight = jnp.exp(attended.log_sum - peak)
    return attended.out * (weight / lax.psum(weight, split))[..., None]


def _axes(part: Any) -> Axes:
    """An entry of a PartitionSpec as the axes that it names."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def _count(split: Axes) -> int:
    return lax.axis_size(split) if split else 1


def _number(split: Axes) -> Any:
    """The index of this device along the axes that share positions."""
    return lax.axis_index(split) if split else 0


def _joined(pages: Array) -> Array:
    """[R, K, P * S, H] of a row's pages [R, P, K, S, H]."""
    rows, count, heads, size, width = pages.shape
    return jnp.reshape(jnp.moveaxis(pages, 1, 2), (rows, heads, count * size, width))

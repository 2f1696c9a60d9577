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

`over_pages` has the attention of a device's queries, `pools` how pages are stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.page_sizes import KEYS_AT_ONCE
from meshwright.models.config_tables import Indexer
from meshwright.models.layer_kinds import Window
from meshwright.native import kernels
from meshwright.nn.attention import paged_kernel
from meshwright.nn.attention.by_formula import ScoreForm
from meshwright.nn.attention.over_pages import (
    Asked,
    PagedKeys,
    decoded,
    gathered,
    gathered_in_tiles,
    in_blocks,
    natively,
    num_parts,
    page_by_page,
    part_number,
    ragged,
    weighed,
)
from meshwright.nn.attention.packed_pages import Packed
from meshwright.nn.attention.paged_selection import (
    attend_to_blocks,
    attend_to_chosen,
    attend_to_entries,
    best_of_tables,
    best_positions,
)
from meshwright.nn.attention.pools import (
    ENTRIES,
    INDEX,
    SIDE_BY_SIDE_POOL,
    Pool,
    Pools,
    as_stored,
    letters_of,
    page_size_of,
    read_pool,
    spec_of,
    store,
    values_of,
)
from meshwright.nn.each_device import partitions_of
from meshwright.nn.start.device_mesh import partition_spec, platform
from meshwright.notation.array import Axes

if TYPE_CHECKING:
    from meshwright.nn.mixers.prompt_states import PromptStates
    from meshwright.nn.mixers.state_cache import StateCache

PADDING = -1  # the position of a token that is padding
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

    @property
    def all_pools(self) -> dict[str, Any]:
        """The pools of pages, and those of states if there are any."""
        return self.pools if self.states is None else {**self.pools, **self.states.states}

    def by_row(self, x: Array) -> Array:
        """x[N, ...] as [R, Q, ...], for rows of one length."""
        [rows] = self.rows
        first, *rest = partitions_of(x)
        shape = (x.shape[0] // rows.length, rows.length, *x.shape[1:])
        return jnp.reshape(x, shape, out_sharding=PartitionSpec(first, None, *rest))

    def written(self, number: int, new: Mapping[str, Array], every: int = 1) -> "PagedCache":
        """The cache with the tokens' new[N, ...] in the pools of cache `number`.

        every: positions of an entry of compressed keys, which is written at its last position. Its page is
        one of the whole context.
        """
        pools = {name: list(layers) for name, layers in self.pools.items()}
        tables = self.tables[:, self.groups[number] if every == 1 else 0]
        if SIDE_BY_SIDE_POOL in pools:
            new = {SIDE_BY_SIDE_POOL: paged_kernel.side_by_side(new["k"], new["v"])}
        for name, x in new.items():
            pool = pools[name][number]
            letters = letters_of(name, values_of(pool).ndim)
            spec, of_size = partition_spec(self.layout.activation(name, letters)), letters.index("S")
            stored = spec_of(pool, spec)
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
        num_pages, size = values_of(pool).shape[0], page_size_of(pool, of_size)
        if every > 1:
            positions = jnp.where((positions + 1) % every == 0, positions // every, PADDING)
        pages, places = self._places(positions, tables, num_pages, size * num_parts(split))
        places = places - size * part_number(split)
        places = jnp.where((places >= 0) & (places < size), places, size)
        if isinstance(pool, Packed):
            return pool.written(pages, places, x)
        at = (pages, *(slice(None),) * (of_size - 1), places)
        return jax.tree.map(partial(store, at), pool, as_stored(x, pool))

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
        of_pool = partition_spec(self.layout.activation(INDEX, letters_of(INDEX, 3)))
        by_replica, heads = of_pool[0], _kv_heads(self.layout) if indexer.block else None

        def local(q: Array, weights: Array | None, positions: Array, tables: Array, pool: Pool) -> Array:
            parts, token, size = [], 0, page_size_of(pool)
            if every > 1:
                positions = (positions + 1) // every - 1

            def read(pages: Array) -> Array:
                keys = read_pool(pages, pool)
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
        in_specs = of_q, of_weights, *places, spec_of(pool, of_pool)
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
        of_pools = spec_of(pools[0], of_keys), spec_of(pools[1], of_entries)
        by_replica = of_keys[0]
        at_once = _CPU_KEYS_AT_ONCE if platform().page_by_page else KEYS_AT_ONCE

        def local(
            q: Array, positions: Array, near: Array, far: Array, sinks: Any, chosen: Any, *pools: Pool
        ) -> Array:
            row_of_token = [row for rows, first in self._numbered() for row in _repeated(rows, first)]
            of_token = jnp.asarray(row_of_token, jnp.int32)
            keys, entries = pools
            size, num_entries = page_size_of(keys), page_size_of(entries)

            def read_keys(table: Array, at: Array) -> Array:
                page = table[at // size]
                return read_pool((page, jnp.zeros_like(page), at % size), keys)

            def read_entries(table: Array, at: Array) -> Array:
                return read_pool((table[at // num_entries], at % num_entries), entries)

            return attend_to_entries(
                q,
                chosen,
                positions,
                (near[of_token], far[of_token]),
                (read_keys, read_entries),
                sinks,
                window,
                how.scale,
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
        letters = [letters_of(name, values_of(pool).ndim) for name, pool in zip(names, pools, strict=True)]
        of_values = [
            partition_spec(self.layout.activation(name, array))
            for name, array in zip(names, letters, strict=True)
        ]
        of_pools = [spec_of(pool, spec) for pool, spec in zip(pools, of_values, strict=True)]
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
            paged = PagedKeys(pools, window, how, sinks, slopes, split, self.stands)
            for rows, first in self._numbered():
                mine = slice(token, token + rows.num_tokens)
                token = mine.stop
                tables_local, length = tables[first : first + rows.num_rows], rows.length
                if is_alone:
                    tables_local, length = jnp.repeat(tables_local, length, axis=0), 1
                asked = Asked(
                    jnp.reshape(q[mine], (-1, length, *q.shape[1:])),
                    jnp.reshape(positions[mine], (-1, length)),
                    tables_local,
                )
                run = kernel if length == 1 or kernel is ragged else several
                attended = run(asked, paged)
                outs.append(
                    jax.tree.map(lambda x, n=rows.num_tokens: jnp.reshape(x, (n, *x.shape[2:])), attended)
                )
            out = weighed(jax.tree.map(lambda *parts: jnp.concatenate(parts), *outs), split)
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
            form = natively
        elif platform().page_by_page:
            form = page_by_page
        else:
            form = gathered_in_tiles if self.batch_invariant else gathered
        several = in_blocks if form is gathered else form
        if not self.with_kernel:
            return form, several
        return ragged if names == [SIDE_BY_SIDE_POOL] else partial(decoded, self.batch_invariant), several

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
        size = page_size_of(pools[0])

        def read(at: Any) -> tuple[Array, Array]:
            first, second = (read_pool(at, pool) for pool in pools)
            return first, second

        at_once = _CPU_KEYS_AT_ONCE if platform().page_by_page else KEYS_AT_ONCE
        if how.block:
            by_group = jnp.reshape(q, (len(q), chosen.shape[1], -1, q.shape[-1]))
            out = attend_to_blocks(
                by_group, chosen, positions, of_token, read, size, how.block, how.scale, at_once
            )
            return jnp.reshape(out, (*q.shape[:2], -1))
        return attend_to_chosen(q, chosen, of_token, read, size, how.scale, at_once)


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


def _axes(part: Any) -> Axes:
    """An entry of a PartitionSpec as the axes that it names."""
    return (part,) if isinstance(part, str) else tuple(part or ())

"""The arrays of a server's cache, and programs that export, import and copy its pages and states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from meshwright.layout import Layout
from meshwright.layout.layout_checks import cached_array, num_replicas
from meshwright.layout.page_sizes import num_state_entries
from meshwright.models.config import ModelConfig
from meshwright.nn.attention.pools import Pools, abstract_pools, page_groups
from meshwright.nn.mixers.state_cache import abstract_states
from meshwright.nn.start.device_mesh import partition_spec


class CacheSizes(NamedTuple):
    """Sizes of a replica's cache: its sequences, pages of `page_size` positions, and states.

    num_window_pages: pages for layers with a window; 0: they use the other pages. num_snapshots,
    num_kept_drafts: see `num_state_entries`, which gives the entries of a replica's states.
    """

    num_slots: int
    num_pages: int
    page_size: int
    num_window_pages: int = 0
    num_snapshots: int = 0
    num_kept_drafts: int = 0


class CacheTypes:
    """The types of a cache's arrays on a mesh: pages, and states without pages.

    num_entries: entries of the states of all replicas. page_axes: mesh axes that split pages. batch_axes:
    mesh axes that split the tokens of a step into num_shards shards; each serves replicas_per_shard replicas.
    """

    def __init__(
        self, config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, sizes: CacheSizes
    ) -> None:
        self._config, self._layout, self.mesh = config, layout, mesh
        self.page_axes = partition_spec(cached_array(layout, config))[0]
        self.batch_axes = partition_spec(layout.activation("x", "BTD"))[0]
        self.num_replicas, self.num_shards = num_replicas(layout, config), layout.num_batch_shards
        self.replicas_per_shard = self.num_replicas // self.num_shards
        self.num_entries = self.num_replicas * num_state_entries(
            sizes.num_slots, sizes.num_snapshots, sizes.num_kept_drafts
        )
        self._num_pages, self._page_size = (sizes.num_pages, sizes.num_window_pages), sizes.page_size
        self.groups = page_groups(config, has_windows=bool(sizes.num_window_pages))
        self.states = abstract_states(config, layout, mesh, self.num_entries)
        self.page_names = tuple(self._pages([0] * len(self.groups), 0))
        self.state_names = tuple(self.states)

    def pools(self) -> Any:
        """The types of the pages of all layers, and of their states."""
        of_caches = [self.num_replicas * self._num_pages[group] for group in self.groups]
        return self._pages(of_caches, self.num_replicas * self._num_pages[0]) | self.states

    def exported(self, num_pages: int) -> Any:
        """The types of `num_pages` exported pages of each replica and one state entry of each shard."""
        return self.exported_pages(num_pages) | self.exported_states()

    def exported_pages(self, num_pages: int) -> Any:
        """The types of `num_pages` exported pages of each replica."""
        count = self.num_replicas * num_pages
        return self._pages([count] * len(self.groups), count)

    def exported_states(self) -> Any:
        """The types of one exported entry of the states of each shard of the batch."""
        return abstract_states(self._config, self._layout, self.mesh, self.num_shards)

    def _pages(self, of_caches: Sequence[int], num_whole: int) -> Any:
        return abstract_pools(self._config, self._layout, self.mesh, of_caches, self._page_size, num_whole)

    def split(self, *shape: int, dtype: DTypeLike = np.int32) -> jax.ShapeDtypeStruct:
        """The type of an array with a part of its first dimension on each shard of the batch."""
        return self.by_axes(self.batch_axes, *shape, dtype=dtype)

    def by_axes(self, axes: Any, *shape: int, dtype: DTypeLike = np.int32) -> jax.ShapeDtypeStruct:
        """The type of an array whose first dimension these mesh axes split."""
        spec = PartitionSpec(axes, *[None] * (len(shape) - 1))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))


class CachePrograms:
    """Programs that copy pages and states of a cache, compiled when they are asked for."""

    def __init__(self, types: CacheTypes) -> None:
        self.types = types

    def export(self, num_pages: int) -> Any:
        """The compiled copy of pages and states: (pools, numbers i32[R num_pages], entries) -> contents.

        num_pages: pages of each of R replicas, in order. Each replica numbers its pages from 0. entries: i32,
        the entry of the states that each shard of the batch copies.
        """

        def copied(pools: Pools, numbers: Array, entries: Array) -> Pools:
            pages = self._by_pool(_copied, self._pages_of(pools), numbers)
            return {**pages, **self._by_state(_copied, pools, entries)}

        return self._compiled(jax.jit(copied), *self._moved(num_pages))

    def accept(self, num_pages: int) -> Any:
        """The compiled write of exported pages and states: (pools, numbers, entries, exported) -> pools.

        numbers, entries: as in `export`; those out of range are not written.
        """

        def pasted(pools: Pools, numbers: Array, entries: Array, exported: Pools) -> Pools:
            pages = self._by_pool(_pasted, self._pages_of(pools), numbers, self._pages_of(exported))
            return {**pages, **self._by_state(_pasted, pools, entries, exported)}

        jitted, exported = jax.jit(pasted, donate_argnums=0), self.types.exported(num_pages)
        return self._compiled(jitted, *self._moved(num_pages), exported)

    def copy_states(self) -> Any:
        """The compiled copy of an entry of the states on each shard of the batch: (pools, from, to) -> pools.

        from, to: i32 numbers, one for each shard.
        """

        def copied(pools: Pools, source: Array, target: Array) -> Pools:
            states = self._by_state(
                lambda state, source, target: state.at[target].set(state[source]), pools, (source, target)
            )
            return {**pools, **states}

        numbers = [self.types.split(self.types.num_shards)] * 2
        return self._compiled(jax.jit(copied, donate_argnums=0), *numbers)

    def _compiled(self, jitted: Any, *arguments: Any) -> Any:
        with jax.set_mesh(self.types.mesh):
            return jitted.lower(self.types.pools(), *arguments).compile()

    def _moved(self, num_pages: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The types of the numbers of pages, and of entries of the states, that a program moves."""
        types = self.types
        return types.by_axes(types.page_axes, types.num_replicas * num_pages), types.split(types.num_shards)

    def _pages_of(self, pools: Pools) -> Pools:
        return {name: pools[name] for name in self.types.page_names}

    def _by_state(self, local: Any, pools: Pools, entries: Any, *more: Pools) -> Pools:
        """The states after `local(state, entries, *others)` on each shard. more: trees that give `others`."""
        numbers = jax.tree.leaves(entries)
        by_shard = [PartitionSpec(self.types.batch_axes)] * len(numbers)

        def of_array(state: Array, *others: Array) -> Array:
            spec = jax.typeof(state).sharding.spec
            in_specs = (spec, *by_shard, *[spec] * len(others))
            mapped = jax.shard_map(local, in_specs=in_specs, out_specs=spec, check_vma=False)
            return mapped(state, *numbers, *others)

        return {
            name: jax.tree.map(of_array, pools[name], *(tree[name] for tree in more))
            for name in self.types.state_names
        }

    def _by_pool(self, local: Any, pools: Pools, numbers: Array, *more: Any) -> Any:
        """The pools after `local(pool, numbers, *others)` on each device. more: trees that give `others`."""

        def of_array(pool: Array, *others: Array) -> Array:
            spec = jax.typeof(pool).sharding.spec
            specs = (spec, PartitionSpec(self.types.page_axes), *[spec] * len(others))
            return jax.shard_map(local, in_specs=specs, out_specs=spec, check_vma=False)(
                pool, numbers, *others
            )

        return jax.tree.map(of_array, pools, *more)


# On one shard of the batch


def _copied(array: Array, numbers: Array) -> Array:
    return array[numbers]


def _pasted(array: Array, numbers: Array, exported: Array) -> Array:
    return array.at[numbers].set(exported, mode="drop")

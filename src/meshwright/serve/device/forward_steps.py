"""The forward passes of steps, before they are compiled: of rows of tokens, and of whole prompts.

A step has N tokens in R rows, G groups of layers and P pages a row. `InferencePrograms.step` says what its
arrays hold.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.layout_checks import cached_array
from meshwright.layout.moves.attention import single_tokens, token_sharding
from meshwright.models import transformer
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.nn.attention.blockwise import dealt_positions, zigzag
from meshwright.nn.attention.paged import PADDING, PagedCache, Rows
from meshwright.nn.attention.pools import Pools
from meshwright.nn.cached_ops import InferenceOps
from meshwright.nn.each_device import partitions_of, spec_of
from meshwright.nn.mixers.prompt_states import PromptStates
from meshwright.nn.mixers.state_cache import StateCache
from meshwright.nn.start.device_mesh import partition_spec, resharded
from meshwright.serve.device.cache_programs import CacheSizes, CacheTypes
from meshwright.serve.engine.batch import PENDING


class StepShape(NamedTuple):
    """The shape of a step on each replica: its rows, and its numbers of logits.

    num_logits: rows of logits after padding. pages_of_row: the width of the tables, which limits the length
    of sequences. is_fresh: the rows are whole prompts and read no page. stands: see PagedCache.
    num_hidden: rows of hidden states after padding, as a further result; 0: no such result. keeps_hidden: the
    hidden states of all tokens after the final norm are the last result.
    """

    rows: tuple[Rows, ...]
    num_heads: int
    num_logits: int
    pages_of_row: int
    is_fresh: bool = False
    stands: tuple[int, int] | None = None
    num_hidden: int = 0
    keeps_hidden: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_rows(self) -> int:
        return sum(row.num_rows for row in self.rows)


@dataclass(frozen=True)
class _Forward:
    """The cache and the states of a step, for both kinds of forward passes.

    layout: of generation. with_kernel: the accelerator's kernel attends over pages, if it supports them.
    """

    config: ModelConfig
    layout: Layout
    cache: CacheTypes
    sizes: CacheSizes
    with_kernel: bool

    def _paged(
        self,
        step: StepShape,
        pools: Pools,
        tables: Array,
        positions: Array,
        states: StateCache | PromptStates | None,
        **how: Any,
    ) -> PagedCache:
        """The cache of a step. positions: split as pages are. how: further fields of PagedCache."""
        pages = {name: pools[name] for name in self.cache.page_names}
        return PagedCache(
            pages,
            positions,
            tables,
            step.rows,
            self.layout,
            self.cache.groups,
            step.is_fresh,
            with_kernel=self.with_kernel,
            states=states,
            **how,
        )

    def _states(self, pools: Pools) -> dict[str, list[Array]]:
        """The pools that hold states; others hold pages."""
        return {name: cast("list[Array]", pools[name]) for name in self.cache.states}


@dataclass(frozen=True)
class TokenSteps(_Forward):
    """Steps of rows of tokens, each token with its own position and slot.

    with_native, batch_invariant: see InferencePrograms.
    """

    ops: InferenceOps
    with_native: bool
    batch_invariant: bool

    def run(
        self,
        step: StepShape,
        params: Mapping[str, Any],
        pools: Pools,
        last: Array,
        tokens: Array,
        positions: Array,
        slots: Array,
        tables: Array,
        heads: Array,
        read: Array | None = None,
    ) -> tuple[Any, ...]:
        """The results of `InferencePrograms.step`. read: the hidden states that a draft head reads."""
        config, ops = self.config, self.ops
        tokens = on_each_shard(_with_last_tokens, tokens, last, slots)
        places = transformer.with_tokens(config, Places(positions[:, None]), tokens[:, None])
        cache = self._paged(
            step,
            pools,
            tables,
            reshard(positions, PartitionSpec(self.cache.page_axes)),
            self._states_of(pools, positions, slots, step),
            stands=step.stands,
            with_native=self.with_native,
            batch_invariant=self.batch_invariant,
        )
        if read is None:
            x = transformer.enter(config, ops, params, tokens[:, None], places)
        else:
            read = read[:, None].astype(ops.dtype)
            x = transformer.enter_draft(config, ops, params, tokens[:, None], read)
        if self.with_native:
            x = on_each_shard(_without_padding, x, positions)
        hidden, cache = transformer.through(config, ops, params, x, places, cache, config.layers)
        with jax.named_scope("take"):
            x = self.rows_taken(hidden, heads)
        logits = transformer.leave(config, ops, params, x)
        num_per_shard = self.cache.replicas_per_shard
        with jax.named_scope("logits"):
            padded = on_each_shard(partial(_padded, step.num_logits, num_per_shard), self.whole(logits))
        results: list[Any] = [padded, cache.all_pools]
        if step.num_hidden:
            num_rows = num_per_shard * step.num_hidden
            results.append(on_each_shard(partial(_with_zero_rows, num_rows), hidden))
        if step.keeps_hidden:
            with jax.named_scope("hidden"):
                results.append(self.whole(transformer.final_norm(config, ops, params, hidden)))
        return tuple(results)

    def _states_of(self, pools: Pools, positions: Array, slots: Array, step: StepShape) -> StateCache | None:
        """The states among `pools`, with the places of the step's tokens; None if the model has none."""
        if not self.cache.states:
            return None
        num_per_shard, sizes = self.cache.replicas_per_shard, self.sizes
        return StateCache(
            self._states(pools),
            positions,
            slots,
            step.rows,
            num_per_shard,
            sizes.num_slots,
            sizes.num_kept_drafts,
        )

    def rows_taken(self, x: Array, rows: Array) -> Array:
        """The rows x[n, 1, D] of each shard of the batch; zeros for padding with native kernels."""
        taken = on_each_shard(_taken, x, rows)
        return on_each_shard(_without_padding, taken, rows) if self.with_native else taken

    def whole(self, x: Array) -> Array:
        """f32[n, V] of x[n, 1, V], whole over V on every device of a replica."""
        return resharded(x, PartitionSpec(self.cache.batch_axes, None, None))[:, 0].astype(jnp.float32)


@dataclass(frozen=True)
class PromptSteps(_Forward):
    """Steps of whole prompts; replicas split the positions of each prompt.

    prefill: the layout of prefill. Each shard has early and late positions, for balance.
    """

    prefill: Layout

    def run(
        self,
        step: StepShape,
        params: Mapping[str, Any],
        pools: Pools,
        last: Array,  # a whole prompt has no token of an earlier step
        tokens: Array,
        positions: Array,
        slots: Array,
        tables: Array,
        heads: Array,
    ) -> tuple[Array, Pools]:
        """Logits and pools, as of `InferencePrograms.step`."""
        [rows], num_shards = step.rows, self.prefill.num_prompt_shards
        length = rows.length
        split = partition_spec(token_sharding(self.prefill, "tokens"))
        shared = PartitionSpec(split[0], None)

        def dealt(x: Array, spec: PartitionSpec) -> Array:
            by_row = PartitionSpec(jax.typeof(x).sharding.spec[0], None)
            return reshard(zigzag(jnp.reshape(x, (-1, length), out_sharding=by_row), num_shards), spec)

        order = jnp.asarray(dealt_positions(length, num_shards))
        places = Places(jnp.broadcast_to(order, (tokens.shape[0] // length, length), out_sharding=shared))
        by_page = PartitionSpec(self.cache.page_axes)
        placed = jnp.reshape(dealt(positions, PartitionSpec(*by_page, None)), -1, out_sharding=by_page)
        by_sequence = cached_array(self.layout, self.config).axes_of("B")
        sharing = tuple(axis for axis in by_sequence if axis not in self.prefill.batch_axes)
        states = self._states_of(pools, positions, slots, places.positions)
        cache = self._paged(step, pools, tables, placed, states, sharing=sharing)
        ops = InferenceOps(self.config, self.prefill)
        x = transformer.enter(self.config, ops, params, dealt(tokens, split), places)
        x, cache = transformer.through(self.config, ops, params, x, places, cache, self.config.layers)
        with jax.named_scope("take"):
            x = _at(heads, x, reshard(places.positions, split))
        head = InferenceOps(self.config, single_tokens(self.prefill))
        logits = transformer.leave(self.config, head, params, x)
        with jax.named_scope("logits"):
            whole = resharded(logits, PartitionSpec(shared[0], None, None))[:, 0].astype(jnp.float32)
            local = partial(_repeated, step.num_logits, self.cache.replicas_per_shard)
            of_each = PartitionSpec(self.cache.batch_axes, None)
            repeated = jax.shard_map(local, in_specs=shared, out_specs=of_each, check_vma=False)
            return repeated(whole), cache.all_pools

    def _states_of(self, pools: Pools, positions: Array, slots: Array, order: Array) -> PromptStates | None:
        """The states among `pools`, with the places of prompts [B, T] in the order of `order`[B, T]."""
        if not self.cache.states:
            return None
        of_rows, of_replicas = (
            jnp.reshape(x, (-1, order.shape[1]), out_sharding=PartitionSpec(spec_of(x).partitions[0], None))
            for x in (slots, positions)
        )
        lengths = jnp.sum(of_rows != self.sizes.num_slots, axis=1)
        # A device keeps its heads' states for all replicas of its shard, so any replica may own a row.
        per_shard, shards = self.cache.replicas_per_shard, self.cache.batch_axes
        is_own = reshard(of_replicas[:, 0] >= 0, PartitionSpec(shards))
        parted = PartitionSpec(shards, None, None)
        is_own = jnp.reshape(is_own, (self.cache.num_shards, per_shard, -1), out_sharding=parted)
        is_own = jnp.reshape(jnp.any(is_own, axis=1), -1, out_sharding=PartitionSpec(shards))
        return PromptStates(self._states(pools), order, lengths, of_rows[:, 0], is_own)


# On each shard of the batch


def on_each_shard(local: Callable[..., Array], *arrays: Array) -> Array:
    """`local` of the part of the arrays on each shard of the batch, with the first's other dimensions."""
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    return jax.shard_map(local, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)


def _with_last_tokens(tokens: Array, last: Array, slots: Array) -> Array:
    """The tokens, with the last token of a slot for PENDING."""
    return jnp.where(tokens == PENDING, last[slots], tokens)


def _without_padding(x: Array, places: Array) -> Array:
    """Zeros in padding rows: most layers keep them zero, and kernels.py skips zero rows."""
    is_padding = jnp.reshape(places == PADDING, (-1, *[1] * (x.ndim - 1)))
    return jnp.where(is_padding, jnp.zeros((), x.dtype), x)


def _with_zero_rows(num_rows: int, x: Array) -> Array:
    """The rows of x, with rows of zeros up to `num_rows`."""
    return jnp.pad(x, ((0, num_rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)))


def _taken(x: Array, heads: Array) -> Array:
    return x[heads]


def _padded(num_rows: int, num_replicas: int, logits: Array) -> Array:
    """The logits of each replica of the shard, with padding up to `num_rows` rows each."""
    of_replicas = jnp.reshape(logits, (num_replicas, -1, logits.shape[-1]))
    missing = num_rows - of_replicas.shape[1]
    return jnp.reshape(jnp.pad(of_replicas, ((0, 0), (0, missing), (0, 0))), (-1, logits.shape[-1]))


def _repeated(num_rows: int, num_replicas: int, logits: Array) -> Array:
    """The logits with padding rows, repeated for each replica that computed them together."""
    padded = jnp.pad(logits, ((0, num_rows - logits.shape[0]), (0, 0)))
    return jnp.tile(padded, (num_replicas, 1))


def _at(heads: Array, x: Array, positions: Array) -> Array:
    """x[R, 1, D]: the rows of x[R, T, D] at positions heads[R], as a sum with zeros of other devices."""
    first, _, last = partitions_of(x)
    mine = (positions == heads[:, None])[:, :, None]
    sample, spec = jnp.where(mine, x, jnp.zeros((), x.dtype)), PartitionSpec(first, last)
    return lax.reduce_sum(sample, (1,), out_sharding=spec)[:, None]

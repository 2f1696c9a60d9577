"""The inference programs: one builder for the server, `mw generate` and the audit.

A step takes rows of tokens: one token per row to generate, a block of tokens per row to prefill, a token and
its drafts per row to verify them, or whole prompts. It writes their keys and values to pages, and returns the
logits to sample. Three kinds of mesh axes make replicas, each with its own slots, rows and pages:

    axes that split the batch                       replicas exchange no tokens
    axes that split only the cache's sequences      (`cache=batch`) replicas of a batch shard share all else
    axes that split the positions of prompts        (`context`) replicas prefill a whole prompt together

In the last case each replica has a part of the prompt and attends to all of it. Keys and values go to the
pages of the replica that generates the sequence.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from meshwright.layout import Layout
from meshwright.layout.attention_kernels import has_prompt_programs, why_no_paged
from meshwright.layout.layout_checks import check_fits, num_replicas
from meshwright.layout.page_sizes import first_page, page_of
from meshwright.layout.runnable import check_runs
from meshwright.layout.workload import InferencePhase, Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import widest_window
from meshwright.nn.attention.paged import Rows
from meshwright.nn.attention.pools import Pools
from meshwright.nn.cached_ops import InferenceOps
from meshwright.nn.layer_weights import abstract_layered, passes_over_zeros
from meshwright.nn.products.batch_invariant import BatchInvariantOps
from meshwright.nn.products.row_products import in_tiles
from meshwright.nn.start.device_mesh import device_mesh, partition_spec
from meshwright.platforms import platform_of
from meshwright.serve.device.cache_programs import CacheSizes, CacheTypes
from meshwright.serve.device.forward_steps import PromptSteps, StepShape, TokenSteps, on_each_shard
from meshwright.serve.device.joined import joined_type, taken_apart
from meshwright.serve.device.sampling import (
    Edits,
    Guesses,
    Needs,
    Sampled,
    SampledRows,
    batch_rows,
    no_edits,
    no_guesses,
    sample,
)
from meshwright.serve.engine.request import GREEDY

_TOKENS, _POSITIONS, _SLOTS, _TABLES, _HEADS = range(5)  # the columns of a step


class InferencePrograms:
    """The steps of one model under one layout, over a cache of these sizes.

    The array `last` has an entry for each entry of the states, and holds the last token of each slot.
    with_native: the programs call native/kernels.py, which must be built. Otherwise they have only XLA's
    operations, for audits that count their FLOPs and bytes.
    batch_invariant: results of a token do not depend on other tokens of its step or on the step's shape, bit
    for bit.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        mesh: jax.sharding.Mesh,
        sizes: CacheSizes,
        *,
        with_native: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        prefill = layout.at("prefill") if layout.rules.prompt_axes else None
        layout = layout.at("generate") if prefill else layout
        self.config, self.layout, self.mesh = config, layout, mesh
        self.cache = CacheTypes(config, layout, mesh, sizes)
        self.num_replicas = self.cache.num_replicas
        self.batch_invariant = batch_invariant
        # Prompts by position have their own layout, whose products may read the weights in other parts.
        self.with_panels = with_native and not prefill
        kind = BatchInvariantOps if batch_invariant else InferenceOps
        self.ops = kind(config, layout, with_native=with_native)
        with_kernel = why_no_paged(platform_of(mesh), config, layout) is None
        shared = config, layout, self.cache, sizes, with_kernel
        self.token_steps = TokenSteps(*shared, self.ops, with_native, batch_invariant)
        self._prompt_steps = PromptSteps(*shared, prefill) if prefill else None
        # Replicas that prefill a prompt together.
        self.num_sharing = self.num_replicas // prefill.num_batch_shards if prefill else 1

    def step(self, step: StepShape) -> Any:
        """The step, to be compiled: (params, pools, last, tokens, positions, slots, tables, heads).

        Arguments, replica by replica:
        tokens i32[N]: token ids; PENDING: the last token of the slot in slots i32[N].
        positions i32[N]: PADDING for padding.
        tables i32[R, G, P]: page numbers, with one table for each group of layers.
        heads i32[num_heads]: indices of the tokens whose logits are returned; PADDING for padding.
        Slots and tokens are numbered through all replicas of a shard of the batch. If replicas prefill
        prompts together, they share tokens, heads and slots, which each token of a prompt has, and each has
        its own positions, PADDING for the tokens of other replicas. A draft head has a last argument: the
        hidden states f32[N, D] of its tokens.

        Returns logits f32[num_logits, V], whole over V, the pools, updated in place, and with num_hidden
        the hidden states after the last layer, [shards num_per_shard num_hidden, 1, D], and with keeps_hidden
        those after the final norm, f32[N, D].
        """
        jitted, arguments = self.jitted_step(step)
        return self.lowered(jitted, *arguments)

    def joined_step(self, step: StepShape) -> Any:
        """`step` with (params, pools, last, columns): the columns joined into one array."""
        jitted, (params, pools, last, *columns) = self.jitted_step(step)

        def run(params: Mapping[str, Any], pools: Pools, last: Array, whole: Array) -> Any:
            return jitted(params, pools, last, *taken_apart(whole, columns))

        run = jax.jit(run, donate_argnums=1)
        return self.lowered(run, params, pools, last, self._joined_type(columns))

    @property
    def joins_inputs(self) -> bool:
        """Whether steps and choices take their small inputs as one array, as they can with one replica."""
        return platform_of(self.mesh).joins_inputs and self.num_replicas == 1

    def _joined_type(self, types: Any) -> jax.ShapeDtypeStruct:
        return joined_type(types, jax.sharding.NamedSharding(self.mesh, PartitionSpec()))

    def jitted_step(self, step: StepShape) -> tuple[Any, tuple[Any, ...]]:
        """The step before it is compiled, and the types of its arguments."""
        by_token = (step.num_tokens,)
        tables = step.num_rows, max(self.cache.groups, default=0) + 1, step.pages_of_row
        shapes = by_token, by_token, by_token, tables, (step.num_heads,)
        of_replicas = [(self.num_replicas * first, *rest) for first, *rest in shapes]
        columns = [self.cache.split(*shape) for shape in of_replicas]
        columns[_TABLES] = self.cache.by_axes(self.cache.page_axes, *of_replicas[_TABLES])
        forward: TokenSteps | PromptSteps = self.token_steps
        if self._prompt_steps and step.is_fresh:
            forward, rows = self._prompt_steps, self._prompt_steps.prefill.num_batch_shards
            shared = partition_spec(forward.prefill.activation("x", "BTD"))[0]
            columns[_TOKENS] = columns[_SLOTS] = self.cache.by_axes(shared, rows * step.num_tokens)
            columns[_POSITIONS] = self.cache.by_axes(self.cache.page_axes, *of_replicas[_POSITIONS])
            columns[_HEADS] = self.cache.by_axes(shared, rows * step.num_heads)
        if self.config.draft_head:
            num_tokens = self.num_replicas * step.num_tokens
            columns.append(self.cache.split(num_tokens, self.config.d_model, dtype=np.float32))
        arguments = (self.abstract_params(), self.cache.pools(), self.cache.split(self.cache.num_entries))
        jitted = jax.jit(partial(forward.run, step), donate_argnums=1)
        return jitted, (*arguments, *columns)

    @property
    def has_choice_by_needs(self) -> bool:
        """Whether choices of tokens are compiled for the needs of rows."""
        return not platform_of(self.mesh).one_sampler

    def choice(
        self, num_logits: int, needs: Needs | None, *, with_edits: bool, with_guesses: bool = False
    ) -> Any:
        """The choice of tokens, to be compiled.

        It maps (last, logits, slots, rows, edits, guesses) to (last, sampled); with `joins_inputs`, slots and
        rows are joined. num_logits: rows a replica.
        needs: the sampling features that the rows use.
        """
        vocab_size, count = self.config.vocab_size, self.num_replicas * num_logits
        greedy = batch_rows([GREEDY] * count, [0] * count)
        edits = no_edits(count, vocab_size) if with_edits else None
        how = greedy, edits, no_guesses(count, vocab_size) if with_guesses else None
        types = jax.tree.map(lambda x: self.cache.split(*x.shape, dtype=x.dtype), how)
        arguments = (
            self.cache.split(self.cache.num_entries),
            self.cache.split(count, vocab_size, dtype=np.float32),
        )
        choose, small = partial(self._choose, needs), (self.cache.split(count), types[0])
        if not self.joins_inputs:
            return self.lowered(jax.jit(choose), *arguments, *small, *types[1:])

        def of_joined(last: Array, logits: Array, whole: Array, *others: object) -> Any:
            return choose(last, logits, *taken_apart(whole, small), *others)

        return self.lowered(jax.jit(of_joined), *arguments, self._joined_type(small), *types[1:])

    def empty(self) -> tuple[Pools, Array]:
        """Pools of zeros, and a `last` of zeros."""

        def zeros() -> Any:
            return jax.tree.map(_zeros, (self.cache.pools(), self.cache.split(self.cache.num_entries)))

        with jax.set_mesh(self.mesh):
            return jax.jit(zeros)()

    def abstract_params(self) -> Any:
        return abstract_layered(self.config, self.layout, self.mesh, with_panels=self.with_panels)

    @property
    def multiplies_padding(self) -> bool:
        """Whether a padding row takes the time of a row with a token."""
        return not self.with_panels or not passes_over_zeros(self.config, self.layout)

    def reads_whole_tables(self, queries: int) -> bool:
        """Whether rows of `queries` read whole tables, and not used pages only."""
        platform = platform_of(self.mesh)
        if self.batch_invariant or platform.page_by_page:
            return False
        return why_no_paged(platform, self.config, self.layout, queries) is not None

    def _choose(
        self,
        needs: Needs | None,
        last: Array,
        logits: Array,
        slots: Array,
        rows: SampledRows,
        edits: Edits | None,
        guesses: Guesses | None,
    ) -> tuple[Array, Sampled]:
        """Choose tokens from whole logits on every device, and keep them in `last` for the next step."""
        by_replica = PartitionSpec(self.cache.batch_axes)
        sample = partial(_sampled, needs)
        chosen = partial(in_tiles, sample) if self.batch_invariant else sample
        local = jax.shard_map(chosen, in_specs=by_replica, out_specs=by_replica, check_vma=False)
        sampled = local((logits, rows, edits, guesses))
        return on_each_shard(_with_sampled, last, slots, sampled.tokens), sampled

    def lowered(self, jitted: Any, *arguments: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return jitted.lower(*arguments)


def num_kept_apart(layout: Layout, config: ModelConfig) -> int:
    """`num_replicas` of the cache that a step fills; prompts split by position fill that of generation."""
    splits = layout.phase == "prefill" and layout.rules.prompt_axes
    return num_replicas(layout.at("generate") if splits else layout, config)


def workload_step(
    config: ModelConfig,
    layout: Layout,
    workload: Workload,
    phase: InferencePhase,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[Any, tuple[Any, ...], jax.sharding.Mesh]:
    """The step of a whole workload: the jitted function, its arguments' types, and the mesh.

        prefill    the prompts of all B sequences, each of T = S tokens, into their pages
        generate   the next token of each sequence, after S - 1 positions in its pages

    Raises LayoutError if the layout does not run in this phase, or does not divide the workload.
    """
    layout = layout.at(phase)
    check_runs(layout, phase)
    check_fits(layout, config, workload.num_sequences, workload.seq_len)
    mesh = device_mesh(layout) if mesh is None else mesh
    window, of_window = widest_window(config), 0
    # Replicas that prefill a prompt together have rows together, and each its own sequences.
    num_rows = workload.num_sequences // num_replicas(layout, config)
    num_slots = -(-workload.num_sequences // num_kept_apart(layout, config))
    page = page_of(config, workload.seq_len)
    platform, pages_of_row = platform_of(mesh), -(-workload.seq_len // page)
    is_fresh = has_prompt_programs(platform, layout)
    if window and window.size < workload.seq_len and (phase == "generate" or is_fresh):
        of_window = pages_of_row - first_page(workload.seq_len - 1, page, window)
    num_window_pages = num_slots * of_window if of_window < pages_of_row else 0
    sizes = CacheSizes(num_slots, num_slots * pages_of_row, page, num_window_pages)
    programs = InferencePrograms(config, layout, mesh, sizes)
    if phase == "generate":
        rows = Rows(num_rows, 1)
    elif is_fresh:
        rows = Rows(num_rows, workload.seq_len)
    else:
        block = min(platform.prompt_rows, workload.seq_len)
        rows = Rows(num_rows * -(-workload.seq_len // block), block)
    stands = 1 if phase == "generate" else workload.seq_len, workload.seq_len
    is_fresh = is_fresh and phase == "prefill"
    step = StepShape((rows,), num_rows, num_rows, pages_of_row, is_fresh=is_fresh, stands=stands)
    return *programs.jitted_step(step), mesh


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding)


# On one shard of the batch


def _sampled(needs: Needs | None, asked: tuple[Array, SampledRows, Edits | None, Guesses | None]) -> Sampled:
    logits, rows, edits, guesses = asked
    return sample(logits, rows, edits, needs, guesses)


def _with_sampled(last: Array, slots: Array, tokens: Array) -> Array:
    """The last token of each slot, after a step sampled `tokens`."""
    return last.at[slots].set(tokens)

"""The inference programs: one builder for all that is served.

A step takes rows of tokens: one token a row to generate, a block of tokens a row to prefill, a token and its
drafts a row to verify them. It writes their keys and values to pages, and yields the logits that are sampled.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import Places
from meshwright.nn.inference import InferenceOps, abstract_layered
from meshwright.nn.mesh import partition_spec
from meshwright.nn.paged import PagedCache, Pools, Rows, abstract_pools
from meshwright.serve.batch import PENDING
from meshwright.serve.logit_edits import batch_rows, no_edits
from meshwright.serve.sampling import Edits, Sampled, sample
from meshwright.serve.sampling import Rows as SampledRows
from meshwright.serve.scoring import score
from meshwright.serve.sequence import SamplingParams


class InferencePrograms:
    """The steps of one model under one layout, over a cache of `num_pages` pages of `page_size` positions.

    num_slots: entries of `last`, which holds the token that each slot's sequence was given last; one more is
    nobody's. pages_of_row: the width of the tables.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        mesh: jax.sharding.Mesh,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        pages_of_row: int,
    ) -> None:
        self.config, self.layout, self.mesh = config, layout, mesh
        self.num_slots, self.pages_of_row = num_slots, pages_of_row
        self._num_pages, self._page_size = num_pages, page_size
        self.ops = InferenceOps(config, layout)

    def step(self, rows: tuple[Rows, ...], num_heads: int, num_logits: int) -> Any:
        """The compiled step of these rows: (params, pools, last, tokens, positions, slots, tables, heads).

        tokens i32[N], PENDING where it is the one last given to slots i32[N]; positions i32[N]; tables
        i32[R, P]; heads i32[num_heads]: the tokens behind which logits are wanted. Yields those logits, and
        zeros behind them, as f32[num_logits, V], whole on every device, and the pools, updated in place.
        """
        num_rows, num_tokens = sum(row.num_rows for row in rows), sum(row.num_tokens for row in rows)
        shapes = ((num_tokens,), (num_tokens,), (num_tokens,), (num_rows, self.pages_of_row), (num_heads,))
        arguments = (self.abstract_params(), self.abstract_pools(), self._int32(self.num_slots + 1))
        return self._compile(
            partial(self._step, rows, num_logits), (1,), *arguments, *map(self._int32, shapes)
        )

    def choice(self, num_logits: int, *, with_edits: bool) -> Any:
        """The compiled choice of tokens: (last, logits, slots, rows, edits) -> (last, sampled)."""
        vocab_size = self.config.vocab_size
        logits = jax.ShapeDtypeStruct((num_logits, vocab_size), jnp.float32, sharding=self._whole)
        slots = self._int32((num_logits,))
        greedy = batch_rows([SamplingParams(temperature=0.0)] * num_logits, [0] * num_logits)
        how = greedy, no_edits(num_logits, vocab_size) if with_edits else None
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._whole), how)
        return self._compile(_choose, (), self._int32(self.num_slots + 1), logits, slots, *types)

    def scores(self, num_tokens: int) -> Any:
        """The compiled scores of a prompt: (params, tokens i32[1, num_tokens]) -> the columns of Scores."""
        step = partial(score, self.config, self.ops, whole=_whole)
        return self._compile(step, (), self.abstract_params(), self._int32((1, num_tokens)))

    def empty(self) -> tuple[Pools, Array]:
        """Pools of zeros, and a `last` of zeros."""

        def zeros() -> tuple[Any, Array]:
            return jax.tree.map(_zeros, self.abstract_pools()), jnp.zeros(self.num_slots + 1, jnp.int32)

        with jax.set_mesh(self.mesh):
            return jax.jit(zeros)()

    def abstract_params(self) -> Any:
        return abstract_layered(self.config, self.layout, self.mesh)

    def abstract_pools(self) -> Any:
        return abstract_pools(self.config, self.layout, self.mesh, self._num_pages, self._page_size)

    def _step(
        self,
        rows: tuple[Rows, ...],
        num_logits: int,
        params: Mapping[str, Any],
        pools: Pools,
        last: Array,
        tokens: Array,
        positions: Array,
        slots: Array,
        tables: Array,
        heads: Array,
    ) -> tuple[Array, Pools]:
        tokens = jnp.where(tokens == PENDING, last[slots], tokens)
        places = Places(positions[:, None])
        cache = PagedCache(pools, positions, tables, rows, self.layout)
        x = transformer.enter(self.config, self.ops, params, tokens[:, None], places)
        x, cache = transformer.through(self.config, self.ops, params, x, places, cache, self.config.layers)
        x = x.at[heads].get(out_sharding=partition_spec(self.layout.activation("x", "BTD")))
        logits = transformer.leave(self.config, self.ops, params, x)
        with jax.named_scope("logits"):
            return jnp.pad(_whole(logits)[:, 0], ((0, num_logits - heads.shape[0]), (0, 0))), cache.pools

    @property
    def _whole(self) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, PartitionSpec())

    def _int32(self, shape: int | tuple[int, ...]) -> jax.ShapeDtypeStruct:
        shape = (shape,) if isinstance(shape, int) else shape
        return jax.ShapeDtypeStruct(shape, np.int32, sharding=self._whole)

    def _compile(self, step: Any, donated: tuple[int, ...], *arguments: Any) -> Any:
        with jax.set_mesh(self.mesh):
            return jax.jit(step, donate_argnums=donated).lower(*arguments).compile()


def _whole(logits: Array) -> Array:
    """Float32 logits gathered over `tensor`: sampling compares the whole vocabulary."""
    return reshard(logits.astype(jnp.float32), PartitionSpec())


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding)


def _choose(
    last: Array, logits: Array, slots: Array, rows: SampledRows, edits: Edits | None
) -> tuple[Array, Sampled]:
    """Every device chooses alike from whole logits; the tokens stay there for the next step."""
    whole = PartitionSpec()
    local = jax.shard_map(sample, in_specs=whole, out_specs=whole, check_vma=False)
    sampled = local(logits, rows, edits)
    return last.at[slots].set(sampled.tokens), sampled

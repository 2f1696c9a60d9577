"""Attention in JAX: positions in queries and keys, moves to its sharding, and its kernels."""

from collections.abc import Mapping
from copy import copy
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.layout.moves.attention import (
    attention_layout,
    chosen_keys,
    from_heads,
    gathered_index,
    gathered_keys,
    shared_by_heads,
    shared_entries,
    to_heads,
    token_sharding,
    uses_ring,
)
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.config import ModelConfig
from meshwright.models.ops import Entries, LatentOps, Scoring
from meshwright.models.transformer import spelt_out
from meshwright.nn.attention.blockwise import blockwise
from meshwright.nn.attention.by_formula import (
    ScoreForm,
    alibi_slopes,
)
from meshwright.nn.attention.flash import flash_kernels
from meshwright.nn.attention.rotary import apply_rope, apply_temperature, norm_turned
from meshwright.nn.attention.selection import choose
from meshwright.nn.each_device import KEPT, partitions_of
from meshwright.nn.norms import along, repeated
from meshwright.nn.ops.products import ProductOps
from meshwright.nn.products.execute import apply_reshard, named_once
from meshwright.nn.remat import MATMUL, OPERATION
from meshwright.nn.stack import KindInLoop
from meshwright.nn.start.device_mesh import partition_spec
from meshwright.notation.einsum import Reshard


class AttentionOps(ProductOps):
    """Attention of `models/transformer.py`."""

    def rope(self, name: str, x: Array, at: AtLayer, *, leading: bool = False, back: bool = False) -> Array:
        with jax.named_scope(name):
            # With sequence_parallel, a part that all heads share has its positions split over `tensor` too.
            split = PartitionSpec(*partitions_of(x)[:2])
            positions = reshard(at.places.positions, split)
            config = self.config.at(at.kind.variant)
            turned = apply_rope(x, positions, config, at.kind, self._once, leading=leading, back=back)
            return checkpoint_name(turned, OPERATION)

    def turned_norm(self, name: str, x: Array, kind: KindInLoop) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(norm_turned(x, self.config, kind), OPERATION)

    def temperature(self, name: str, q: Array, at: AtLayer) -> Array:
        with jax.named_scope(name):
            scaled = apply_temperature(q, self._places_of_tokens(at.places).positions, self.config, at.kind)
            return checkpoint_name(scaled, OPERATION)

    def for_layers(self, name: str, x: Array) -> Array:
        """Keys or values that several layers read, each by the same reshard, which XLA runs once."""
        with jax.named_scope(name):
            return named_once(x)

    def attention(
        self,
        name: str,
        q: Array,
        k: Array,
        v: Array,
        at: AtLayer,
        scoring: Scoring[Array],
    ) -> tuple[Array, AtLayer]:
        if attention_layout(self.layout) is not self.layout:
            return self._by_heads(name, (q, k, v), at, scoring), at
        sinks, chosen, entries = scoring.sinks, scoring.chosen, scoring.entries
        places, _, kind = at
        how = self._score_form(q, kind, scoring)
        with jax.named_scope(name):
            if not uses_ring(self.layout):
                values_are_keys = v is k
                k = self._gather_positions("k", k)
                v = k if values_are_keys else self._gather_positions("v", v)
            queries, keys = self._places_of_tokens(places), self._places_of_sequences(places)
            if sinks is not None:
                with jax.named_scope("sinks"):
                    sinks = self._split_as(q, (2,), sinks.astype(jnp.float32))
            # Kernels take queries and keys to be the same tokens in order.
            if chosen is None and entries is None and q.shape[1] == k.shape[1]:
                pairs = queries.segments, keys.segments
                documents = None if places.segments is None else pairs
                kernels = flash_kernels(
                    q, self.config, self.layout, kind.windows, how, has_documents=documents is not None
                )
                if kernels:
                    number = 0 if kind.which is None else kind.which
                    return lax.switch(number, kernels, q, k, v, sinks, documents), at
            if sinks is not None:
                with jax.named_scope("sinks"):
                    sinks = along(q[..., 0], sinks)
            windows = [layer.kind.window for layer in self.config.all_layers if layer.kind in kind.among]
            first = self._first(queries.positions, kind)
            of_heads = None
            if entries is not None and entries.values.shape[1]:
                of_heads, added = self._of_heads(entries, kind)
                keys, chosen = self._with_entries(keys, added, chosen, k.shape[1])
            out = blockwise(q, k, v, sinks, queries, keys, first, self.layout, how, windows, chosen, of_heads)
            return out, at

    def _score_form(self, q: Array, kind: KindInLoop, scoring: Scoring[Array]) -> ScoreForm:
        """The form of the scores of q[B, T, N, H] in layers of a kind, with all defaults filled in."""
        scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
        slopes = alibi_slopes(self.config.num_heads) if self.config.positions == "alibi" else None
        indexer = self.config.at(kind.variant).indexer
        return ScoreForm(scale, scoring.softcap, slopes, indexer.block if indexer else None)

    def _of_heads(self, entries: Entries[Array], kind: KindInLoop) -> Entries[Array]:
        """Entries as keys [B, S, K, H] at their last positions.

        Devices with different queries or heads add up their cotangents.
        """
        with jax.named_scope("entries"):
            keys = apply_reshard(shared_entries(self.layout), entries.values[:, :, None])
        return Entries(keys, _last_positions(entries.places, self.config.at(kind.variant)))

    def _with_entries(
        self, keys: Places, entries: Places, chosen: Array | None, num_keys: int
    ) -> tuple[Places, Array | None]:
        """The places of keys followed by entries, and the mask of entries preceded by True for each key."""
        joined = jax.tree.map(
            lambda *each: jnp.concatenate(each, axis=1), keys._replace(tokens=None), entries
        )
        if chosen is not None:
            chosen = jnp.pad(chosen, [(0, 0), (0, 0), (num_keys, 0)], constant_values=True)
        return joined, chosen

    def index(
        self, name: str, q: Array, k: Array, weights: Array | None, at: AtLayer, entries: Places | None = None
    ) -> tuple[Array, AtLayer]:
        """bool[B, T, S]: the keys that each query reads; or bool[B, T, K, blocks] if blocks are chosen.

        entries: the places of compressed keys, if k is such.
        """
        config, places = self.config.at(at.kind.variant), at.places._replace(tokens=None)
        indexer = config.indexer
        assert indexer is not None, "only an indexer has an index"
        with jax.named_scope(name):
            if entries is None:
                with jax.named_scope("index_k"):
                    k = apply_reshard(gathered_index(self.layout), k)
                keys = self._places_of_sequences(places)
            else:
                keys = _last_positions(entries, config)
            chosen = choose(q, k, weights, places, keys, indexer, self.layout)
            move = chosen_keys(self.layout, indexer)
            if move.forward:
                with jax.named_scope("chosen"):
                    chosen = apply_reshard(move, chosen.astype(jnp.int8)) > 0
            return checkpoint_name(chosen, KEPT), at

    def _by_heads(
        self, name: str, projected: tuple[Array, Array, Array], at: AtLayer, scoring: Scoring[Array]
    ) -> Array:
        """Attention of whole sequences by a share of the heads: exchanged for positions, and back."""

        def moved(letter: str, move: Reshard, x: Array) -> Array:
            with jax.named_scope(name), jax.named_scope(letter):
                is_named = letter in "kv" and self.config.layers_per_cache > 1
                return checkpoint_name(apply_reshard(move, x, is_named=is_named), MATMUL)

        (q, k, v), layout, ops = projected, self.layout, copy(self)
        ops.layout = attention_layout(layout)
        q = moved("q", to_heads(layout, "q", "BTNH"), q)
        k, v = (moved(one, to_heads(layout, one, "BTKH"), x) for one, x in (("k", k), ("v", v)))
        out, _ = ops.attention(name, q, k, v, at, scoring)
        return moved("a", from_heads(layout, "a", "BTNH"), out)

    def _first(self, positions: Array, kind: KindInLoop) -> Array | None:
        """The first position that each query sees; None if no layer of the loop has a window."""
        if kind.windows == (None,):
            return None
        nothing = jnp.zeros_like(positions)
        return kind.choose([window.first(positions) if window else nothing for window in kind.windows])

    def latent_attention(
        self,
        name: str,
        q: Array,
        latent: Array,
        rope: Array,
        w: Mapping[str, Array],
        at: AtLayer,
        scoring: Scoring[Array],
    ) -> tuple[Array, AtLayer]:
        """Keys and values spelt out; in generation they are absorbed (nn/cached_ops.py)."""
        k, v = spelt_out(cast("LatentOps[Array]", self), w, latent, rope)
        return self.attention(name, q, k, v, at, scoring)

    def join_rope(self, name: str, k: Array, rope: Array) -> Array:
        with jax.named_scope(name):
            rope = apply_reshard(shared_by_heads(self.layout, "rope"), rope)
            shape = (*k.shape[:3], rope.shape[-1])
            heads = repeated(rope, (0, 1, 3), shape, partitions_of(k))
            return checkpoint_name(jnp.concatenate([k, heads], axis=-1), OPERATION)

    def _places_of_tokens(self, places: Places) -> Places:
        """The places of a device's own tokens; T may be split, unlike in the places that are given."""
        spec = partition_spec(token_sharding(self.layout, "tokens"))
        return jax.tree.map(lambda x: reshard(x, spec), places)

    def _places_of_sequences(self, places: Places) -> Places:
        """The places of all tokens of a device's sequences, as they are given: nothing moves."""
        spec = partition_spec(token_sharding(self.layout, "tokens").replace(axes={"T": ()}))
        return jax.tree.map(lambda x: reshard(x, spec), places)

    def _gather_positions(self, name: str, x: Array) -> Array:
        """Keys or values of all positions; every shard of the queries adds to their cotangents."""
        with jax.named_scope(name):
            steps = gathered_keys(self.layout, name)
            return apply_reshard(steps, x, is_named=self.config.layers_per_cache > 1)


def _last_positions(entries: Places, config: ModelConfig) -> Places:
    """The places of entries at their last positions, since later queries see them."""
    assert config.compressed is not None, "layers with entries compress keys"
    return entries._replace(positions=entries.positions + config.compressed - 1)

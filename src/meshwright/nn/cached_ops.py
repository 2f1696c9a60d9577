"""The operations of the forward pass for inference: a layer at a time, over a cache of pages.

A step takes tokens of many sequences at once, as x[B, 1, D] with one token per row: the rows of a batch of
prompts and answers need not be equally long. Products are over all tokens; only attention knows sequences.

Each layer has arrays of its own for its weights, which layer_weights.py copies out of the stacks of layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.moves.attention import attention_layout, gathered_index, gathered_keys, uses_ring
from meshwright.layout.moves.states import gathered_states
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.layer_kinds import Layer
from meshwright.models.ops import Entries, Scoring
from meshwright.nn.attention.paged import PagedCache
from meshwright.nn.attention.pools import ENTRIES, INDEX
from meshwright.nn.each_device import partitions_of, spec_of
from meshwright.nn.mixers.pieces import Pieces
from meshwright.nn.mixers.prompt_states import PromptStates
from meshwright.nn.mixers.recurrence import Inputs
from meshwright.nn.ops.mixers import letters_of_states
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.products.stored_products import ProductsOfStored
from meshwright.nn.stack import KindInLoop
from meshwright.nn.start.device_mesh import platform


class CacheOfLayer(NamedTuple):
    """The cache of all layers, with a layer's number among layers with pages, and with states."""

    cache: PagedCache
    number: int
    state: int


class InferenceOps(ProductsOfStored):
    """Operations of `models/transformer.py` on weights from `layered` and a PagedCache.

    They are called under `jax.set_mesh`.
    """

    def attention(
        self,
        name: str,
        q: Array,
        k: Array,
        v: Array,
        at: AtLayer,
        scoring: Scoring[Array],
    ) -> tuple[Array, AtLayer]:
        """Attention over pages: writes keys and values of the step's tokens, then reads each sequence's own.

        A layer that shares keys and values writes none: another layer has written them.
        """
        _, cache, kind = at
        if cache is None:
            return super().attention(name, q, k, v, at, scoring)
        if scoring.entries is not None:
            return self._over_entries(name, (q, k), at, scoring)
        pages, number, _ = cache
        if self.layout.table.position_axes:
            with jax.named_scope(name):
                whole = {letter: self._gather_positions(letter, x) for letter, x in (("k", k), ("v", v))}
                if not kind.shares_kv:
                    pages = pages.written(number, {letter: _flat_tokens(x) for letter, x in whole.items()})
            if not uses_ring(self.layout) and attention_layout(self.layout) is self.layout:
                k, v = whole["k"], whole["v"]
            out, _ = super().attention(name, q, k, v, at.uncached, scoring)
            return out, _with_pages(at, pages)
        if not kind.shares_kv:
            with jax.named_scope(name):
                new = {"k": k[:, 0]} if self.config.values_are_cached_keys else {"k": k[:, 0], "v": v[:, 0]}
                pages = pages.written(number, new)
        if pages.is_fresh:
            q, k, v = (pages.by_row(x[:, 0]) for x in (q, k, v))
            out, _ = super().attention(name, q, k, v, _from_the_start(q, kind), scoring)
            return _by_token(out), _with_pages(at, pages)
        with jax.named_scope(name):
            form = self._score_form(q, kind, scoring)
            out = pages.attend(number, q[:, 0], kind.windows[0], form, scoring.sinks, scoring.chosen)
            return out.astype(self.dtype)[:, None], _with_pages(at, pages)

    def _over_entries(
        self,
        name: str,
        projected: tuple[Array, Array],
        at: AtLayer,
        scoring: Scoring[Array],
    ) -> tuple[Array, AtLayer]:
        """Attention of the step's tokens over a window and entries, which are written first.

        scoring.entries: one for each token, [N, 1, H]; only those that end at their token are written.
        """
        assert scoring.entries is not None, "without entries, attention reads keys only"
        (q, k), (_, (pages, number, _), kind), values = projected, at, scoring.entries.values
        every, [window] = self._positions_of_entry(kind), kind.windows
        assert window is not None, "layers with entries have a window"
        with jax.named_scope(name):
            pages = pages.written(number, {"k": k[:, 0]}).written(number, {ENTRIES: values[:, 0]}, every)
        at = _with_pages(at, pages)
        if pages.is_fresh:
            q, k, values = (pages.by_row(x[:, 0]) for x in (q, k, values))
            whole = Entries(*self._of_prompts(values, every))
            of_prompts = scoring._replace(entries=whole)
            out, _ = super().attention(name, q, k, k, _from_the_start(q, kind), of_prompts)
            return _by_token(out), at
        with jax.named_scope(name):
            form = self._score_form(q, kind, scoring)
            out = pages.attend_with_entries(number, q[:, 0], window, form, scoring.sinks, scoring.chosen)
            return out.astype(self.dtype)[:, None], at

    def _positions_of_entry(self, kind: KindInLoop) -> int:
        """The number of positions that an entry compresses."""
        every = self.config.at(kind.variant).compressed
        assert every is not None, "layers with entries compress keys"
        return every

    def _of_prompts(self, values: Array, every: int) -> tuple[Array, Places]:
        """The entries [R, S, H] of whole prompts, of one per token [R, Q, H], and their first positions."""
        values = values[:, every - 1 :: every]
        spec = PartitionSpec(partitions_of(values)[0], None)
        first = every * lax.broadcasted_iota(jnp.int32, values.shape[:2], 1, out_sharding=spec)
        return values, Places(first)

    def compressed(
        self, name: str, values: Array, gates: Array, bias: Array, at: AtLayer
    ) -> tuple[Entries[Array], AtLayer]:
        """The entries that would end at each of the step's tokens, [N, 1, H], and the cache."""
        places, cache, kind = at
        if cache is None:
            return super().compressed(name, values, gates, bias, at)
        states = cache.cache.of_states
        assert not isinstance(states, PromptStates), "prompts are not split by position"
        with jax.named_scope(name):
            entries, states = states.compressed(cache.state, name, values[:, 0], gates[:, 0], bias)
            first = places.positions + 1 - self._positions_of_entry(kind)
            return Entries(entries[:, None], Places(first)), _with_states(at, states)

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
        """Absorbed: queries times wk_up attend to latents, and wv_up maps the sums of latents to values."""
        if at.cache is None:
            return super().latent_attention(name, q, latent, rope, w, at, scoring)
        _, (pages, number, _), kind = at
        if self.layout.table.position_axes:
            with jax.named_scope(name):
                kept = {"latent": latent, "rope": rope}
                whole = {letter: self._gather_positions(letter, x) for letter, x in kept.items()}
                pages = pages.written(number, {letter: _flat_tokens(x) for letter, x in whole.items()})
            out, _ = super().latent_attention(name, q, latent, rope, w, at.uncached, scoring)
            return out, _with_pages(at, pages)
        num_rotary = rope.shape[-1]
        with jax.named_scope(name):
            pages = pages.written(number, {"latent": latent[:, 0], "rope": rope[:, 0]})
        if pages.is_fresh:
            q, latent, rope = (pages.by_row(x[:, 0]) for x in (q, latent, rope))
            out, _ = super().latent_attention(name, q, latent, rope, w, _from_the_start(q, kind), scoring)
            return _by_token(out), _with_pages(at, pages)
        with jax.named_scope(name):
            up, out_of = (
                self._absorbed("wk_up", w, "BTR,RNJ->BTNJ"),
                self._absorbed("wv_up", w, "BTR,RNO->BTNO"),
            )
            form = self._score_form(q, kind, scoring)
            plain, turned = q[:, 0, :, :-num_rotary], q[:, 0, :, -num_rotary:]
            with jax.named_scope("wk_up"):
                query = self._with_heads("BNJ,NJR->BNR", plain, up)
            query = jnp.concatenate([query, turned], axis=-1)
            sums = pages.attend(number, query, kind.windows[0], form, None, scoring.chosen)
            sums = sums.astype(self.dtype)
            with jax.named_scope("wv_up"):
                values = self._with_heads("BNR,NOR->BNO", sums, out_of)
            return values[:, None], _with_pages(at, pages)

    def index(
        self, name: str, q: Array, k: Array, weights: Array | None, at: AtLayer, entries: Places | None = None
    ) -> tuple[Array, AtLayer]:
        """Write the indexer's keys of the step's tokens, and choose the positions that each token reads."""
        if at.cache is None:
            return super().index(name, q, k, weights, at, entries)
        _, (pages, number, _), kind = at
        indexer = self.config.at(kind.variant).indexer
        assert indexer is not None, "only an indexer has an index"
        if self.layout.table.position_axes:
            with jax.named_scope(name):
                with jax.named_scope("index_k"):
                    whole = apply_reshard(gathered_index(self.layout), k)
                pages = pages.written(number, {INDEX: _flat_tokens(whole)})
            chosen, _ = super().index(name, q, k, weights, at.uncached)
            return chosen, _with_pages(at, pages)
        every = 1 if entries is None else self._positions_of_entry(kind)
        with jax.named_scope(name):
            pages = pages.written(number, {INDEX: k[:, 0]}, every)
        at = _with_pages(at, pages)
        if pages.is_fresh:
            q, k, weights = jax.tree.map(lambda x: pages.by_row(x[:, 0]), (q, k, weights))
            k, entries = (k, None) if entries is None else self._of_prompts(k, every)
            return super().index(name, q, k, weights, _from_the_start(q, kind), entries)[0], at
        with jax.named_scope(name):
            weights = None if weights is None else weights[:, 0]
            return pages.choose(number, q[:, 0], weights, indexer, every), at

    def _with_heads(self, spec: str, x: Array, w: Array) -> Array:
        """The einsum of tokens x[B, N, ...] with weights of each head."""
        return jnp.einsum(spec, x, w)

    def _gather_positions(self, name: str, x: Array) -> Array:
        """All positions of keys, values or latents, gathered if they are split."""
        if partitions_of(x)[1] is None:
            return x
        with jax.named_scope(name):
            gather = gathered_keys(self.layout, name, "BTKH" if x.ndim == 4 else "BTR")
            return apply_reshard(gather, x, is_named=self.config.layers_per_cache > 1)

    def _convolved(self, x: Array, taps: Array, at: AtLayer, memory: str) -> tuple[Array, AtLayer]:
        cache = at.cache
        if cache is None:
            return super()._convolved(x, taps, at, memory)
        states = cache.cache.of_states
        if isinstance(states, PromptStates):
            y, _ = super()._convolved(x, taps, at.uncached, memory)
            states = states.with_last_inputs(cache.state, memory, x, _pieces(self.layout, x))
            return y, _with_states(at, states)
        y, states = states.convolved(cache.state, memory, x[:, 0], taps)
        return y[:, None], _with_states(at, states)

    def recurrence(
        self,
        name: str,
        q: Array,
        k: Array,
        v: Array,
        decay: Array,
        beta: Array | None,
        at: AtLayer,
        log_rates: Array | None = None,
    ) -> tuple[Array, AtLayer]:
        cache = at.cache
        if cache is None:
            return super().recurrence(name, q, k, v, decay, beta, at, log_rates)
        with jax.named_scope(name):
            given = self._inputs(q, k, v, decay, beta, log_rates).present
            states = cache.cache.of_states
            if isinstance(states, PromptStates):
                inputs, pieces = self._with_own_rates(Inputs.of(given)), _pieces(self.layout, v)
                to_all = gathered_states(self.layout, name, letters_of_states(v))
                o, states = states.recurrence(cache.state, "state", inputs, pieces, to_all)
                o = jnp.reshape(o, v.shape, out_sharding=spec_of(v))
                return o, _with_states(at, states)
            inputs = Inputs.of({kind: x if kind == "log_rates" else x[:, 0] for kind, x in given.items()})
            o, states = states.recurrence(cache.state, "state", inputs)
            o = jnp.reshape(o[:, None], v.shape, out_sharding=spec_of(v))
            return o, _with_states(at, states)

    def _absorbed(self, name: str, w: Mapping[str, Array], spec: str) -> Array:
        """The weight `name` as `spec` reads it, for a product of other operands."""
        return self._read_weight(contraction_of(self.layout, name, spec), w[name])

    def layers(
        self,
        block: Callable,
        weights: Any,
        x: Array,
        places: Places,
        cache: PagedCache | None,
        layers: Sequence[Layer],
    ) -> tuple[Array, Any]:
        """The layers in order, unrolled: a loop would copy each layer's weights out of a stack."""
        with jax.named_scope("layers"):
            shared = None
            for layer in layers:
                w, kind = weights[layer.kind.stack][layer.row], KindInLoop((layer.kind,))
                if self.layout.rules.zero_stage == 3 and platform().ordered_gathers:
                    w, x = lax.optimization_barrier((w, x))
                given = None if cache is None else CacheOfLayer(cache, layer.cache, layer.state)
                x, kept, made = block(self, w, x, AtLayer(places, given, kind), shared)
                shared = shared if made is None else made
                if kept is not None:
                    cache = kept.cache
                    if cache is not None and cache.is_fresh and platform().ordered_caches:
                        x, pools = lax.optimization_barrier((x, cache.pools))
                        cache = replace(cache, pools=pools)
                    if cache is not None and cache.states and platform().ordered_states:
                        # Otherwise the new states of all layers wait in memory before they are written.
                        x, states = lax.optimization_barrier((x, cache.states.states))
                        cache = replace(cache, states=replace(cache.states, states=states))
            return x, cache


def _pieces(layout: Layout, x: Array) -> Pieces:
    """The pieces of prompts on devices that split their positions."""
    pieces = Pieces.of(layout, x)
    assert pieces is not None, "prompts whose states are kept so have their positions split"
    return pieces


def _from_the_start(q: Array, kind: KindInLoop) -> AtLayer:
    """Positions from 0 on, without a cache, for whole prompts q[R, Q, ...].

    Padding has later positions than its prompt, so no token of the prompt sees it.
    """
    spec = PartitionSpec(partitions_of(q)[0], None)
    return AtLayer(Places(lax.broadcasted_iota(jnp.int32, q.shape[:2], 1, out_sharding=spec)), None, kind)


def _with_pages(at: AtLayer, pages: PagedCache) -> AtLayer:
    return at._replace(cache=at.cache._replace(cache=pages))


def _with_states(at: AtLayer, states: Any) -> AtLayer:
    return _with_pages(at, replace(at.cache.cache, states=states))


def _flat_tokens(x: Array) -> Array:
    """x[B, T, ...] as [B * T, ...]."""
    first, _, *rest = partitions_of(x)
    plain = reshard(x, PartitionSpec(*partitions_of(x)))  # no cotangent will be summed
    return jnp.reshape(plain, (-1, *x.shape[2:]), out_sharding=PartitionSpec(first, *rest))


def _by_token(out: Array) -> Array:
    """out[R, Q, ...] as [N, 1, ...]."""
    first, _, *rest = partitions_of(out)
    return jnp.reshape(out, (-1, 1, *out.shape[2:]), out_sharding=PartitionSpec(first, None, *rest))

"""The operations of the forward pass for inference: a layer at a time, over a cache of pages.

A step takes tokens of many sequences at once, as x[B, 1, D] with one token per row: the rows of a batch of
prompts and answers need not be equally long. Products are over all tokens; only attention knows sequences.

Each layer has an array of weights, with summed dimensions last: wq[N, H, D], w_out[D, F]. So XLA for CPU
reads one row's product x W^T at memory speed and copies nothing (12 x 768 x 2048 in f32, one row: 11 ms, as
W[D, F] 18; bf16, 16 rows: 32 and 37; jax 0.10.2, two shared cores). A stack's layers are copied first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from meshwright.dtypes import number_type
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of, input_groups
from meshwright.layout.moves.attention import attention_layout, gathered_index, gathered_keys, uses_ring
from meshwright.layout.moves.states import gathered_states
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.config import ModelConfig
from meshwright.models.layer_kinds import Layer
from meshwright.models.mixers import BLOCK_GATES
from meshwright.models.ops import Entries, Scoring
from meshwright.models.parameters import Param, dimensions, of_a_layer, parameters
from meshwright.native import kernels
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention.paged import PagedCache
from meshwright.nn.attention.pools import ENTRIES, INDEX
from meshwright.nn.each_device import each_device, spec_of
from meshwright.nn.embedding import embed
from meshwright.nn.experts.grouped_products import read_product
from meshwright.nn.mixers.pieces import Pieces
from meshwright.nn.mixers.prompt_states import PromptStates
from meshwright.nn.mixers.recurrence import Inputs
from meshwright.nn.norms import along
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.ops.mixers import letters_of_states
from meshwright.nn.ops.products import Readable
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.products.panels import Panels, in_panels
from meshwright.nn.products.quantised import (
    Quantised,
    group_size,
    is_narrow,
    quantise,
    quantised_product,
    rounded_product,
    type_name,
    widened,
)
from meshwright.nn.products.row_products import einsum_of_rows
from meshwright.nn.stack import KindInLoop
from meshwright.nn.start.device_mesh import array_type, partition_spec, platform
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Contraction, Einsum, Reshard
from meshwright.platforms import platform_of

_Params = dict[str, Any]

# Matrices with other uses than products of rows: looked up, absorbed, of a router, or by blocks.
_READ_OTHERWISE = {"positions", "router", "wk_up", "wv_up", "wo_down", *BLOCK_GATES}
_BEFORE_ATTENTION = {"wq_bias", "wk_bias", "wv_bias"}
# Weights that are multiplied by one input, stored as one array on platforms where that is faster.
_OF_ONE_INPUT = ("wq", "wk", "wv"), ("w_gate", "w_in"), ("shared_gate", "shared_in")


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["sizes"])
@dataclass(frozen=True)
class Joined:
    """Weights of one input joined in the first one's place: `sizes` are of their first dimensions."""

    weight: Any
    sizes: tuple[int, ...]


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclass(frozen=True)
class Elsewhere:
    """Placeholder of a weight that is part of a Joined one."""


class CacheOfLayer(NamedTuple):
    """The cache of all layers, with a layer's number among layers with pages, and with states."""

    cache: PagedCache
    number: int
    state: int


class _ProductsOfStored(JaxOps):
    """Products of activations and weights from `layered`: in their own order or panels, joined or quantised.

    Products with weights in panels run in kernels.py. with_native: other operations may use it, too.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, with_native: bool = False) -> None:
        super().__init__(config, layout)
        self._with_native = with_native

    def _once(self, x: Array) -> Array:
        return each_device(kernels.once, spec_of(x), spec_of(x))(x) if self._with_native else x

    def activation(
        self,
        name: str,
        gate: Readable,
        up: Readable,
        kind: str,
        slopes: tuple[Array, Array] | None = None,
    ) -> Array:
        if self._with_native:
            # In bf16 XLA for CPUs rounds after every operation, which takes 2.5 times the time.
            gate, up = (None if one is None else one.astype(jnp.float32) for one in (gate, up))
        return super().activation(name, gate, up, kind, slopes).astype(self.dtype)

    def einsums(self, x: Array, weights: Mapping[str, Any], **specs: str) -> tuple[Array, ...]:
        joined = weights[next(iter(specs))]
        if not isinstance(joined, Joined):
            return super().einsums(x, weights, **specs)
        [group] = input_groups(self.layout, specs)
        name, plan = next(iter(group.plans.items()))
        y = self._einsum(name, plan, apply_reshard(group.reshard, x), joined.weight)
        return tuple(lax.split(y, joined.sizes, plan.einsum.out.index(_letters_there(plan)[0])))

    def _einsum(self, name: str, plan: Contraction, x: Array, weight: Array | Quantised | Panels) -> Array:
        einsum = plan.einsum
        spec = f"{einsum.lhs},{_letters_there(plan)}->{einsum.out}"
        with jax.named_scope(name):
            if isinstance(weight, Panels):
                w: Array | Panels | Quantised = weight
            elif self._routes:
                return read_product(plan, x, self._of_experts(plan, weight), self._routes, self._of_one)
            elif isinstance(weight, Quantised) and not weight.is_grouped:
                return self._scaled_product(plan, spec, x, weight)
            elif isinstance(weight, Quantised) and isinstance(weight.values, Panels):
                w = weight
            else:
                w = self._read_weight(plan, weight)
            rounded_to = self._rounded_to if isinstance(weight, Quantised) else None
            y = self._product(plan, spec, x, w, rounded_to).astype(self.dtype)
            return apply_reshard(plan.out_reshard, y)

    def _product(
        self,
        plan: Contraction,
        spec: str,
        x: Array,
        w: Array | Panels | Quantised,
        rounded_to: str | None = None,
    ) -> Array:
        """The product in the operands' types; x is cast to the type of weights in int8 and fp8.

        w: Quantised if the weight has groups; its values and scales are then in panels. rounded_to: the type
        to round x to, for a weight with groups; None: x is not rounded.
        """
        spec_of_product = partition_spec(plan.product)
        if isinstance(w, Quantised):
            parts = w.values.numbers, w.scales.numbers

            def grouped(rows: Array, parts: tuple[Array, Array]) -> Array:
                return kernels.grouped_int4_product(rows, *parts, rounds=rounded_to is not None)

            return einsum_of_rows(grouped, spec, x, parts, spec_of_product)
        if isinstance(w, Panels):
            is_widened = is_narrow(w.dtype) and not self._is_narrow(w)
            product = kernels.widened_product if is_widened else kernels.product
            return einsum_of_rows(product, spec, x, w.numbers, spec_of_product)
        if is_narrow(w.dtype):
            return einsum_of_rows(partial(quantised_product, self._rows), spec, x, w, spec_of_product)
        if rounded_to is not None:
            product = partial(rounded_product, self._rows, rounded_to)
            return einsum_of_rows(product, spec, x, w, spec_of_product)
        return self._by_xla(spec, x, w, spec_of_product)

    def _by_xla(self, spec: str, x: Array, w: Array, out_sharding: PartitionSpec) -> Array:
        """The einsum, summed in float32."""
        return _product(spec, x, w, out_sharding)

    def _rows(self, x: Array, w: Array) -> Array:
        """`rows_product` of the rows that a device has."""
        return rows_product(x, w)

    @property
    def _rounded_to(self) -> str | None:
        """The type of rounded activations next to weights with groups; None: they are not rounded."""
        dtype = self.layout.precision.matmul_dtype
        return None if dtype == self.layout.precision.compute_dtype else dtype

    def _is_narrow(self, values: Array | Panels) -> bool:
        """Whether activations are cast to the type of a weight's values."""
        return is_narrow(values.dtype) and type_name(values.dtype) == self.layout.precision.matmul_dtype

    def _of_experts(self, plan: Contraction, weight: Array | Quantised) -> Array | Quantised:
        """The experts' weights gathered for the products of rows, in their stored type."""
        move = _in_order(plan.rhs_reshard, _letters_there(plan))
        if isinstance(weight, Quantised):
            return Quantised(apply_reshard(move, weight.values), weight.scales)
        return apply_reshard(move, weight)

    def _of_one(self, x: Array, weight: Array | Quantised) -> Array:
        """Rows x[C, I] by the weight[O, I] of one expert."""
        if not isinstance(weight, Quantised):
            return rows_product(x, weight.astype(self.dtype)).astype(self.dtype)
        if weight.is_grouped:
            to = self._rounded_to
            product = rows_product if to is None else partial(rounded_product, rows_product, to)
            return product(x, widened(weight, self.dtype)).astype(self.dtype)
        if self._is_narrow(weight.values):
            y = quantised_product(rows_product, x, weight.values)
        else:
            y = rows_product(x, weight.values.astype(self.dtype))
        return (y * weight.scales[None]).astype(self.dtype)

    def _scaled_product(self, plan: Contraction, spec: str, x: Array, weight: Quantised) -> Array:
        """The product with a weight that has a scale for each output; the scales multiply the results."""
        einsum, values = plan.einsum, weight.values
        if not isinstance(values, Panels):
            values = apply_reshard(_in_order(plan.rhs_reshard, _letters_there(plan)), values)
            values = values if self._is_narrow(values) else values.astype(self.dtype)
        y = self._product(plan, spec, x, values)
        y = apply_reshard(plan.out_reshard, y.astype(self.dtype)).astype(jnp.float32)
        kept = [letter for letter in _letters_there(plan) if letter in einsum.out]
        dims = tuple(einsum.out.index(letter) for letter in kept)
        return (y * along(y, self._split_as(y, dims, weight.scales), dims)).astype(self.dtype)

    def _read_weight(self, plan: Contraction, weight: Array | Quantised) -> Array:
        """The weight as its product reads it: gathered if the plan says so."""
        return apply_reshard(_in_order(plan.rhs_reshard, _letters_there(plan)), widened(weight, self.dtype))

    def embed(self, name: str, tokens: Array, table: Array | Quantised | Panels) -> Array:
        if not isinstance(table, Quantised | Panels):
            return super().embed(name, tokens, table)
        with jax.named_scope(name):
            if isinstance(table, Panels):
                return self._rows_of(table, tokens).astype(self.dtype)
            rows = self._rows_of(table.values, tokens).astype(jnp.float32)
            scales = embed(tokens, table.scales[:, None], self.layout, is_column=True)
            return (rows * scales).astype(self.dtype)

    def _rows_of(self, table: Array | Panels, tokens: Array) -> Array:
        if isinstance(table, Panels):
            return embed(tokens, table.numbers, self.layout, rows_of=kernels.rows_of_panels)
        return embed(tokens, table, self.layout)


class InferenceOps(_ProductsOfStored):
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
                    pages = pages.written(number, {letter: _in_a_row(x) for letter, x in whole.items()})
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
        every = self.config.at(kind.variant).compressed
        assert every is not None, "layers with entries compress keys"
        return every

    def _of_prompts(self, values: Array, every: int) -> tuple[Array, Places]:
        """The entries [R, S, H] of whole prompts, of one per token [R, Q, H], and their first positions."""
        values = values[:, every - 1 :: every]
        spec = PartitionSpec(_split_of(values)[0], None)
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
                pages = pages.written(number, {letter: _in_a_row(x) for letter, x in whole.items()})
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
                pages = pages.written(number, {INDEX: _in_a_row(whole)})
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
        if _split_of(x)[1] is None:
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


def _product(spec: str, x: Array, w: Array, out_sharding: PartitionSpec) -> Array:
    """The einsum by XLA, summed in float32, in the form that is fastest on the platform."""
    if x.shape[:2] == (1, 1) and spec.startswith("B") and _is_paired(x):
        return _product(spec, jnp.concatenate([x, x]), w, out_sharding)[:1]
    if spec.startswith("B") and w.ndim > 2 and not Einsum.parse(spec).batched:
        return _of_flat_weight(spec, x, w, out_sharding)
    return jnp.einsum(spec, x, w, out_sharding=out_sharding, preferred_element_type=jnp.float32)


def rows_product(x: Array, w: Array) -> Array:
    """y[C, O] = x[C, I] by w[O, I], summed in float32, of int8 in int32."""
    if len(x) == 1 and _is_paired(x):
        return rows_product(jnp.concatenate([x, x]), w)[:1]
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return jnp.einsum("CI,OI->CO", x, w, preferred_element_type=sums)


def _is_paired(x: Array) -> bool:
    """Whether a single row is computed as two."""
    return x.dtype in (jnp.bfloat16, jnp.int8) and platform().pairs_rows


def _of_flat_weight(spec: str, x: Array, w: Array, out_sharding: PartitionSpec) -> Array:
    """The einsum with w[N, H, D] as [N·H, D]: XLA for CPU would copy it transposed, every step.

    On a 134M LLaMA a step with one row took 245 ms, mostly for such copies (jax 0.10.2, two busy cores).
    """
    _, rhs, out = spec.replace("->", ",").split(",")
    kept = [letter for letter in rhs if letter in out]
    first, last = _entries(w, len(kept))
    flat = jnp.reshape(w, (prod(w.shape[: len(kept)]), -1), out_sharding=_spec_like(w, first, last))
    *rows, inner = *_split_of(x)[:2], _split_of(x)[2]
    x = jnp.reshape(x, (*x.shape[:2], -1), out_sharding=_spec_like(x, *rows, inner))
    through = PartitionSpec(*out_sharding.partitions[:2], first, unreduced=out_sharding.unreduced)
    y = jnp.einsum("BTI,OI->BTO", x, flat, out_sharding=through, preferred_element_type=jnp.float32)
    shape = (*y.shape[:2], *w.shape[: len(kept)])
    return y if len(kept) == 1 else jnp.reshape(y, shape, out_sharding=out_sharding)


def _split_of(x: Array) -> tuple[Any, ...]:
    return jax.typeof(x).sharding.spec.partitions


def _entries(x: Array, num_first: int) -> tuple[Any, Any]:
    """The axes that split the first and the last dimensions of x, as two joint dimensions."""
    first, last = _split_of(x)[:num_first], _split_of(x)[num_first:]
    assert not any((*first[1:], *last[1:])), "only the outer dimension is split"
    return first[0], last[0]


def _spec_like(x: Array, *parts: object) -> PartitionSpec:
    return PartitionSpec(*parts, reduced=jax.typeof(x).sharding.spec.reduced)


def _letters_there(plan: Contraction) -> str:
    """The letters of a weight's stored array, with summed letters last."""
    einsum = plan.einsum
    return "".join(sorted(einsum.rhs, key=lambda letter: letter not in einsum.out))


def _from_the_start(q: Array, kind: KindInLoop) -> AtLayer:
    """Positions from 0 on, without a cache, for whole prompts q[R, Q, ...].

    Padding has later positions than its prompt, so no token of the prompt sees it.
    """
    spec = PartitionSpec(_split_of(q)[0], None)
    return AtLayer(Places(lax.broadcasted_iota(jnp.int32, q.shape[:2], 1, out_sharding=spec)), None, kind)


def _with_pages(at: AtLayer, pages: PagedCache) -> AtLayer:
    return at._replace(cache=at.cache._replace(cache=pages))


def _with_states(at: AtLayer, states: Any) -> AtLayer:
    return _with_pages(at, replace(at.cache.cache, states=states))


def _in_a_row(x: Array) -> Array:
    """x[B, T, ...] as [B * T, ...]."""
    first, _, *rest = _split_of(x)
    plain = reshard(x, PartitionSpec(*_split_of(x)))  # no cotangent will be summed
    return jnp.reshape(plain, (-1, *x.shape[2:]), out_sharding=PartitionSpec(first, *rest))


def _by_token(out: Array) -> Array:
    """out[R, Q, ...] as [N, 1, ...]."""
    first, _, *rest = jax.typeof(out).sharding.spec.partitions
    return jnp.reshape(out, (-1, 1, *out.shape[2:]), out_sharding=PartitionSpec(first, None, *rest))


def _in_order(reshard: Reshard, letters: str) -> Reshard:
    """The same reshard for an array with its dimensions in the order of `letters`."""
    given, used = _transposed(reshard.given, letters), _transposed(reshard.used, letters)
    return Reshard(given, used, _transposed(reshard.yielded, letters))


def _transposed(array: ShardedArray, letters: str) -> ShardedArray:
    axes = tuple(array.axes_of(letter) for letter in letters)
    return ShardedArray(array.name, tuple(letters), axes, array.unreduced)


# Parameters, an array for each layer


def stored_letters(param: Param) -> str:
    """The letters of one layer's array: without the layer, and for matrices with summed letters last.

    >>> stored_letters(Param("LDNH")), stored_letters(Param("LD", "ones")), stored_letters(Param("VD"))
    ('NHD', 'D', 'VD')
    """
    letters = of_a_layer(param.letters)
    if param.init != "normal":
        return letters
    return "".join(sorted(letters, key=lambda letter: letter in param.fan_in))


def layered(
    params: Mapping[str, Any],
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    *,
    with_panels: bool = False,
    cuts: dict[str, Any] | None = None,
) -> _Params:
    """The parameters of `nn/params.py` with an array a layer, as InferenceOps reads them.

    with_panels: store every eligible weight in panels, for the products of kernels.py, which must be
    available. cuts: compiled programs by path, kept from call to call. Takes the arrays out of `params`
    one by one, so that memory holds at most one parameter twice.
    """
    stacks = {name: dict(node) for name, node in params.items() if isinstance(node, Mapping)}
    plain = {name: node for name, node in params.items() if not isinstance(node, Mapping)}
    cuts = {} if cuts is None else cuts

    def leaf(path: str, param: Param, row: int | None) -> Any:
        group, _, name = path.rpartition("/")
        if path not in cuts:  # one program cuts every row of a stack
            types = _type(config, layout, mesh, path, param, with_panels)
            cut = partial(_cut, param, layout.precision.stored_dtype(path, param), types)
            cuts[path] = jax.jit(cut, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, types))
        with jax.set_mesh(mesh):
            if row is None:
                return cuts[path](plain[name], None)
            return cuts[path](stacks[group][name], np.int32(row))

    return _with_joined(
        _build(config, leaf, lambda path: _forget(stacks, plain, path)), mesh, jnp.concatenate
    )


def _cut(param: Param, dtype: str, types: Any, whole: Array, row: Array | None) -> Any:
    """One layer's array out of a stack, with summed dimensions last, stored as `dtype` in the given types."""
    layer = whole if row is None else lax.dynamic_index_in_dim(whole, row, keepdims=False)
    letters = of_a_layer(param.letters)
    turned = jnp.transpose(layer, [letters.index(letter) for letter in stored_letters(param)])
    num_summed = len(param.fan_in)
    if number_type(dtype).scales is None:
        made = turned.astype(jax_dtype(dtype))
        return in_panels(made, num_summed) if isinstance(types, Panels) else made
    made = quantise(turned, dtype, num_summed, types.group)
    if isinstance(types.values, Panels):
        made = replace(made, values=in_panels(made.values, num_summed))
    if isinstance(types.scales, Panels):
        made = replace(made, scales=in_panels(made.scales, num_summed))
    return made


def _forget(stacks: Mapping[str, dict], plain: dict, path: str) -> None:
    group, _, name = path.rpartition("/")
    (stacks[group] if group else plain).pop(name)


def abstract_layered(
    config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, *, with_panels: bool = False
) -> _Params:
    """The types of `layered`, to compile for."""

    def leaf(path: str, param: Param, row: int | None) -> Any:
        return _type(config, layout, mesh, path, param, with_panels)

    def concatenated(types: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        first = types[0]
        shape = sum(one.shape[0] for one in types), *first.shape[1:]
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=first.sharding)

    return _with_joined(_build(config, leaf, lambda path: None), mesh, concatenated)


def _with_joined(params: _Params, mesh: jax.sharding.Mesh, concatenate: Callable) -> _Params:
    """The parameters with weights of one input joined, on platforms that join unsplit weights."""
    if not platform_of(mesh).joins_weights:
        return params
    stacks = [stack for stack in params.values() if isinstance(stack, list)]
    for weights in (layer for stack in stacks for layer in stack):
        for names in _OF_ONE_INPUT:
            parts = [weights[name] for name in names if name in weights]
            if len(parts) == len(names) and _can_be_joined(parts):
                whole = jax.tree.map(lambda *leaves: concatenate(leaves), *parts)
                sizes = tuple(jax.tree.leaves(part)[0].shape[0] for part in parts)
                weights |= dict.fromkeys(names, Elsewhere()) | {names[0]: Joined(whole, sizes)}
    return params


def _can_be_joined(parts: Sequence[Any]) -> bool:
    """Whether parts differ only in their first dimensions, no axis splits them, and panels are full."""
    alike = {
        (jax.tree.structure(part), *((leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(part)))
        for part in parts
    }
    leaves = jax.tree.leaves(parts)
    panels = jax.tree.leaves(parts, is_leaf=lambda part: isinstance(part, Panels))
    # The rows of such a weight are all its dimensions but the last, over which its product sums.
    are_whole = all(
        kernels.has_whole_panels(prod(part.shape[:-1])) for part in panels if isinstance(part, Panels)
    )
    return (
        are_whole and len(alike) == 1 and all(axes is None for leaf in leaves for axes in leaf.sharding.spec)
    )


def _type(
    config: ModelConfig,
    layout: Layout,
    mesh: jax.sharding.Mesh,
    path: str,
    param: Param,
    with_panels: bool,
) -> Any:
    """The type of one layer's array: a ShapeDtypeStruct, Panels of one, or a Quantised of such."""
    sizes, dtype = dimensions(config, path), layout.precision.stored_dtype(path, param)
    array = _sharding(layout, path, param)
    lies_in_panels = with_panels and _can_lie_in_panels(config, layout, path, param)
    record = number_type(dtype)
    if record.scales is None:
        plain = array_type(array, mesh, sizes, jax_dtype(dtype))
        return Panels(plain) if lies_in_panels else plain
    if record.group:
        last = array.dims[-1]
        num_shards = layout.mesh.size(array.axes_of(last))
        groups = sizes[last] // group_size(sizes[last] // num_shards, record.group)
        in_pair, stored = (2, jnp.int8) if platform_of(mesh).packs_int4 else (1, jax_dtype(dtype))
        parts = (
            array_type(array, mesh, {**sizes, last: sizes[last] // in_pair}, stored),
            array_type(array, mesh, {**sizes, last: groups}, jnp.float32),
        )
        return Quantised(*(map(Panels, parts) if lies_in_panels else parts))
    values: Any = array_type(array, mesh, sizes, jax_dtype(dtype))
    values = Panels(values) if lies_in_panels else values
    kept = tuple(letter for letter in array.dims if letter not in param.fan_in)
    used = layout.rules.used.split(array.name, "".join(array.dims))
    scales = ShardedArray(array.name, kept, tuple(used.axes_of(letter) for letter in kept))
    return Quantised(values, array_type(scales, mesh, sizes, jnp.float32))


def passes_over_zeros(config: ModelConfig, layout: Layout) -> bool:
    """Whether, with panels, rows of zeros stay zeros through all layers, so that products may skip them.

    Biases make them nonzero, except biases of queries, keys and values: attention of a padding token is zero.
    """
    of_layers = {path: param for path, param in parameters(config).items() if "/" in path}
    matrices = {path: param for path, param in of_layers.items() if param.init == "normal"}
    biases = {path.rpartition("/")[2] for path in of_layers if path.endswith("_bias")}
    stay = biases <= _BEFORE_ATTENTION and not config.attention_sinks and config.positions != "alibi"
    stay &= config.state_mixer is None  # its padding rows read a state
    return stay and all(_can_lie_in_panels(config, layout, *item) for item in matrices.items())


def _can_lie_in_panels(config: ModelConfig, layout: Layout, path: str, param: Param) -> bool:
    """Whether only products read the weight, in its stored sharding and type."""
    name, dtype = path.rpartition("/")[2], layout.precision.stored_dtype(path, param)
    is_of_products = param.init == "normal" and name not in _READ_OTHERWISE and "E" not in param.letters
    is_of_products &= len(of_a_layer(param.letters)) > 1
    if not is_of_products or (name == "embed" and not config.tied_embeddings):
        return False
    stored = _sharding(layout, path, param)
    used = layout.rules.used.split(stored.name, "".join(stored.dims))
    if used.axes != stored.axes:
        return False
    record = number_type(dtype)
    precision = layout.precision
    is_rounded = precision.matmul_dtype == record.served_operands
    if (record.served_operands if is_rounded else precision.compute_dtype) not in record.native_operands:
        return False
    sizes = dimensions(config, path)
    summed = [sizes[letter] // layout.mesh.size(used.axes_of(letter)) for letter in param.fan_in]
    if record.group:
        # Tables are read by rows, which `rows_of_panels` does not multiply by the scales of groups.
        return name != "embed" and kernels.has_whole_groups(group_size(summed[-1], record.group))
    return kernels.has_whole_steps(prod(summed), jax_dtype(dtype))


def _build(config: ModelConfig, leaf: Callable, done: Callable[[str], None]) -> _Params:
    """{"embed": ..., "layers": [{"wq": ...}, ...], ...} with leaf(path, param, row) at every array."""
    tree: _Params = {}
    for path, param in parameters(config).items():
        group, _, name = path.rpartition("/")
        if not group:
            tree[name] = leaf(path, param, None)
        else:
            num_rows = dimensions(config, path)[param.letters[0]]
            rows = tree.setdefault(group, [{} for _ in range(num_rows)])
            for row, node in enumerate(rows):
                node[name] = leaf(path, param, row)
        done(path)
    return tree


def _sharding(layout: Layout, path: str, param: Param) -> ShardedArray:
    name, letters = path.rpartition("/")[2], of_a_layer(param.letters)
    return _transposed(layout.weight(name, letters), stored_letters(param))

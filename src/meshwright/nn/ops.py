"""The operations of the forward pass in JAX, under explicit sharding.

A result's letters and the Layout give its sharding. The collectives of an einsum are exactly those
of its `Contraction` (nn/products/execute.py): three projections of one input share its move and, backward,
the one reduction of its cotangent; a gathered weight's gradient is reduce-scattered.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard

from meshwright.layout import Layout
from meshwright.layout.contractions import input_groups
from meshwright.layout.grouped import Crossing
from meshwright.layout.moves.attention import (
    attention_layout,
    from_heads,
    gathered_keys,
    shared_by_heads,
    to_heads,
    token_sharding,
    uses_ring,
)
from meshwright.layout.moves.experts import (
    RowRouting,
    expert_rows,
    from_experts,
    has_fixed_rows,
    row_routing,
    to_experts,
)
from meshwright.layout.runnable import check_runs
from meshwright.models.config import Layer, ModelConfig
from meshwright.models.parameters import ADAPTER_B, is_latent
from meshwright.models.transformer import Places, spelt_out
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.attention.blockwise import blockwise
from meshwright.nn.attention.flash import flash_kernels
from meshwright.nn.attention.reference import (
    Scores,
    alibi_slopes,
)
from meshwright.nn.attention.rope import apply_rope, apply_temperature, norm_turned
from meshwright.nn.each_device import KEPT
from meshwright.nn.embedding import embed, embed_positions
from meshwright.nn.experts.capacity import combine, dispatch, gates_of, router_losses, within_capacity
from meshwright.nn.experts.dropless import (
    Choices,
    Routes,
    choices_of,
    home_tokens,
    in_rounds,
    met_gates,
    met_tokens,
    routes_of,
    rows_at_columns,
    rows_at_experts,
    rows_at_tokens,
    rows_of_tokens,
    sums_of_columns,
    sums_of_rows,
    weighed_rows_of_tokens,
)
from meshwright.nn.experts.grouped_products import biased_rows, computed_rows, grouped_product
from meshwright.nn.experts.node_dispatch import (
    Crossings,
    crossings_of,
    gates_at_nodes,
    rows_at_nodes,
    rows_from_nodes,
    sums_of_nodes,
)
from meshwright.nn.gradients import Scattered, read, sent_types
from meshwright.nn.loss import Names, loss_by_chunks, nats_of, num_chunks
from meshwright.nn.norms import activate, along, mean_of_last, norm, repeated, softcap
from meshwright.nn.products.contract import LATER, local_product
from meshwright.nn.products.execute import apply_reshard, named_once
from meshwright.nn.products.narrow import Kept, kept, narrow_multiply, narrow_product, wide
from meshwright.nn.stack import KindInLoop, run_layers, run_stage
from meshwright.nn.start.device_mesh import partition_spec
from meshwright.notation.einsum import Contraction, Reshard
from meshwright.notation.operation import bias_reshard

# Names that a remat policy may save: results of operations, never gathered arrays (or FSDP would keep
# every layer's whole weights) and nothing from within an operation. cost/graph.py counts the same.
MATMUL, SECOND, OPERATION = "matmul", "second matmul", "operation"
# The same products with a latent as input: queries, keys and values, larger than the latent.
OF_LATENT = {MATMUL: "matmul of a latent", SECOND: "second matmul of a latent"}
# An Array, or in training a Kept: operations for inference take only arrays.
Readable = Any
# The name of a layer's input if it is offloaded: without a name it stays on the device.
INPUT = "input"

_SAVED = {
    "none": (MATMUL, SECOND, *OF_LATENT.values(), OPERATION, KEPT),
    "attention": (MATMUL, SECOND, *OF_LATENT.values(), OPERATION, KEPT),  # scores are within an operation
    "matmuls": (MATMUL, SECOND, *OF_LATENT.values(), KEPT),
    "latents": (MATMUL, SECOND, KEPT),
    "alternate": (MATMUL, OF_LATENT[MATMUL], KEPT),
    "full": (),
}


def _policy(layout: Layout) -> Callable[..., Any]:
    """The remat policy: the arrays to save for the backward pass, and the memory that holds them.

    XLA for CPU has only one memory: offloaded arrays stay in it (jax 0.10.2).
    """
    if not layout.schedule.offload:
        return jax.checkpoint_policies.save_only_these_names(*_SAVED[layout.schedule.remat], LATER)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[LATER],
        names_which_can_be_offloaded=[INPUT, *_SAVED[layout.schedule.remat]],
        offload_src="device",
        offload_dst="pinned_host",
    )


def _kept_mean(x: Array) -> Array:
    """The mean over a split last dimension, saved: to recompute it would take another all-reduce."""
    return checkpoint_name(mean_of_last(x), OPERATION)


class JaxOps:
    """Operations of `models/transformer.py` for one model and layout. Call under `jax.set_mesh`.

    masked: some targets of the loss may be NOT_COUNTED. z_loss: see `nats_of`. router_losses: `layers` also
    returns the sum of the layers' `router_losses`. Caches are for inference (nn/cached_ops.py): here always
    None.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        *,
        masked: bool = False,
        z_loss: float = 0.0,
        router_losses: bool = False,
    ) -> None:
        check_runs(layout, layout.phase)
        self.config, self.layout, self.masked, self.z_loss = config, layout, masked, z_loss
        self.router_losses = router_losses
        self._of_routers: list[Array] = []  # of the layer that is being traced
        self.dtype = jax_dtype(layout.precision.compute_dtype)
        self._sent_in = sent_types(layout, self.dtype)
        narrow = layout.precision.matmul_dtype if layout.phase == "train" else None
        self._narrow = None if narrow == layout.precision.compute_dtype else narrow
        self._saved_in = layout.precision.saved_dtype if layout.phase == "train" else None
        self._scales = layout.precision.matmul_scales or "rows"
        self._num_products = 0  # of the layer that is being traced
        self._kinds: dict[str, str] = {}  # of its products and exchanges so far, as policies know them
        self._routes: Routes | None = None  # of the experts that are being traced, without a capacity
        self._stage: tuple[Array, Sequence[Sequence[Layer]]] | None = None
        self._token: Array | None = None
        self.parted: set[str] = set()

    def of_validation(self) -> "JaxOps":
        """A copy with the plain cross-entropy as its loss."""
        ops = copy(self)
        ops.z_loss, ops.router_losses = 0.0, False
        return ops

    def on_stage(self, number: Array, layers: Sequence[Sequence[Layer]]) -> "JaxOps":
        """A copy for stage `number` of a pipeline. layers: of every stage."""
        ops = copy(self)
        ops._stage = number, layers
        ops.layout = self.layout.replace(offload=False)  # the pipeline offloads the ring as a whole
        return ops

    def parting(self, token: Array | None) -> "JaxOps":
        """A copy whose products multiply gradients of weights by `token` (`local_product`).

        `parted` holds the names of such weights once a program has been traced.
        """
        ops = copy(self)
        ops._token = token
        return ops

    def reads(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The weights, each scattered one by `gradients.read`; each layer reads its own in this way."""
        return {
            name: read(self.layout, self.dtype, name, weight) if isinstance(weight, Scattered) else weight
            for name, weight in weights.items()
        }

    def embed(self, name: str, tokens: Array, table: Array) -> Array:
        with jax.named_scope(name):
            return embed(tokens, self._table(table), self.layout, self._sent_in)

    def add_positions(self, name: str, x: Array, places: Places, table: Array) -> Array:
        with jax.named_scope(name):
            rows = embed_positions(places.positions, self._table(table), self.layout, self._sent_in)
            return checkpoint_name(x + rows, OPERATION)

    def _table(self, table: Array) -> Array:
        """A table for look-ups: in the type that it travels in, unless its gradient has another."""
        return table if self._sent_in else table.astype(self.dtype)

    def scale(self, name: str, x: Array, factor: float) -> Array:
        with jax.named_scope(name):
            return x * jnp.asarray(factor, x.dtype)

    def norm(
        self, name: str, x: Array, scale: Array, bias: Array | None = None, *, kind: str = "rms"
    ) -> Array:
        with jax.named_scope(name):
            last = (x.ndim - 1,)
            scale = self._split_as(x, last, scale)
            bias = None if bias is None else self._split_as(x, last, bias)
            is_split = jax.typeof(x).sharding.spec.partitions[-1] is not None
            mean = _kept_mean if is_split else mean_of_last
            return checkpoint_name(norm(x, scale, bias, kind, self.config, mean), OPERATION)

    def kept(self, name: str, x: Array) -> Array | Kept:
        """x for products and gates, in the type of `saved_dtype`, under its name in remat policies."""
        if self._saved_in is None:
            return x
        is_sum = name + ADAPTER_B in self._kinds  # of a product and its adapter's
        with jax.named_scope(name):
            known_as = OPERATION if is_sum else self._kinds.get(name, OPERATION)
            return kept(x, self._saved_in, self._scales, known_as)

    def einsums(self, x: Readable, weights: Mapping[str, Array], **specs: str) -> tuple[Array, ...]:
        """Several contractions of one input with the weights so named; the input is moved once."""
        made: dict[str, Array] = {}
        named: dict[str, Array] = {}
        for group in input_groups(self.layout, specs):
            there = group.reshard
            with jax.named_scope(group.name):
                if self._routes:
                    moved = self._rows_at_columns(wide(x), there)
                else:
                    if group.name not in named:
                        named[group.name] = named_once(wide(x)) if there.forward else wide(x)
                    moved = self._moved(x, named[group.name], there)
            for name, plan in group.plans.items():
                made[name] = self._einsum(name, plan, moved, weights[name])
        return tuple(made[name] for name in specs)

    def _moved(self, x: Array | Kept, here: Array, there: Reshard) -> Array | Kept:
        """An input where its products are; if it is kept narrow, they save the moved array narrow, too.

        here: x as it is sent, under the name of its reader.
        """
        moved = apply_reshard(there, here, is_named=True)
        if not isinstance(x, Kept) or self._saved_in is None:
            return moved
        return x if moved is x.wide else kept(moved, self._saved_in, self._scales)

    def _einsum(self, name: str, plan: Contraction, x: Readable, weight: Array) -> Array:
        with jax.named_scope(name):
            w, kind = self._fetched(plan, weight), self._kind_of_product(plan)
            self._kinds[name] = kind
            if self._routes:
                multiply = narrow_multiply(self.dtype, self._narrow, self._scales) if self._narrow else None
                return checkpoint_name(grouped_product(plan, wide(x), w, self._routes, multiply), kind)
            if self._narrow:
                y = narrow_product(plan, self.dtype, self._narrow, x, w, self._scales)
            else:
                y = local_product(plan, self.dtype, wide(x), w, self._token)
                self.parted |= {name} if self._token is not None else set()
            return checkpoint_name(apply_reshard(plan.out_reshard, y), kind)

    def _rows_at_columns(self, rows: Array, there: Reshard) -> Array:
        """Rows of experts, exchanged from the devices where they arrived to devices with columns."""
        assert self._routes and self.config.moe, "only a mixture of experts has rows of experts"
        if not there.forward:
            return rows
        return rows_at_columns(rows, self._routes, self.layout, self.config.moe)

    def _fetched(self, plan: Contraction, weight: Array) -> Array:
        """A weight as its product reads it, with a gradient summed in the layout's type for gradients."""
        if self._sent_in is None:
            return apply_reshard(plan.rhs_reshard, weight.astype(self.dtype))
        return apply_reshard(plan.rhs_reshard, weight, self._sent_in)

    def _kind_of_product(self, plan: Contraction) -> str:
        """MATMUL, or SECOND for every second product of a layer; sums over devices are always MATMUL."""
        number, self._num_products = self._num_products, self._num_products + 1
        is_sum = plan.out_reshard.forward or plan.out_reshard.backward
        kind = MATMUL if number % 2 == 0 or is_sum else SECOND
        return OF_LATENT[kind] if is_latent(plan.einsum.lhs) else kind

    def bias(self, name: str, y: Array, b: Array) -> Array:
        """y plus b; b has the last dimensions of y, or of y[E, C, M] the first and the last."""
        is_of_experts = (y.ndim, b.ndim) == (3, 2)
        dims = (y.ndim - 3, y.ndim - 1) if is_of_experts else tuple(range(y.ndim - b.ndim, y.ndim))
        with jax.named_scope(name):
            if self._routes:
                return checkpoint_name(self._biased_rows(name, y, b.astype(self.dtype)), OPERATION)
            split = self._split_as(y, dims, b.astype(self.dtype))
            return checkpoint_name(y + along(y, split, dims), OPERATION)

    def _biased_rows(self, name: str, y: Array, b: Array) -> Array:
        """Rows plus b[E, M] or, for sums over the columns of an expert, b[E, D]."""
        assert self._routes, "rows have routes"
        is_sum = name.startswith("expert_out")
        rows = expert_rows(self.layout, name, "ECD" if is_sum else "ECM")
        there = bias_reshard(rows, self.layout.weight(name, "ED" if is_sum else "EM"))
        if there.forward:
            b = apply_reshard(there, b)
        else:
            spec = partition_spec(rows)
            b = reshard(b, PartitionSpec(spec[0], spec[2], reduced=jax.typeof(b).sharding.spec.reduced))
        return biased_rows(y, b, self._routes, row_routing(self.layout).columns if is_sum else ())

    def _split_as(self, x: Array, dims: Sequence[int], vector: Array) -> Array:
        """A small weight split as the dimensions `dims` of x."""
        split = [jax.typeof(x).sharding.spec.partitions[dim] for dim in dims]
        return reshard(vector, PartitionSpec(*split, reduced=jax.typeof(vector).sharding.spec.reduced))

    def rope(self, name: str, x: Array, places: Places, kind: KindInLoop) -> Array:
        with jax.named_scope(name):
            turned = apply_rope(x, self._own(places).positions, self.config, kind)
            return checkpoint_name(turned, OPERATION)

    def turned_norm(self, name: str, x: Array, kind: KindInLoop) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(norm_turned(x, self.config, kind), OPERATION)

    def temperature(self, name: str, q: Array, places: Places, kind: KindInLoop) -> Array:
        with jax.named_scope(name):
            scaled = apply_temperature(q, self._own(places).positions, self.config, kind)
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
        places: Places,
        cache: Any,
        kind: KindInLoop,
        *,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: Array | None = None,
    ) -> tuple[Array, Any]:
        if attention_layout(self.layout) is not self.layout:
            options = {"softcap": softcap, "scale": scale, "sinks": sinks}
            return self._by_heads(name, (q, k, v), places, kind, options), None
        alibi = self.config.positions == "alibi"
        how = Scores(softcap, scale, alibi_slopes(self.config.num_heads) if alibi else None)
        with jax.named_scope(name):
            if not uses_ring(self.layout):
                k, v = self._gather_positions("k", k), self._gather_positions("v", v)
            queries, keys = self._own(places), self._all(places)
            if sinks is not None:
                with jax.named_scope("sinks"):
                    sinks = self._split_as(q, (2,), sinks.astype(jnp.float32))
            if q.shape[1] == k.shape[1]:  # the same tokens in order, as kernels take them to be
                pairs = queries.segments, keys.segments
                documents = None if places.segments is None else pairs
                kernels = flash_kernels(
                    q, self.config, self.layout, kind.windows, how, has_documents=documents is not None
                )
                if kernels:
                    number = 0 if kind.which is None else kind.which
                    return lax.switch(number, kernels, q, k, v, sinks, documents), None
            if sinks is not None:
                with jax.named_scope("sinks"):
                    sinks = along(q[..., 0], sinks)
            windows = [layer.kind.window for layer in self.config.layers if layer.kind in kind.among]
            first = self._first(queries.positions, kind)
            return blockwise(q, k, v, sinks, queries, keys, first, self.layout, how, windows), None

    def _by_heads(
        self,
        name: str,
        projected: tuple[Array, Array, Array],
        places: Places,
        kind: KindInLoop,
        options: Mapping[str, Any],
    ) -> Array:
        """Attention of whole sequences by a share of the heads: exchanged for positions, and back."""

        def moved(letter: str, there: Reshard, x: Array) -> Array:
            with jax.named_scope(name), jax.named_scope(letter):
                is_named = letter in "kv" and self.config.layers_per_cache > 1
                return checkpoint_name(apply_reshard(there, x, is_named=is_named), MATMUL)

        (q, k, v), layout, ops = projected, self.layout, copy(self)
        ops.layout = attention_layout(layout)
        q = moved("q", to_heads(layout, "q", "BTNH"), q)
        k, v = (moved(one, to_heads(layout, one, "BTKH"), x) for one, x in (("k", k), ("v", v)))
        out, _ = ops.attention(name, q, k, v, places, None, kind, **options)
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
        places: Places,
        cache: Any,
        kind: KindInLoop,
        *,
        scale: float | None = None,
    ) -> tuple[Array, Any]:
        """Keys and values spelt out; in generation they are absorbed (nn/cached_ops.py)."""
        k, v = spelt_out(self, w, latent, rope)
        return self.attention(name, q, k, v, places, None, kind, scale=scale)

    def join_rope(self, name: str, k: Array, rope: Array) -> Array:
        with jax.named_scope(name):
            rope = apply_reshard(shared_by_heads(self.layout, "rope"), rope)
            shape = (*k.shape[:3], rope.shape[-1])
            heads = repeated(rope, (0, 1, 3), shape, jax.typeof(k).sharding.spec.partitions)
            return checkpoint_name(jnp.concatenate([k, heads], axis=-1), OPERATION)

    # Experts

    def router(
        self, name: str, x: Array | Kept, w: Array, b: Array | None = None, choice: Array | None = None
    ) -> Array:
        assert self.config.moe is not None, "only a mixture of experts has a router"
        (scores,) = self.einsums(x, {name: w}, **{name: "BTD,DE->BTE"})
        if b is not None:
            scores = self.bias(f"{name}_bias", scores, b)
        with jax.named_scope("top_k"):
            gates = checkpoint_name(gates_of(scores, choice, self.layout, self.config.moe), OPERATION)
        if self.router_losses:
            with jax.named_scope("router_losses"):
                self._of_routers.append(router_losses(scores, gates, self.config.moe))
        return gates

    def experts(
        self,
        block: Callable[[Any, Mapping[str, Any], Array], Array],
        w: Mapping[str, Any],
        x: Array | Kept,
        gates: Array,
    ) -> Array:
        assert self.config.moe is not None, "only a mixture of experts has experts"
        x = wide(x)
        if has_fixed_rows(self.layout):
            return self._within_capacity(block, w, x, gates)
        routing = row_routing(self.layout)
        met, met_by = self._met(x, gates, routing.to_nodes)
        through = self._across_nodes if routing.nodes else self._in_rounds
        total = through(block, w, met, met_by)
        with jax.named_scope("combine"):
            return checkpoint_name(home_tokens(total, x, routing.to_nodes), MATMUL)

    def _met(self, x: Array, gates: Array, routing: RowRouting) -> tuple[Array, Array]:
        """The tokens that a device makes rows of, or sends to nodes, and their gates."""
        with jax.named_scope("gates"):
            gates = checkpoint_name(met_gates(gates, self.layout, routing), MATMUL)
        with jax.named_scope("dispatch"):
            return checkpoint_name(met_tokens(x, self.layout, routing), MATMUL), gates

    def _across_nodes(
        self, block: Callable[..., Array], w: Mapping[str, Any], x: Array, gates: Array
    ) -> Array:
        """The sum of all experts for the tokens x[1, n, D], each sent to each of its nodes once."""
        layout, moe = self.layout, self.config.moe
        assert moe is not None, "only a mixture of experts has experts"
        with jax.named_scope("dispatch"):
            if layout.schedule.capacity is not None:
                gates = within_capacity(gates, moe, layout.schedule.capacity)
            crossings = crossings_of(gates, layout, moe, MATMUL)

        def of_round(crossings: Crossings, number: Array | int, x: Array, gates: Array, w: Any) -> Array:
            with jax.named_scope("gates"):
                gates, route = gates_at_nodes(gates, crossings, number, layout)
                gates = checkpoint_name(gates, MATMUL)
            with jax.named_scope("dispatch"):
                rows = checkpoint_name(rows_of_tokens(x, route.tokens), OPERATION)
                came = checkpoint_name(rows_at_nodes(rows, route, layout), MATMUL)
            met, gates = self._met(came, gates, row_routing(layout).of_node)
            total = self._in_rounds(block, w, met, gates, crossings.room)
            with jax.named_scope("combine"):
                total = checkpoint_name(home_tokens(total, came, row_routing(layout).of_node), MATMUL)
                total = checkpoint_name(rows_from_nodes(total, route, layout), MATMUL)
                return checkpoint_name(sums_of_nodes(total, route), OPERATION)

        return in_rounds(of_round, crossings, x, gates, dict(w))

    def _in_rounds(
        self,
        block: Callable[..., Array],
        w: Mapping[str, Any],
        met: Array,
        gates: Array,
        crossing: Crossing | None = None,
    ) -> Array:
        """The sum of a device's experts for tokens m[1, n, D]. crossing: of tokens from other nodes."""
        assert self.config.moe is not None, "only a mixture of experts has experts"
        with jax.named_scope("dispatch"):
            choices = choices_of(gates, self.layout, self.config.moe, MATMUL, crossing)
        num_even = self.config.moe.experts_per_token * (crossing.own if crossing else met.shape[1])
        start = self._num_products

        def of_round(choices: Choices, number: Array | int, met: Array, gates: Array, w: Any) -> Array:
            ops = copy(self)
            ops._num_products = start
            ops._routes = routes_of(choices, gates, number, num_even)
            sums = ops._sums_of_experts(block, w, met)
            self._num_products = ops._num_products
            return sums

        return in_rounds(of_round, choices, met, gates, dict(w))

    def _sums_of_experts(self, block: Callable[..., Array], w: Mapping[str, Any], met: Array) -> Array:
        """The sum of one pass's rows for the tokens m[1, n, D]."""
        routes, layout, moe = self._routes, self.layout, self.config.moe
        assert routes and moe, "rows have routes"
        with jax.named_scope("dispatch"):
            weighed = moe.scales_input
            rows = weighed_rows_of_tokens(met, routes) if weighed else rows_of_tokens(met, routes.tokens)
            rows = checkpoint_name(rows, OPERATION)
            self._kinds["dispatch"] = OPERATION
            if routes.counts is not None:
                rows = checkpoint_name(rows_at_experts(rows, routes, layout, moe), MATMUL)
                self._kinds["dispatch"] = MATMUL
        y = block(self, w, rows)
        if row_routing(layout).rows:
            # After the bias, which only the first device's columns add, and under the product's name.
            with jax.named_scope("expert_out"):
                y = checkpoint_name(sums_of_columns(y, routes, layout, moe), MATMUL)
        with jax.named_scope("combine"):
            if routes.counts is not None:
                y = checkpoint_name(rows_at_tokens(y, routes, layout, moe), MATMUL)
            return checkpoint_name(sums_of_rows(y, routes, moe), OPERATION)

    def _within_capacity(
        self, block: Callable[..., Array], w: Mapping[str, Any], x: Array, gates: Array
    ) -> Array:
        layout, moe = self.layout, self.config.moe
        assert moe is not None, "only a mixture of experts has experts"
        with jax.named_scope("dispatch"):
            rows = checkpoint_name(dispatch(x, gates, layout, moe), OPERATION)
            rows = checkpoint_name(apply_reshard(to_experts(layout, "d"), rows), MATMUL)
            self._kinds["dispatch"] = MATMUL
        y = block(self, w, rows)
        with jax.named_scope("combine"):
            rows = checkpoint_name(apply_reshard(from_experts(layout, "y"), y), MATMUL)
            return checkpoint_name(combine(rows, gates, layout, moe), OPERATION)

    def _own(self, places: Places) -> Places:
        """The places of a device's own tokens; T may be split, unlike in the places that are given."""
        spec = partition_spec(token_sharding(self.layout, "tokens"))
        return jax.tree.map(lambda x: reshard(x, spec), places)

    def _all(self, places: Places) -> Places:
        """The places of all tokens of a device's sequences, as they are given: nothing moves."""
        spec = partition_spec(token_sharding(self.layout, "tokens").replace(axes={"T": ()}))
        return jax.tree.map(lambda x: reshard(x, spec), places)

    def _gather_positions(self, name: str, x: Array) -> Array:
        """Keys or values of all positions; every shard of the queries adds to their cotangents."""
        with jax.named_scope(name):
            steps = gathered_keys(self.layout, name)
            return apply_reshard(steps, x, is_named=self.config.layers_per_cache > 1)

    def activation(self, name: str, gate: Readable, up: Readable, kind: str) -> Array:
        gate, up = wide(gate), None if up is None else wide(up)
        with jax.named_scope(name):
            if self._routes:
                inputs = (gate,) if up is None else (gate, up)
                made = computed_rows(lambda gate, up=None: activate(gate, up, kind), self._routes, *inputs)
                return checkpoint_name(made, OPERATION)
            return checkpoint_name(activate(gate, up, kind), OPERATION)

    def residual(self, name: str, x: Array, y: Array) -> Array:
        with jax.named_scope(name):
            return checkpoint_name(x + y, OPERATION)

    def layers(
        self,
        block: Callable,
        weights: Any,
        x: Array,
        places: Places,
        cache: Any,
        layers: Sequence[Layer],
    ) -> tuple[Array, Any]:
        """The layers in loops, rematerialised by the Layout's policy."""

        def plain(x: Array, w: Any, lost: Any, kind: KindInLoop, shared: Any) -> tuple[Array, Any, Any]:
            def one(x: Array, w: Any, which: Array | None, shared: Any) -> tuple[Array, Any, Any]:
                self._num_products, self._of_routers = 0, []
                x = checkpoint_name(x, INPUT) if self.layout.schedule.offload else x
                own = kind._replace(which=which)
                x, _, made = block(self, self.reads(w), x, places, None, own, shared)
                return x, sum(self._of_routers) if self._of_routers else None, made

            x, more, made = jax.checkpoint(one, policy=_policy(self.layout))(x, w, kind.which, shared)
            return x, lost if more is None else lost + more, made

        with jax.named_scope("layers"):
            nothing = jnp.zeros(2) if self.router_losses else None
            if self._stage is not None:
                return run_stage(plain, weights, x, nothing, *self._stage)
            return run_layers(plain, weights, x, nothing, layers)

    def take(self, name: str, x: Array, indices: Array) -> Array:
        with jax.named_scope(name):
            return jnp.take_along_axis(x, indices[:, :, None], axis=1)

    def softcap(self, name: str, logits: Array, cap: float) -> Array:
        with jax.named_scope(name):
            return softcap(logits, cap).astype(logits.dtype)

    def loss(
        self,
        name: str,
        x: Array | Kept,
        weights: Mapping[str, Array],
        targets: Array,
        cap: float | None = None,
        **head: str,
    ) -> Array:
        """The mean over all targets; targets that are not counted add zero to the sum."""
        [group] = input_groups(self.layout, head)
        [(weight, plan)] = group.plans.items()

        def nats(logits: Array, targets: Array) -> Array:
            capped = softcap(logits, cap) if cap else logits
            return nats_of(capped, targets, masked=self.masked, z_loss=self.z_loss)

        count = num_chunks(group, targets.shape, self.layout.num_batch_shards)
        if count > 1 and not self._narrow and not isinstance(x, Kept):
            with jax.named_scope(weight):
                w = self._fetched(plan, weights[weight])
            return loss_by_chunks(plan, self.dtype, x, w, targets, nats, count, Names(weight, name))
        (logits,) = self.einsums(x, weights, **head)
        if cap:
            logits = self.softcap("logit_softcap", logits, cap)
        with jax.named_scope(name):
            return jnp.mean(nats_of(logits, targets, masked=self.masked, z_loss=self.z_loss))

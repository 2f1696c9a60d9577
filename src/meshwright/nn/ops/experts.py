"""A mixture of experts in JAX: its router, and the passes of rows through the experts."""

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from meshwright.layout.grouped import Crossing
from meshwright.layout.moves.experts import (
    RowRouting,
    from_experts,
    has_fixed_rows,
    row_routing,
    to_experts,
)
from meshwright.models.at_layer import Places
from meshwright.nn.experts.capacity import combine, dispatch, gates_of, router_losses, within_capacity
from meshwright.nn.experts.dropless import (
    Choices,
    choices_of,
    combined_tokens,
    gathered_gates,
    gathered_tokens,
    over_passes,
    routes_of,
    rows_at_experts,
    rows_at_tokens,
    rows_of_tokens,
    sums_of_columns,
    sums_of_rows,
    weighed_rows_of_tokens,
)
from meshwright.nn.experts.node_dispatch import (
    Crossings,
    crossings_of,
    gates_at_nodes,
    rows_at_nodes,
    rows_from_nodes,
    sums_of_nodes,
)
from meshwright.nn.ops.products import ProductOps
from meshwright.nn.products.execute import apply_reshard
from meshwright.nn.products.narrow import Kept, wide
from meshwright.nn.remat import MATMUL, OPERATION


class ExpertOps(ProductOps):
    """The router and the experts of `models/transformer.py`.

    router_losses: whether `router` appends to `_of_routers`.
    """

    router_losses: bool
    _of_routers: list[Array]  # of the layer that is being traced

    def router(
        self,
        name: str,
        x: Array | Kept,
        w: Array,
        b: Array | None = None,
        choice: Array | None = None,
        *,
        table: Array | None = None,
        places: Places | None = None,
    ) -> Array:
        assert self.config.moe is not None, "only a mixture of experts has a router"
        (scores,) = self.einsums(x, {name: w}, **{name: "BTD,DE->BTE"})
        if b is not None:
            scores = self.bias(f"{name}_bias", scores, b)
        listed = None if table is None or places is None else (table, places.tokens)
        with jax.named_scope("top_k"):
            gates = gates_of(scores, choice, self.layout, self.config.moe, listed)
            gates = checkpoint_name(gates, OPERATION)
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
        m, gates_of_m = self._gathered(x, gates, routing.to_nodes)
        through = self._across_nodes if routing.nodes else self._over_passes
        total = through(block, w, m, gates_of_m)
        with jax.named_scope("combine"):
            return checkpoint_name(combined_tokens(total, x, routing.to_nodes), MATMUL)

    def _gathered(self, x: Array, gates: Array, routing: RowRouting) -> tuple[Array, Array]:
        """The tokens that a device makes rows of, or sends to nodes, and their gates."""
        with jax.named_scope("gates"):
            gates = checkpoint_name(gathered_gates(gates, self.layout, routing), MATMUL)
        with jax.named_scope("dispatch"):
            return checkpoint_name(gathered_tokens(x, self.layout, routing), MATMUL), gates

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

        def of_pass(
            crossings: Crossings, number: Array | int, x: Array, gates: Array, w: Mapping[str, Any]
        ) -> Array:
            with jax.named_scope("gates"):
                gates, route = gates_at_nodes(gates, crossings, number, layout)
                gates = checkpoint_name(gates, MATMUL)
            with jax.named_scope("dispatch"):
                rows = checkpoint_name(rows_of_tokens(x, route.tokens), OPERATION)
                came = checkpoint_name(rows_at_nodes(rows, route, layout), MATMUL)
            m, gates = self._gathered(came, gates, row_routing(layout).of_node)
            total = self._over_passes(block, w, m, gates, crossings.crossing)
            with jax.named_scope("combine"):
                total = checkpoint_name(combined_tokens(total, came, row_routing(layout).of_node), MATMUL)
                total = checkpoint_name(rows_from_nodes(total, route, layout), MATMUL)
                return checkpoint_name(sums_of_nodes(total, route), OPERATION)

        return over_passes(of_pass, crossings, x, gates, dict(w))

    def _over_passes(
        self,
        block: Callable[..., Array],
        w: Mapping[str, Any],
        m: Array,
        gates: Array,
        crossing: Crossing | None = None,
    ) -> Array:
        """The sum of a device's experts for tokens m[1, n, D]. crossing: of tokens from other nodes."""
        assert self.config.moe is not None, "only a mixture of experts has experts"
        with jax.named_scope("dispatch"):
            choices = choices_of(gates, self.layout, self.config.moe, MATMUL, crossing)
        num_even = self.config.moe.experts_per_token * (crossing.num_tokens if crossing else m.shape[1])
        start = self._num_products

        def of_pass(
            choices: Choices, number: Array | int, m: Array, gates: Array, w: Mapping[str, Any]
        ) -> Array:
            ops = copy(self)
            ops._num_products = start
            ops._routes = routes_of(choices, gates, number, num_even)
            sums = ops._sums_of_experts(block, w, m)
            self._num_products = ops._num_products
            return sums

        return over_passes(of_pass, choices, m, gates, dict(w))

    def _sums_of_experts(self, block: Callable[..., Array], w: Mapping[str, Any], m: Array) -> Array:
        """The sum of one pass's rows for the tokens m[1, n, D]."""
        routes, layout, moe = self._routes, self.layout, self.config.moe
        assert routes and moe, "rows have routes"
        with jax.named_scope("dispatch"):
            weighed = moe.scales_input
            rows = weighed_rows_of_tokens(m, routes) if weighed else rows_of_tokens(m, routes.tokens)
            rows = checkpoint_name(rows, OPERATION)
            self._kinds["dispatch"] = OPERATION
            if routes.counts is not None:
                rows = checkpoint_name(rows_at_experts(rows, routes, layout, moe), MATMUL)
                self._kinds["dispatch"] = MATMUL
        y = block(self, w, rows)
        if row_routing(layout).rows:
            # The sum comes after the bias, which only the device with the first columns adds. Audits find it
            # under the name of the product.
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

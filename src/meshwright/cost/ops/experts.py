"""A mixture of experts, recorded as nodes: its router, dispatch and combine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from meshwright.cost.collectives import Copies
from meshwright.cost.graph import Node, Transfer, Value
from meshwright.cost.ops.products import ProductOps
from meshwright.dtypes import dtype_bytes
from meshwright.layout.grouped import Blocks, Crossing
from meshwright.layout.moves.experts import (
    expert_rows,
    from_experts,
    gates_to_experts,
    gathered_in_node,
    has_fixed_rows,
    row_routing,
    sorted_rows,
    sums_from_node,
    sums_from_nodes,
    to_experts,
    to_nodes,
    tokens_from_experts,
    tokens_to_experts,
)
from meshwright.models.at_layer import Places
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Reshard
from meshwright.units import whole


class ExpertOps(ProductOps):
    """The router and the experts of `models/transformer.py`."""

    _local_gates: Value | None = None  # of the rows of the current layer
    _elements = "D"  # the letter of the elements of the current layer's rows: D, or m of a latent

    def router(
        self,
        name: str,
        x: Value,
        w: Value,
        b: Value | None = None,
        choice: Value | None = None,
        *,
        table: Value | None = None,
        places: Places | None = None,
    ) -> Value:
        """gates[B, T, E]: a product, the best k of its scores and their weights."""
        (scores,) = self.einsums(x, {name: w}, **{name: "BTD,DE->BTE"})
        if b is not None:
            scores = self.bias(f"{name}_bias", scores, b)
        return self.elementwise("top_k", (scores,), self.value(scores.array, "f32"), (scores,))

    def experts(
        self,
        block: Callable[[Any, Mapping[str, Value], Value], Value],
        w: Mapping[str, Value],
        x: Value,
        gates: Value,
    ) -> Value:
        """y[B, T, D] in one pass: no device gets over twice its even share of rows."""
        self._elements = x.array.dims[-1]
        rows = self._dispatch("dispatch", x, gates)
        return self._combine("combine", block(self, w, rows), gates, x)

    def _dispatch(self, name: str, x: Value, gates: Value) -> Value:
        """d[E, C, D]: each device sorts its tokens by expert and sends them to the experts' devices.

        Without a capacity each device sends its counts by expert to its group. Grouped tokens go to all
        devices of a group of experts, and are sorted there.
        """
        if has_fixed_rows(self.layout):
            rows = self.value(sorted_rows(self.layout, "d", self._elements), x.dtype)
            needs = (x, gates) if self._scales_input else (gates,)
            rows = self.elementwise(f"{name}_sort", (x, gates), rows, needs)
            return self._exchange(name, rows, to_experts(self.layout, "d", self._elements))
        gathered = self._exchange(name, x, tokens_to_experts(self.layout, "x", self._elements))
        gates = self._resharded_gates(gates, gates_to_experts(self.layout, "gates"))
        if self.expert_rows.crossing is not None:
            gathered, gates = self._to_nodes(name, gathered, gates, self.expert_rows.crossing)
        self._local_gates = gates
        inputs = gathered, gates, *self._agreed_passes(name, gates, self.expert_rows.blocks)
        needs = (gathered, gates) if self._scales_input else (gates,)
        if not row_routing(self.layout).exchanged:
            rows = self.value(expert_rows(self.layout, "d", f"EC{self._elements}"), x.dtype)
            return self.elementwise(f"{name}_sort", inputs, rows, needs)
        with self._capacity(self.expert_rows.sorted):
            rows = self.value(sorted_rows(self.layout, "d", self._elements), x.dtype)
        rows = self.elementwise(f"{name}_sort", inputs, rows, needs)
        counts = (self._counts(name, rows),) if self.expert_rows.blocks is not None else ()
        return self._exchange(name, rows, to_experts(self.layout, "d", self._elements), counts)

    @property
    def _scales_input(self) -> bool:
        """Whether gates weigh the inputs of experts, and not their outputs."""
        return self.config.moe is not None and self.config.moe.scales_input

    def _resharded_gates(self, gates: Value, reshard: Reshard) -> Value:
        return self.reshard("gates", "exchange", gates, reshard, gates.dtype, critical=True, what="tokens")

    def _to_nodes(self, name: str, x: Value, gates: Value, crossing: Crossing) -> tuple[Value, Value]:
        """Tokens and gates at a node: each token once, with the gates of the node's experts."""
        layout, agreed = self.layout, self._agreed_passes(f"{name}_nodes", gates, crossing)
        capacity, even = self._of_tokens(crossing)
        of_node = capacity * self.sizes["E"] / crossing.num_nodes
        with self._capacity(of_node, of_node):
            crossed = to_nodes(layout, "gates", "CE")
            sent = self.elementwise("gates_sort", (gates,), self.value(crossed.given, gates.dtype), ())
            sent = self._resharded_gates(
                self._resharded_gates(sent, crossed), gathered_in_node(layout, "gates", "CE")
            )
        with self._capacity(capacity, even):
            crossed = to_nodes(layout, "x", f"EC{self._elements}")
            inputs = (x, gates, *agreed)
            x = self.elementwise(f"{name}_sort", inputs, self.value(crossed.given, x.dtype), (gates,))
            x = self._exchange(name, x, crossed)
        with self._capacity(capacity, capacity):
            return self._exchange(name, x, gathered_in_node(layout, "x", f"EC{self._elements}")), sent

    def _from_nodes(self, name: str, y: Value, crossing: Crossing) -> Value:
        """[B, T, D]: each node's sums for its rows of tokens, added on the tokens' devices."""
        layout, (capacity, even) = self.layout, self._of_tokens(crossing)
        with self._capacity(capacity, capacity):
            y = self._exchange(name, y, sums_from_node(layout, "y", self._elements))
        with self._capacity(capacity, even):
            y = self._exchange(name, y, sums_from_nodes(layout, "y", self._elements))
        parts = self.value(tokens_from_experts(layout, "y", self._elements).given, y.dtype)
        return self.elementwise(f"{name}_sum", (y,), parts, ())

    def _of_tokens(self, crossing: Crossing) -> tuple[Any, Any]:
        """C of tokens that cross to nodes: by capacity, and by even load."""
        share = self.mesh.size(row_routing(self.layout).tokens) / self.sizes["E"]
        return crossing.num_nodes * crossing.tokens * share, crossing.even * share

    @contextmanager
    def _capacity(self, rows: Any, even: Any = None) -> Iterator[None]:
        """Set C to `rows`, and the number of sent rows to `even`, within a context.

        even: None for the rows of experts by even load.
        """
        before = self.sizes["C"], self.expert_rows
        self.sizes["C"] = rows
        self.expert_rows = before[1] if even is None else replace(before[1], even=even)
        yield
        self.sizes["C"], self.expert_rows = before

    def _counts(self, name: str, rows: Value) -> Value:
        """Rows of each device for each expert, sent to its group."""
        routing = row_routing(self.layout)
        num_experts = self.sizes["E"] / self.mesh.size(routing.nodes)
        num_bytes, sent = num_experts * dtype_bytes("i32"), []
        for axes in filter(None, (routing.exchanged, routing.rows)):
            num_bytes = num_bytes * self.mesh.size(axes)
            sent.append(Transfer("tokens", "all_gather", axes, name, whole(num_bytes), "i32", critical=True))
        array = ShardedArray(name, ("E",), ((),))
        counts = Value(array, "i32", whole(num_bytes))
        return self.add(Node(f"{name}_counts", "exchange", (rows,), (counts,), forward_transfers=tuple(sent)))

    def _agreed_passes(
        self, name: str, gates: Value, capacity: Blocks | Crossing | None
    ) -> tuple[Value, ...]:
        """The number of passes of the rows, the same on all devices; nothing if it is always one."""
        if capacity is None:
            return ()
        axes = row_routing(self.layout).devices
        more = 1 * (capacity.passes > 1) * (self.mesh.size(axes) > 1)
        if isinstance(more, int) and not more:
            return ()
        each = whole(dtype_bytes("i32"))
        sent = Transfer("tokens", "all_reduce", axes, name, each, "i32", critical=True, repeat=more)
        number = Value(ShardedArray(name, (), ()), "i32", whole(each * more))
        return (self.add(Node(f"{name}_rounds", "exchange", (gates,), (number,), forward_transfers=(sent,))),)

    def _combine(self, name: str, y: Value, gates: Value, like: Value) -> Value:
        """[B, T, D]: rows returned to the tokens' devices, and summed by gate.

        Grouped rows are summed before.
        """
        if has_fixed_rows(self.layout):
            rows = self._exchange(name, y, from_experts(self.layout, "y", self._elements))
            out = self.value(like.array, like.dtype)
            needs = (gates,) if self._scales_input else (rows, gates)
            return self.elementwise(f"{name}_sum", (rows, gates), out, needs)
        back, local = tokens_from_experts(self.layout, "y", self._elements), self._local_gates
        assert local is not None, "experts are combined after their dispatch"
        if row_routing(self.layout).exchanged:
            with self._capacity(self.expert_rows.sorted):
                y = self._exchange(name, y, from_experts(self.layout, "y", self._elements))
        if self.expert_rows.crossing is not None:
            with self._capacity(*self._of_tokens(self.expert_rows.crossing)):
                parts = self.value(sums_from_node(self.layout, "y", self._elements).given, y.dtype)
            needs = (local,) if self._scales_input else (y, local)
            y = self.elementwise(f"{name}_sum", (y, local), parts, needs)
            return self._exchange(name, self._from_nodes(name, y, self.expert_rows.crossing), back)
        parts = self.value(back.given, y.dtype)
        # A token's rows that cross together were summed before: experts weigh inputs of their last product.
        summed_before = self._copied_on_arrival and row_routing(self.layout).exchanged
        needs = (local,) if summed_before or self._scales_input else (y, local)
        return self._exchange(name, self.elementwise(f"{name}_sum", (y, local), parts, needs), back)

    @property
    def _copied_on_arrival(self) -> bool:
        """Whether a token's rows for one node cross once without `expert_nodes`."""
        return self.layout.schedule.dispatch == "once" and self.expert_rows.crossing is None

    def _exchange(self, name: str, rows: Value, reshard: Reshard, counts: tuple[Value, ...] = ()) -> Value:
        """Rows of tokens to or from the experts' devices, k of each token, or one for each node.

        Under a schedule that joins the passes of two microbatches (DualPipe; DeepSeek-V3, 2024), the rows of
        one travel during the other's compute (cost/step_cost.py).
        """
        moe = self.config.moe
        assert moe is not None, "only a mixture of experts has experts"
        before = len(self.nodes)
        out = self.reshard(name, "exchange", rows, reshard, rows.dtype, critical=True, what="tokens")
        if len(self.nodes) == before:
            return out
        node = self.nodes[-1]
        if self._copied_on_arrival:
            node = _with_copies(node, Copies(moe.experts_per_token, moe.num_groups, moe.groups_per_token))
        self.nodes[-1] = replace(node, inputs=(*node.inputs, *counts), outputs=(out,))
        return out


def _with_copies(node: Node, copies: Copies) -> Node:
    def copied(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(t, copies=copies) if t.op == "all_to_all" else t for t in transfers)

    return replace(
        node,
        forward_transfers=copied(node.forward_transfers),
        backward_transfers=copied(node.backward_transfers),
    )

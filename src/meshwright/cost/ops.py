"""The operations of the forward pass in symbols: each records its work and transfers as a node.

The counterpart of `nn/ops.py`, reading the same `models/transformer.py` with the same Layout: a
contraction's collectives and FLOPs come from the algebra, forward and backward. Elementwise work
is priced by the bytes it reads and writes, fused as compilers fuse it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from meshwright.cost.graph import Graph, Node, Segment, Transfer, Value, Work
from meshwright.layout import Layout
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.models.transformer import dimensions, input_of, parameters
from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective
from meshwright.notation.einsum import Contraction, Route
from meshwright.notation.operation import placed
from meshwright.units import dtype_bytes


@dataclass(frozen=True)
class Shape:
    """The letters that the workload fixes: sequences B (of one microbatch), T queries, S keys."""

    num_sequences: float
    query_len: int
    key_len: int


class SymbolicOps:
    """Records `models/transformer.py` for one model, layout and shape.

    Sizes may be fractions (a batch that does not divide), since they are only multiplied.
    """

    def __init__(self, config: ModelConfig, layout: Layout, shape: Shape, *, flash_attention: bool) -> None:
        self.layout, self.flash_attention = layout, flash_attention
        self.sizes: dict[str, float] = {
            **dimensions(config),
            "B": shape.num_sequences,
            "T": shape.query_len,
            "S": shape.key_len,
        }
        self.segments: list[Segment] = []
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        """What was recorded, the nodes since the layers as the last segment."""
        tail = (Segment("head", tuple(self._nodes), 1),) if self._nodes else ()
        return Graph((*self.segments, *tail))

    # Values, transfers and nodes

    def value(self, array: ShardedArray, dtype: str) -> Value:
        return Value(array, dtype, round(self._elements(array) * dtype_bytes(dtype)))

    def tokens(self, name: str) -> Value:
        """An integer input: tokens, targets or positions [B, T]."""
        return self.value(self.layout.tokens(name), "i32")

    def weight(self, name: str, letters: str) -> Value:
        """A weight of one layer as it is stored."""
        return self.value(self.layout.weight(name, letters), self.layout.weights_dtype)

    def _activation(self, name: str, letters: str) -> Value:
        return self.value(self.layout.activation(name, letters), self.layout.compute_dtype)

    def _elements(self, array: ShardedArray) -> float:
        size = self.layout.mesh.size
        return prod(self.sizes[dim] / size(axes) for dim, axes in zip(array.dims, array.axes, strict=True))

    def _transfers(
        self, steps: list[Collective], tensor: str, dtype: str, *, critical: bool
    ) -> tuple[Transfer, ...]:
        mesh, sizes = self.layout.mesh, self.sizes
        return tuple(
            Transfer(s.op, s.axes, tensor, s.gathered_bytes(mesh, sizes, dtype), dtype, critical, s)
            for s in steps
            if s.op != "slice"
        )

    def _elementwise(
        self, name: str, inputs: tuple[Value, ...], output: Value, needs: tuple[Value, ...]
    ) -> Value:
        """A memory-bound operation: the backward reads the inputs and the cotangent and writes one."""
        moved = sum(value.bytes_per_device for value in inputs) + output.bytes_per_device
        backward = Work(hbm_bytes=moved + output.bytes_per_device)
        self._nodes.append(
            Node(name, "elementwise", inputs, (output,), needs, Work(hbm_bytes=moved), backward)
        )
        return output

    def _travel(self, name: str, kind: str, x: Value, route: Route, dtype: str, *, critical: bool) -> Value:
        """`x` at the end of its route, in `dtype`: a node, unless nothing moves and nothing changes."""
        forward = self._transfers(route.forward, name, dtype, critical=critical)
        backward = self._transfers(route.backward, name, dtype, critical=critical)
        if not forward and not backward and x.dtype == dtype:
            return x
        out = self.value(route.used, dtype)
        node = Node(name, kind, (x,), (out,), forward_transfers=forward, backward_transfers=backward)
        self._nodes.append(node)
        return out

    # The operations of models/transformer.py

    def embed(self, name: str, tokens: Value, table: Value) -> Value:
        """Rows of table[V_tensor, D]: gathered over fsdp, looked up, summed over tensor.

        A lookup is the product of one-hot rows with the table, without its FLOPs.
        """
        dtype = self.layout.compute_dtype
        out, lookup = self._activation("x", "BTD"), self.layout.contraction(name, "BTV,VD->BTD")
        rows = self._travel(name, "gather", table, lookup.rhs_route, dtype, critical=False)
        moved = Work(hbm_bytes=2 * out.bytes_per_device)
        share = self._transfers(lookup.out_route.forward, name, dtype, critical=True)
        spread = self._transfers(lookup.out_route.backward, name, dtype, critical=True)
        self._nodes.append(
            Node(name, "embed", (tokens, rows), (out,), (tokens,), moved, moved, share, spread)
        )
        return out

    def norm(self, name: str, x: Value, scale: Value) -> Value:
        """RMSNorm; its scale is whole everywhere: the gradient is a float32 sum over all that split x."""
        operation = placed((x.array, scale.array), x.array, wanted=True, whole="D")
        summed = self._transfers(operation.routes[1].backward, name, "f32", critical=False)
        if summed:
            self._nodes.append(Node(name, "gather", (scale,), (scale,), backward_transfers=summed))
        return self._elementwise(name, (x,), self.value(x.array, x.dtype), (x,))

    def einsums(self, x: Value, weights: Mapping[str, Value], **specs: str) -> tuple[Value, ...]:
        """Contractions of one input: it is moved once, and its cotangents are summed before they move."""
        plans = {name: self.layout.contraction(name, spec) for name, spec in specs.items()}
        first, group = next(iter(plans.values())), input_of(*plans)
        moved = self._travel(group, "move", x, first.lhs_route, x.dtype, critical=True)
        return tuple(self._einsum(name, plan, moved, weights[name]) for name, plan in plans.items())

    def _einsum(self, name: str, plan: Contraction, x: Value, stored: Value) -> Value:
        dtype = self.layout.compute_dtype
        w = self._travel(name, "gather", stored, plan.rhs_route, dtype, critical=False)
        partial = self.value(plan.product, dtype)
        traffic = x.bytes_per_device + w.bytes_per_device + partial.bytes_per_device
        forward = Work(plan.flops_per_device(self.layout.mesh, self.sizes), traffic)
        backward = forward + forward  # one product for the gradient of each operand
        self._nodes.append(Node(name, "matmul", (x, w), (partial,), (x, w), forward, backward))
        return self._travel(name, "reduce", partial, plan.out_route, dtype, critical=True)

    def rope(self, name: str, x: Value, positions: Value) -> Value:
        return self._elementwise(name, (x,), self.value(x.array, x.dtype), ())

    def attention(
        self, name: str, q: Value, k: Value, v: Value, positions: Value, cache: object
    ) -> tuple[Value, object]:
        """softmax(q . k) . v: 4 B T S N H FLOPs forward; the backward computes the scores again.

        Flash kernels skip the blocks that the causal mask hides and keep scores on chip. The share
        skipped is T / 2S of the slowest device, which over `context` holds the last T queries.
        Without one (XLA on CPU) all are computed, and between the products each float32 score crosses
        memory about 5 times forward (written, masked, exponentiated and written, read) and 11 backward.
        """
        k, v = self._gather_positions("k", k), self._gather_positions("v", v)
        out = self.value(q.array, q.dtype)
        num_queries, keys = self._elements(q.array), self.sizes["S"]
        queries_of_one = self.sizes["T"] / self.layout.context
        flops = 4 * num_queries * keys
        traffic = sum(value.bytes_per_device for value in (q, k, v, out))
        inputs = (q, k, v)
        if self.flash_attention:
            flops *= 1 - queries_of_one / (2 * keys)
        else:
            inputs = (*inputs, self._scores(q, k, round(4 * num_queries / self.sizes["H"] * keys)))
        # Backward: the scores again, then dV, dP, dQ and dK, five products to the forward's two.
        forward, backward = Work(flops, traffic), Work(2.5 * flops, 2 * traffic)
        self._nodes.append(Node(name, "attention", inputs, (out,), (q, k, v), forward, backward))
        return out, cache

    def _scores(self, q: Value, k: Value, num_bytes: int) -> Value:
        """The softmax between the two products, where no kernel fuses it with them."""
        scores = Value(q.array.replace(name="scores"), "f32", num_bytes)
        forward, backward = Work(hbm_bytes=5 * num_bytes), Work(hbm_bytes=11 * num_bytes)
        self._nodes.append(Node("softmax", "elementwise", (q, k), (scores,), (q, k), forward, backward))
        return scores

    def _gather_positions(self, name: str, x: Value) -> Value:
        """Keys or values of all positions; their cotangents are partial sums over `context`."""
        return self._travel(name, "move", x, self.layout.keys(name), x.dtype, critical=True)

    def activation(self, name: str, gate: Value, up: Value) -> Value:
        return self._elementwise(name, (gate, up), self.value(gate.array, gate.dtype), (gate, up))

    def residual(self, name: str, x: Value, y: Value) -> Value:
        return self._elementwise(name, (x, y), self.value(x.array, x.dtype), ())

    def layers(
        self, block: Callable, weights: Mapping[str, Value], x: Value, positions: Value, cache: object
    ) -> tuple[Value, object]:
        """One layer is recorded and counted L times."""
        self.segments.append(Segment("embedding", tuple(self._nodes), 1))
        self._nodes = []
        out, cache = block(self, weights, x, positions, cache)
        self.segments.append(Segment("layer", tuple(self._nodes), round(self.sizes["L"]), x))
        self._nodes = []
        return out, cache

    def last(self, name: str, x: Value, lengths: Value) -> Value:
        self.sizes["T"] = 1
        return self._activation("x", "BTD")

    def loss(self, name: str, logits: Value, targets: Value) -> Value:
        """Cross-entropy in float32; over a split V maximum, sum and target are reduced."""
        per_token = self.value(ShardedArray("nll", ("B", "T"), logits.array.axes[:2]), "f32")
        over_vocabulary = placed((logits.array,), per_token.array, wanted=True).finish.forward
        over_tokens = placed((per_token.array,), ShardedArray("mean", (), ()), wanted=True).finish.forward
        reduced = 3 * self._transfers(over_vocabulary, name, "f32", critical=True)
        mean = self._transfers(over_tokens, name, "f32", critical=True)
        read = Work(hbm_bytes=2 * logits.bytes_per_device)
        self._nodes.append(
            Node(name, "loss", (logits,), (per_token,), (logits,), read, read, (*reduced, *mean))
        )
        return per_token


def record_loss(config: ModelConfig, layout: Layout, shape: Shape, *, flash_attention: bool) -> Graph:
    """The graph of one microbatch's loss."""
    ops = SymbolicOps(config, layout, shape, flash_attention=flash_attention)
    tokens, positions = ops.tokens("tokens"), ops.tokens("positions")
    transformer.loss(ops, symbolic_weights(config, ops), tokens, tokens, positions)
    return ops.graph()


def symbolic_weights(config: ModelConfig, ops: SymbolicOps) -> dict:
    """Every parameter as a stored value; those of the layers without their L."""
    tree: dict = {}
    for path, param in parameters(config).items():
        group, _, name = path.rpartition("/")
        node = tree.setdefault(group, {}) if group else tree
        node[name] = ops.weight(name, param.letters.removeprefix("L"))
    return tree

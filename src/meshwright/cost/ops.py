"""Symbolic operations of the forward pass: each records its work and transfers as a node.

The counterpart of `nn/ops.py`, with the same `models/transformer.py` and Layout: a contraction's collectives
and FLOPs come from the algebra, forward and backward. Elementwise work is priced by the bytes that it reads
and writes, fused as compilers fuse it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

from meshwright.cost.arrays import each, smaller
from meshwright.cost.collectives import Copies
from meshwright.cost.graph import Cargo, Direction, Graph, Node, Transfer, Value, Work
from meshwright.cost.recorder import FLASH, Lowering, MeshSizes, Recorder, Shape
from meshwright.dtypes import dtype_bytes, number_type
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention import attention_block, lacks_flash, visible_pairs, window_block
from meshwright.layout.contractions import contraction_of, input_groups
from meshwright.layout.grouped import Blocks, Crossing
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
from meshwright.layout.rules import STAGES
from meshwright.layout.runnable import has_static_rows
from meshwright.models import transformer
from meshwright.models.config import Layer, LayerKind, ModelConfig, Window
from meshwright.models.count import count_params, read_positions, seen_keys
from meshwright.models.parameters import ENTERING, parameters
from meshwright.models.transformer import SHARED_KV, Places, spelt_out
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Contraction, Reshard
from meshwright.notation.operation import bias_reshard, placed
from meshwright.units import whole

# A kernel that quantises reads two bytes of an element and writes one; one more byte finds the scales.
_CAST_BYTES = 4
# XLA's kernels for a pair of blocks (nn/attention/blockwise.py): products, and operations between them.
_BLOCK_KERNELS, _BLOCK_KERNELS_BACKWARD = 5, 9


class SymbolicOps(Recorder):
    """Records `models/transformer.py` for one model, layout and shape, as `lowering` runs it."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        shape: Shape,
        lowering: Lowering = FLASH,
        many: MeshSizes | None = None,
    ) -> None:
        super().__init__(config, layout, shape, lowering, many)
        self._quantised: dict[int, Value] = {}
        self._local_gates: Value | None = None  # of the rows of the current layer
        self._shared: tuple[Value, ...] = ()  # values of an earlier layer that the current one reads

    # Embedding, norms and elementwise operations

    def embed(self, name: str, tokens: Value, table: Value) -> Value:
        """Rows of table[V_tensor, D]: gathered over fsdp, looked up, summed over tensor.

        A look-up is the product of one-hot rows with the table, without its FLOPs.
        """
        dtype = self.layout.precision.compute_dtype
        out, lookup = self.activation_value("x", "BTD"), contraction_of(self.layout, name, "BTV,VD->BTD")
        rows = self.fetch(name, table, lookup.rhs_reshard)
        moved = (Work(hbm_bytes=2 * out.bytes_per_device),)
        share = self._rows_sent(name, table, lookup)
        spread = self.transfers("activations", lookup.out_reshard.backward, name, dtype, critical=True)
        if table.frozen:
            spread = ()
        return self.add(
            Node(
                name,
                "embed",
                (tokens, rows),
                (out,),
                (tokens,),
                forward=moved,
                backward=() if table.frozen else moved,
                forward_transfers=share,
                backward_transfers=spread,
            )
        )

    def _rows_sent(self, name: str, table: Value, lookup: Contraction) -> tuple[Transfer, ...]:
        """Transfers of looked-up rows from the devices that have them."""
        steps, dtype = lookup.out_reshard.forward, self.layout.precision.compute_dtype
        return self.transfers("activations", steps, name, dtype, critical=True)

    def add_positions(self, name: str, x: Value, places: Places, table: Value) -> Value:
        """x plus rows of a learned table[W, D]."""
        lookup = contraction_of(self.layout, name, "BTW,WD->BTD")
        rows = self.fetch(name, table, lookup.rhs_reshard)
        return self.elementwise(name, (x, x), self.value(x.array, x.dtype), (places.positions, rows))

    def scale(self, name: str, x: Value, factor: float) -> Value:
        """Fused with its reader."""
        self.fused.add(name)
        return x

    def norm(
        self, name: str, x: Value, scale: Value, bias: Value | None = None, *, kind: str = "rms"
    ) -> Value:
        """A norm over the last letter; its scale and bias are whole on all devices.

        If that letter is split (2D tensor parallelism), the sum of squares is summed over its axes, and so is
        a layer norm's mean before it.
        """
        letter, axes = x.array.dims[-1], x.array.axes[-1]
        for stored in (scale, *([bias] if bias else [])):
            operation = placed((x.array, stored.array), x.array, wanted=True, whole="" if axes else letter)
            self.sum_gradient(name, stored, operation.reshards[1].yielded)
        sums = ()
        if axes:
            squares = ShardedArray(name, x.array.dims[:-1], x.array.axes[:-1], axes)
            whole = placed((squares,), squares.replace(unreduced=()), wanted=True).reshards[0]
            sums = self.transfers("norm statistics", whole.forward, name, "f32", critical=True)
            sums *= 2 if kind == "layer" else 1
        out = self.value(x.array, x.dtype)
        # Steps of an RMS norm: x in float32, and divided by its size. Layer norms are one kernel anywhere.
        kept = self.value(x.array, "f32").bytes_per_device + out.bytes_per_device if kind == "rms" else 0
        # PyTorch's operations, a cast, a square, a mean, a product, a cast and a product, move 36 bytes an
        # element, not 4; in the backward pass about twice that.
        traffic = 8 * self.value(x.array, "f32").bytes_per_device if kind == "rms" else 0
        return self.elementwise(
            name,
            (x,),
            out,
            (x,),
            forward_transfers=sums,
            backward_transfers=sums,
            unfused_bytes=kept,
            steps="norms",
            unfused_traffic=traffic,
        )

    def rope(self, name: str, x: Value, places: Places, kind: LayerKind) -> Value:
        return self.elementwise(name, (x,), self.value(x.array, x.dtype), ()) if kind.turned else x

    def turned_norm(self, name: str, x: Value, kind: LayerKind) -> Value:
        return self.elementwise(name, (x,), self.value(x.array, x.dtype), (x,)) if kind.turned else x

    def temperature(self, name: str, q: Value, places: Places, kind: LayerKind) -> Value:
        """Fused with its reader."""
        self.fused.add(name)
        return q

    def for_layers(self, name: str, x: Value) -> Value:
        return x

    def join_rope(self, name: str, k: Value, rope: Value) -> Value:
        """k[B, T, N, J] and rope[B, T, A], concatenated."""
        shared = shared_by_heads(self.layout, "rope")
        rope = self.reshard(name, "move", rope, shared, rope.dtype, critical=True, what="keys and values")
        array = self.layout.activation(name, "BTNH")
        return self.elementwise(name, (k, rope), self.value(array, k.dtype), ())

    def activation(self, name: str, gate: Value, up: Value | None, kind: str) -> Value:
        """The activation.

        Of experts' rows only the existing ones count, regardless of the capacity.
        """
        inputs = (gate,) if up is None else (gate, up)
        factor = 0 if up is None else gate.bytes_per_device  # the activated gate, before the product with up
        out = self.value(gate.array, gate.dtype)
        share = self.multiplied_share(gate.array)
        out = self.elementwise(name, inputs, out, inputs, unfused_bytes=factor, steps="gates", share=share)
        if cast := [self.elements(one.array) for one in inputs if id(one) in self._narrowed]:
            node, work = self.nodes[-1], Work(hbm_bytes=_CAST_BYTES * share * sum(cast))
            self.nodes[-1] = replace(node, forward=(*node.forward, work))
        return out

    def residual(self, name: str, x: Value, y: Value) -> Value:
        return self.elementwise(name, (x, y), self.value(x.array, x.dtype), ())

    def softcap(self, name: str, logits: Value, cap: float) -> Value:
        """Fused with the loss."""
        self.fused.add(name)
        return logits

    def bias(self, name: str, y: Value, b: Value) -> Value:
        """Fused with the product; its gradient is one more sum."""
        self.fused.add(name)
        reshard_of_bias = bias_reshard(y.array, b.array)
        if not reshard_of_bias.forward:
            self.sum_gradient(name, b, reshard_of_bias.yielded)
            return y
        used = self.fetch(name, b, reshard_of_bias)
        # A recomputation of y reads b again.
        made = next(i for i, node in enumerate(self.nodes) if any(out is y for out in node.outputs))
        self.nodes[made] = replace(self.nodes[made], inputs=(*self.nodes[made].inputs, used))
        return y

    # Contractions

    def kept(self, name: str, x: Value) -> Value:
        """x, kept for the backward pass in a narrower type.

        A product casts its operand to that type in any case.
        """
        if self.layout.precision.saved_dtype and self.layout.phase == "train":
            self._narrow(x)
        return x

    def _narrow(self, x: Value) -> None:
        """Record the bytes of x in the narrower type."""
        precision, length = self.layout.precision, self._local(x.array, x.array.dims[-1])
        assert precision.saved_dtype is not None, "only a layout with a saved_dtype keeps values narrower"
        each_number = number_type(precision.saved_dtype).saved_bytes(length, precision.matmul_scales)
        self._narrowed[id(x)] = whole(self.elements(x.array) * each_number)

    def einsums(self, x: Value, weights: Mapping[str, Value], **specs: str) -> tuple[Value, ...]:
        """Contractions of one input: moved once, with cotangents summed before they move."""
        made: dict[str, Value] = {}
        for group in input_groups(self.layout, specs):
            is_sent = group.is_sent
            moved = self.reshard(
                group.name, "move", x, group.reshard, x.dtype, critical=True, is_there=is_sent
            )
            if id(x) in self._narrowed and moved is not x:
                self._narrow(moved)
            for name, plan in group.plans.items():
                made[name] = self._einsum(name, plan, moved, weights[name])
        return tuple(made[name] for name in specs)

    def _einsum(self, name: str, plan: Contraction, x: Value, stored: Value) -> Value:
        dtype = self.layout.precision.compute_dtype
        w = self.fetch(name, stored, plan.rhs_reshard)
        partial = self.value(plan.product, dtype)
        self._quantise(name, x, w, partial)
        rows, inner, columns, batch = self._product_shape(plan, x, w)
        read, taken = self.read_share(plan), self.multiplied_share(plan.product)
        rows = rows * taken
        kernels = -(-batch * read // 1)  # one of each expert here
        flops = plan.flops_per_device(self.mesh, self.sizes) * taken
        routed = "E" in plan.einsum.lhs and "E" in plan.einsum.rhs
        rows_moved = (x.bytes_per_device + partial.bytes_per_device) * taken
        widened = dtype_bytes(w.dtype) < dtype_bytes(self.layout.precision.matmul_dtype or dtype)
        weight_bytes = w.bytes_per_device * read
        product = Work(flops, rows_moved + weight_bytes, kernels, (rows, inner, columns), batch, routed)
        of_weight = replace(product, shape=(inner, rows, columns))
        if routed and self.blocks is not None:
            reads = self.blocks.even / self.own_experts
            product = replace(product, hbm_bytes=rows_moved + weight_bytes * reads)
            of_weight = self._of_weight(of_weight, w, rows_moved, self.blocks)
        self.add(
            Node(
                name,
                "matmul",
                (x, w),
                (partial,),
                (w,) if stored.frozen else (x, w),
                forward=(replace(product, widened=widened),),
                backward=(replace(product, shape=(rows, columns, inner)),),
                weight_gradient=() if stored.frozen else (of_weight,),
            )
        )
        return self.reshard(name, "reduce", partial, plan.out_reshard, dtype, critical=True)

    def _of_weight(self, work: Work, w: Value, rows_moved: Any, blocks: Blocks) -> Work:
        """The gradient of experts' weights: products of some blocks of rows, the last of them masked.

        The gradient is a float32 sum from zeros to a cast; each product reads and writes it.
        """
        more = blocks.sums * blocks.together / blocks.even
        in_float32 = self.elements(w.array) * dtype_bytes("f32")
        of_sums = (2 * blocks.sums / self.own_experts + 2) * in_float32 + w.bytes_per_device
        return replace(work, flops=work.flops * more, hbm_bytes=rows_moved * more + of_sums)

    def multiplied_share(self, array: ShardedArray) -> Any:
        """The share of an array that is computed: only existing rows of experts."""
        return self.multiplied_rows if "C" in array.dims else 1.0

    def read_share(self, plan: Contraction) -> Any:
        """The share of a product's weights that it reads: all in training."""
        return 1.0

    def _product_shape(self, plan: Contraction, x: Value, w: Value) -> tuple[float, float, float, float]:
        """(rows, contracted, columns, products at once) on one device."""
        e = plan.einsum
        shared = [letter for letter in e.lhs if letter in e.rhs and letter in e.out]
        x_elements, w_elements = self.elements(x.array), self.elements(w.array)
        batch = prod(self._local(x.array, letter) for letter in shared)
        inner = prod(self._local(x.array, letter) for letter in e.lhs if letter in e.contracted)
        return x_elements / batch / inner, inner, w_elements / batch / inner, batch

    def _local(self, array: ShardedArray, letter: str) -> float:
        return self.sizes[letter] / self.mesh.size(array.axes_of(letter))

    def _quantise(self, name: str, x: Value, w: Value, product: Value) -> None:
        """Casts of the operands, and of the cotangent in the backward pass, to the products' type.

        Weights change once a step, so their cast serves all microbatches.
        """
        matmul_dtype, compute_dtype = self.layout.precision.matmul_dtype, self.layout.precision.compute_dtype
        if matmul_dtype is None or dtype_bytes(matmul_dtype) >= dtype_bytes(compute_dtype):
            return
        times = {id(x): 1.0, id(w): 1 / self.microbatches, id(product): 1.0}
        fresh = [value for value in dict.fromkeys((x, w)) if id(value) not in self._quantised]
        self._quantised |= {id(value): value for value in fresh}
        forward, backward = (
            tuple(Work(hbm_bytes=_CAST_BYTES * times[id(v)] * self.elements(v.array)) for v in values)
            for values in (fresh, (product,))
        )
        self.add(Node(f"{name}_cast", "cast", (x, w), (product,), forward=forward, backward=backward))

    # Attention

    def attention(
        self,
        name: str,
        q: Value,
        k: Value,
        v: Value,
        places: Places,
        cache: object,
        kind: LayerKind,
        *,
        softcap: float | None = None,
        scale: float | None = None,
        sinks: Value | None = None,
    ) -> tuple[Value, object]:
        """softmax(q . k) . v: 2 B T S N (H + O) FLOPs forward; the backward pass repeats the scores.

        Flash kernels skip masked blocks and keep scores on chip. Shards of a sequence are dealt so that each
        has its share of early and late queries. Without a kernel (XLA on CPU, GPUs before 2023) all scores
        are computed. Between the products each score, in `scores_dtype`, then crosses memory about 5 times
        forward (written, masked, exponentiated and written, read) and 11 times backward.
        """
        if attention_layout(self.layout) is not self.layout:
            return self._by_heads(name, (q, k, v), places, kind, sinks), cache
        if sinks is not None:
            scores = ShardedArray("sinks", q.array.dims[:-1], q.array.axes[:-1])
            yielded = placed((scores, sinks.array), scores, wanted=True).reshards[1].yielded
            self.sum_gradient("sinks", sinks, yielded)
        out = self.value(self._like_queries(q, v), q.dtype)
        if uses_ring(self.layout):
            passed = [self._rounds(name, x) for name, x in (("k", k), ("v", v))]
            forward, backward = (tuple(t for ways in passed for t in ways[way]) for way in range(2))
            return self._attend(name, (q,), (k, v), out, out, kind.window, forward, backward), cache
        k, v = self._all_positions("k", k), self._all_positions("v", v)
        return self._attend(name, (q,), (k, v), out, out, kind.window), cache

    def _by_heads(
        self,
        name: str,
        projected: tuple[Value, Value, Value],
        places: Places,
        kind: LayerKind,
        sinks: Value | None,
    ) -> Value:
        """Attention by a share of the heads: exchanged for positions, and exchanged back."""
        layout = self.layout
        q, k, v = (
            self._exchange_heads(letter, x, to_heads(layout, letter, "".join(x.array.dims)))
            for letter, x in zip("qkv", projected, strict=True)
        )
        self.layout = attention_layout(layout)
        out, _ = self.attention(name, q, k, v, places, None, kind, sinks=sinks)
        self.layout = layout
        return self._exchange_heads("a", out, from_heads(layout, "a", "".join(out.array.dims)))

    def _exchange_heads(self, name: str, x: Value, reshard: Reshard) -> Value:
        return self._brought(name, "exchange", x, reshard, "activations")

    def _brought(self, name: str, kind: str, x: Value, reshard: Reshard, what: Cargo) -> Value:
        """Queries, keys or values, resharded for attention.

        Layers that share keys reshard them once in the forward pass, since XLA merges equal operations, and
        again for a recomputation.
        """
        is_shared = x in self._shared
        out = self.reshard(name, kind, x, reshard, x.dtype, critical=True, what=what, is_there=is_shared)
        if is_shared and out is not x:
            again = self.transfers(what, reshard.forward, name, x.dtype, critical=True)
            self.nodes[-1] = replace(self.nodes[-1], recompute_transfers=again)
        return out

    def latent_attention(
        self,
        name: str,
        q: Value,
        latent: Value,
        rope: Value,
        w: Mapping[str, Value],
        places: Places,
        cache: object,
        kind: LayerKind,
        *,
        scale: float | None = None,
    ) -> tuple[Value, object]:
        k, v = spelt_out(self, w, latent, rope)
        return self.attention(name, q, k, v, places, cache, kind, scale=scale)

    def _attend(
        self,
        name: str,
        queries: tuple[Value, ...],
        kept: tuple[Value, ...],
        summed: Value,
        out: Value,
        window: Window | None,
        forward_transfers: tuple[Transfer, ...] = (),
        backward_transfers: tuple[Transfer, ...] = (),
    ) -> Value:
        """Attention of the parts of the queries over the kept arrays of positions, as one node.

        summed: the values' sum of each query head, as from the kernel.
        """
        keys = self._keys_met(kept[0], window)
        scores = 2 * keys * sum(self.elements(q.array) for q in queries)
        kernel, widened = self.lowering.kernel, 1.0
        if kernel and kernel.wide_values:
            widened = max(1.0, self.sizes["H"] / self.sizes[summed.array.dims[-1]])
        values = 2 * keys * self.elements(summed.array) * widened
        traffic = sum(value.bytes_per_device for value in (*queries, *kept, summed))
        inputs, outputs = (*queries, *kept), (out,)
        inputs = (*inputs, *self._softmax(queries[0], kept, summed, keys, window))
        if self.lowering.by_blocks:
            outputs = (out, self._log_sum(queries[0]))
        # Backward: the scores again, dQ and dK over H; dP and dV over O.
        head = sum(self.sizes[value.array.dims[-1]] for value in (*queries, summed)) / 2
        shape = self.sizes["T"], head, keys
        forward = Work(scores + values, traffic, shape=shape)
        backward = Work(3 * scores + 2 * values, 2 * traffic, shape=shape)
        needs = (*queries, *kept, *(outputs if self.lowering.by_blocks else ()))
        node = Node(name, "attention", inputs, outputs, needs, (forward,), (backward,))
        return self.add(
            replace(
                node,
                forward_transfers=forward_transfers,
                backward_transfers=backward_transfers,
                unfused_bytes=self._copies_of_keys(kept),
                steps="keys",
            )
        )

    def _keys_met(self, k: Value, window: Window | None) -> Any:
        """Mean number of keys that a query is multiplied with."""
        if self.lowering.by_blocks:
            return each(lambda own: self._keys_of_visible_blocks(window, _block(own)), self._positions(k))
        if self.lowering.kernel and self.lowering.kernel.whole_blocks and window:
            block = window_block(window)
            if window.chunked:
                return self._keys_of_visible_blocks(window, block)
            return smaller(self._mean_keys(None), block * (1 + -(-(window.size - 1) // block)))
        return self._mean_keys(window) if self.lowering.flash_attention else self.sizes["S"]

    def _softmax(
        self, q: Value, kept: tuple[Value, ...], summed: Value, keys: Any, window: Window | None
    ) -> tuple[Value, ...]:
        """The scores between the two products, if they are in memory."""
        if self.lowering.by_blocks:
            return (self._scores_by_blocks(q, kept[0], summed, keys),)
        return () if self.lowering.flash_attention else (self._scores(q, kept[0], keys),)

    def _copies_of_keys(self, kept: tuple[Value, ...]) -> int:
        """Bytes of keys and values repeated for each query head, for kernels without groups."""
        group = self.sizes["N"] / self.sizes["K"] if "K" in kept[0].array.dims else 1
        return whole((group - 1) * sum(value.bytes_per_device for value in kept))

    def _mean_keys(self, window: Window | None) -> float:
        """Mean number of keys that a query sees under the causal mask, within a window if there is one.

        A query at position i of T sees i + 1 of them, T/2 on average.
        """
        queries, keys = self.sizes["T"], self.sizes["S"]
        if window and window.size < keys:
            return seen_keys(keys, window) if queries == keys else read_positions(keys, window)
        return keys * (1 - queries / (2 * keys))

    def _like_queries(self, q: Value, v: Value) -> ShardedArray:
        """q[B, T, N, H] with the head dimension of the values."""
        last = v.array.dims[-1]
        return q.array if last == "H" else self.layout.activation("a", f"BTN{last}")

    def _scores(self, q: Value, k: Value, keys: float) -> Value:
        """The softmax between the two products, without a kernel that fuses it."""
        rows = self.elements(q.array) / self.sizes[q.array.dims[-1]]
        num_bytes = whole(dtype_bytes(self.lowering.scores_dtype) * rows * keys)
        scores = Value(q.array.replace(name="scores"), self.lowering.scores_dtype, num_bytes)
        forward, backward = Work(hbm_bytes=5 * num_bytes), Work(hbm_bytes=11 * num_bytes)
        return self.add(Node("softmax", "softmax", (q, k), (scores,), (q, k), (forward,), (backward,)))

    def _log_sum(self, q: Value) -> Value:
        """The logarithm of the sum of exp(score) of each query, kept for the backward pass."""
        return self.value(ShardedArray("log_sum", q.array.dims[:-1], q.array.axes[:-1]), "f32")

    def _positions(self, x: Value) -> Any:
        """A device's positions of queries, or of keys in attention."""
        return self.sizes["T"] / self.mesh.size(x.array.axes_of("T"))

    def _keys_of_visible_blocks(self, window: Window | None, block: int) -> float:
        """Mean number of keys in the visible blocks of a query."""
        num_blocks = self.sizes["S"] / block
        return block * visible_pairs(num_blocks, block, window) / num_blocks

    def _scores_by_blocks(self, q: Value, k: Value, summed: Value, keys: float) -> Value:
        """The softmax by pairs of blocks, in XLA's operations (nn/attention/blockwise.py).

        Forward a score is written, read for the maximum and for its exponential (float32), and its weight is
        written and read (the type of activations). Backward the score and its gradient are written and read,
        and the weight and the gradient once in the cast type: dV reads one, dQ and dK the other. Each block
        reads and writes the float32 sums: of values, dQ, dK and dV. Keys and values that pass round a ring
        take memory in addition to a device's own.
        """
        f32, narrow = dtype_bytes("f32"), dtype_bytes(self.layout.precision.compute_dtype)
        positions = self._positions(q)
        of_q, of_k = (each(_block, self._positions(x)) for x in (q, k))
        head, out = (self.elements(x.array) for x in (q, summed))
        rows = head / self.sizes[q.array.dims[-1]]
        kept = self.elements(k.array) * (1 + self.sizes[summed.array.dims[-1]] / self.sizes[q.array.dims[-1]])
        pairs = keys / of_k * (positions / of_q)
        of_keys = kept * of_k / self.sizes["S"] * pairs
        score = rows * keys
        forward = score * (3 * f32 + 2 * narrow) + 2 * f32 * out * keys / of_k
        backward = score * (4 * f32 + 5 * narrow) + 2 * f32 * (head * keys / of_k + of_keys)
        held = rows / positions * of_q * of_k * 2 * (f32 + narrow) + f32 * out
        held = held + narrow * kept if uses_ring(self.layout) else held
        scores = Value(q.array.replace(name="scores"), "f32", whole(held))
        works = (
            Work(hbm_bytes=forward, kernels=_BLOCK_KERNELS * pairs),
            Work(hbm_bytes=backward, kernels=_BLOCK_KERNELS_BACKWARD * pairs),
        )
        return self.add(Node("softmax", "softmax", (q, k), (scores,), (q, k), works[:1], works[1:]))

    def _all_positions(self, name: str, x: Value) -> Value:
        """Keys or values of all positions; their cotangents are partial sums over `context`."""
        reshard = gathered_keys(self.layout, name, "".join(x.array.dims))
        return self._brought(name, "move", x, reshard, "keys and values")

    def _rounds(self, name: str, x: Value) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Blocks that pass round a ring during attention; backward also float32 cotangents."""
        reshard = gathered_keys(self.layout, name, "".join(x.array.dims))
        blocks = each(lambda positions: positions / _block(positions), self._positions(x))

        def passed(dtype: str) -> tuple[Transfer, ...]:
            gathers = self.transfers("keys and values", reshard.forward, name, dtype, critical=False)
            return tuple(
                replace(
                    gather,
                    op="permute",
                    gathered_bytes=whole(gather.gathered_bytes / blocks),
                    repeat=whole((self.mesh.size(gather.axes) - 1) * blocks),
                )
                for gather in gathers
            )

        return passed(x.dtype), (*passed(x.dtype), *passed("f32"))

    # Experts

    def router(
        self, name: str, x: Value, w: Value, b: Value | None = None, choice: Value | None = None
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
        rows = self._dispatch("dispatch", x, gates)
        return self._combine("combine", block(self, w, rows), gates, x)

    def _dispatch(self, name: str, x: Value, gates: Value) -> Value:
        """d[E, C, D]: each device sorts its tokens by expert and sends them to the experts' devices.

        Without a capacity each device sends its counts by expert to its group. Grouped tokens go to all
        devices of a group of experts, and are sorted there.
        """
        if has_fixed_rows(self.layout):
            rows = self.value(sorted_rows(self.layout, "d"), x.dtype)
            needs = (x, gates) if self._scales_input else (gates,)
            rows = self.elementwise(f"{name}_sort", (x, gates), rows, needs)
            return self._exchange(name, rows, to_experts(self.layout, "d"))
        gathered = self._exchange(name, x, tokens_to_experts(self.layout, "x"))
        gates = self._resharded_gates(gates, gates_to_experts(self.layout, "gates"))
        if self.crossing is not None:
            gathered, gates = self._to_nodes(name, gathered, gates, self.crossing)
        self._local_gates = gates
        inputs = gathered, gates, *self._agreed_passes(name, gates, self.blocks)
        needs = (gathered, gates) if self._scales_input else (gates,)
        if not row_routing(self.layout).exchanged:
            rows = self.value(expert_rows(self.layout, "d"), x.dtype)
            return self.elementwise(f"{name}_sort", inputs, rows, needs)
        with self._capacity(self.home_rows):
            rows = self.value(sorted_rows(self.layout, "d"), x.dtype)
        rows = self.elementwise(f"{name}_sort", inputs, rows, needs)
        counts = (self._counts(name, rows),) if self.blocks is not None else ()
        return self._exchange(name, rows, to_experts(self.layout, "d"), counts)

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
            crossed = to_nodes(layout, "x")
            inputs = (x, gates, *agreed)
            x = self.elementwise(f"{name}_sort", inputs, self.value(crossed.given, x.dtype), (gates,))
            x = self._exchange(name, x, crossed)
        with self._capacity(capacity, capacity):
            return self._exchange(name, x, gathered_in_node(layout, "x")), sent

    def _from_nodes(self, name: str, y: Value, crossing: Crossing) -> Value:
        """[B, T, D]: each node's sums for its rows of tokens, added on the tokens' devices."""
        layout, (capacity, even) = self.layout, self._of_tokens(crossing)
        with self._capacity(capacity, capacity):
            y = self._exchange(name, y, sums_from_node(layout, "y"))
        with self._capacity(capacity, even):
            y = self._exchange(name, y, sums_from_nodes(layout, "y"))
        parts = self.value(tokens_from_experts(layout, "y").given, y.dtype)
        return self.elementwise(f"{name}_sum", (y,), parts, ())

    def _of_tokens(self, crossing: Crossing) -> tuple[Any, Any]:
        """C of tokens that cross to nodes: by capacity, and by even load."""
        share = self.mesh.size(row_routing(self.layout).tokens) / self.sizes["E"]
        return crossing.num_nodes * crossing.tokens * share, crossing.even * share

    @contextmanager
    def _capacity(self, rows: Any, even: Any = None) -> Iterator[None]:
        """A context in which C is `rows`, of which `even` are sent.

        even: None for the rows of experts by even load.
        """
        before = self.sizes["C"], self.even_rows
        self.sizes["C"], self.even_rows = rows, self.even_rows if even is None else even
        yield
        self.sizes["C"], self.even_rows = before

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
            rows = self._exchange(name, y, from_experts(self.layout, "y"))
            out = self.value(like.array, like.dtype)
            needs = (gates,) if self._scales_input else (rows, gates)
            return self.elementwise(f"{name}_sum", (rows, gates), out, needs)
        back, local = tokens_from_experts(self.layout, "y"), self._local_gates
        assert local is not None, "experts are combined after their dispatch"
        if row_routing(self.layout).exchanged:
            with self._capacity(self.home_rows):
                y = self._exchange(name, y, from_experts(self.layout, "y"))
        if self.crossing is not None:
            with self._capacity(*self._of_tokens(self.crossing)):
                parts = self.value(sums_from_node(self.layout, "y").given, y.dtype)
            needs = (local,) if self._scales_input else (y, local)
            y = self.elementwise(f"{name}_sum", (y, local), parts, needs)
            return self._exchange(name, self._from_nodes(name, y, self.crossing), back)
        parts = self.value(back.given, y.dtype)
        # A token's rows that cross together were summed before: experts weigh inputs of their last product.
        summed_before = self._copied_on_arrival and row_routing(self.layout).exchanged
        needs = (local,) if summed_before or self._scales_input else (y, local)
        return self._exchange(name, self.elementwise(f"{name}_sum", (y, local), parts, needs), back)

    @property
    def _copied_on_arrival(self) -> bool:
        """Whether a token's rows for one node cross once without `expert_nodes`."""
        return self.layout.schedule.dispatch == "once" and self.crossing is None

    def _exchange(self, name: str, rows: Value, reshard: Reshard, counts: tuple[Value, ...] = ()) -> Value:
        """Rows of tokens to or from the experts' devices, k of each token, or one for each node.

        Under a schedule that joins the passes of two microbatches (DualPipe; DeepSeek-V3, 2024), the rows of
        one travel during the other's compute (cost/step.py).
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

    # The rest

    def layers(
        self,
        block: Callable,
        weights: Mapping[str, Value],
        x: Value,
        places: Places,
        cache: object,
        layers: Sequence[Layer],
    ) -> tuple[Value, object]:
        """Records one layer of each kind, with the number of such layers."""
        is_trained = any(param.trained for path, param in parameters(self.config).items() if path in ENTERING)
        if self.layout.schedule.is_spmd and self.layout.pipe > 1 and is_trained:
            x = self._of_stage("enter", x, "backward")
        self.close("embedding", 1)
        recorded: dict[LayerKind, int] = {}
        shared: tuple[Value, ...] | None = None
        for kind, count in Counter(layer.kind for layer in layers).items():
            source, recorded[kind] = x, len(self.segments)
            self._shared = (shared or ()) if kind.shares_kv else ()
            x, cache, made = block(self, weights[kind.stack], source, places, cache, kind, shared)
            self.close("layer", count, source, made or (), self._shared)
            shared = shared if made is None else made
            self.fused |= {SHARED_KV} if made else set()
        self.layer_segments += [recorded[layer.kind] for layer in layers]
        if self.layout.schedule.is_spmd and self.layout.pipe > 1:
            x = self._of_stage("leave", x, "forward")
        return x, cache

    def _of_stage(self, name: str, x: Value, direction: Direction) -> Value:
        """A stage's value on all stages: the last's output, or the first's cotangent."""
        sent = Transfer(
            "activations", "all_reduce", (STAGES,), name, x.bytes_per_device, x.dtype, critical=True
        )
        node = Node(name, "reduce", (x,), (self.value(x.array, x.dtype),))
        if direction == "forward":
            return self.add(replace(node, forward_transfers=(sent,)))
        return self.add(replace(node, backward_transfers=(sent,)))

    def take(self, name: str, x: Value, indices: Value) -> Value:
        self.sizes["T"] = 1
        return self.activation_value("x", "BTD")

    def loss(
        self,
        name: str,
        x: Value,
        weights: Mapping[str, Value],
        targets: Value,
        cap: float | None = None,
        **head: str,
    ) -> Value:
        """Cross-entropy in float32; over a split V maximum, sum and target are reduced.

        XLA fuses it for TPUs and GPUs. On CPU there is a float32 copy of the logits, which becomes the
        probabilities.
        """
        (logits,) = self.einsums(x, weights, **head)
        logits = self.softcap("logit_softcap", logits, cap) if cap else logits
        logits, wide = self._held_logits(logits, head, is_capped=cap is not None)
        per_token = self.value(ShardedArray("nll", ("B", "T"), logits.array.axes[:2]), "f32")
        over_vocabulary = placed((logits.array,), per_token.array, wanted=True).finish.forward
        over_tokens = placed((per_token.array,), ShardedArray("mean", (), ()), wanted=True).finish.forward
        reduced = 3 * self.transfers("loss", over_vocabulary, name, "f32", critical=True)
        mean = self.transfers("loss", over_tokens, name, "f32", critical=True)
        read = (Work(hbm_bytes=2 * self.value(logits.array, logits.dtype).bytes_per_device),)
        gathered = self.value(logits.array.replace(axes={"V": ()}), logits.dtype)
        node = Node(name, "loss", (logits,), (per_token, *wide), (logits,), read, read)
        return self.add(
            replace(
                node,
                forward_transfers=(*reduced, *mean),
                unfused_bytes=gathered.bytes_per_device,
                steps="logits",
            )
        )

    def _held_logits(
        self, logits: Value, head: Mapping[str, str], *, is_capped: bool
    ) -> tuple[Value, tuple[Value, ...]]:
        """The logits in memory, of a chunk of tokens or of all, and their float32 copy."""
        copy = self.value(logits.array.replace(name="probabilities"), "f32")
        head_tokens = self.lowering.head_tokens
        if self.lowering.flash_attention and not head_tokens:
            is_narrow = self.layout.precision.matmul_dtype not in (None, self.layout.precision.compute_dtype)
            return logits, (copy,) if self.lowering.wide_logits and (is_capped or is_narrow) else ()
        [group] = input_groups(self.layout, head)
        if not (head_tokens and group.takes_chunks):
            return logits, (copy,)
        share = smaller(1.0, head_tokens / self.elements(token_sharding(self.layout, "tokens")))
        chunk, copy = (replace(v, bytes_per_device=whole(share * v.bytes_per_device)) for v in (logits, copy))
        assert self.nodes[-1].outputs == (logits,), "the product of a head by chunks is not moved"
        self.nodes[-1] = replace(self.nodes[-1], outputs=(chunk,))
        return chunk, (copy,)


def _with_copies(node: Node, copies: Copies) -> Node:
    def copied(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(t, copies=copies) if t.op == "all_to_all" else t for t in transfers)

    return replace(
        node,
        forward_transfers=copied(node.forward_transfers),
        backward_transfers=copied(node.backward_transfers),
    )


def record_loss(
    config: ModelConfig,
    layout: Layout,
    shape: Shape,
    lowering: Lowering = FLASH,
    many: MeshSizes | None = None,
) -> Graph:
    """The graph of one microbatch's loss; see SymbolicOps."""
    ops = SymbolicOps(config, layout, shape, lowering, many)
    tokens, places = ops.tokens("tokens"), Places(ops.tokens("positions"))
    transformer.loss(config, ops, symbolic_weights(config, ops), tokens, tokens, places)
    return ops.graph()


def record_training(
    config: ModelConfig,
    hardware: Hardware,
    layout: Layout,
    shape: Shape,
    many: MeshSizes | None = None,
    *,
    has_kernel: bool | None = None,
) -> Graph:
    """The graph of one microbatch's loss as the hardware's software runs it.

    has_kernel: whether a flash kernel takes attention; None: as on these chips (`lacks_flash`).
    """
    if has_kernel is None:
        has_kernel = lacks_flash(config, hardware, layout, shape.key_len) is None
    platform, software = hardware.chip.platform, hardware.software
    kernel = platform.flash if software.flash and has_kernel else None
    lowering = Lowering(
        flash_attention=software.flash,
        by_blocks=software.flash and not has_kernel,
        kernel=kernel,
        head_tile=kernel.head_tile if kernel else 1,
        scores_dtype=layout.precision.compute_dtype if platform.fused_softmax else "f32",
        wide_logits=platform.wide_logits and software.is_ours,
        head_tokens=platform.head_tokens,
        static_blocks=platform.share_blocks if has_static_rows(hardware, layout) else None,
    )
    graph = replace(record_loss(config, layout, shape, lowering, many), head_waits=platform.head_waits)
    graph = _with_early_layers(graph) if platform.early_recompute else graph
    if not hardware.software.counts_head:
        return graph
    params = count_params(config)
    of_a_layer = (params.total - params.vocab) / config.num_layers
    return replace(graph, head_layers=config.d_model * config.vocab_size / of_a_layer)


def _with_early_layers(graph: Graph) -> Graph:
    """The graph as XLA for CPU runs it, without barriers before recomputation.

    A stack of several layers is a loop, which ties recomputation to its backward pass; nothing does so for a
    stack of one layer.
    """
    single = {graph.layers[layer] for part in graph.weights if len(part.layers) == 1 for layer in part.layers}
    segments = (replace(one, recomputed_early=i in single) for i, one in enumerate(graph.segments))
    return replace(graph, segments=tuple(segments))


def _block(positions: float) -> int:
    return attention_block(int(positions))


def symbolic_weights(config: ModelConfig, ops: SymbolicOps) -> dict:
    """Every parameter as a stored value; parameters of layers without their L or P."""
    tree: dict = {}
    for path, param in parameters(config).items():
        group, _, name = path.rpartition("/")
        node = tree.setdefault(group, {}) if group else tree
        node[name] = ops.weight(path, param)
    return tree

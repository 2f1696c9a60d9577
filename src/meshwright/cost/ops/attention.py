"""Attention, recorded as nodes: its work, its scores, and the moves of queries, keys and values."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from meshwright.cost.arrays import mapped, smaller
from meshwright.cost.graph import Cargo, Node, Transfer, Value, Work
from meshwright.cost.ops.products import ProductOps
from meshwright.dtypes import dtype_bytes
from meshwright.layout.attention_kernels import (
    attention_block,
    visible_pairs,
    visible_share,
    window_block,
)
from meshwright.layout.moves.attention import (
    attention_layout,
    chosen_keys,
    from_heads,
    gathered_index,
    gathered_keys,
    shared_by_heads,
    shared_entries,
    to_heads,
    uses_ring,
)
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.config_tables import Indexer
from meshwright.models.count import read_positions, seen_keys
from meshwright.models.layer_kinds import LayerKind, Window
from meshwright.models.ops import LatentOps, Scoring
from meshwright.models.transformer import spelt_out
from meshwright.notation.array import ShardedArray
from meshwright.notation.einsum import Reshard
from meshwright.notation.operation import placed_operation
from meshwright.units import whole

_MASK = "int8"  # a byte for each truth value
# XLA's kernels for a pair of blocks (nn/attention/blockwise.py): products, and operations between them.
_BLOCK_KERNELS, _BLOCK_KERNELS_BACKWARD = 5, 9


def positions_of_entry(kind: LayerKind) -> int:
    """Positions of a compressed key; 1 if the layer's keys are not compressed."""
    return (kind.window.compressed if kind.window else 0) or 1


class AttentionOps(ProductOps):
    """Attention of `models/transformer.py`."""

    _shared: tuple[Value, ...] = ()  # values of an earlier layer that the current one reads

    def rope(self, name: str, x: Value, at: AtLayer, *, leading: bool = False, back: bool = False) -> Value:
        return self.elementwise(name, (x,), self.value(x.array, x.dtype), ()) if at.kind.turned else x

    def turned_norm(self, name: str, x: Value, kind: LayerKind) -> Value:
        return self.elementwise(name, (x,), self.value(x.array, x.dtype), (x,)) if kind.turned else x

    def temperature(self, name: str, q: Value, at: AtLayer) -> Value:
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

    def attention(
        self,
        name: str,
        q: Value,
        k: Value,
        v: Value,
        at: AtLayer,
        scoring: Scoring[Value],
    ) -> tuple[Value, AtLayer]:
        """softmax(q . k) . v: 2 B T S N (H + O) FLOPs forward; the backward pass repeats the scores.

        Flash kernels skip masked blocks and keep scores on chip. Shards of a sequence are dealt so that each
        has its share of early and late queries. Without a kernel (XLA on CPU, GPUs before 2023) all scores
        are computed. Between the products each score, in `scores_dtype`, then crosses memory about 5 times
        forward (written, masked, exponentiated and written, read) and 11 times backward.
        """
        if attention_layout(self.layout) is not self.layout:
            return self._by_heads(name, (q, k, v), at, scoring), at
        sinks, chosen, entries = scoring.sinks, scoring.chosen, scoring.entries
        if sinks is not None:
            scores = ShardedArray("sinks", q.array.dims[:-1], q.array.axes[:-1])
            yielded = placed_operation((scores, sinks.array), scores, wanted=True).reshards[1].yielded
            self.sum_gradient("sinks", sinks, yielded)
        out = self.value(self._like_queries(q, v), q.dtype)
        if uses_ring(self.layout):
            passed = [self._rounds(name, x) for name, x in (("k", k), ("v", v))]
            forward, backward = (tuple(t for ways in passed for t in ways[way]) for way in range(2))
            moves = forward, backward
            return self._attend(name, (q,), (k, v), out, out, self._read(at.kind), chosen, *moves), at
        values_are_keys = v is k
        k = self._all_positions("k", k)
        v = k if values_are_keys else self._all_positions("v", v)
        more = () if entries is None else (self._entries_of_heads(entries.values),)
        return self._attend(name, (q,), (k, v), out, out, self._read(at.kind), chosen, more=more), at

    def _entries_of_heads(self, entries: Value) -> Value:
        """Entries as keys of all heads; devices with different queries or heads add up their cotangents."""
        move = shared_entries(self.layout)
        sent = self.transfers("keys and values", move.backward, "entries", entries.dtype, critical=True)
        out = replace(self.value(move.used, entries.dtype), is_copy=False)
        return self.add(Node("entries", "move", (entries,), (out,), backward_transfers=sent))

    def _read(self, kind: LayerKind) -> Window | None:
        """A window of the number of keys that a query reads: the layer's, or `top_k` with an indexer.

        By blocks the layer's window stays: all visible scores are computed, and those not chosen are masked.
        """
        is_masked = self.lowering.by_blocks or (kind.window and kind.window.compressed)
        if self.config.indexer is None or is_masked:
            return kind.window
        return Window(self.config.indexer.top_k)

    def index(
        self, name: str, q: Value, k: Value, weights: Value | None, at: AtLayer, entries: Places | None = None
    ) -> tuple[Value, AtLayer]:
        """Scores of all keys of the index, and the choice of the highest: 2 B T S x y FLOPs.

        By blocks the product of each head with each key crosses memory twice. The score, the sum of a query's
        products, crosses it about eight times: written, read for the choice, compared twice, and counted. The
        result is a mask, which is kept for the backward pass. Otherwise it is the chosen keys' positions.
        If blocks of keys are chosen, there is a choice for each KV head, and only the best score of a block
        crosses memory eight times.
        """
        indexer, every = self.config.indexer, positions_of_entry(at.kind)
        assert indexer is not None, "only an indexer has an index"
        held = self._index_keys(k, every) if entries is None else k
        keys = self._keys_scored(held) / every
        heads = self._heads_scored(q, indexer)
        of_queries = self.elements(q.array) / heads / self.sizes["y"]
        choices, together = heads if indexer.block else 1, indexer.block_size
        inputs = (q, held, *(() if weights is None else (weights,)))
        flops, moved = 2 * keys * self.elements(q.array), sum(x.bytes_per_device for x in inputs)
        shape, num_keys = (self.sizes["T"], float(self.sizes["y"]), keys), self.sizes["S"] / every
        if not self.lowering.by_blocks:
            array = self.layout.activation(name, "BTK" if indexer.block else "BT")
            num_chosen = min(indexer.top_k, num_keys) / together
            chosen = Value(array, "i32", whole(of_queries * choices * num_chosen * dtype_bytes("i32")))
            work = (Work(flops, moved, shape=shape),)
            return self.add(Node(name, "attention", inputs, (chosen,), (), work)), at
        move, f32 = chosen_keys(self.layout, indexer), dtype_bytes("f32")
        chosen = self.value(move.used, _MASK)
        chosen = replace(chosen, bytes_per_device=whole(chosen.bytes_per_device / together / every))
        in_block = of_queries * mapped(_block, self._positions(q)) / self._positions(q)
        kept = 3 * choices * num_keys / together
        temporary = in_block * f32 * (heads * _block(self.sizes["S"]) + kept)
        scores = Value(move.given.replace(name="scores"), "f32", whole(temporary))
        traffic = of_queries * keys * f32 * (2 * heads + 8 * choices / together)
        work = (Work(flops, moved + traffic + chosen.bytes_per_device, shape=shape),)
        sent = self.transfers("activations", move.forward, "chosen", _MASK, critical=True)
        sent = tuple(replace(one, gathered_bytes=whole(one.gathered_bytes / every)) for one in sent)
        node = Node(name, "attention", inputs, (chosen, scores), (), work, forward_transfers=sent)
        return self.add(node), at

    def _heads_scored(self, q: Value, indexer: Indexer) -> float:
        """Number of the index's heads whose scores a device computes."""
        letter = indexer.head_letter
        return self.sizes[letter] / self.mesh.size(q.array.axes_of(letter))

    def _index_keys(self, k: Value, every: int) -> Value:
        """The keys of the index that queries are scored with, one for `every` positions."""
        move = gathered_index(self.layout)
        return self.reshard("index_k", "move", k, move, k.dtype, critical=True, what="keys and values")

    def _keys_scored(self, keys: Value) -> Any:
        """Mean number of keys that a query is scored with."""
        return self._keys_multiplied(keys, None)

    def _by_heads(
        self, name: str, projected: tuple[Value, Value, Value], at: AtLayer, scoring: Scoring[Value]
    ) -> Value:
        """Attention by a share of the heads: exchanged for positions, and exchanged back."""
        layout = self.layout
        q, k, v = (
            self._exchange_heads(letter, x, to_heads(layout, letter, "".join(x.array.dims)))
            for letter, x in zip("qkv", projected, strict=True)
        )
        self.layout = attention_layout(layout)
        out, _ = self.attention(name, q, k, v, at, scoring)
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
        at: AtLayer,
        scoring: Scoring[Value],
    ) -> tuple[Value, AtLayer]:
        k, v = spelt_out(cast("LatentOps[Value]", self), w, latent, rope)
        return self.attention(name, q, k, v, at, scoring)

    def _attend(
        self,
        name: str,
        queries: tuple[Value, ...],
        kept: tuple[Value, ...],
        summed: Value,
        out: Value,
        window: Window | None,
        chosen: Value | None = None,
        forward_transfers: tuple[Transfer, ...] = (),
        backward_transfers: tuple[Transfer, ...] = (),
        more: tuple[Value, ...] = (),
    ) -> Value:
        """Attention of the parts of the queries over the kept arrays of positions, as one node.

        summed: the values' sum of each query head, as from the kernel. more: compressed keys after `kept`.
        """
        keys = self._keys_multiplied(kept[0], window)
        scores = 2 * keys * sum(self.elements(q.array) for q in queries)
        kernel, widened = self.lowering.kernel, 1.0
        if kernel and kernel.wide_values:
            widened = max(1.0, self.sizes["H"] / self.sizes[summed.array.dims[-1]])
        values = 2 * keys * self.elements(summed.array) * widened
        traffic = sum(value.bytes_per_device for value in (*queries, *kept, *more, summed))
        inputs, outputs = (*queries, *kept, *more), (out,)
        inputs = (*inputs, *self._softmax(queries[0], kept, summed, keys, window))
        if self.lowering.by_blocks:
            outputs = (out, self._log_sum(queries[0]))
        # Backward: the scores again, dQ and dK over H; dP and dV over O.
        head = sum(self.sizes[value.array.dims[-1]] for value in (*queries, summed)) / 2
        shape = self.sizes["T"], head, keys
        forward = Work(scores + values, traffic, shape=shape)
        backward = Work(3 * scores + 2 * values, 2 * traffic, shape=shape)
        needs = (*queries, *kept, *more, *(outputs if self.lowering.by_blocks else ()))
        if chosen is not None:
            inputs, needs = (*inputs, chosen), (*needs, chosen)
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

    def _keys_multiplied(self, k: Value, window: Window | None) -> Any:
        """Mean number of keys that a query is multiplied with."""
        if self.lowering.by_blocks:
            return mapped(lambda size: self._keys_of_visible_blocks(window, _block(size)), self._positions(k))
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

        A query at position i of T sees i + 1 of them, T/2 on average; of packed documents only its own.
        """
        queries, keys = self.sizes["T"], self.sizes["S"]
        if self.document_len is not None and queries == keys:
            return seen_keys(min(self.document_len, keys), window)
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
        return self.sizes["T"] / self.mesh.size(x.array.axes_of("T") if "T" in x.array.dims else ())

    def _keys_of_visible_blocks(self, window: Window | None, block: int) -> float:
        """Mean number of keys in the visible blocks of a query."""
        if window and window.entries(self.sizes["S"]):
            num_keys = self.sizes["S"] + window.entries(self.sizes["S"])
            return num_keys * visible_share(self.sizes["S"], window)
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
        of_q, of_k = (mapped(_block, self._positions(x)) for x in (q, k))
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
        blocks = mapped(lambda positions: positions / _block(positions), self._positions(x))

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


def _block(positions: float) -> int:
    return attention_block(int(positions))

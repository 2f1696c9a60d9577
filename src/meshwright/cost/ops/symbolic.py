"""Symbolic operations of the forward pass: each records its work and transfers as a node.

The counterpart of `nn/ops/`, with the same `models/transformer.py` and Layout: a contraction's collectives
and FLOPs come from the algebra, forward and backward. Elementwise work is priced by the bytes that it reads
and writes, fused as compilers fuse it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshwright.cost.arrays import smaller
from meshwright.cost.graph import Direction, Node, Transfer, Value, Work
from meshwright.cost.ops.compression import CompressionOps
from meshwright.cost.ops.experts import ExpertOps
from meshwright.cost.ops.mixers import MixerOps
from meshwright.cost.ops.products import CAST_BYTES
from meshwright.cost.ops.streams import StreamOps
from meshwright.layout.contractions import input_groups
from meshwright.layout.moves.attention import (
    token_sharding,
)
from meshwright.layout.rules import STAGES
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.layer_kinds import Layer, LayerKind, Window
from meshwright.models.parameters import ENTERING, dimensions, parameters
from meshwright.models.scopes import SHARED_KV
from meshwright.notation.array import ShardedArray
from meshwright.notation.operation import placed_operation
from meshwright.units import whole


class SymbolicOps(CompressionOps, ExpertOps, MixerOps, StreamOps):
    """Records `models/transformer.py` for one model, layout and shape, as `lowering` runs it."""

    def scale(self, name: str, x: Value, factor: float) -> Value:
        """Fused with its reader."""
        self.fused.add(name)
        return x

    def norm(
        self,
        name: str,
        x: Value,
        scale: Value | None,
        bias: Value | None = None,
        *,
        kind: str = "rms",
        num_letters: int = 1,
        eps: float | None = None,
    ) -> Value:
        """A norm over the last letters; its scale and bias are as they are stored.

        If those letters are split (2D tensor parallelism, or all heads together), the sum of squares is
        summed over their axes, and so is a layer norm's mean before it.
        """
        axes = tuple(axis for split in x.array.axes[-num_letters:] for axis in split)
        for stored in filter(None, (scale, bias)):
            whole = "" if x.array.axes[-1] else x.array.dims[-1]
            operation = placed_operation((x.array, stored.array), x.array, wanted=True, whole=whole)
            self.sum_gradient(name, stored, operation.reshards[1].yielded)
        sums = ()
        if axes:
            squares = ShardedArray(name, x.array.dims[:-num_letters], x.array.axes[:-num_letters], axes)
            whole = placed_operation((squares,), squares.replace(unreduced=()), wanted=True).reshards[0]
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

    def dot(self, name: str, x: Value, w: Value) -> Value:
        """x[B, T, D] times w[D], summed over D."""
        operation = placed_operation(
            (x.array, w.array), x.array, wanted=True, whole="" if x.array.axes[-1] else "D"
        )
        self.sum_gradient(name, w, operation.reshards[1].yielded)
        parts = ShardedArray(name, x.array.dims[:-1], x.array.axes[:-1], x.array.axes[-1])
        finish = placed_operation((parts,), parts.replace(unreduced=()), wanted=True).reshards[0]
        sums = self.transfers("activations", finish.forward, name, "f32", critical=True)
        out = self.value(parts.replace(unreduced=()), x.dtype)
        return self.elementwise(name, (x,), out, (x,), forward_transfers=sums)

    def clip(self, name: str, x: Value, limit: float) -> Value:
        """Fused with its reader."""
        self.fused.add(name)
        return x

    def gated(self, name: str, y: Value, gate: Value) -> Value:
        return self.elementwise(name, (y, gate), self.value(y.array, y.dtype), (y, gate))

    def activation(
        self,
        name: str,
        gate: Value,
        up: Value | None,
        kind: str,
        slopes: tuple[Value, Value] | None = None,
    ) -> Value:
        """The activation.

        Of experts' rows only the existing ones count, regardless of the capacity.
        """
        for slope in slopes or ():
            operation = placed_operation((gate.array, slope.array), gate.array, wanted=True)
            self.sum_gradient(name, slope, operation.reshards[1].yielded)
        inputs = (gate,) if up is None else (gate, up)
        factor = 0 if up is None else gate.bytes_per_device  # the activated gate, before the product with up
        out = self.value(gate.array, gate.dtype)
        share = self.multiplied_share(gate.array)
        out = self.elementwise(name, inputs, out, inputs, unfused_bytes=factor, steps="gates", share=share)
        if cast := [self.elements(one.array) for one in inputs if id(one) in self._narrowed]:
            node, work = self.nodes[-1], Work(hbm_bytes=CAST_BYTES * share * sum(cast))
            self.nodes[-1] = replace(node, forward=(*node.forward, work))
        return out

    def residual(self, name: str, x: Value, y: Value) -> Value:
        return self.elementwise(name, (x, y), self.value(x.array, x.dtype), ())

    def add_shared_experts(self, name: str, chosen: Value, shared: Value, gate: Value | None) -> Value:
        shared = shared if gate is None else self.gated(f"{name}_gated", shared, gate)
        return self.residual(f"{name}_residual", chosen, shared)

    def softcap(self, name: str, logits: Value, cap: float) -> Value:
        """Fused with the loss."""
        self.fused.add(name)
        return logits

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
        self.close("head" if self.layer_segments else "embedding", 1)
        recorded: dict[LayerKind, int] = {}
        of_model = self.config, self.sizes
        shared_by: dict[Window | None, tuple[Value, ...]] = {}
        shared: tuple[Value, ...] | None = None
        kinds = [layer.kind._replace(slope=1.0) for layer in layers]  # decays take the same time
        for kind, count in Counter(kinds).items():
            self.config = of_model[0].at(kind.variant)
            self.sizes = {**of_model[1], **dimensions(of_model[0], kind.stack)}
            source, recorded[kind] = x, len(self.segments)
            if of_model[0].num_kv_shared:
                shared = shared_by.get(kind.window, shared)
            self._shared = (shared or ()) if kind.shares_kv else ()
            at = AtLayer(places, cache, kind)
            x, cache, made = block(self, weights[kind.stack], source, at, shared)
            self.close("layer", count, source, made or (), self._shared)
            shared = shared if made is None else made
            shared_by |= {} if made is None else {kind.window: made}
            self.fused |= {SHARED_KV} if made else set()
        self.config, self.sizes = of_model
        self.layer_segments += [recorded[kind] for kind in kinds]
        if self.layout.schedule.is_spmd and self.layout.pipe > 1:
            x = self._of_stage("leave", x, "forward")
        return x, cache

    def join(self, name: str, x: Value, y: Value) -> Value:
        return self.elementwise(name, (x, y), self.activation_value(name, "BTh"), ())

    def detached(self, x: Value) -> Value:
        """`x`; nothing that was recorded so far has a backward pass."""
        self.nodes = list(map(_only_forward, self.nodes))
        self.segments = [
            replace(segment, nodes=tuple(map(_only_forward, segment.nodes)), memo={})
            for segment in self.segments
        ]
        return x

    def undifferentiated(self, block: Callable[..., Any], *inputs: object) -> Any:
        """The result of block(*inputs), whose nodes have no backward pass."""
        start = len(self.nodes)
        made = block(*inputs)
        self.nodes[start:] = map(_only_forward, self.nodes[start:])
        return made

    def with_draft_loss(self, handed_on: object, loss: Value) -> object:
        return handed_on

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
        *,
        has_last: bool = True,
        **head: str,
    ) -> Value:
        """Cross-entropy in float32; over a split V maximum, sum and target are reduced.

        XLA fuses it for TPUs and GPUs. On CPU there is a float32 copy of the logits, which becomes the
        probabilities.
        """
        (logits,) = self.einsums(x, weights, **head)
        if "unembed_bias" in weights:
            logits = self.bias("unembed_bias", logits, weights["unembed_bias"])
        logits = self.softcap("logit_softcap", logits, cap) if cap else logits
        logits, wide = self._held_logits(logits, head, is_capped=cap is not None)
        per_token = self.value(ShardedArray("nll", ("B", "T"), logits.array.axes[:2]), "f32")
        over_vocabulary = placed_operation((logits.array,), per_token.array, wanted=True).finish.forward
        over_tokens = placed_operation(
            (per_token.array,), ShardedArray("mean", (), ()), wanted=True
        ).finish.forward
        reduced = 3 * self.transfers("loss", over_vocabulary, name, "f32", critical=True)
        mean = self.transfers("loss", over_tokens, name, "f32", critical=True)
        read = (Work(hbm_bytes=2 * self.value(logits.array, logits.dtype).bytes_per_device),)
        gathered = self.value(logits.array.replace(axes={"V": ()}), logits.dtype)
        node = Node(name, "loss", (logits,), (per_token, *wide), (logits,), read, read)
        if cap and self.lowering.caps_apart:
            node = replace(node, scratch=logits.memory_bytes)
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
        """The logits in memory, of a slice of tokens or of all, and their float32 copy."""
        copy = self.value(logits.array.replace(name="probabilities"), "f32")
        head_tokens = self.lowering.head_tokens
        if self.lowering.flash_attention and not head_tokens:
            is_narrow = self.layout.precision.matmul_dtype not in (None, self.layout.precision.compute_dtype)
            return logits, (copy,) if self.lowering.wide_logits and (is_capped or is_narrow) else ()
        [group] = input_groups(self.layout, head)
        if not (head_tokens and group.takes_slices):
            return logits, (copy,)
        share = smaller(1.0, head_tokens / self.elements(token_sharding(self.layout, "tokens")))
        of_slice, copy = (
            replace(v, bytes_per_device=whole(share * v.bytes_per_device)) for v in (logits, copy)
        )
        assert self.nodes[-1].outputs == (logits,), "the product of a head by slices is not moved"
        self.nodes[-1] = replace(self.nodes[-1], outputs=(of_slice,))
        return of_slice, (copy,)


def _only_forward(node: Node) -> Node:
    """The node without a backward pass."""
    return replace(
        node,
        needs=(),
        backward=(),
        weight_gradient=(),
        backward_transfers=(),
        update_transfers=(),
        unfused_bytes=0,
    )

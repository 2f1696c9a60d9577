"""One forward pass with a cache: prefill of B prompts, or the next token of B sequences.

The recorded pass is priced as the forward passes of training are (step.py). Memory is weights, caches and
what one operation reads and writes; nothing is kept for a backward pass. What a cache holds, and what a
layer reads of it, is said by models/count.py: a local layer's window, one latent for all heads, one cache
for several layers. What serve/ runs today keeps every position of every layer.
"""

from collections import Counter
from dataclasses import asdict, dataclass, replace

from meshwright.cost.graph import Graph, Node, Value
from meshwright.cost.memory import stored_parameters
from meshwright.cost.ops import SymbolicOps, symbolic_weights
from meshwright.cost.recorder import Shape
from meshwright.cost.step import StepCost, StepPricer
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Phase
from meshwright.models import transformer
from meshwright.models.config import LayerKind, ModelConfig
from meshwright.models.count import cache_arrays, cache_windows, cached_positions
from meshwright.models.transformer import Places
from meshwright.notation.collective import reshard
from meshwright.units import dtype_bytes


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes on one chip. buffers: the inputs and outputs of the largest operation."""

    weights: int
    cache: int
    buffers: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.buffers

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class _CachedOps(SymbolicOps):
    """Records a pass of T queries of each sequence, behind S - T positions in the cache."""

    def attention(
        self,
        name: str,
        q: Value,
        k: Value,
        v: Value,
        places: Places,
        cache: object,
        kind: LayerKind,
        **how: object,
    ) -> tuple[Value, object]:
        """In prefill as in training. A generate step reads what the cache keeps of every sequence.

        From latents[B,S,R] and rotary keys[B,S,A] it reads them as one KV head: queries go through wk_up
        and sums of latents through wv_up (DeepSeek-V2, 2024), which are the FLOPs of the new position's keys
        and values. So scores take 2 B S N (R + A) FLOPs, and values 2 B S N R.
        """
        if self.sizes["T"] == self.sizes["S"]:
            return super().attention(name, q, k, v, places, cache, kind)
        out = self.value(self._like_queries(q, v), q.dtype)
        kept = tuple(self.cached(1, kind.window).values())
        if self.config.mla is None:
            return self._attend(name, (q,), kept, out, out, kind.window), cache
        latent, rope = (
            self.value(self.layout.activation("q", letters), q.dtype) for letters in ("BTNR", "BTNA")
        )
        return self._attend(name, (latent, rope), kept, latent, out, kind.window), cache

    def cached(self, num_layers: int, window: int | None) -> dict[str, Value]:
        """The arrays in the cache of so many layers with this window."""
        sizes = self.sizes
        self.sizes = sizes | {"L": num_layers, "S": cached_positions(sizes["S"], window)}
        found = {
            name: self.activation_value(name, "L" + letters)
            for name, letters in cache_arrays(self.config).items()
        }
        self.sizes = sizes
        return found


def record_inference(config: ModelConfig, layout: Layout, shape: Shape, *, flash_attention: bool) -> Graph:
    """The graph of one step: logits[B, V] after each sequence's last token, whole over V."""
    ops = _CachedOps(config, layout, shape, flash_attention=flash_attention)
    tokens, places = ops.tokens("tokens"), Places(ops.tokens("positions"))
    weights = symbolic_weights(config, ops)
    logits, _ = transformer.logits(config, ops, weights, tokens, places, indices=tokens)
    steps = reshard(logits.array, logits.array.replace(axes={"V": ()}))
    gathered = ops.transfers("logits", steps, "logits", logits.dtype, critical=True)
    ops.add(Node("logits", "move", (logits,), (logits,), forward_transfers=gathered))
    caches = tuple(
        value
        for window, count in Counter(cache_windows(config)).items()
        for value in ops.cached(count, window).values()
    )
    return replace(ops.graph(), caches=caches, directions=("forward",))


def inference_cost(
    config: ModelConfig, layout: Layout, hardware: Hardware, phase: Phase, num_sequences: int, context: int
) -> tuple[StepCost, InferenceMemory]:
    """The parts of one step with caches of `context` positions, and its peak on one chip."""
    queries = context if phase == "prefill" else 1
    shape, whole = Shape(num_sequences, queries, context), layout.replace(microbatches=1)
    graph = record_inference(config, whole, shape, flash_attention=hardware.chip.kind != "cpu")
    return StepPricer(graph, whole, hardware).cost(), inference_memory(graph, whole)


def inference_memory(graph: Graph, layout: Layout) -> InferenceMemory:
    """The peak of one recorded pass on one chip."""
    held = max(
        sum(value.bytes_per_device for value in (*node.inputs, *node.outputs)) for _, node in graph.nodes()
    )
    return InferenceMemory(
        weights=round(stored_parameters(graph, layout).weights * dtype_bytes(layout.weights_dtype)),
        cache=sum(value.bytes_per_device for value in graph.caches),
        buffers=held,
    )

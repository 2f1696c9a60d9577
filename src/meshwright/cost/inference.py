"""One forward pass with a cache: prefill of B prompts, or the next token of B sequences.

    seconds = for each segment: work + waiting . critical transfers + other transfers - what hides

as `step.py` has them for the forward pass of training. Memory is weights, caches and what one operation
reads and writes; nothing is kept for a backward pass.
"""

from collections import defaultdict
from dataclasses import asdict, dataclass
from math import prod

from meshwright.cost.collectives import OUTER_LINKS
from meshwright.cost.graph import Graph, Node
from meshwright.cost.memory import stored_parameters
from meshwright.cost.ops import SymbolicOps, symbolic_weights
from meshwright.cost.passes import Dtypes, passes
from meshwright.cost.recorder import Shape, Value
from meshwright.cost.step import PlannedTransfer, StepCost, Term, at_step_rates, transfer_price
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import Phase
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions
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
    """Attention reads the keys and values of the cache, S positions of every sequence."""

    def attention(
        self, name: str, q: Value, k: Value, v: Value, *rest: object, **how: object
    ) -> tuple[Value, object]:
        keys, values = (self._cached(x) for x in (k, v))
        return super().attention(name, q, keys, values, *rest, **how)  # pyright: ignore[reportArgumentType]

    def _cached(self, x: Value) -> Value:
        return Value(x.array, x.dtype, round(x.bytes_per_device / self.sizes["T"] * self.sizes["S"]))


def record_inference(config: ModelConfig, layout: Layout, shape: Shape, *, flash_attention: bool) -> Graph:
    """The graph of one step: logits[B, V] after each sequence's last token, whole over V."""
    ops = _CachedOps(config, layout, shape, flash_attention=flash_attention)
    tokens, positions = ops.tokens("tokens"), ops.tokens("positions")
    weights = symbolic_weights(config, ops)
    logits, _ = transformer.next_token_logits(config, ops, weights, tokens, positions, tokens, None)
    steps = reshard(logits.array, logits.array.replace(axes={"V": ()}))
    gathered = ops.transfers(steps, "logits", logits.dtype, critical=True)
    ops.add(Node("logits", "move", (logits,), (logits,), forward_transfers=gathered))
    return ops.graph()


def inference_cost(
    config: ModelConfig, layout: Layout, hardware: Hardware, phase: Phase, num_sequences: int, context: int
) -> tuple[StepCost, InferenceMemory]:
    """The parts of one step with caches of `context` positions, and its peak on one chip."""
    queries = context if phase == "prefill" else 1
    shape = Shape(num_sequences, queries, context)
    graph = record_inference(config, layout, shape, flash_attention=hardware.chip.kind != "cpu")
    return _cost(graph, layout, hardware), _memory(config, layout, graph, num_sequences, context)


def _cost(graph: Graph, layout: Layout, hardware: Hardware) -> StepCost:
    chip, placement = hardware.chip, at_step_rates(hardware).place(layout.mesh)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    transfers: list[PlannedTransfer] = []
    flops = 0.0
    for segment in graph.segments:
        work = passes(segment, "none", Dtypes.of(layout), chip)[0]
        flops += segment.count * work.flops
        for name, bound, each in work.terms:
            seconds[name, bound] += segment.count * each
        prices = [(t, transfer_price(t, placement)) for t in work.transfers if not t.once]
        behind = sum(price.seconds for t, price in prices if not t.critical)
        exposed = 1 - chip.step.overlap * min(1.0, work.seconds / behind) if behind else 0.0
        for t, price in prices:
            share = chip.step.waiting if t.critical else exposed
            bound = "dcn" if price.link in OUTER_LINKS else "ici"
            transfers.append(PlannedTransfer(t, "forward", segment.count, price.seconds, bound, share))
            kind = "activations" if t.critical else "weights"
            seconds[f"{kind} over {'·'.join(t.axes)}", bound] += segment.count * price.seconds * share
    terms = [Term(name, total, bound) for (name, bound), total in seconds.items() if total]
    return StepCost(tuple(sorted(terms, key=lambda term: -term.seconds)), tuple(transfers), flops)


def _memory(
    config: ModelConfig, layout: Layout, graph: Graph, num_sequences: int, context: int
) -> InferenceMemory:
    sizes = {**dimensions(config), "B": num_sequences, "S": context}
    cache = layout.activation("cache", "LBSKH")
    block = prod(
        sizes[dim] / layout.mesh.size(axes) for dim, axes in zip(cache.dims, cache.axes, strict=True)
    )
    held = max(
        sum(value.bytes_per_device for value in (*node.inputs, *node.outputs)) for _, node in graph.nodes()
    )
    weights = stored_parameters(config, layout).weights * dtype_bytes(layout.weights_dtype)
    return InferenceMemory(round(weights), round(2 * block * dtype_bytes(layout.compute_dtype)), held)

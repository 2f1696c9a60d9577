"""The price of one step of one phase, for a batch and a context."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.record_inference import cache_bytes
from meshwright.cost.serving_step import InferenceMemory, pass_cost
from meshwright.cost.step_cost import StepCost
from meshwright.errors import PlanError
from meshwright.hardware.links import bound_name
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.layout_checks import num_replicas
from meshwright.layout.runnable import why_not
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.count import forward_flops_per_token
from meshwright.plan.bisection import first_false


@dataclass(frozen=True)
class PhasePoint:
    """A step of `workload.phase`, its parts and bytes."""

    config: ModelConfig
    hardware: Hardware
    layout: Layout
    workload: Workload
    cost: StepCost
    memory: InferenceMemory

    @cached_property
    def max_batch(self) -> int:
        """The most sequences that fit."""
        at = self.layout.at(self.workload.phase)
        return max_batch(self.config, self.hardware, at, self.queries, self.workload.seq_len)

    @property
    def queries(self) -> int:
        """Tokens of each sequence that the step computes."""
        return 1 if self.workload.phase == "generate" else self.workload.seq_len

    @property
    def step_seconds(self) -> float:
        return self.cost.seconds

    @property
    def num_tokens(self) -> int:
        return self.workload.num_sequences * self.queries

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.hardware.chip.program_bytes

    @property
    def mfu(self) -> float:
        """Model FLOPs over the dense peak: of prefill causal attention counted half."""
        flops = forward_flops_per_token(
            self.config, self.workload.seq_len, causal=self.workload.phase == "prefill"
        )
        peak = self.hardware.chip.flops(self.layout.precision.operand_dtype)
        return flops * self.num_tokens / (self.step_seconds * peak * self.hardware.num_chips)

    def to_dict(self) -> dict:
        """The keys of `mw plan serve --phase` in docs/reference/json.md, then optional ones."""
        network, seconds = self.hardware.chip.network, self.step_seconds
        chips = self.hardware.num_chips
        return {
            "phase": self.workload.phase,
            "hardware": self.hardware.spec,
            "chips": chips,
            "layout": str(self.layout),
            "mesh": dict(self.layout.mesh.sizes),
            "weights_dtype": self.layout.precision.weights_dtype,
            "kv_dtype": self.layout.precision.cache_dtype,
            "batch": self.workload.num_sequences,
            "context": self.workload.seq_len,
            "step_seconds": seconds,
            "tokens_per_second": self.num_tokens / seconds,
            "tokens_per_second_per_chip": self.num_tokens / seconds / chips,
            "mfu": self.mfu,
            "bytes_per_chip": {key: int(value) for key, value in self.memory.to_dict().items()},
            "fits": self.fits,
            "max_batch": self.max_batch,
            "bound": self.cost.bound,
            "bound_name": bound_name(self.cost.bound, network),
            "breakdown": [
                {
                    "name": term.name,
                    "seconds": term.seconds,
                    "share": term.seconds / seconds,
                    "bound": term.bound,
                    "bound_name": bound_name(term.bound, network),
                }
                for term in self.cost.terms
            ],
            "why_not_run": why_not(self.config, self.layout, self.workload.phase, hardware=self.hardware),
        }


def price_phase(
    config: ModelConfig, hardware: Hardware, workload: Workload, layouts: Sequence[Layout]
) -> PhasePoint:
    """The fastest of `layouts` that fits, or the layout with the least memory if none fits.

    Raises PlanError if the batch divides over none of the layouts.
    """
    points = []
    for layout in layouts:
        at = layout.at(workload.phase)
        shards = num_replicas(at, config)
        if workload.num_sequences % shards == 0:
            points.append(_point(config, hardware, workload, layout))
    if not points:
        least = min(layout.num_batch_shards for layout in layouts)
        raise PlanError(
            f"a batch of {workload.num_sequences} sequences (B) divides over none of the layouts of "
            f"{hardware.spec}; fits: --batch {least}"
        )
    return min(points, key=lambda p: (not p.fits, p.step_seconds if p.fits else p.memory.total))


def _point(config: ModelConfig, hardware: Hardware, workload: Workload, layout: Layout) -> PhasePoint:
    at, context = layout.at(workload.phase), workload.seq_len
    queries = 1 if workload.phase == "generate" else context
    cost, memory = pass_cost(config, at, hardware, workload.num_sequences, queries, context)
    return PhasePoint(config, hardware, layout, workload, cost, memory)


def max_batch(config: ModelConfig, hardware: Hardware, layout: Layout, queries: int, context: int) -> int:
    """The most sequences that fit, of whole shards; 0 where one does not. Bytes grow with the batch."""
    shards = num_replicas(layout, config)

    def fits(batches: int) -> bool:
        _, memory = pass_cost(config, layout, hardware, batches * shards, queries, context)
        return memory.total <= hardware.chip.program_bytes

    each = cache_bytes(config, layout, float(shards), context)
    most = 1 + int(hardware.chip.program_bytes // max(each, 1))
    return (first_false(fits, 0, most + 1) - 1) * shards

"""Seconds and memory of a step that serves: a recorded pass of record_inference.py, priced.

It is priced as the forward passes of training (step_cost.py), at the chip's rates in inference. Memory is
weights, caches and the values that one operation reads and writes, since there is no backward pass.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from meshwright.cost.arrays import largest
from meshwright.cost.graph import Graph
from meshwright.cost.memory import alive_in_inference
from meshwright.cost.passes import Dtypes, SegmentPass
from meshwright.cost.pipeline.stages import depth_counts
from meshwright.cost.record_inference import record_inference
from meshwright.cost.recorder import PassShape
from meshwright.cost.state import StageState
from meshwright.cost.step_cost import StepCost, StepPricer
from meshwright.cost.step_seconds import SegmentSeconds
from meshwright.cost.timed_passes import TimedPass, sent_together, timed_passes
from meshwright.cost.transfer_prices import TransferPrices, at_step_rates
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import InferencePhase
from meshwright.models.config import ModelConfig
from meshwright.platforms.tpu import LANES
from meshwright.units import whole

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes on one chip. buffers: live values of a layer, or of an end of the model."""

    weights: Any
    cache: Any
    buffers: Any

    @property
    def total(self) -> Any:
        return self.weights + self.cache + self.buffers

    def to_dict(self) -> dict[str, int]:
        """The keys of `bytes_per_chip` in docs/reference/json.md."""
        return {**asdict(self), "total": self.total}


@lru_cache(maxsize=256)
def in_inference(hardware: Hardware) -> Hardware:
    """`hardware` with the rates of its chips in inference.

    A share of the peak for products in inference takes precedence over rates measured in training by FLOPs:
    products of few rows have few FLOPs, and both one large and several small products read their weights
    once.
    """
    chip = hardware.chip
    if not chip.inference:
        return hardware
    rates = {dtype: one for dtype, one in chip.matmul_rates.items() if dtype not in chip.inference.matmul}
    return replace(hardware, chip=replace(chip, step=chip.inference, matmul_rates=rates))


def inference_cost(
    config: ModelConfig,
    layout: Layout,
    hardware: Hardware,
    phase: InferencePhase,
    num_sequences: int,
    context: int,
) -> tuple[StepCost, InferenceMemory]:
    """The parts of one step with caches of `context` positions, and its peak on one chip."""
    queries = context if phase == "prefill" else 1
    return pass_cost(config, layout.at(phase), hardware, num_sequences, queries, context)


def pass_cost(
    config: ModelConfig, layout: Layout, hardware: Hardware, num_sequences: float, queries: int, context: int
) -> tuple[StepCost, InferenceMemory]:
    """The parts of a pass of `queries` tokens of each sequence, the last of `context` positions."""
    shape, alone = PassShape(num_sequences, queries, context), layout.replace(microbatches=1)
    graph = record_inference(config, hardware, alone, shape)
    return StepPricer(graph, alone, in_inference(hardware)).cost(), inference_memory(graph, alone)


def inference_memory(graph: Graph, layout: Layout) -> InferenceMemory:
    """The peak of one recorded pass on one chip."""
    return InferenceMemory(
        weights=StageState(graph, layout).stored.weight_bytes,
        cache=whole(sum(value.bytes_per_device for value in graph.caches) / layout.pipe),
        buffers=largest(map(alive_in_inference, graph.segments)),
    )


class Passes:
    """One pass of one layout, recorded for many batches at once; `seconds` prices it on a machine.

    batches: an array of numbers of sequences. layout: in its phase, without stages. hardware: the machine to
    record for; valid for machines with an equal `alike_of`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        batches: "NDArray[Any]",
        queries: int,
        context: int,
        hardware: Hardware,
    ) -> None:
        self.layout, self.batches = layout, batches
        shape, longest = PassShape(batches, queries, context), -(-context // LANES) * LANES
        self.graph = record_inference(config, hardware, layout, shape, longest=longest)

    @cached_property
    def memory(self) -> InferenceMemory:
        """The peak on one chip, for every batch."""
        return inference_memory(self.graph, self.layout)

    def seconds(self, hardware: Hardware) -> Any:
        """Seconds of the pass for every batch: `StepPricer.cost` of each."""
        machine = at_step_rates(in_inference(hardware))
        places = [machine.place(self.layout.mesh)] * len(self.batches)
        chip, dtypes = machine.chip, Dtypes.of(self.layout)
        prices = TransferPrices(self.layout, chip, places)

        def timed_pass(work: SegmentPass) -> TimedPass:
            return TimedPass(work, sent_together(work.transfers, prices.seconds), chip)

        timed = timed_passes(self.graph, self.layout, dtypes, chip, timed_pass)
        [counts] = depth_counts(self.graph, "1f1b", 1, 1)
        return SegmentSeconds.of(timed).run(counts).forward + chip.step.launch_seconds + 0 * self.batches

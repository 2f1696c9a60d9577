"""A server of another engine in a simulated load test: its limits, scheduler and seconds of steps."""

from dataclasses import dataclass
from functools import lru_cache

from meshwright.cost.record_inference import cache_bytes
from meshwright.engines.serving_engine import ServingEngine
from meshwright.errors import PlanError
from meshwright.hardware.chip import SharedMemory, Torus
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.page_sizes import DEFAULT_PAGE
from meshwright.models.config import ModelConfig
from meshwright.models.count import forward_flops
from meshwright.plan.serve.engine_steps import EngineSteps, EngineTable
from meshwright.plan.serve.steps import StepBytes
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.shared_tokens import SharedTokens

# Contexts and numbers of sequences that price tables share: the next power of two, at least this.
_SHORTEST_TABLE = 8192
# Maximum steps that a prompt waits for prompts of other replicas: TensorRT-LLM's `timeout_iters` in
# InferenceX's launch scripts.
_BALANCE_STEPS = 60


@dataclass(frozen=True)
class EngineServer:
    """One replica of an engine: a layout of a model on a machine with the engine's efficiency.

    stands_for: groups of devices with sequences of their own for each simulated group. Groups are equally
    loaded, so that few of them show how all do. receives: its prompts come computed, from other servers.
    drafts: draft tokens of a sequence that a step verifies. gain: expected tokens of a sequence in a step.
    """

    config: ModelConfig
    layout: Layout
    hardware: Hardware
    engine: ServingEngine
    stands_for: int = 1
    receives: bool = False
    drafts: int = 0
    gain: float = 1.0

    @property
    def data(self) -> int:
        """Groups of devices with sequences of their own."""
        return self.layout.at("generate").num_batch_shards

    def limits(self, context: int, num_sequences: int) -> Limits:
        """The limits of a server for `num_sequences` sequences of up to `context` positions.

        Raises PlanError if the weights and one sequence exceed the memory.
        """
        data, engine = self.data // self.stands_for, self.engine
        positions = self.num_positions(context)
        if positions < context:
            raise PlanError(
                f"{self.config.name}: the weights leave memory for {max(0, positions):,} positions of a "
                f"sequence, and {context:,} are wanted"
            )
        slots = max(1, min(-(-num_sequences // data), engine.max_sequences))
        is_plenty = positions >= slots * context
        page = context if is_plenty or engine.reserves_answers else min(DEFAULT_PAGE, context)
        pages = min(positions // page, slots * -(-context // page))
        return Limits(
            slots * data, context, page, pages, engine.step_tokens, 1, data, multiplies_padding=False
        )

    def num_positions(self, context: int) -> int:
        """Positions of the cache of each group of devices."""
        # Graphs and libraries are not free memory; a share of all memory leaves them the rest.
        outside = self.engine.outside_bytes if self.engine.shares_free else 0
        room = self.engine.cache_bytes(self.hardware.chip.reported_bytes, self.weight_bytes + outside)
        at = self.layout.at("generate")
        each = float(cache_bytes(self.config, at, at.num_batch_shards, context)) / context
        return int(room / max(each, 1e-9))

    @property
    def weight_bytes(self) -> int:
        return _weight_bytes(self.config, self.layout)

    def policy(self, limits: Limits) -> SharedTokens:
        """The engine's scheduler."""
        engine = self.engine
        is_balanced = engine.balances_prompts and self.data > 1 and not self.receives
        return SharedTokens(
            limits.num_slots * limits.context if self.receives else engine.step_tokens,
            limits.num_replicas,
            cuts_prompts=engine.cuts_prompts,
            counts_generated=engine.counts_generated,
            separate_prompts=engine.separate_prompts and not self.receives,
            balance_steps=_BALANCE_STEPS if is_balanced else 0,
        )

    def steps(self, limits: Limits) -> "EngineSteps":
        """The seconds of its steps."""
        most = self.engine.step_tokens + _table_size(limits.slots_per_replica, 256)
        context = _table_size(limits.context, _SHORTEST_TABLE)
        return EngineSteps(
            _table(self.config, self.layout, self.hardware, most, context, self.drafts),
            self.data // self.stands_for,
            separate_prompts=self.engine.separate_prompts,
            receives=self.receives,
            step_seconds=self.engine.step_seconds,
            least_seconds=self.engine.prompt_layer_seconds * self.config.num_layers,
            balances_prompts=self.engine.balances_prompts,
            shared_share=self._shared_share,
            gain=self.gain,
        )

    @property
    def _shared_share(self) -> float:
        """Share of a token's products that groups of devices divide: products of experts over all groups."""
        if self.config.moe is None or self.layout.mesh.sizes.get("expert", 1) < self.data:
            return 0.0
        flops = forward_flops(self.config, 1)
        return flops.mlp / flops.total


def _table_size(size: int, least: int) -> int:
    return max(least, 1 << (size - 1).bit_length())


@lru_cache(maxsize=64)
def _table(
    config: ModelConfig, layout: Layout, hardware: Hardware, most_tokens: int, context: int, drafts: int
) -> EngineTable:
    return EngineTable(config, layout, hardware, most_tokens, context, drafts)


@lru_cache(maxsize=256)
def _weight_bytes(config: ModelConfig, layout: Layout) -> int:
    return StepBytes(config, layout).weights


def transfer_seconds_of(config: ModelConfig, layout: Layout, hardware: Hardware, context: int) -> float:
    """Seconds to send one token's keys and values between two replicas, over each chip's network card."""
    network, at = hardware.chip.network, layout.at("generate")
    if isinstance(network, SharedMemory):
        return 0.0
    rate = network.dcn_bytes_per_second if isinstance(network, Torus) else network.nic_bytes_per_second
    return float(cache_bytes(config, at, at.num_batch_shards, context)) / context / rate

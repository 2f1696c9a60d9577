"""One way to serve: a machine, a layout and a batch, with the latency, throughput and price that follow."""

from dataclasses import dataclass
from functools import cached_property

from meshwright.cost.serving_step import InferenceMemory, pass_cost
from meshwright.cost.step_cost import StepCost
from meshwright.hardware.links import bound_name
from meshwright.hardware.prices import per_hour, per_million_tokens
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.runnable import why_not
from meshwright.layout.workload import DEFAULT_CHUNK
from meshwright.models.config import ModelConfig
from meshwright.models.count import forward_flops_per_token
from meshwright.plan.serve.prefill import PromptPasses, Way, by_position, prefilling, serving_both
from meshwright.plan.serve.requests import Requests, paying_acceptance


@dataclass(frozen=True)
class Point:
    """tpot_seconds: of one more token of a request. prefill_seconds: the chips' time for one of many prompts.

    ttft_seconds: of a prompt that finds the chips idle, prefilled in prefill_layout. max_batch: the largest
    that fits.
    """

    config: ModelConfig
    hardware: Hardware
    layout: Layout
    requests: Requests
    batch: int
    tpot_seconds: float
    ttft_seconds: float
    prefill_seconds: float
    memory: InferenceMemory
    max_batch: int
    prefill_layout: Layout

    def __str__(self) -> str:
        return f"{self.hardware.spec}, {self.layout}, batch {self.batch}"

    @property
    def chips(self) -> int:
        return self.hardware.num_chips

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of all of the batch while it generates."""
        return self.batch / self.tpot_seconds

    @property
    def tokens_per_second_per_chip(self) -> float:
        return self.tokens_per_second / self.chips

    @property
    def chip_seconds(self) -> tuple[float, float]:
        """Chip-seconds of one request: (prefill, generation)."""
        generation = self.requests.output_tokens * self.tpot_seconds / self.batch
        return self.chips * self.prefill_seconds, self.chips * generation

    @property
    def requests_per_second_per_chip(self) -> float:
        """Requests per second per chip, with prefill and generate chips in a ratio so that neither waits."""
        return 1 / sum(self.chip_seconds)

    @property
    def prefill_to_generate_ratio(self) -> float:
        """Chips that only prefill, for each chip that only generates."""
        prefill, generate = self.chip_seconds
        return prefill / generate

    @property
    def price_per_hour(self) -> float | None:
        return per_hour(self.hardware.chip, self.chips)

    @property
    def price_per_million_tokens(self) -> float | None:
        """The price of a million generated tokens, including the prefill of their prompts."""
        tokens_per_chip_second = self.requests.output_tokens / sum(self.chip_seconds)
        return per_million_tokens(self.hardware.chip.price_per_chip_hour, tokens_per_chip_second)

    @cached_property
    def cost(self) -> StepCost:
        """The parts of a generate step."""
        queries, context = 1 + self.requests.drafts, self.requests.mean_context
        cost, _ = pass_cost(
            self.config, self.layout.at("generate"), self.hardware, self.batch, queries, context
        )
        return cost

    @cached_property
    def draft_step_ratio(self) -> float:
        """Seconds of a step whose drafts are made and verified, over a step without drafts."""
        plain, _ = pass_cost(
            self.config, self.layout.at("generate"), self.hardware, self.batch, 1, self.requests.mean_context
        )
        return self.tpot_seconds * self.requests.tokens_a_step / plain.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs of a generate step over the dense peak."""
        flops = forward_flops_per_token(self.config, self.requests.mean_context, causal=False)
        peak = self.hardware.chip.flops(self.layout.precision.operand_dtype)
        return flops * self.tokens_per_second_per_chip / peak

    @property
    def bound(self) -> str:
        return self.cost.bound

    @property
    def served_layout(self) -> Layout | None:
        """The layout of both phases; None if they store weights differently."""
        return serving_both(self.layout, self.prefill_layout)

    @property
    def why_not(self) -> str | None:
        """Why `mw serve` does not run it; None if it does."""
        if (both := self.served_layout) is None:
            return f"weights stored as {self.prefill_layout} in prefill and as {self.layout} in generation"
        machine = self.hardware
        return why_not(self.config, both, "generate", hardware=machine) or why_not(
            self.config, both, "prefill", hardware=machine
        )

    @cached_property
    def other_prefills(self) -> tuple[Way, ...]:
        """The other ways to prefill: in chunks, or whole where chunks were asked for, and by position."""
        machine, requests = self.hardware, self.requests
        chunk = None if requests.chunk else DEFAULT_CHUNK
        plain = prefilling(self.layout)
        has_chunks = not plain.rules.prompt_axes and requests.new_prompt_tokens > DEFAULT_CHUNK
        tried = [(plain, chunk)] if has_chunks else []
        tried += [
            (layout, requests.chunk)
            for layout in by_position(self.config, self.layout, requests)
            if layout != self.prefill_layout
        ]
        ways = [
            Way(layout, chunk, float(passes.seconds(machine)[0]))
            for layout, chunk in tried
            for passes in [PromptPasses(self.config, layout, requests, chunk, machine)]
        ]
        return tuple(sorted(ways, key=lambda way: way.ttft_seconds))

    def to_dict(self) -> dict:
        """The keys of a point of `mw plan serve` in docs/reference/json.md, then optional ones."""
        precision, drafts = self.layout.precision, self.requests.drafts
        return {
            "hardware": self.hardware.spec,
            "chip": self.hardware.chip.name,
            "chips": self.chips,
            "layout": str(self.layout),
            "mesh": dict(self.layout.mesh.sizes),
            "weights_dtype": precision.weights_dtype,
            "kv_dtype": self.layout.precision.cache_dtype,
            "batch": self.batch,
            "max_batch": self.max_batch,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_chip": self.tokens_per_second_per_chip,
            "requests_per_second_per_chip": self.requests_per_second_per_chip,
            "prefill_to_generate_ratio": self.prefill_to_generate_ratio,
            "prefill_layout": str(self.prefill_layout),
            "prefill_chunk": self.requests.chunk,
            "bytes_per_chip": {key: int(value) for key, value in self.memory.to_dict().items()},
            "bound": self.bound,
            "bound_name": bound_name(self.bound, self.hardware.chip.network),
            "price_per_hour": self.price_per_hour,
            "price_per_million_tokens": self.price_per_million_tokens,
            "currency": self.hardware.chip.currency,
            "why_not_run": self.why_not,
        } | (
            {
                "draft_step_ratio": self.draft_step_ratio,
                "paying_acceptance": paying_acceptance(drafts, self.draft_step_ratio),
            }
            if drafts
            else {}
        )

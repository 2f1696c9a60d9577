"""Seconds of a server's steps, padded to the compiled numbers of rows and blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from meshwright.cost.serving_step import in_inference
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import has_prompt_programs
from meshwright.layout.page_sizes import compiled_sizes
from meshwright.models.config import ModelConfig
from meshwright.plan.serve.steps import StepSeconds, end_of_one
from meshwright.serve.engine.limits import IdleSeconds, Limits, timed_blocks

if TYPE_CHECKING:  # it loads an HTTP client, which generation does without
    from meshwright.load.simulator import StepPrices


class PaddedSteps:
    """Seconds of a step in the smallest program that it fits (`JaxRunner`).

    Steps that only generate have 1, 2, 4, ... rows per replica. With prompts all slots have a row, and
    prompts have 1, 2, 4, ... blocks. Padding rows attend to nothing; by the limits they are multiplied, or
    they are skipped and take the share `padding` of the time of a row. has_kernels: a single whole prompt
    has a program without rows (accelerators). host_step_seconds, host_token_seconds: host time of a step,
    and of each sequence that generates in it, if the devices are the host's cores.
    """

    def __init__(
        self,
        prices: "StepPrices",
        limits: Limits,
        *,
        has_kernels: bool,
        padding: float = 0.0,
        host_step_seconds: float = 0.0,
        host_token_seconds: float = 0.0,
    ) -> None:
        self._prices, self._limits, self._has_kernels, self._padding = prices, limits, has_kernels, padding
        self._host_step_seconds, self._host_token_seconds = host_step_seconds, host_token_seconds
        self._rows = _filled_up(limits.slots_per_replica, limits.num_replicas)
        self._blocks = _filled_up(limits.chunk // limits.block, limits.num_replicas)

    @classmethod
    def of(
        cls, config: ModelConfig, layout: Layout, hardware: Hardware, limits: Limits, num_drafts: int
    ) -> "PaddedSteps":
        """The steps of a server of this layout, priced on a machine."""
        most, reached = limits.max_step_tokens(num_drafts), in_inference(hardware).chip.step
        return cls(
            StepSeconds(config, layout, hardware, most, limits.context),
            limits,
            has_kernels=has_prompt_programs(hardware.chip.platform, layout),
            padding=reached.padding,
            host_step_seconds=reached.host_step_seconds,
            host_token_seconds=reached.host_token_seconds,
        )

    @property
    def idle_seconds(self) -> IdleSeconds:
        """Seconds of steps as `JaxRunner` measures them on an idle machine: all rows are at position 0."""
        limits, replicas = self._limits, self._limits.num_replicas
        sizes = compiled_sizes(limits.slots_per_replica)
        generate = [(size, self._prices.seconds(size * replicas, 0.0, [], 0)) for size in sizes]
        num_tokens = timed_blocks(limits) * replicas * limits.block
        mixed = self._prices.seconds(limits.num_slots, 0.0, [(num_tokens, num_tokens)], 0)
        return IdleSeconds.of(generate, mixed, limits)

    def seconds(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int
    ) -> float:
        """Seconds of a step, as `StepPrices` has them."""
        filled = self._prices.seconds(*self.filled_up(num_sequences, mean_context, chunks, num_drafts))
        of_host = self._host_step_seconds + self._host_token_seconds * num_sequences
        if self._limits.multiplies_padding:
            return filled + of_host
        held = self._prices.seconds(num_sequences, mean_context, chunks, num_drafts)
        return held + self._padding * max(0.0, filled - held) + of_host

    def generating(self, num_sequences: int, mean_contexts: np.ndarray) -> np.ndarray:
        """Seconds of decode steps, as `StepPrices` has them."""
        rows = self._rows[num_sequences]
        filled = self._prices.generating(rows, mean_contexts * num_sequences / rows)
        of_host = self._host_step_seconds + self._host_token_seconds * num_sequences
        if self._limits.multiplies_padding:
            return filled + of_host
        held = self._prices.generating(num_sequences, mean_contexts)
        return held + self._padding * np.maximum(0.0, filled - held) + of_host

    def filled_up(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int
    ) -> tuple[int, float, Sequence[tuple[int, int]], int]:
        """The step with the rows and blocks of its program, padding included."""
        rows = self._rows[num_sequences]
        if chunks:
            block = self._limits.block
            num_blocks = sum([-(-count // block) for count, _ in chunks])
            is_whole = len(chunks) == 1 and chunks[0][0] == chunks[0][1]
            rows = 0 if self._has_kernels and is_whole and not num_sequences else self._limits.num_slots
            num_tokens = self._blocks[num_blocks] * block
            chunks = [(num_tokens, end_of_one(num_tokens, chunks))]
        if rows == num_sequences:
            return num_sequences, mean_context, chunks, num_drafts
        drafts = num_drafts * rows // num_sequences if num_drafts else 0
        return rows, mean_context * num_sequences / rows, chunks, drafts


def _filled_up(most: int, num_replicas: int) -> list[int]:
    """Rows (or blocks) of the smallest program on all replicas, by their number without padding.

    most: the largest number of one replica; replicas share evenly.
    """
    sizes = compiled_sizes(most)
    of_replica = [next(size for size in sizes if size >= number) for number in range(1, most + 1)]
    return [0, *(num_replicas * size for size in of_replica for _ in range(num_replicas))]

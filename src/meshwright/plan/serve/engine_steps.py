"""Seconds of the steps of other engines than ours, as a table: by batch, context and prompt tokens.

Groups of devices with sequences of their own (attention data parallelism) step together, so a step takes
the time of the busiest group. All numbers below are of one group:

    decode(n, c)      a pass over n sequences with a mean context of c positions
    prompts(q, p)     q prompt tokens with p pairs of a query and a key: short(q) + pairs beyond short ones
    both              prompts(q, p) + decode(n, c) - decode(n, 2) + decode(n + q, 2) - decode(q, 2)

short(q) is a pass over whole prompts of _SHORT tokens. Attention takes time in proportion to its pairs. If
both parts are one program, weights are read once; `decode(n, 2)` is its products, with hardly any attention.
"""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from meshwright.cost.serving_step import Passes
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig

# A context of this many positions, whose attention takes no time.
_NEXT_TO_NONE = 2
# Tokens of a short prompt, and the tokens that a long prompt exceeds.
_SHORT, _LEAST_LONG = 256, 2048


class EngineTable:
    """The priced passes of one layout on one machine with an engine's efficiency.

    most_tokens: maximum tokens of a group in a step. context: maximum positions of a sequence. drafts: draft
    tokens of a sequence that a decode step verifies, and makes by a head of one layer each.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        hardware: Hardware,
        most_tokens: int,
        context: int,
        drafts: int = 0,
    ) -> None:
        self._config, self._layout, self._hardware = config, layout, hardware
        self._groups = layout.at("generate").num_batch_shards
        self.contexts = [_NEXT_TO_NONE, *_steps(_SHORT, context, 4)]
        batches = np.array(_steps(1, most_tokens, 2 ** (1 / 2)))
        self._queries = queries = 1 + drafts
        heads = 1 + drafts / config.num_layers
        rows = [
            heads * self._passes("generate", batches, queries, max(queries, length))
            for length in self.contexts
        ]
        everywhere = np.arange(most_tokens + 1)
        decode = np.array([np.interp(everywhere, batches, row) for row in rows])
        self._decode, self._by_number = decode.tolist(), decode.T.copy()
        few, many = _steps(16, _SHORT, 4), np.array(_steps(1, max(1, most_tokens // _SHORT), 2))
        short = [float(self._passes("prefill", np.ones(1), length, length)[0]) for length in few[:-1]]
        self._lengths = [*few[:-1], *(_SHORT * many).tolist()]
        self._short = [*short, *self._passes("prefill", many, _SHORT, _SHORT).tolist()]
        self.pair_seconds = self._pair_seconds(context)

    def _pair_seconds(self, context: int) -> float:
        """Seconds for each pair of a query and a key: a long prompt against short ones of the same tokens.

        Whole prompts build the keys and values of latents, which all engines do for later chunks, too.
        """
        if context <= _LEAST_LONG:
            context = 2 * _LEAST_LONG
        short, long = (
            float(self._passes("prefill", np.array([context / length]), length, length)[0])
            for length in (_SHORT, context)
        )
        return max(0.0, long - short) / (context * (context - _SHORT) / 2)

    def _passes(self, phase: str, batches: np.ndarray, queries: int, context: int) -> np.ndarray:
        passes = Passes(
            self._config, self._layout.at(phase), self._groups * batches, queries, context, self._hardware
        )
        return np.broadcast_to(passes.seconds(self._hardware), batches.shape)

    def decode(self, num_sequences: int, mean_context: float) -> float:
        """Seconds of a decode step with `num_sequences` sequences of a group."""
        contexts, rows = self.contexts, self._decode
        at = min(max(bisect_left(contexts, mean_context), 1), len(contexts) - 1)
        share = (mean_context - contexts[at - 1]) / (contexts[at] - contexts[at - 1])
        share = min(max(share, 0.0), 1.0)
        return (1 - share) * rows[at - 1][num_sequences] + share * rows[at][num_sequences]

    def decodes(self, num_sequences: int, mean_contexts: np.ndarray) -> np.ndarray:
        """Seconds of decode steps with `num_sequences` sequences of a group, by their mean context."""
        return np.interp(mean_contexts, self.contexts, self._by_number[num_sequences])

    def prompts(self, num_tokens: int, num_pairs: float) -> float:
        """Seconds of a prefill of a group. num_pairs: pairs of a query and a key."""
        short = float(np.interp(num_tokens, self._lengths, self._short))
        if num_tokens > self._lengths[-1]:
            short *= num_tokens / self._lengths[-1]
        counted = num_tokens * min(num_tokens, _SHORT) / 2
        return short + max(0.0, num_pairs - counted) * self.pair_seconds

    def mixed(self, num_sequences: int, mean_context: float, num_tokens: int, num_pairs: float) -> float:
        """Seconds of a step that prefills and generates in one program."""
        most = len(self._decode[0]) - 1
        prompts = min(num_tokens // self._queries, most)  # sequences that decode as many tokens
        products, together = self._decode[0], min(num_sequences + prompts, most)
        attention = max(0.0, self.decode(num_sequences, mean_context) - products[num_sequences])
        more = max(0.0, products[together] - products[prompts])
        return self.prompts(num_tokens, num_pairs) + attention + more


class EngineSteps:
    """Seconds of an engine's steps, as `StepPrices` in `load/simulator.py`.

    data: simulated groups. separate_prompts, balances_prompts, step_seconds: as in `Engine`. receives:
    prompts come computed from other servers. least_seconds: of a program with prompts, whose kernels the host
    launches one by one. shared_share: share of the products of a token that all groups divide, whichever
    group has it (experts). gain: expected tokens of a sequence in a step.
    """

    def __init__(
        self,
        table: EngineTable,
        data: int,
        *,
        separate_prompts: bool = False,
        receives: bool = False,
        step_seconds: float = 0.0,
        least_seconds: float = 0.0,
        balances_prompts: bool = False,
        shared_share: float = 0.0,
        gain: float = 1.0,
    ) -> None:
        self._balances_prompts, self._shared_share, self._gain = balances_prompts, shared_share, gain
        self._table, self._data, self._step_seconds = table, data, step_seconds
        self._least_seconds = least_seconds
        self._separate_prompts, self._receives = separate_prompts, receives

    def seconds(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int
    ) -> float:
        """Seconds of a step, as `StepPrices` has them."""
        table, data = self._table, self._data
        if self._receives and chunks:
            positions = num_sequences * mean_context + sum([end for _, end in chunks])
            num_sequences += len(chunks)
            mean_context, chunks = positions / num_sequences, ()
        num_sequences = -(-num_sequences // data)
        decode = table.decode(num_sequences, mean_context) + self._step_seconds
        if not chunks:
            return decode / self._gain
        num_tokens, num_pairs = self._tokens_and_pairs(chunks)
        if not num_sequences or self._separate_prompts:
            prompts = max(table.prompts(num_tokens, num_pairs), self._least_seconds) + self._step_seconds
            if not num_sequences:
                return prompts
            return prompts + decode / self._gain
        mixed = table.mixed(num_sequences, mean_context, num_tokens, num_pairs)
        # The simulator adds one token to each sequence in a step, where the engine adds `gain` tokens, so
        # decoding counts 1 / gain of its time.
        saved = decode * (1 - 1 / self._gain)
        return max(mixed, self._least_seconds) + self._step_seconds - saved

    def _tokens_and_pairs(self, chunks: Sequence[tuple[int, int]]) -> tuple[int, float]:
        """Prompt tokens and query-key pairs of one group that takes the time of all groups' chunks.

        The step waits for the busiest group; all divide the work of experts.
        """

        def totals(some: Sequence[tuple[int, int]]) -> tuple[int, float]:
            num_pairs = sum([count * (2 * end - count) for count, end in some]) / 2
            return sum([count for count, _ in some]), num_pairs

        if self._data == 1:
            return totals(chunks)
        ordered = sorted(chunks, reverse=True)
        most = totals(ordered[: 1 if self._balances_prompts else -(-len(chunks) // self._data)])
        evenly = [number / self._data for number in totals(chunks)]
        tokens = max(most[0], evenly[0])
        return round(tokens + self._shared_share * (evenly[0] - tokens)), max(most[1], evenly[1])

    def generating(self, num_sequences: int, mean_contexts: np.ndarray) -> np.ndarray:
        """Seconds of decode steps, as `StepPrices` has them."""
        seconds = self._table.decodes(-(-num_sequences // self._data), mean_contexts) + self._step_seconds
        return seconds / self._gain


def _steps(least: int, most: int, factor: float) -> list[int]:
    """Whole numbers from `least` to `most`, each about `factor` times the one before."""
    contexts, last = [least], float(least)
    while last * factor < most:
        last *= factor
        contexts.append(round(last))
    return sorted({*contexts, max(least, most)})

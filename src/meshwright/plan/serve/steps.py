"""Seconds and bytes of any step of an engine: sequences that generate, and parts of prompts beside them."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from meshwright.cost.inference import Passes, cache_bytes, inference_memory, record_inference
from meshwright.cost.recorder import Shape
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig

# Each length is this many times the one before, from the shortest that is priced to a whole context.
_APART = 4
_SHORTEST = 64
# Positions of a context that attention takes no time for, and still is one that generates.
_NEXT_TO_NONE = 2


class StepSeconds:
    """Seconds of steps of one layout on one machine, from passes priced for some batches and lengths.

    most_tokens: that a step computes. A step of n sequences that generate and q prompt tokens takes

        prefill(q) + (generate(n) - products(n)) + (products(n + q) - products(q))

    where products(n) is a generate step over contexts of two positions: weights are read once, and each part
    has its own attention. Between the priced ones figures are as good as linear.
    """

    def __init__(
        self, config: ModelConfig, layout: Layout, hardware: Hardware, most_tokens: int, context: int
    ) -> None:
        self._config, self._layout, self._hardware = config, layout, hardware
        self._shards = layout.at("generate").num_batch_shards
        self._contexts = [_NEXT_TO_NONE, *_lengths(context)]
        self._batches = np.unique(np.round(2 ** np.arange(0, np.log2(max(2, most_tokens)) + 0.5, 0.5)))
        rows = [self._generate(length) for length in self._contexts]
        everywhere = np.arange(most_tokens + 1)
        # By context and number of sequences; of none nothing is said.
        self._generating = np.array([np.interp(everywhere, self._batches, row) for row in rows]).tolist()
        self._chunks = _lengths(most_tokens)
        self._prompts = {
            (length, ends): self._prefill(length, ends)
            for length in self._chunks
            for ends in self._contexts
            if ends >= length
        }

    def seconds(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int = 0
    ) -> float:
        """Seconds of one step.

        num_sequences: that generate, behind `mean_context` positions. chunks: of each prompt its tokens in
        this step, and the positions up to their last. num_drafts: guesses verified, of all sequences.
        """
        num_tokens = sum(count for count, _ in chunks)
        alone = self._prompt(num_tokens, max(ends for _, ends in chunks)) if chunks else 0.0
        if not num_sequences:
            return alone
        generating = self.generate(num_sequences, mean_context)
        besides = num_tokens + num_drafts
        if not besides:
            return generating
        attention = max(0.0, generating - self._products(num_sequences))
        if not chunks:
            return attention + self._products(num_sequences + num_drafts)
        more = self._products(num_sequences + besides) - self._products(num_tokens)
        return alone + attention + max(0.0, more)

    def _products(self, num_tokens: int) -> float:
        """Seconds of a generate step of `num_tokens` sequences with almost no context."""
        row = self._generating[0]
        return row[min(num_tokens, len(row) - 1)]

    def generate(self, num_sequences: int, mean_context: float) -> float:
        """Seconds of a step in which so many sequences generate."""
        return _between(self._contexts, mean_context, lambda place: self._generating[place][num_sequences])

    def _prompt(self, num_tokens: int, ends: int) -> float:
        """Seconds of a pass over `num_tokens` tokens of a prompt, the last at position `ends`."""
        ends = max(ends, num_tokens)

        def of_chunk(place: int) -> float:
            length = self._chunks[place]
            known = [context for context in self._contexts if context >= length]
            return _between(known, ends, lambda at: self._prompts[length, known[at]])

        return _between(self._chunks, num_tokens, of_chunk)

    def _generate(self, context: int) -> np.ndarray:
        return self._passes("generate", self._shards * np.ceil(self._batches / self._shards), 1, context)

    def _prefill(self, num_tokens: int, ends: int) -> float:
        """Seconds of prefilling `num_tokens` tokens that are divided over the shards of the batch."""
        share = max(1, -(-num_tokens // self._shards))
        return float(self._passes("prefill", np.array([float(self._shards)]), share, max(share, ends))[0])

    def _passes(self, phase: str, batches: np.ndarray, queries: int, context: int) -> np.ndarray:
        layout, flash = self._layout, self._hardware.chip.kind != "cpu"
        if phase == "prefill" and layout.form:
            layout = layout.replace(cache="copies")
        found = Passes(self._config, layout.at(phase), batches, queries, context, flash_attention=flash)
        return np.broadcast_to(found.seconds(self._hardware), batches.shape)


class StepBytes:
    """Bytes that a step reads from the memory of one chip, by the model's sizes.

    weights: all of them, once, as if every expert were chosen.
    """

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        self._config, self._layout = config, layout.at("generate").replace(microbatches=1)
        self._shards = float(layout.num_batch_shards)
        shape = Shape(self._shards, 1, _SHORTEST)
        graph = record_inference(config, self._layout, shape, flash_attention=True)
        self.weights = int(inference_memory(graph, self._layout).weights)
        self._cached: dict[int, float] = {}

    def cache(self, context: int) -> float:
        """Of the keys and values of one sequence of up to `context` positions, in a mean over the chips.

        Local layers read their window alone. Contexts are rounded up to multiples of 64.
        """
        length = -(-context // _SHORTEST) * _SHORTEST
        if length not in self._cached:
            whole = cache_bytes(self._config, self._layout, self._shards, length)
            self._cached[length] = float(whole) / self._shards
        return self._cached[length]


def _lengths(most: int) -> list[int]:
    """Lengths up to `most`, each _APART times the one before."""
    found = [_SHORTEST]
    while found[-1] * _APART < most:
        found.append(found[-1] * _APART)
    return sorted({*(length for length in found if length < most), most})


def _between(known: Sequence[int], value: float, figure: Callable[[int], float]) -> float:
    """The figure at `value` on the line between those at the known ones beside it."""
    at = bisect_left(known, value)
    if at == 0:
        return figure(0)
    if at == len(known):
        return figure(len(known) - 1)
    low, high = known[at - 1], known[at]
    share = (value - low) / (high - low)
    return (1 - share) * figure(at - 1) + share * figure(at)

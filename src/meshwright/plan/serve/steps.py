"""Seconds and bytes of any step of an engine, with generating sequences and parts of prompts."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from meshwright.cost.cached_ops import keys_read
from meshwright.cost.record_inference import cache_bytes, record_pass
from meshwright.cost.recorder import PassShape
from meshwright.cost.serving_step import Passes, inference_memory
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig

# Steps are priced for contexts of _SHORTEST positions, _APART times this number, and so on up to the longest.
_APART = 4
_SHORTEST = 64
# A CPU's block of prompt tokens; shorter parts of prompts are padded to it.
_SHORTEST_PROMPT = 16
# In a decode step with a context of this length, attention takes nearly no time.
_NEXT_TO_NONE = 2


class StepSeconds:
    """Seconds of steps of one layout on one machine, from passes priced for some batches and lengths.

    most_tokens: maximum tokens of a step. A step of n generating sequences and q prompt tokens takes

        prefill(q) + (generate(n) - products(n)) + (products(n + q) - products(q))

    products(n) is a generate step over contexts of two positions. Weights are thus read once, and each part
    has its own attention. Figures between the priced sizes are interpolated, since they are nearly linear.
    """

    def __init__(
        self, config: ModelConfig, layout: Layout, hardware: Hardware, most_tokens: int, context: int
    ) -> None:
        self._config, self._layout, self._hardware = config, layout, hardware
        self._most_tokens = most_tokens
        self._shards = layout.at("generate").num_batch_shards
        # A whole prompt is divided over the devices of a prompt axis; one of them computes a later part.
        self._whole = layout.replace(cache="copies") if layout.form else layout
        by_one = replace(self._whole.rules, activations=self._whole.at("generate").table, by_phase=())
        self._in_parts = replace(self._whole, rules=by_one) if layout.rules.prompt_axes else self._whole
        self._contexts = [_NEXT_TO_NONE, *_lengths(context)]
        self._batches = np.unique(np.round(2 ** np.arange(0, np.log2(max(2, most_tokens)) + 0.5, 0.5)))
        even = self._shards * np.ceil(self._batches / self._shards)
        rows = [self._passes("generate", even, 1, length) for length in self._contexts]
        everywhere = np.arange(most_tokens + 1)
        # By context and number of sequences, from one on.
        generating = np.array([np.interp(everywhere, self._batches, row) for row in rows])
        self._generating, self._by_number = generating.tolist(), generating.T.copy()
        self._chunks = _lengths(most_tokens, _SHORTEST_PROMPT)
        # For each length of a chunk, the priced positions of its last token. Several prompts together may be
        # longer than a context.
        self._ends = [[end for end in self._contexts if end >= length] or [length] for length in self._chunks]
        self._prefilled = lru_cache(maxsize=None)(self._prefill)
        self._prompt = lru_cache(maxsize=1 << 16)(self._price_prompt)

    def seconds(
        self, num_sequences: int, mean_context: float, chunks: Sequence[tuple[int, int]], num_drafts: int = 0
    ) -> float:
        """Seconds of one step.

        num_sequences: generating sequences, with `mean_context` positions in the cache. chunks: for each
        prompt, its tokens in this step and the position of the last. num_drafts: verified guesses of all
        sequences.
        """
        prompts, num_tokens = 0.0, 0
        if chunks:
            num_tokens = sum([count for count, _ in chunks])
            prompts = self._prompt(num_tokens, end_of_one(num_tokens, chunks))
        if not num_sequences:
            return prompts
        generating = self.generate(num_sequences, mean_context)
        num_extra = num_tokens + num_drafts
        if not num_extra:
            return generating
        products, most = self._generating[0], self._most_tokens
        products_here = products[num_sequences]
        attention = generating - products_here if generating > products_here else 0.0
        together = num_sequences + num_extra
        more = products[together if together < most else most]
        if not num_tokens:
            return attention + more
        more -= products[num_tokens if num_tokens < most else most]
        return prompts + attention + more if more > 0 else prompts + attention

    def generate(self, num_sequences: int, mean_context: float) -> float:
        """Seconds of a decode step with `num_sequences` sequences."""
        low, high, share = _between(self._contexts, mean_context)
        rows = self._generating
        return (1 - share) * rows[low][num_sequences] + share * rows[high][num_sequences]

    def generating(self, num_sequences: int, mean_contexts: np.ndarray) -> np.ndarray:
        """Seconds of decode steps with `num_sequences` sequences, by their mean context."""
        return np.interp(mean_contexts, self._contexts, self._by_number[num_sequences])

    def _price_prompt(self, num_tokens: int, ends: int) -> float:
        """Seconds of a pass over `num_tokens` tokens of a prompt, the last of them at position `ends`."""
        low, high, share = _between(self._chunks, num_tokens)
        shorter, longer = (self._chunk(place, max(ends, num_tokens)) for place in (low, high))
        return (1 - share) * shorter + share * longer

    def _chunk(self, place: int, ends: int) -> float:
        """Seconds of a pass with the size of chunk number `place`, the last token at position `ends`."""
        known, length = self._ends[place], self._chunks[place]
        low, high, share = _between(known, ends)
        # Few ends are asked for, and pricing one takes milliseconds.
        shorter, longer = self._prefilled(length, known[low]), self._prefilled(length, known[high])
        return (1 - share) * shorter + share * longer

    def _prefill(self, num_tokens: int, ends: int) -> float:
        """Seconds of prefilling `num_tokens` tokens that are divided over the shards of the batch."""
        is_whole = num_tokens >= ends
        shards = (self._whole if is_whole else self._in_parts).num_batch_shards
        share = max(1, -(-num_tokens // shards))
        return float(self._passes("prefill", np.array([float(shards)]), share, max(share, ends))[0])

    def _passes(self, phase: str, batches: np.ndarray, queries: int, context: int) -> np.ndarray:
        layout = self._layout
        if phase == "prefill":
            layout = self._whole if queries == context else self._in_parts
        at, longest = layout.at(phase), self._contexts[-1]
        context = keys_read(self._config, self._hardware, at, queries, context, longest)
        passes = Passes(self._config, at, batches, queries, context, self._hardware)
        return np.broadcast_to(passes.seconds(self._hardware), batches.shape)


class StepBytes:
    """Bytes that a step reads from the memory of one chip, by the model's sizes.

    weights: all of them, once, as if every expert were chosen.
    """

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        self._config, self._layout = config, layout.at("generate").replace(microbatches=1)
        self._shards = float(self._layout.num_batch_shards)
        shape = PassShape(self._shards, 1, _SHORTEST)
        graph = record_pass(config, self._layout, shape)
        self.weights = int(inference_memory(graph, self._layout).weights)
        self._cached: dict[int, float] = {}

    def cache(self, context: int) -> float:
        """Bytes of keys and values of a sequence with `context` positions, a mean over chips.

        Local layers read only their window. Contexts are rounded up to multiples of 64.
        """
        length = -(-context // _SHORTEST) * _SHORTEST
        if length not in self._cached:
            whole = cache_bytes(self._config, self._layout, self._shards, length)
            self._cached[length] = float(whole) / self._shards
        return self._cached[length]


def _lengths(most: int, shortest: int = _SHORTEST) -> list[int]:
    """Lengths up to `most`, each _APART times the one before."""
    contexts = [shortest]
    while contexts[-1] * _APART < most:
        contexts.append(contexts[-1] * _APART)
    return sorted({*(length for length in contexts if length < most), most})


def end_of_one(num_tokens: int, chunks: Sequence[tuple[int, int]]) -> int:
    """The last position of one prompt part with `num_tokens` tokens and as much attention as `chunks`.

    Attention counts pairs of a query and a key: n (2 e - n) / 2 for n tokens up to position e, plus a half
    for each token. Several short prompts have fewer pairs than one prompt of all their tokens. The result is
    then below `num_tokens`.

    >>> end_of_one(64, [(64, 300)]), end_of_one(64, [(32, 600), (32, 32)]), end_of_one(64, [(32, 32)] * 2)
    (300, 332, 48)
    """
    pairs = sum([count * (2 * end - count) for count, end in chunks])
    return (pairs // num_tokens + num_tokens) // 2


def _between(known: Sequence[int], value: float) -> tuple[int, int, float]:
    """(numbers of the entries of `known` below and above the value, the share of the upper one)."""
    at = bisect_left(known, value)
    if at == 0:
        return 0, 0, 0.0
    if at == len(known):
        return at - 1, at - 1, 0.0
    return at - 1, at, (value - known[at - 1]) / (known[at] - known[at - 1])

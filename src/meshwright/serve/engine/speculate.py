"""Speculative decoding: guesses of the next tokens, verified in one step. Plain Python.

A guess is right if the token sampled in its place is the same. Sampling depends on a position and a seed, not
on the step, so that an answer has the same tokens as without guesses, drawn or greedy.

The paper's test accepts a guess x with probability min(1, p(x) / q(x)) and draws the rest from
max(0, p - q). A guess is then right with probability 1 - d = sum(min(p, q)), with d the total variation
distance of p and q. A looked-up guess has q = 1, and both rules accept it with probability p(x). A draft
model draws with the noise of the large model, by position and token. Without the test the two tokens are the
same with probability at least (1 - d) / (1 + d), and the answer does not depend on the draft model. With the
test (`by_ratio`) more guesses are right, and answers have the same distribution, but other tokens.

Sources: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Daliri et al.
2024, "Coupling without Communication and Drafter-Invariant Speculative Decoding".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary, ref

import numpy as np

from meshwright.serve.engine.batch import Batch, Runner, SequenceWork, WorkOutput
from meshwright.serve.engine.limits import Limits
from meshwright.serve.engine.request import SamplingParams
from meshwright.serve.engine.sequence import Tokens, TokenSequence

_LONGEST, _SHORTEST = 4, 2  # n-grams that are looked up, the longest first
_DECAY = 0.95  # of the running mean, with each verification
_FEW = 2  # tokens that the draft model takes one by one
_PAUSE = 256  # steps without guesses after a step that they did not pay for


class Payoff:
    """Whether guesses pay, by the mean number of right guesses of a sequence.

    num_drafts: maximum guesses of a sequence in a step. cost_ratio: by the number of sequences, seconds of a
    step whose tokens are guessed and verified over one that generates.
    """

    def __init__(self, num_drafts: int, cost_ratio: Callable[[int], float]) -> None:
        self._num_drafts, self._cost_ratio = num_drafts, cost_ratio
        self._mean_right = float(num_drafts)
        self._num_paused = 0

    def pays(self, num_sequences: int) -> bool:
        """Whether guesses yield more tokens per second in a step of `num_sequences` sequences.

        A step with a mean of r right guesses yields 1 + r tokens in the time of `cost_ratio` steps.
        """
        if self._num_paused:
            self._num_paused -= 1
            if not self._num_paused:
                self._mean_right = float(self._num_drafts)
            return False
        if 1 + self._mean_right > self._cost_ratio(num_sequences):
            return True
        self._num_paused = _PAUSE
        return False

    def verified(self, num_accepted: int) -> None:
        """Note how many of the guesses of one sequence were right."""
        self._mean_right = _DECAY * self._mean_right + (1 - _DECAY) * num_accepted


class Drafter:
    """Guesses the next tokens of sequences. This one never does.

    payoff: decides when to guess; without one there are no guesses.
    """

    def __init__(self, payoff: Payoff | None = None) -> None:
        self._payoff = payoff

    def pays(self, num_sequences: int) -> bool:
        """Whether guesses make a step of this number of sequences worth its longer time."""
        return self._payoff is not None and self._payoff.pays(num_sequences)

    def prepare(self, sequences: Sequence[TokenSequence]) -> None:
        """Compute the guesses of the sequences whose `draft` is asked for next, together."""

    def draft(self, sequence: TokenSequence) -> list[int]:
        """The next tokens of `sequence`, perhaps none."""
        return []

    def logits(self, sequence: TokenSequence) -> Sequence[np.ndarray]:
        """Logits f32[V] that the last guesses were drawn from, for the ratio test; empty without it."""
        return ()

    def computed(self, work: SequenceWork, hidden: np.ndarray) -> None:
        """Take the hidden states [n, D] of the n tokens of a work, from a runner that keeps them."""

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Note how many of the guesses of one sequence were right."""
        if self._payoff is not None:
            self._payoff.verified(num_accepted)


class NgramDrafter(Drafter):
    """Prompt look-up: guesses the tokens that followed the last earlier occurrence of the last few tokens.

    It pays if answers repeat their prompt, as edits and summaries do. num_drafts, cost_ratio: of Payoff.
    """

    def __init__(self, num_drafts: int, cost_ratio: Callable[[int], float]) -> None:
        super().__init__(Payoff(num_drafts, cost_ratio))
        self._num_drafts = num_drafts
        self._places: WeakKeyDictionary[TokenSequence, _Places] = WeakKeyDictionary()

    def draft(self, sequence: TokenSequence) -> list[int]:
        """The next tokens of `sequence`, none if its last n-gram is new."""
        places = self._places.setdefault(sequence, _Places())
        begin = places.find(sequence.tokens)
        # A looked-up guess has q = 1: both rules accept it with probability p, so that it needs no logits.
        return [] if begin is None else [*sequence.tokens[begin : begin + self._num_drafts]]


class ModelDrafter(Drafter):
    """Guesses by a smaller model of the same vocabulary, one token after another.

    It samples as the request does, with the same noise, but without penalties and constraints.

    runner: of that model, with the slots and the context of the engine's. Each slot has its own pages, whose
    keys and values are used again for tokens that were guessed right. num_drafts, cost_ratio: of Payoff.
    by_ratio: the runner keeps logits, and guesses are accepted by the ratio test.
    """

    def __init__(
        self, runner: Runner, num_drafts: int, cost_ratio: Callable[[int], float], *, by_ratio: bool = False
    ) -> None:
        super().__init__(Payoff(num_drafts, cost_ratio))
        self._runner, self._num_drafts, self._by_ratio = runner, num_drafts, by_ratio
        self._known: dict[int, _Known] = {}

    def draft(self, sequence: TokenSequence) -> list[int]:
        assert sequence.slot is not None
        known = self._known.get(sequence.slot)
        if known is None or known.sequence() is not sequence:
            known = self._known[sequence.slot] = _Known(ref(sequence))
        count = min(self._num_drafts, self._runner.limits.context - len(sequence.tokens))
        known.tokens = known.tokens[: _num_common(known.tokens, sequence.tokens[:-1])]
        tokens = list(sequence.tokens)
        known.logits = []
        for _ in range(count):
            output = self._next(sequence, known, tokens)
            tokens.append(output.tokens[0].token)
            known.logits += output.logits
        return tokens[len(sequence.tokens) :]

    def logits(self, sequence: TokenSequence) -> Sequence[np.ndarray]:
        return self._known[sequence.slot].logits if self._by_ratio and sequence.slot is not None else ()

    def _next(self, sequence: TokenSequence, known: "_Known", tokens: list[int]) -> WorkOutput:
        """The model's next token after `tokens`; computes the tokens that are not known yet."""
        assert sequence.slot is not None
        limits, reader = self._runner.limits, None
        pages, asked = pages_of_slot(limits, sequence.slot), without_edits(sequence)
        while len(known.tokens) < len(tokens):
            start = len(known.tokens)
            missing = tokens[start:]
            # A block takes the same time for two tokens as for all of its tokens.
            part = tuple(missing[: 1 if len(missing) <= _FEW else limits.chunk])
            samples = start + len(part) == len(tokens)
            work = SequenceWork(asked, sequence.slot, start, part, pages, samples=samples)
            reader = self._runner.run(Batch((work,)))
            known.tokens = tokens[: start + len(part)]
        assert reader is not None, "the last token is never known"
        [output] = reader.read()
        return output


def pages_of_slot(limits: Limits, slot: int) -> tuple[int, ...]:
    """The pages of a slot in a cache that has a whole context for each."""
    first = slot % limits.slots_per_replica * limits.pages_per_context
    return tuple(range(first, first + limits.pages_per_context))


def without_edits(sequence: TokenSequence) -> TokenSequence:
    """A sequence of the same request, without penalties and constraints, to draw guesses for.

    It has no tokens: a runner reads those of the work, and a copy of the prompt for each guess would cost
    more than the guess.
    """
    of = sequence.request.sampling
    sampling = SamplingParams(of.temperature, of.top_p, of.top_k, of.seed, min_p=of.min_p)
    request = replace(sequence.request, sampling=sampling)
    return TokenSequence(request, len(sequence.tokens), 0, lambda _: None, new_tokens=lambda _: [])


@dataclass
class _Known:
    """The tokens of a sequence that the draft model has computed in one slot, guesses included.

    logits: of its last guesses.
    """

    sequence: "ref[TokenSequence]"
    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


class _Places:
    """The end of the last occurrence of each n-gram of a growing list of tokens."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_known = 0

    def find(self, tokens: Tokens) -> int | None:
        """The position after the previous occurrence of the last tokens."""
        # The n-grams that end at the last token are looked up before they are noted.
        for end in range(self._num_known + 1, len(tokens)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._num_known = max(self._num_known, len(tokens) - 1)
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            if (known := self._ends.get(tuple(tokens[-length:]))) is not None:
                return known
        return None

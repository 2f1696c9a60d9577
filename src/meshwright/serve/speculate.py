"""Guesses of the next tokens, which one step verifies together (Leviathan et al., 2023). Plain Python.

A guess is right where the token sampled in its place is the same. Sampling depends on a position and a seed,
not on the step: so an answer is, token for token, the one without guesses, drawn or greedy.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from meshwright.serve.sequence import Sequence

_LONGEST, _SHORTEST = 4, 2  # n-grams that are looked up, the longest first
_MEMORY = 0.95  # how much of the mean stays with each verification
_PAUSE = 256  # steps without guesses, once they do not pay, until they are tried again


class NgramDrafter:
    """Guesses that a sequence goes on as it did behind the last earlier place with the same few tokens.

    Known as prompt look-up: it pays where answers repeat their prompt, as edits and summaries do.
    num_drafts: most guesses of a sequence a step. cost_ratio: of so many sequences, how much longer a step
    that verifies takes than one that generates.
    """

    def __init__(self, num_drafts: int, cost_ratio: Callable[[int], float]) -> None:
        self._num_drafts, self._cost_ratio = num_drafts, cost_ratio
        self._mean_right = float(num_drafts)
        self._num_paused = 0
        self._places: WeakKeyDictionary[Sequence, _Places] = WeakKeyDictionary()

    def pays(self, num_sequences: int) -> bool:
        """Whether a step of so many sequences yields more tokens a second with guesses, by those so far.

        With a right guesses a step on the mean it yields 1 + a tokens in `cost_ratio` steps' time.
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

    def draft(self, sequence: Sequence) -> list[int]:
        """The next tokens of `sequence`, none where its last ones are new to it."""
        places = self._places.setdefault(sequence, _Places())
        begin = places.find(sequence.tokens)
        return [] if begin is None else sequence.tokens[begin : begin + self._num_drafts]

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """Tells how many of the guesses of one sequence were right."""
        self._mean_right = _MEMORY * self._mean_right + (1 - _MEMORY) * num_accepted


class _Places:
    """Where each n-gram of a growing list of tokens ended last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_known = 0

    def find(self, tokens: list[int]) -> int | None:
        """Where what follows the last tokens began, the last time that they came."""
        # The n-grams that end at the last token are looked up before they are noted.
        for end in range(self._num_known + 1, len(tokens)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._num_known = max(self._num_known, len(tokens) - 1)
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            if (found := self._ends.get(tuple(tokens[-length:]))) is not None:
                return found
        return None

"""Words that an answer may not have, as vLLM's `bad_words` forbids them."""

from collections.abc import Sequence

import numpy as np

from meshwright.errors import RequestError
from meshwright.serve.engine.request import Constraint, NewConstraint
from meshwright.serve.text.tokenizer import Tokenizer

Tokens = tuple[int, ...]
_MOST_TOKENS = 20_000  # of all words, since long ones are compared with the answer in each step


def tokens_of_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[Tokens, ...]:
    """The tokens of each word, as they begin a text and, if their number is the same, as they follow a blank.

    Raises RequestError for a word without tokens, and at the first word with which there are too many tokens.
    """
    sequences: list[Tokens] = []
    num_tokens = 0
    for word in words:
        first, after_blank = (
            tuple(tokenizer.ids(text, add_special_tokens=False)) for text in (word, " " + word.lstrip())
        )
        if not first:
            raise RequestError(f"bad_words: {word!r} has no tokens", param="bad_words")
        sequences.append(first)
        if len(after_blank) == len(first) and after_blank[0] != first[0]:
            sequences.append(after_blank)
            num_tokens += len(after_blank)
        num_tokens += len(first)
        if num_tokens > _MOST_TOKENS:  # before the next words are split into tokens, which takes time
            raise RequestError(f"bad_words have more than {_MOST_TOKENS:,} tokens", param="bad_words")
    return tuple(sequences)


def without_words(
    words: Sequence[Tokens], vocab_size: int, also: NewConstraint | None = None
) -> NewConstraint:
    """Makes constraints that forbid the last token of each word after its others.

    also: a further constraint. If no token meets both, it decides.
    """
    return lambda: _WithoutWords(words, vocab_size, also() if also else None)


class _WithoutWords:
    """A Constraint."""

    def __init__(self, words: Sequence[Tokens], vocab_size: int, also: Constraint | None) -> None:
        self._vocab_size, self._also = vocab_size, also
        self._first = [word[0] for word in words if len(word) == 1]
        self._after: dict[int, list[Tokens]] = {}  # longer words, by their last token but one
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self._length = max(map(len, words)) - 1
        self._last: Tokens = ()

    def allowed(self) -> np.ndarray:
        free = np.ones(self._vocab_size, bool) if self._also is None else self._also.allowed()
        last, forbidden = self._last, list(self._first)
        for word in self._after.get(last[-1], ()) if last else ():
            if len(word) - 1 <= len(last) and last[len(last) - len(word) + 1 :] == word[:-1]:
                forbidden.append(word[-1])
        kept = free.copy()
        kept[forbidden] = False
        return kept if kept.any() else free

    def accept(self, token: int) -> None:
        if self._length:
            self._last = (*self._last, token)[-self._length :]
        if self._also is not None:
            self._also.accept(token)

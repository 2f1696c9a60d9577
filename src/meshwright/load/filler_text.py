"""Texts of about a given number of tokens, for a server with an unknown tokenizer."""

import random
from dataclasses import dataclass

_TEXT = (
    "the of and to in is it for as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up "
    "said what its about than into them can only other time new some could these two may first then do "
    "any like my now over such our man me even most made after also did many off before must well back "
    "through years where much your way down should because long each just state those people too mister "
    "how little good world make very year still see own work men day get here old between both life being "
    "under three never know same last another while us might great go come since against right came take "
    "used himself few house use place during without "
)
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Words:
    """Texts of random words, with tokens_per_word and overhead_tokens as the server counts them."""

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0

    @classmethod
    def fitted(cls, short: tuple[int, int], long: tuple[int, int]) -> "Words":
        """The line through two prompts, each (words, tokens counted by the server)."""
        slope = (long[1] - short[1]) / (long[0] - short[0])
        if slope <= 0:  # the server does not count tokens
            return cls()
        return cls(slope, max(0.0, short[1] - slope * short[0]))

    def text(self, num_tokens: int, seed: str) -> str:
        """A text of about `num_tokens` tokens, the same for the same seed."""
        return self.words(max(1, round((num_tokens - self.overhead_tokens) / self.tokens_per_word)), seed)

    @staticmethod
    def words(num_words: int, seed: str) -> str:
        return " ".join(random.Random(seed).choices(_WORDS, k=num_words))

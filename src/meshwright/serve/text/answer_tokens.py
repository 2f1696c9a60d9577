"""Tokens of a whole answer, in little memory."""

from array import array
from collections.abc import Collection, Iterable, Iterator

from meshwright.serve.engine.request import TokenScore
from meshwright.serve.text.generation import AnswerToken


class AnswerTokens(Collection[AnswerToken]):
    """The tokens of an answer and their scores, stored as arrays.

    As objects, 100,000 tokens would be visited by each garbage collection, which stops the whole
    server meanwhile: for up to 0.25 s.
    """

    def __init__(self, tokens: Iterable[AnswerToken] = ()) -> None:
        self._tokens, self._logprobs, self._offsets = array("q"), array("d"), array("q")
        # The alternatives of token i are between ends i - 1 and i.
        self._top_tokens, self._top_logprobs, self._ends = array("q"), array("d"), array("q", [0])
        self.extend(tokens)

    def extend(self, tokens: Iterable[AnswerToken]) -> None:
        for (token, logprob, top), offset in tokens:
            self._tokens.append(token)
            self._logprobs.append(logprob)
            self._offsets.append(offset)
            for other, other_logprob in top:
                self._top_tokens.append(other)
                self._top_logprobs.append(other_logprob)
            self._ends.append(len(self._top_tokens))

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token; 0 without tokens."""
        return sum(self._logprobs) / max(len(self), 1)

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, token: object) -> bool:
        return any(token == each for each in self)

    def __iter__(self) -> Iterator[AnswerToken]:
        for index, (token, logprob, offset) in enumerate(
            zip(self._tokens, self._logprobs, self._offsets, strict=True)
        ):
            part = slice(self._ends[index], self._ends[index + 1])
            top = zip(self._top_tokens[part], self._top_logprobs[part], strict=True)
            yield AnswerToken(TokenScore(token, logprob, tuple(top)), offset)

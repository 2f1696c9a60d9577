"""A request for tokens, and the events that answer it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, overload

import numpy as np

NUM_TOP = 20
"""Maximum alternatives whose log-probabilities are returned, as in OpenAI's API."""
_AT_ONCE = 64  # scores that an iteration converts to objects together

Reads = Literal["scores", "embedding"] | None
FinishReason = Literal["stop", "length", "cancelled", "failed"]


class EngineError(Exception):
    """The engine cannot finish a request; not the user's mistake, so HTTP answers 500."""


class EngineStopped(EngineError):
    """The engine takes no requests any more; nothing of this one was done, and HTTP answers 503."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling; see `SampledRows` and `Edits` in `meshwright.serve.device.sampling`.

    logit_bias: (token, number added to its logit). allowed_ids: the only tokens of the answer; None: all.
    min_tokens: tokens before the first stop token. top_logprobs: alternatives to report with each token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        assert self.temperature >= 0 and 0 <= self.top_p <= 1 and self.top_k >= 0 and 0 <= self.min_p <= 1
        assert 0 <= self.seed < 2**32 and self.repetition_penalty > 0 and self.top_logprobs >= 0

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before they are sampled."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        return penalties or bool(self.logit_bias) or self.allowed_ids is not None or self.min_tokens > 0


GREEDY = SamplingParams(temperature=0.0)


class Constraint(Protocol):
    """A constraint on the next token: a JSON schema, a regular expression, a grammar."""

    def allowed(self) -> np.ndarray:
        """bool[V], at least one of them true."""
        ...

    def accept(self, token: int) -> None:
        """Advance by `token`, which was allowed."""
        ...


NewConstraint = Callable[[], Constraint]


@dataclass(frozen=True)
class Request:
    """A prompt to continue, or only to read.

    max_tokens: None continues to the end of the context. 0 generates nothing: the request finishes after its
    prompt, with the scores or the embedding that were asked for.
    stop_ids: tokens that end the answer, such as end-of-sequence.
    priority: requests of a lower number go first, and keep their pages when these run out.
    new_constraint: makes the constraint that the answer must meet.
    scores_prompt: report the log-probabilities of the prompt's tokens with the first event.
    embeds: report the embedding of the prompt with the last event; needs max_tokens = 0.
    exports_pages: report the contents of the prompt's full pages with the last event, for another engine.
    client: name of the client; the clients with fewest running requests go first.
    """

    prompt: Sequence[int]
    max_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    new_constraint: Callable[[], Any] | None = None
    scores_prompt: bool = False
    embeds: bool = False
    exports_pages: bool = False
    priority: int = 0
    client: str = ""

    def __post_init__(self) -> None:
        assert not self.embeds or (self.max_tokens == 0 and not self.scores_prompt)

    @property
    def generates(self) -> bool:
        return self.max_tokens != 0

    @property
    def edits_logits(self) -> bool:
        return self.sampling.edits_logits or self.new_constraint is not None


class TokenScore(NamedTuple):
    """A token and its log-probability in nats under the model's unmodified distribution.

    top: (token, log-probability) of the likeliest tokens, descending, `top_logprobs` of them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Scores(Sequence[TokenScore]):
    """Scores of prompt tokens, stored as arrays.

    As objects they would take 20 times the memory, and each garbage collection would visit them for seconds.
    tokens: i32[T]. logprobs: f32[T]. top_ids: i32[T, K]. top_logprobs: f32[T, K], descending.
    """

    def __init__(
        self, tokens: np.ndarray, logprobs: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> None:
        self._columns = tokens, logprobs, top_ids, top_logprobs

    @staticmethod
    def joined(parts: Iterable[Sequence[TokenScore]]) -> Sequence[TokenScore]:
        """The scores of one part after another."""
        filled = [part for part in parts if part]
        if len(filled) < 2:
            return filled[0] if filled else ()
        as_arrays = [part._columns for part in filled if isinstance(part, Scores)]
        if len(as_arrays) == len(filled):
            return Scores(*map(np.concatenate, zip(*as_arrays, strict=True)))
        return [score for part in filled for score in part]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __iter__(self) -> Iterator[TokenScore]:
        """The scores in order, converted in groups: a fifth of the time of `self[i]` for each i."""
        for begin in range(0, len(self), _AT_ONCE):
            tokens, logprobs, ids, top = (
                column[begin : begin + _AT_ONCE].tolist() for column in self._columns
            )
            for token, logprob, of_ids, of_top in zip(tokens, logprobs, ids, top, strict=True):
                yield TokenScore(token, logprob, tuple(zip(of_ids, of_top, strict=True)))

    @overload
    def __getitem__(self, where: int, /) -> TokenScore: ...
    @overload
    def __getitem__(self, where: slice, /) -> "Scores": ...
    def __getitem__(self, where: int | slice, /) -> "TokenScore | Scores":
        if isinstance(where, slice):
            return Scores(*(column[where] for column in self._columns))
        token, logprob, ids, logprobs = (column[where].tolist() for column in self._columns)
        return TokenScore(token, logprob, tuple(zip(ids, logprobs, strict=True)))


@dataclass(frozen=True)
class Event:
    """One more token of the request at `index` among those submitted together.

    score: None for the only event of a request that generates nothing. finish_reason: set on the last event:
    `stop` (the token is one of stop_ids and not part of the answer) or `length`. prompt: with the first
    event and if asked for, the scores of the prompt's tokens but the first. embedding: f32[D], if asked for.
    pages: with the last event and if asked for, as the runner exports them. num_cached: with the first event,
    the prompt's tokens that were read from the prefix cache.
    """

    index: int
    score: TokenScore | None
    finish_reason: FinishReason | None = None
    prompt: Sequence[TokenScore] = ()
    embedding: np.ndarray | None = None
    pages: object = None
    num_cached: int = 0

    @property
    def token(self) -> int:
        assert self.score is not None
        return self.score.token

    @property
    def logprob(self) -> float:
        assert self.score is not None
        return self.score.logprob

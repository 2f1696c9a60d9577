"""A request for tokens, the events that answer it, and its state while it is served."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshwright.serve.engine.counted import Text
from meshwright.serve.engine.pages import Pages

if TYPE_CHECKING:
    from meshwright.serve.engine.logit_edits import LogitEdits

FinishReason = Literal["stop", "length", "cancelled", "failed"]


class EngineError(Exception):
    """The engine cannot finish a request; not the user's mistake, so HTTP answers 500."""


class EngineStopped(EngineError):
    """The engine takes no requests any more; nothing of this one was done, and HTTP answers 503."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose among tokens; see `SampledRows` and `Edits` in `meshwright.serve.device.sampling`.

    logit_bias: (token, what is added to its logit). allowed_ids: the only tokens that may come, None for all.
    min_tokens: no stop token comes before so many. top_logprobs: alternatives to report with each token.
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
        """Whether it changes logits before they are sampled."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)
        return penalties or bool(self.logit_bias) or self.allowed_ids is not None or self.min_tokens > 0


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    max_tokens: None continues to the end of the context.
    stop_ids: tokens that end the answer, such as end-of-sequence.
    priority: requests of a lower number go first, and keep their pages when these run out.
    new_constraint: makes what says, token by token, which may come next (see `logit_edits.Constraint`).
    scores_prompt: report the log-probabilities of the prompt's tokens with the first event.
    exports_pages: hand out what stands in the prompt's full pages with the last event, for another engine.
    """

    prompt: tuple[int, ...] | Text
    max_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    new_constraint: Callable[[], Any] | None = None
    scores_prompt: bool = False
    exports_pages: bool = False
    priority: int = 0

    @property
    def edits_logits(self) -> bool:
        return self.sampling.edits_logits or self.new_constraint is not None


class TokenScore(NamedTuple):
    """A token, its log-probability in nats under the model's unmodified distribution, and the likeliest.

    top: (token, log-probability), descending, as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """One more token of the request at `index` among those submitted together.

    finish_reason: set on the last event: `stop` (the token is one of stop_ids and not part of the
    answer) or `length`. prompt: with the first event, the scores of the prompt's tokens but the first,
    if they were asked for. pages: with the last event, as the runner exports them, where they were asked for.
    """

    index: int
    score: TokenScore
    finish_reason: FinishReason | None = None
    prompt: tuple[TokenScore, ...] = ()
    pages: object = None

    @property
    def token(self) -> int:
        return self.score.token

    @property
    def logprob(self) -> float:
        return self.score.logprob


@dataclass(slots=True)
class Lifetime:
    """The times of a request by `time.perf_counter`: arrival, first step, first token, end.

    0: not yet. reason: why it finished.
    """

    submitted_seconds: float = field(default_factory=time.perf_counter)
    started_seconds: float = 0.0
    first_token_seconds: float = 0.0
    finished_seconds: float = 0.0
    reason: FinishReason | None = None

    def start(self) -> None:
        """The request is in a step; only the first counts."""
        self.started_seconds = self.started_seconds or time.perf_counter()

    def finish(self, reason: FinishReason) -> None:
        self.finished_seconds, self.reason = time.perf_counter(), reason

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """(start, end) of each phase that it has left: queue, prefill, generate."""
        ends = [self.submitted_seconds, self.started_seconds, self.first_token_seconds]
        reached = [*(seconds for seconds in ends if seconds), self.finished_seconds]
        return dict(zip(("queue", "prefill", "generate"), pairwise(reached), strict=False))


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """A request on its way: waiting (slot is None), running in a slot, then finished.

    tokens: prompt and answer as far as the host knows them; num_generated are of the answer. num_pending:
    tokens that steps under way sample. num_computed: tokens whose keys and values stand in `pages`, or will
    once the steps under way are done; num_cached of them were there when it began. rank: who comes first: the
    most urgent, of these the first to arrive. num_preempted: how often it lost its pages. is_handed_over:
    another engine generates the rest.
    """

    request: Request
    max_tokens: int
    index: int
    emit: Callable[[Event | EngineError], None]
    slot: int | None = None
    pages: Pages = field(default_factory=Pages)
    num_computed: int = 0
    num_pending: int = 0
    rank: tuple[int, int] = (0, 0)
    num_preempted: int = 0
    num_cached: int = 0
    is_handed_over: bool = False
    prompt_scores: tuple[TokenScore, ...] = ()
    edits: "LogitEdits | None" = None
    finish_reason: FinishReason | None = None
    lifetime: Lifetime = field(default_factory=Lifetime)
    tokens: list[int] | Text = field(init=False)
    num_prompt: int = field(init=False)
    num_generated: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.num_prompt = len(prompt)
        self.tokens = prompt.of_length(self.num_prompt) if isinstance(prompt, Text) else list(prompt)

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled, those under way not counted."""
        return self.max_tokens - self.num_generated - self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens, known or under way, whose keys and values no step has been asked for."""
        return self.num_prompt + self.num_generated + self.num_pending - self.num_computed

    def append(self, score: TokenScore) -> Event:
        """The event of the next token; sets finish_reason when it is the last."""
        self.take(score.token)
        prompt, self.prompt_scores = self.prompt_scores, ()
        return Event(self.index, score, self.finish_reason, prompt)

    def take(self, token: int) -> None:
        """Goes on with the next token; sets finish_reason when it is the last."""
        self.tokens.append(token)
        self.num_generated += 1
        if self.edits is not None:
            self.edits.accept(token)
        if self.num_generated == 1:
            self.lifetime.first_token_seconds = time.perf_counter()
        if token in self.request.stop_ids:
            self.finish_reason = "stop"
        elif self.num_generated == self.max_tokens:
            self.finish_reason = "length"

    def grow(self, count: int) -> None:
        """`count` more tokens of an answer whose tokens are counted."""
        assert isinstance(self.tokens, Text)
        self.tokens.grow(count)
        self.num_generated += count

    @property
    def time_to_first_token_seconds(self) -> float:
        return self.lifetime.first_token_seconds - self.lifetime.submitted_seconds

    def time_per_output_token_seconds(self, now_seconds: float) -> float:
        """Mean seconds between tokens after the first; needs two tokens."""
        assert self.num_generated > 1
        return (now_seconds - self.lifetime.first_token_seconds) / (self.num_generated - 1)

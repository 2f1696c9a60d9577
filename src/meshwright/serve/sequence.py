"""A request for tokens, the events that answer it, and its state while it is served."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "failed"]


class EngineError(Exception):
    """The engine cannot finish a request; not the user's mistake, so HTTP answers 500."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose among tokens; see `meshwright.serve.sampling.sample`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.temperature >= 0 and 0 <= self.top_p <= 1 and self.top_k >= 0
        assert 0 <= self.seed < 2**32


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    max_tokens: None continues to the end of the context.
    stop_ids: tokens that end the answer, such as end-of-sequence.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Event:
    """One more token of the request at `index` among those submitted together.

    finish_reason: set on the last event: `stop` (the token is one of stop_ids and not part of the
    answer) or `length`. logprob: nats, under the model's unmodified distribution.
    """

    index: int
    token: int
    logprob: float
    finish_reason: FinishReason | None = None


@dataclass(eq=False)
class Sequence:
    """A request on its way: waiting (slot is None), running in a slot, then finished.

    position: of the last token, prompt included; the next token sits at position + 1.
    """

    request: Request
    max_tokens: int
    index: int
    emit: Callable[[Event | EngineError], None]
    slot: int | None = None
    last_token: int = 0
    num_generated: int = 0
    finish_reason: FinishReason | None = None
    submitted_seconds: float = field(default_factory=time.perf_counter)
    first_token_seconds: float = 0.0

    @property
    def position(self) -> int:
        return len(self.request.prompt) + self.num_generated - 1

    def append(self, token: int, logprob: float) -> Event:
        """The event of the next token; sets finish_reason when it is the last."""
        self.last_token, self.num_generated = token, self.num_generated + 1
        if self.num_generated == 1:
            self.first_token_seconds = time.perf_counter()
        if token in self.request.stop_ids:
            self.finish_reason = "stop"
        elif self.num_generated == self.max_tokens:
            self.finish_reason = "length"
        return Event(self.index, token, logprob, self.finish_reason)

    @property
    def time_to_first_token_seconds(self) -> float:
        return self.first_token_seconds - self.submitted_seconds

    def time_per_output_token_seconds(self, now_seconds: float) -> float:
        """Mean seconds between tokens after the first; needs two tokens."""
        assert self.num_generated > 1
        return (now_seconds - self.first_token_seconds) / (self.num_generated - 1)

"""The state of a request while it is served."""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import pairwise
from typing import Protocol, overload

import numpy as np

from meshwright.serve.engine.logit_edits import LogitEdits
from meshwright.serve.engine.pages import Pages
from meshwright.serve.engine.request import (
    EngineError,
    Event,
    FinishReason,
    Reads,
    Request,
    Scores,
    TokenScore,
)


class Tokens(Protocol):
    """A list of token ids that grows at its end."""

    def append(self, token: int, /) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    @overload
    def __getitem__(self, where: int, /) -> int: ...
    @overload
    def __getitem__(self, where: slice, /) -> Sequence[int]: ...


@dataclass(slots=True)
class Lifetime:
    """The times of a request by `time.perf_counter`: arrival, first step, first token, end.

    0: not reached. reason: why it finished.
    """

    submitted_seconds: float = field(default_factory=time.perf_counter)
    started_seconds: float = 0.0
    first_token_seconds: float = 0.0
    finished_seconds: float = 0.0
    reason: FinishReason | None = None

    def start(self) -> None:
        """Note that the request is in a step; only the first counts."""
        self.started_seconds = self.started_seconds or time.perf_counter()

    def finish(self, reason: FinishReason) -> None:
        self.finished_seconds, self.reason = time.perf_counter(), reason

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """(start, end) of each phase that has ended: queue, prefill, generate."""
        starts = [self.submitted_seconds, self.started_seconds, self.first_token_seconds]
        reached = [*(seconds for seconds in starts if seconds), self.finished_seconds]
        return dict(zip(("queue", "prefill", "generate"), pairwise(reached), strict=False))


@dataclass(eq=False, slots=True, weakref_slot=True)
class TokenSequence:
    """A request that waits (slot is None), runs in a slot, or has finished.

    tokens: prompt and answer as far as the host knows them. num_generated: tokens of the answer in `tokens`.
    num_pending: tokens that steps under way sample. num_computed: tokens whose keys and values are in `pages`
    once the steps under way have ended. num_cached: tokens that were cached when it started.
    limit: tokens of the answer that this engine generates; max_tokens, unless another generates the rest.
    rank: its place among others, by the policy. num_preempted: times that it lost its pages.
    prompt_scores: read so far, each part by the position before its first token. embedding: as read.
    snapshots: numbers of states that steps save, by the number of tokens before each. num_right: right drafts
    of its last step, if that verified drafts.
    edits: None until its first token is sampled, and for a request without any. new_tokens: makes `tokens`
    of a prompt. shares_tokens: whether other sequences have the same `tokens`, as answers to one prompt do
    until their first token. group: the same of sequences that were submitted together.
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
    limit: int = -1
    prompt_scores: dict[int, Sequence[TokenScore]] = field(default_factory=dict)
    embedding: np.ndarray | None = None
    snapshots: dict[int, int] = field(default_factory=dict)
    num_right: int = 0
    edits: LogitEdits | None = None
    finish_reason: FinishReason | None = None
    lifetime: Lifetime = field(default_factory=Lifetime)
    new_tokens: InitVar[Callable[[Sequence[int]], Tokens]] = list
    shares_tokens: bool = False
    group: Hashable = None
    tokens: Tokens = field(init=False)
    num_prompt: int = field(init=False)
    num_generated: int = field(init=False, default=0)

    def __post_init__(self, new_tokens: Callable[[Sequence[int]], Tokens]) -> None:
        self.num_prompt, self.tokens = len(self.request.prompt), new_tokens(self.request.prompt)
        if self.limit < 0:
            self.limit = self.max_tokens

    @property
    def num_left(self) -> int:
        """Tokens that this engine may still sample, without those under way."""
        return self.limit - self.num_generated - self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens, known or under way, whose keys and values no step has been asked for."""
        return self.num_prompt + self.num_generated + self.num_pending - self.num_computed

    @property
    def is_scheduled(self) -> bool:
        """Whether all that this engine computes of it is computed or under way."""
        return self.num_left < 1 and (self.request.generates or self.num_uncomputed < 1)

    @property
    def reads_every_position(self) -> bool:
        """Whether no cached prefix may be used, since the prompt is scored while it is prefilled."""
        return self.request.scores_prompt and not self.num_generated

    def reads(self, start: int, end: int) -> Reads:
        """The result that is read from the hidden states of positions `start` to `end`."""
        if self.reads_every_position and start < self.num_prompt - 1:
            return "scores"
        return "embedding" if self.request.embeds and end == self.num_prompt else None

    def add_prompt_scores(self, start: int, scores: Sequence[TokenScore]) -> None:
        """Note the scores of the tokens after position `start`; scores of a lost prefill are replaced."""
        kept = {begin: part[: start - begin] for begin, part in self.prompt_scores.items() if begin < start}
        self.prompt_scores = kept | {start: scores}

    def append(self, score: TokenScore | None) -> Event:
        """The event of the next token, or of a whole prompt; sets finish_reason with the last."""
        if score is None:
            self.finish_reason = "length"
        else:
            self.take(score.token)
        prompt, self.prompt_scores = Scores.joined(self.prompt_scores.values()), {}
        is_first = self.num_generated <= 1
        num_cached = min(self.num_cached, len(self.request.prompt)) if is_first else 0
        return Event(self.index, score, self.finish_reason, prompt, self.embedding, num_cached=num_cached)

    def prepare_edits(self, vocab_size: int) -> None:
        """Make `edits` if the request has any, and prepare them for the next token."""
        if self.edits is None and self.request.edits_logits:
            self.edits = LogitEdits(self.request, vocab_size)
        if self.edits is not None:
            self.edits.prepare()

    def take(self, token: int) -> None:
        """Append the next token; sets finish_reason with the last."""
        if self.shares_tokens:
            self.tokens, self.shares_tokens = list(self.tokens), False
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

    @property
    def time_to_first_token_seconds(self) -> float:
        return self.lifetime.first_token_seconds - self.lifetime.submitted_seconds

    def time_per_output_token_seconds(self, now_seconds: float) -> float:
        """Mean seconds between tokens after the first; needs two tokens."""
        assert self.num_generated > 1
        return (now_seconds - self.lifetime.first_token_seconds) / (self.num_generated - 1)

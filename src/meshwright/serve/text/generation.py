"""The text of the answers to one HTTP request, as their tokens arrive."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.errors import RequestError
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.metrics import Latencies
from meshwright.serve.engine.request import Event, FinishReason, Request, TokenScore
from meshwright.serve.engine.sequence import Lifetime
from meshwright.serve.text.detokenizer import TextStream
from meshwright.serve.text.tokenizer import Tokenizer


class AnswerToken(NamedTuple):
    """A token of an answer; its text begins at character `offset` of the answer."""

    score: TokenScore
    offset: int


@dataclass(frozen=True)
class Delta:
    """A further piece of the answer at `index`; finish_reason is set on its last.

    tokens: tokens since the previous piece, the end token included. prompt: on the first piece, if requested,
    the scores of the prompt's tokens after the first.
    """

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[AnswerToken, ...] = ()
    prompt: Sequence[TokenScore] = ()


class _Answer:
    """One answer on its way from tokens to pieces of text."""

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self._tokens: list[AnswerToken] = []
        self._prompt: Sequence[TokenScore] = ()

    def take(self, event: Event) -> Delta | None:
        """What `event` adds; None while its text is held back."""
        self._prompt = self._prompt or event.prompt
        if event.score is None:  # nothing was asked for but the prompt
            return Delta(event.index, "", event.finish_reason, (), self._prompt)
        self._tokens.append(AnswerToken(event.score, self.text.num_decoded))
        # The token that means "stop" is not part of the answer.
        piece = "" if event.finish_reason == "stop" else self.text.push(event.token)
        if event.finish_reason and not self.text.stopped:
            piece += self.text.finish()
        reason, tokens = event.finish_reason, self._tokens
        if self.text.stopped:  # tokens of the stop string itself are no part of the answer either
            reason, tokens = "stop", [one for one in tokens if one.offset < self.text.num_shown]
        if not piece and not reason:
            return None
        delta = Delta(event.index, piece, reason, tuple(tokens), self._prompt)
        self._tokens, self._prompt = [], ()
        return delta


def timed_out(limit_seconds: float | None) -> RequestError:
    """The refusal of an answer that takes longer than the server allows."""
    return RequestError(
        f"the answer exceeded this server's limit of {limit_seconds:g} s",
        status=408,
        code="request_timed_out",
    )


class Generation:
    """An asynchronous iterator of Delta over the answers to `requests`.

    Used as `with Generation(...) as generation`: leaving the block cancels unfinished requests.
    num_generated_tokens: so far, over all answers. num_cached_tokens: of the prompts, read from the prefix
    cache. keeps_stop: whether an answer includes its stop string.
    limit_seconds: time limit, after which it raises RequestError 408; None: no limit.
    on_closed: called with the lifetimes of the requests after the last.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        stops: Sequence[str],
        *,
        keeps_stop: bool = False,
        limit_seconds: float | None = None,
        on_closed: Callable[[Sequence[Lifetime]], None] | None = None,
    ) -> None:
        self._answers = [
            _Answer(
                TextStream(
                    tokenizer, request.prompt, stops, keeps_stop=keeps_stop, token_bytes=tokenizer.token_bytes
                )
            )
            for request in requests
        ]
        self._limit_seconds, self._on_closed = limit_seconds, on_closed
        self._deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
        self._latencies = Latencies(engine.metrics, len(requests))
        self._stream = engine.submit(*requests)
        self.num_generated_tokens = 0
        self.num_cached_tokens = 0
        prompts = [request.prompt for request in requests]
        # Only these count: further answers to a prompt find it in the cache because of its first answer.
        self._first_answers = {i for i, prompt in enumerate(prompts) if not i or prompt is not prompts[i - 1]}

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        self._stream.close()
        if self._on_closed is not None:
            self._on_closed(self._stream.lifetimes)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        next_event = self._stream.next_event if self._deadline is None else self._event_in_time
        while (event := await next_event()) is not None:
            self.num_generated_tokens += event.score is not None
            self._latencies.take(event)
            if event.index in self._first_answers:
                self.num_cached_tokens += event.num_cached
            answer = self._answers[event.index]
            delta = answer.take(event)
            if answer.text.stopped:
                self._stream.finish(event.index, "stop")
            if delta is not None:
                yield delta

    async def _event_in_time(self) -> Event | None:
        """The next event, None after the last; raises RequestError after the time limit."""
        assert self._deadline is not None
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                return await self._stream.next_event()
        except TimeoutError:
            raise timed_out(self._limit_seconds) from None

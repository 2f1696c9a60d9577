"""The text of the answers to one HTTP request, as their tokens arrive."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from meshwright.serve.engine import Engine
from meshwright.serve.sequence import Event, FinishReason, Request, TokenScore
from meshwright.serve.text import TextStream
from meshwright.serve.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerToken:
    """A token of an answer; its text begins at character `offset` of the answer."""

    score: TokenScore
    offset: int


@dataclass(frozen=True)
class Delta:
    """A further piece of the answer at `index`; finish_reason is set on its last.

    tokens: those since the piece before, the end token included. prompt: with the first piece, the scores of
    the prompt's tokens but the first, where they were asked for.
    """

    index: int
    text: str
    finish_reason: FinishReason | None = None
    tokens: tuple[AnswerToken, ...] = ()
    prompt: tuple[TokenScore, ...] = ()


class _Answer:
    """One answer on its way from tokens to pieces of text."""

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self._tokens: list[AnswerToken] = []
        self._prompt: tuple[TokenScore, ...] = ()

    def take(self, event: Event) -> Delta | None:
        """What `event` adds; None while its text is held back."""
        self._prompt = self._prompt or event.prompt
        self._tokens.append(AnswerToken(event.score, self.text.num_decoded))
        # The token that means "stop" is not part of the answer.
        piece = "" if event.finish_reason == "stop" else self.text.push(event.token)
        if event.finish_reason and not self.text.stopped:
            piece += self.text.finish()
        reason = "stop" if self.text.stopped else event.finish_reason
        if not piece and not reason:
            return None
        # Tokens of the stop string itself are no part of the answer either.
        tokens = tuple(t for t in self._tokens if not self.text.stopped or t.offset < self.text.num_shown)
        delta = Delta(event.index, piece, reason, tokens, self._prompt)
        self._tokens, self._prompt = [], ()
        return delta


class Generation:
    """An asynchronous iterator of Delta over the answers to `requests`.

    Used as `with Generation(...) as generation`: leaving the block cancels what is unfinished.
    num_generated_tokens: so far, over all answers. keeps_stop: a stop string is part of the answer it ends.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        stops: Sequence[str],
        *,
        keeps_stop: bool = False,
    ) -> None:
        self._answers = [
            _Answer(TextStream(tokenizer, request.prompt, stops, keeps_stop=keeps_stop))
            for request in requests
        ]
        self._stream = engine.submit(*requests)
        self.num_generated_tokens = 0

    @property
    def num_answers(self) -> int:
        return len(self._answers)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for event in self._stream:
            self.num_generated_tokens += 1
            answer = self._answers[event.index]
            delta = answer.take(event)
            if answer.text.stopped:
                self._stream.finish(event.index, "stop")
            if delta is not None:
                yield delta

"""The text of the answers to one HTTP request, as their tokens arrive."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from meshwright.serve.engine import Engine
from meshwright.serve.sequence import Event, FinishReason, Request
from meshwright.serve.text import TextStream
from meshwright.serve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Delta:
    """A further piece of the answer at `index`; finish_reason is set on its last."""

    index: int
    text: str
    finish_reason: FinishReason | None = None


class Generation:
    """An asynchronous iterator of Delta over the answers to `requests`.

    Used as `with Generation(...) as generation`: leaving the block cancels what is unfinished.
    num_generated_tokens: so far, over all answers.
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, requests: Sequence[Request], stops: Sequence[str]
    ) -> None:
        self._texts = [TextStream(tokenizer, request.prompt, stops) for request in requests]
        self._stream = engine.submit(*requests)
        self.num_generated_tokens = 0

    @property
    def num_answers(self) -> int:
        return len(self._texts)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for event in self._stream:
            self.num_generated_tokens += 1
            delta = self._delta(event)
            if delta.text or delta.finish_reason:
                yield delta

    def _delta(self, event: Event) -> Delta:
        text = self._texts[event.index]
        # The token that means "stop" is not part of the answer.
        piece = "" if event.finish_reason == "stop" else text.push(event.token)
        if event.finish_reason and not text.stopped:
            piece += text.finish()
        if text.stopped:
            self._stream.finish(event.index, "stop")
        return Delta(event.index, piece, "stop" if text.stopped else event.finish_reason)

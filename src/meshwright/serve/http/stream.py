"""Answers on the wire: as one JSON body or as server-sent events, given up when the client leaves."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from meshwright.serve.generation import Generation
from meshwright.serve.http.errors import error_object
from meshwright.serve.http.forms import Choice, Form, Json
from meshwright.serve.sequence import EngineError

logger = logging.getLogger(__name__)


def usage(num_prompt_tokens: int, generation: Generation) -> dict[str, int]:
    """The `usage` object, of the tokens so far."""
    num_generated = generation.num_generated_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
    }


async def whole_body(generation: Generation, form: Form, num_prompt_tokens: int) -> Json:
    """The body of an answer that is not streamed."""
    texts = [""] * generation.num_answers
    reasons: list[str | None] = [None] * generation.num_answers
    async for delta in generation:
        texts[delta.index] += delta.text
        reasons[delta.index] = delta.finish_reason
    choices = [Choice(text, reason) for text, reason in zip(texts, reasons, strict=True)]
    return form.body(choices) | {"usage": usage(num_prompt_tokens, generation)}


class EventStream(StreamingResponse):
    """Server-sent events, each one chunk, then `[DONE]`; an error event in its place if it fails."""

    def __init__(
        self, generation: Generation, form: Form, num_prompt_tokens: int, *, includes_usage: bool
    ) -> None:
        self._generation = generation
        self._form = form
        self._num_prompt_tokens = num_prompt_tokens
        self._includes_usage = includes_usage
        # Proxies that buffer would turn a stream into one late body.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The slots are free again when the response is over, however it ended.
        with self._generation:
            await super().__call__(scope, receive, send)

    async def _events(self) -> AsyncIterator[str]:
        try:
            async for chunk in self._chunks():
                yield _event(chunk)
        except Exception as error:  # the status is sent, so the error travels in the stream
            if not isinstance(error, EngineError):
                logger.exception("a stream failed")
            yield _event(error_object(error))
            return
        yield "data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[Json]:
        blank = {"usage": None} if self._includes_usage else {}
        for index in range(self._generation.num_answers):
            for chunk in self._form.opening(index):
                yield chunk | blank
        async for delta in self._generation:
            yield self._form.chunk(delta) | blank
        if self._includes_usage:
            yield self._form.last() | {"usage": usage(self._num_prompt_tokens, self._generation)}


def _event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


T = TypeVar("T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled with ClientDisconnect if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

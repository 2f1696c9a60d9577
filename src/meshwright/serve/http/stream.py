"""Answers on the wire: as one JSON body or as server-sent events, given up when the client leaves."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from meshwright.errors import RequestError
from meshwright.serve.engine.request import EngineError
from meshwright.serve.http.error_bodies import error_object
from meshwright.serve.http.forms import AnswerForm, Choice, Json
from meshwright.serve.http.long_json import json_pieces
from meshwright.serve.http.protocol import StreamOptions
from meshwright.serve.text.generation import Generation

logger = logging.getLogger(__name__)


def usage(num_prompt_tokens: int, generation: Generation) -> Json:
    """The `usage` object, of the tokens so far."""
    num_generated = generation.num_generated_tokens
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt_tokens + num_generated,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


async def whole_body(generation: Generation, form: AnswerForm, num_prompt_tokens: int) -> list[bytes]:
    """The body of an answer that is not streamed, in pieces."""
    choices = [Choice() for _ in range(generation.num_answers)]
    async for delta in generation:
        choices[delta.index].add(delta)
    return await json_pieces(form.body(choices, usage(num_prompt_tokens, generation)))


def json_response(pieces: Sequence[bytes]) -> Response:
    """A response with this body. Several pieces are sent one by one: joining them would delay other tasks."""
    if len(pieces) == 1:
        return Response(pieces[0], media_type="application/json")

    async def each() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    length = {"Content-Length": str(sum(map(len, pieces)))}
    return StreamingResponse(each(), headers=length, media_type="application/json")


class EventStream(StreamingResponse):
    """Server-sent events, each one chunk, then the form's last; an error event in their place if it fails."""

    def __init__(
        self,
        generation: Generation,
        form: AnswerForm,
        num_prompt_tokens: int,
        options: StreamOptions,
        stalled_seconds: float,
    ) -> None:
        self._generation = generation
        self._form = form
        self._num_prompt_tokens = num_prompt_tokens
        self._options = options
        self._stalled_seconds = stalled_seconds
        # Proxies that buffer would turn a stream into one late body.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(), media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A send this slow means that the server's buffer is full: the client reads nothing, and its tokens
        # would pile up for ever. There is one send per token, so a single timer checks the current send and
        # rearms for the earliest time that makes the next one too slow.
        loop, stalled = asyncio.get_running_loop(), asyncio.timeout(None)
        began: float | None = None

        async def timed_send(message: Message) -> None:
            nonlocal began
            began = loop.time()
            await send(message)
            began = None

        def check_client() -> None:
            nonlocal timer
            now = loop.time()
            if began is not None and now >= began + self._stalled_seconds:
                stalled.reschedule(now)
            else:
                timer = loop.call_at((began or now) + self._stalled_seconds, check_client)

        timer = loop.call_later(self._stalled_seconds, check_client)
        # The slots are free again when the response is over, however it ended.
        with self._generation:
            try:
                async with stalled:
                    await super().__call__(scope, receive, timed_send)
            except (ClientDisconnect, TimeoutError):
                logger.info("a client stopped reading its stream and was left")
            finally:
                timer.cancel()

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks():
                yield _framed(chunk, b"".join(await json_pieces(chunk)))
        except Exception as error:  # the status is sent, so the error travels in the stream
            if not isinstance(error, EngineError | RequestError):
                logger.exception("a stream failed")
            yield event(error_object(error))
            return
        if self._form.ends_with_done:
            yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[Json]:
        # The openings come with the first piece: who has seen nothing of an answer can be given another.
        openings = [x for i in range(self._generation.num_answers) for x in self._form.opening(i)]
        async for delta in self._generation:
            while openings:
                yield openings.pop(0) | self._usage_so_far()
            for chunk in self._form.chunks(delta):
                yield chunk | self._usage_so_far()
        for chunk in self._form.closing(self._usage(), asked=self._options.include_usage):
            yield chunk

    def _usage(self) -> Json:
        return usage(self._num_prompt_tokens, self._generation)

    def _usage_so_far(self) -> Json:
        if not self._options.include_usage:
            return {}
        return {"usage": self._usage() if self._options.continuous_usage_stats else None}


def event(content: Json) -> bytes:
    """One server-sent event; with its name if the content has a type, as in /v1/responses."""
    return _framed(content, to_json(content))


def _framed(content: Json, text: bytes) -> bytes:
    name = b"event: %b\n" % content["type"].encode() if "type" in content else b""
    return b"%bdata: %b\n\n" % (name, text)


_T = TypeVar("_T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
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

"""The OpenAI-compatible application: routes, and from a request's body to the engine's requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import RequestError
from meshwright.serve.device.prefill_pool import PrefilledElsewhere
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.metrics import Metrics
from meshwright.serve.engine.request import EngineError
from meshwright.serve.engine.request import Request as EngineRequest
from meshwright.serve.http import embeddings
from meshwright.serve.http.admission import Bodies, Gate, client_of
from meshwright.serve.http.asking import Asking
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.embeddings import EmbeddingsRequest
from meshwright.serve.http.error_bodies import on_failure, on_http_exception, on_request_error
from meshwright.serve.http.forms import AnswerForm, ChatForm, CompletionForm, Echo, Head
from meshwright.serve.http.log import RequestLog
from meshwright.serve.http.logprobs import TokenNames
from meshwright.serve.http.page import page
from meshwright.serve.http.protocol import ChatRequest, CompletionRequest, StreamOptions
from meshwright.serve.http.reading import Asked, Read, Reader, unknown_model
from meshwright.serve.http.responses import ResponsesForm
from meshwright.serve.http.stream import EventStream, json_response, unless_disconnected, whole_body
from meshwright.serve.text.generation import Generation
from meshwright.serve.text.tokenizer import Tokenizer
from meshwright.serve.workers.pool import Calls, InThreads

if TYPE_CHECKING:
    from meshwright.serve.http.tracing import Tracing

# nginx's status for a client that left, for the metrics only.
_CLIENT_LEFT = 499


def create_app(
    engine: Engine,
    tokenizer: Tokenizer,
    model_name: str,
    limits: ClientLimits | None = None,
    tracing: "Tracing | None" = None,
    prefilled: PrefilledElsewhere | None = None,
    calls: Calls | None = None,
) -> Starlette:
    """The application that serves `engine` under `model_name` within `limits`.

    tracing: receives spans of the requests. prefilled: fetches the pages of prompts from other servers.
    calls: runs methods of a Reader (see `reader_of`); by default in threads of this process, without limits.
    The application's `state` has `end_requests`, and `probes`, an application for a separate port of probes.
    """
    limits = limits or ClientLimits()
    calls = calls or InThreads(reader_of(engine, tokenizer, model_name, limits))
    api = _Api(Asking(engine, tokenizer), calls, model_name, limits, tracing, prefilled)
    probes = [Route("/health", api.health), Route("/ready", api.health), Route("/metrics", api.metrics)]
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        *probes,
        Route("/", page),
    ]
    counted = Middleware(_CountRequests, metrics=engine.metrics, paths=[route.path for route in routes])
    app = guarded(routes, limits, *_traced(tracing), counted)
    app.state.end_requests = engine.end_requests
    app.state.probes = Starlette(routes=probes)
    return app


def _traced(tracing: "Tracing | None") -> list[Middleware]:
    if tracing is None:
        return []
    from meshwright.serve.http.tracing import Traced  # needs the extra for tracing

    return [Middleware(Traced, tracing=tracing)]


def guarded(
    routes: Sequence[Route], limits: ClientLimits, *counted: Middleware, tells_id: bool = True
) -> Starlette:
    """The application of `routes` within `limits`, with a log line and an id for each request.

    Errors have the form of OpenAI's API. counted: middleware that also sees refused requests. tells_id:
    whether the id is sent with the answer.
    """
    handlers = {
        RequestError: on_request_error,
        HTTPException: on_http_exception,
        EngineError: on_failure,
        ClientDisconnect: _on_client_left,
        Exception: on_failure,
    }
    shared = Middleware(
        CORSMiddleware,
        allow_origins=limits.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type"],
    )
    # Counting and logging come first, so that they include refused requests.
    middleware = [
        Middleware(RequestLog, tells_id=tells_id),
        *counted,
        shared,
        Middleware(Gate, limits=limits),
    ]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


def reader_of(engine: Engine, tokenizer: Tokenizer, model_name: str, limits: ClientLimits) -> Reader:
    """The reader of requests to a model."""
    return Reader(
        tokenizer,
        model_name,
        engine.context,
        engine.vocab_size,
        engine.embedding_size,
        engine.max_answers,
        limits.takes_priorities,
    )


@dataclass(frozen=True)
class _Api:
    asking: Asking
    calls: Calls
    model_name: str
    limits: ClientLimits
    tracing: "Tracing | None" = None
    prefilled: PrefilledElsewhere | None = None

    @cached_property
    def bodies(self) -> Bodies:
        return Bodies(self.limits.max_body_bytes)

    @property
    def engine(self) -> Engine:
        return self.asking.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.asking.tokenizer

    async def _read(self, request: Request, method: str) -> Any:
        """The result of the Reader's method of this name for a request's body."""
        async with self.bodies.parts(request) as body:
            calling = self.calls.call(client_of(request.scope), method, body=body)
            return await unless_disconnected(request, calling)

    async def completions(self, request: Request) -> Response:
        read: Read[CompletionRequest] = await self._read(request, "completion")
        asked = read.asked
        prompts = [tuple(prompt) for prompt in read.prompts]
        echoes: list[Echo | None] = [None] * len(prompts)
        if read.texts is not None:
            echoes = [Echo(*pair) for pair in zip(prompts, read.texts, strict=True)]
        form = CompletionForm(
            Head.new("cmpl", self.model_name),
            TokenNames(self.tokenizer, asked.return_tokens_as_token_ids, asked.num_top),
            [echo for echo in echoes for _ in range(asked.num_sampled)],
            num_sampled=asked.num_sampled,
            num_choices=asked.n,
            logprobs=asked.logprobs is not None,
            prompt_top=asked.prompt_logprobs,
        )
        return await self._answer(request, read, prompts, form)

    async def chat_completions(self, request: Request) -> Response:
        read: Read[ChatRequest] = await self._read(request, "chat")
        form = ChatForm(
            Head.new("chatcmpl", self.model_name),
            TokenNames(self.tokenizer, read.asked.return_tokens_as_token_ids, read.asked.num_top),
            logprobs=read.asked.logprobs,
            tools=read.tools,
            forced_tool=read.is_forced,
            prompt_top=read.asked.prompt_logprobs,
        )
        return await self._answer(request, read, [tuple(prompt) for prompt in read.prompts], form)

    async def responses(self, request: Request) -> Response:
        read: Read[ChatRequest] = await self._read(request, "response")
        assert read.response is not None
        form = ResponsesForm.new(self.model_name, read.response)
        return await self._answer(request, read, [tuple(prompt) for prompt in read.prompts], form)

    async def embeddings(self, request: Request) -> Response:
        read: Read[EmbeddingsRequest] = await self._read(request, "embeddings")
        client, priority = client_of(request.scope), read.asked.priority
        requests = [
            EngineRequest(tuple(prompt), 0, embeds=True, priority=priority, client=client)
            for prompt in read.prompts
        ]
        on_closed = self.tracing.answers if self.tracing else None
        computed = embeddings.embeddings(self.engine, requests, self.limits.request_seconds, on_closed)
        vectors = await unless_disconnected(request, computed)
        num_tokens = sum(map(len, read.prompts))
        written = self.calls.call(client, "embeddings_body", read.asked, np.array(vectors), num_tokens)
        return _json(await written)

    async def _answer(
        self, request: Request, read: Read[Asked], prompts: Sequence[tuple[int, ...]], form: AnswerForm
    ) -> Response:
        asked = read.asked
        requests = await self.asking.requests(read, prompts, client_of(request.scope))
        if self.prefilled is not None:
            await unless_disconnected(request, self.prefilled.fetch(prompts))
        # Marks of tools may be special tokens, which are left out of a text otherwise.
        keeps_special = not asked.skip_special_tokens or read.tools is not None
        generation = Generation(
            self.engine,
            self.tokenizer.with_special() if keeps_special else self.tokenizer,
            requests,
            asked.stops,
            keeps_stop=asked.include_stop_str_in_output,
            limit_seconds=self.limits.request_seconds,
            on_closed=self.tracing.answers if self.tracing else None,
        )
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        if asked.stream:
            options = asked.stream_options or StreamOptions()
            return EventStream(generation, form, num_prompt_tokens, options, self.limits.stalled_seconds)
        with generation:
            body = await unless_disconnected(request, whole_body(generation, form, num_prompt_tokens))
        return json_response(body)

    async def tokenize(self, request: Request) -> Response:
        return _json(await self._read(request, "tokenize"))

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": await self._read(request, "detokenize")})

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise unknown_model(name, self.model_name)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "meshwright",
            "max_model_len": self.engine.context,
        }

    async def health(self, _: Request) -> Response:
        if self.engine.stopped:
            return JSONResponse({"status": "stopped", "message": self.engine.stopped}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        text = self.engine.metrics.text(self.model_name)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _on_client_left(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)


@dataclass(frozen=True)
class _CountRequests:
    """Middleware that counts responses by endpoint and status."""

    app: ASGIApp
    metrics: Metrics
    paths: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.http_requests.labels(self._endpoint(scope), message["status"]).inc()
            await send(message)

        await self.app(scope, receive, counting_send if scope["type"] == "http" else send)

    def _endpoint(self, scope: Scope) -> str:
        # Only known paths become labels: otherwise clients could create any number of time series.
        return scope["path"] if scope["path"] in self.paths else "other"

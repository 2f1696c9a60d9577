"""The OpenAI-compatible application: routes, and from a request's body to the engine's requests."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import CheckpointError, RequestError
from meshwright.serve.device.prefill_pool import PrefilledElsewhere
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.metrics import Metrics
from meshwright.serve.engine.request import EngineError
from meshwright.serve.engine.request import Request as EngineRequest
from meshwright.serve.http import embeddings
from meshwright.serve.http.asking import Asking, is_forced
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.embeddings import EmbeddingsRequest
from meshwright.serve.http.error_bodies import on_failure, on_http_exception, on_request_error
from meshwright.serve.http.forms import ChatForm, CompletionForm, Echo, Form, Head
from meshwright.serve.http.limits import Gate, whole_request
from meshwright.serve.http.log import RequestLog
from meshwright.serve.http.logprobs import TokenNames
from meshwright.serve.http.page import page
from meshwright.serve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    parse,
)
from meshwright.serve.http.responses import ResponsesForm, ResponsesRequest
from meshwright.serve.http.stream import EventStream, unless_disconnected, whole_body
from meshwright.serve.text.generation import Generation
from meshwright.serve.text.tokenizer import Tokenizer

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
) -> Starlette:
    """The application that serves `engine` under `model_name` within `limits`.

    tracing: receives spans of the requests. prefilled: asks the servers that prefill for this one, if any.
    Raises CheckpointError if the tokenizer knows tokens that the model does not.
    """
    if tokenizer.vocab_size > engine.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has {tokenizer.vocab_size} tokens, but the model's vocabulary has "
            f"{engine.vocab_size}; they belong to different models"
        )
    limits = limits or ClientLimits()
    api = _Api(Asking(engine, tokenizer), model_name, limits, tracing, prefilled)
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/responses", api.responses, methods=["POST"]),
        Route("/v1/embeddings", api.embeddings, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        Route("/health", api.health),
        Route("/ready", api.health),
        Route("/metrics", api.metrics),
        Route("/", page),
    ]
    counted = Middleware(_CountRequests, metrics=engine.metrics, paths=[route.path for route in routes])
    return guarded(routes, limits, *_traced(tracing), counted)


def _traced(tracing: "Tracing | None") -> list[Middleware]:
    if tracing is None:
        return []
    from meshwright.serve.http.tracing import Traced  # of an extra

    return [Middleware(Traced, tracing=tracing)]


def guarded(
    routes: Sequence[Route], limits: ClientLimits, *counted: Middleware, tells_id: bool = True
) -> Starlette:
    """The application of `routes` within `limits`, with a log line and an id for each request.

    Its errors are OpenAI's objects. counted: middleware that also sees refused requests. tells_id: whether
    answers have the id.
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


@dataclass(frozen=True)
class _Api:
    asking: Asking
    model_name: str
    limits: ClientLimits
    tracing: "Tracing | None" = None
    prefilled: PrefilledElsewhere | None = None

    @property
    def engine(self) -> Engine:
        return self.asking.engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.asking.tokenizer

    async def completions(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await whole_request(request, self.limits.max_body_bytes))
        self._check_model(asked.model)
        prompts = await self.asking.prompts(asked)
        names = TokenNames(self.tokenizer, asked.return_tokens_as_token_ids)
        pairs = zip(asked.prompts, prompts, strict=True)
        echoes = [self._echo(*pair) if asked.echo else None for pair in pairs]
        form = CompletionForm(
            Head.new("cmpl", self.model_name),
            names,
            [echo for echo in echoes for _ in range(asked.num_sampled)],
            num_sampled=asked.num_sampled,
            num_choices=asked.n,
            logprobs=asked.logprobs is not None,
        )
        return await self._answer(request, asked, prompts, form)

    async def chat_completions(self, request: Request) -> Response:
        asked = parse(ChatRequest, await whole_request(request, self.limits.max_body_bytes))
        self._check_model(asked.model)
        prompt = await self.asking.chat_prompt(asked)
        form = ChatForm(
            Head.new("chatcmpl", self.model_name),
            TokenNames(self.tokenizer, asked.return_tokens_as_token_ids),
            logprobs=asked.logprobs,
            tools=self.asking.tool_format if asked.offered_tools else None,
            forced_tool=is_forced(asked),
        )
        return await self._answer(request, asked, [prompt], form)

    async def responses(self, request: Request) -> Response:
        asked = parse(ResponsesRequest, await whole_request(request, self.limits.max_body_bytes))
        self._check_model(asked.model)
        chat = asked.as_chat()
        prompt = await self.asking.chat_prompt(chat)
        return await self._answer(request, chat, [prompt], ResponsesForm.new(self.model_name, asked))

    async def embeddings(self, request: Request) -> Response:
        asked = parse(EmbeddingsRequest, await whole_request(request, self.limits.max_body_bytes))
        self._check_model(asked.model)
        self._check_priority(asked.priority)
        prompts = await self.asking.prompts(asked, "input")
        embeddings.check(asked, prompts, self.engine)
        requests = [EngineRequest(one, 0, embeds=True, priority=asked.priority) for one in prompts]
        on_closed = self.tracing.answers if self.tracing else None
        computed = embeddings.embeddings(self.engine, requests, self.limits.request_seconds, on_closed)
        vectors = await unless_disconnected(request, computed)
        return JSONResponse(embeddings.body(asked, self.model_name, vectors, sum(map(len, prompts))))

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[tuple[int, ...]],
        form: Form,
    ) -> Response:
        self._check_priority(asked.priority)
        requests = await self.asking.requests(asked, prompts)
        if self.prefilled is not None:
            await unless_disconnected(request, self.prefilled.fetch(prompts))
        # Marks of tools may be special tokens, which are left out of a text otherwise.
        keeps_special = not asked.skip_special_tokens or getattr(form, "tools", None) is not None
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
        return JSONResponse(body)

    async def tokenize(self, request: Request) -> Response:
        asked = parse(TokenizeRequest, await whole_request(request, self.limits.max_body_bytes))
        self._check_model(asked.model or self.model_name)
        if asked.messages is not None:
            tokens = await self.asking.conversation(asked.messages)
        else:
            text, special = asked.prompt or "", asked.add_special_tokens
            self.asking.check_length(len(text), "prompt")
            tokens = await asyncio.to_thread(self.tokenizer.ids, text, add_special_tokens=special)
        names = TokenNames(self.tokenizer)
        strings = [names.text(token) for token in tokens] if asked.return_token_strs else None
        limit = self.engine.context
        return JSONResponse(
            {"tokens": list(tokens), "count": len(tokens), "max_model_len": limit, "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> Response:
        asked = parse(DetokenizeRequest, await whole_request(request, self.limits.max_body_bytes))
        self._check_model(asked.model or self.model_name)
        self.asking.check_ids("tokens", asked.tokens)
        text = await asyncio.to_thread(self.tokenizer.with_special().decode, asked.tokens)
        return JSONResponse({"prompt": text})

    def _echo(self, prompt: str | list[int], tokens: tuple[int, ...]) -> Echo:
        return Echo(tokens, prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt))

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise RequestError(
                f"model {name!r} is not served here; this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _check_priority(self, priority: int) -> None:
        if priority and not self.limits.takes_priorities:
            raise RequestError(
                f"priority = {priority}: this server answers in the order of arrival; leave it out, or start "
                "the server with --scheduling-policy priority",
                param="priority",
                code="unsupported_parameter",
            )

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

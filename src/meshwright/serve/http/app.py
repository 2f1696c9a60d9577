"""The OpenAI-compatible application: routes, and from a request's body to the engine's requests."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import CheckpointError, RequestError
from meshwright.serve.engine import Engine
from meshwright.serve.generation import Generation
from meshwright.serve.http.errors import on_failure, on_http_exception, on_request_error
from meshwright.serve.http.forms import ChatForm, CompletionForm, Form, Head
from meshwright.serve.http.protocol import ChatRequest, CompletionRequest, parse
from meshwright.serve.http.stream import EventStream, unless_disconnected, whole_body
from meshwright.serve.metrics import Metrics
from meshwright.serve.sequence import EngineError, SamplingParams
from meshwright.serve.sequence import Request as EngineRequest
from meshwright.serve.tokenizer import Tokenizer

_MAX_BODY_BYTES = 16_000_000
# nginx's status for a client that left; nobody reads it, but the metrics count it.
_CLIENT_LEFT = 499


def create_app(engine: Engine, tokenizer: Tokenizer, model_name: str) -> Starlette:
    """The application that serves `engine` under `model_name`.

    Raises CheckpointError if the tokenizer knows tokens that the model does not.
    """
    if tokenizer.vocab_size > engine.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has {tokenizer.vocab_size} tokens, but the model's vocabulary has "
            f"{engine.vocab_size}; they belong to different models"
        )
    api = _Api(engine, tokenizer, model_name)
    routes = [
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{id:path}", api.model),
        Route("/health", api.health),
        Route("/metrics", api.metrics),
    ]
    handlers = {
        RequestError: on_request_error,
        HTTPException: on_http_exception,
        EngineError: on_failure,
        ClientDisconnect: _on_client_left,
        Exception: on_failure,
    }
    counted = Middleware(_CountRequests, metrics=engine.metrics, paths=[route.path for route in routes])
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[counted])


@dataclass(frozen=True)
class _Api:
    engine: Engine
    tokenizer: Tokenizer
    model_name: str

    async def completions(self, request: Request) -> Response:
        asked = parse(CompletionRequest, await _body(request))
        self._check_model(asked.model)
        # In a thread, since a long text would hold up everyone else's streams.
        prompts = await asyncio.to_thread(lambda: [self._tokens(prompt) for prompt in asked.prompts])
        texts = [self._echo(prompt) if asked.echo else "" for prompt in asked.prompts]
        form = CompletionForm(
            Head.new("cmpl", self.model_name), [text for text in texts for _ in range(asked.n)]
        )
        return await self._answer(request, asked, prompts, asked.max_tokens, form)

    async def chat_completions(self, request: Request) -> Response:
        asked = parse(ChatRequest, await _body(request))
        self._check_model(asked.model)
        messages = [message.as_template_reads() for message in asked.messages]
        prompt = await asyncio.to_thread(self.tokenizer.encode_chat, messages)
        form = ChatForm(Head.new("chatcmpl", self.model_name))
        return await self._answer(request, asked, [prompt], asked.limit, form)

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int | None,
        form: Form,
    ) -> Response:
        requests = self._engine_requests(asked, prompts, max_tokens)
        generation = Generation(self.engine, self.tokenizer, requests, asked.stops)
        num_prompt_tokens = sum(len(prompt) for prompt in prompts)
        if asked.stream:
            return EventStream(generation, form, num_prompt_tokens, includes_usage=asked.includes_usage)
        with generation:
            body = await unless_disconnected(request, whole_body(generation, form, num_prompt_tokens))
        return JSONResponse(body)

    def _engine_requests(
        self,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int | None,
    ) -> list[EngineRequest]:
        """n requests for each prompt. Answer i of any prompt has seed + i, whatever else was asked."""
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        return [
            EngineRequest(
                prompt,
                max_tokens,
                SamplingParams(asked.temperature, asked.top_p, asked.top_k, (seed + answer) % 2**32),
                frozenset() if asked.ignore_eos else self.tokenizer.eos_ids,
            )
            for prompt in prompts
            for answer in range(asked.n)
        ]

    def _tokens(self, prompt: str | list[int]) -> tuple[int, ...]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)

    def _echo(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _check_model(self, name: str) -> None:
        if name != self.model_name:
            raise RequestError(
                f"model {name!r} is not served here; this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
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
        return Response(self.engine.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _body(request: Request) -> bytes:
    """The request's body, given up once it is longer than any prompt can be."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {_MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


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
        # Only paths of ours become labels, or strangers could make as many time series as they like.
        return scope["path"] if scope["path"] in self.paths else "other"

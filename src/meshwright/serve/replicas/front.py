"""The front of several servers: checks requests, forwards them, and asks another server if one dies."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from meshwright.serve.engine.request import EngineError
from meshwright.serve.http.admission import Bodies
from meshwright.serve.http.app import guarded
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.error_bodies import error_object
from meshwright.serve.http.log import request_id
from meshwright.serve.http.page import page
from meshwright.serve.http.stream import event, unless_disconnected
from meshwright.serve.replicas.forwarded import ROUTING, Forwarded
from meshwright.serve.replicas.routes import beginning_of, prompt_in

# A request fails after this number of servers in a row died while they answered it.
_MOST_DEATHS = 5
# Time for a server to return its metrics; a server that dies in this time is left out.
_METRICS_SECONDS = 5.0
_DIED = "the replica that answered has died; send the request again"


def front_app(servers: DeploymentHandle, limits: ClientLimits) -> Starlette:
    """The application that forwards requests within `limits` to `servers`."""
    front = _Front(servers.options(stream=True), limits)
    # The servers answer or refuse every other path.
    routes = [Route("/metrics", front.metrics), Route("/", page), Route("/{path:path}", front)]
    return guarded(routes, limits, tells_id=False)  # Ray's proxy does


@dataclass(frozen=True)
class _Front:
    servers: DeploymentHandle
    limits: ClientLimits

    @cached_property
    def bodies(self) -> Bodies:
        return Bodies(self.limits.max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        async with self.bodies.parts(request) as body:
            await self._answer(request, b"".join(body), send)

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        scope = request.scope
        forwarded = Forwarded(
            uuid.uuid4().hex,
            scope["method"],
            scope["path"],
            scope["query_string"],
            _headers(scope),
            body,
            beginning_of(prompt_in(body)),
        )
        answer = _Answer(send)
        ROUTING.open(forwarded.name)
        try:
            await unless_disconnected(request, self._forward(forwarded, answer))
        except ClientDisconnect:
            if not answer.has_begun:
                raise
        finally:
            ROUTING.end(forwarded.name)

    async def _forward(self, forwarded: Forwarded, answer: "_Answer") -> None:
        """Pass on the answer. If a server dies before the client got a part of it, another server answers."""
        for _ in range(_MOST_DEATHS):
            try:
                async with aclosing(self._messages(forwarded)) as messages:
                    async for message in messages:
                        await answer.take(message)
                return
            except RayActorError:
                if answer.has_begun:
                    await answer.fail(EngineError(_DIED))
                    return
        raise EngineError(f"{_MOST_DEATHS} replicas in a row died while they answered this request")

    async def _messages(self, forwarded: Forwarded) -> AsyncGenerator[Message, None]:
        response = self.servers.answer.remote(forwarded)
        done = False
        try:
            async for message in response:
                yield message
            done = True
        finally:
            if not done:  # the client has left
                response.cancel()

    async def metrics(self, request: Request) -> Response:
        """The metrics of every server, labelled with `replica`."""
        asked = Forwarded("", "GET", "/metrics", b"", _headers(request.scope), b"")
        # One after another: Ray (2.60) mistakes calls at once of one request for each other.
        texts = {name: await self._text(replace(asked, server=name)) for name in ROUTING.servers}
        text = generate_latest(_Merged({name: text for name, text in texts.items() if text}))
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _text(self, asked: Forwarded) -> str:
        """The body of one server's answer; empty if the server has died."""
        try:
            async with asyncio.timeout(_METRICS_SECONDS), aclosing(self._messages(asked)) as messages:
                return b"".join([message.get("body", b"") async for message in messages]).decode()
        except (RayActorError, TimeoutError):
            return ""


class _Answer:
    """Sends an answer's messages; the status is held back until the first part of the body arrives."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self.has_begun = False

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self.has_begun:
            assert self._start is not None, "an answer begins with its status"
            self.has_begun = True
            await self._send(self._start)
        await self._send(message)

    async def fail(self, error: Exception) -> None:
        """End a stream of events with the error as its last event; any other body just ends."""
        assert self._start is not None
        is_stream = dict(self._start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
        last = event(error_object(error)) if is_stream else b""
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


@dataclass(frozen=True)
class _Merged:
    """Metrics of several servers as one registry's."""

    texts: dict[str, str]

    def collect(self) -> Iterator[Metric]:
        metrics: dict[str, Metric] = {}
        for name, text in self.texts.items():
            for metric in text_string_to_metric_families(text):
                whole = metrics.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                whole.samples += [s._replace(labels=s.labels | {"replica": name}) for s in metric.samples]
        return iter(metrics.values())


def _headers(scope: Scope) -> tuple[tuple[bytes, bytes], ...]:
    """The client's headers with the request's id, so that both logs have the same."""
    headers = (b"x-request-id", b"content-length", b"transfer-encoding")
    kept = tuple((name, value) for name, value in scope["headers"] if name not in headers)
    return (*kept, (b"x-request-id", (request_id.get() or "").encode()))

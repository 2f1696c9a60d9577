"""OpenTelemetry's spans of requests; within them each answer's time in the queue, prefill, generation."""

import time
from collections.abc import Sequence
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]
    OTLPSpanExporter,
)
from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.serve.engine.sequence import Lifetime
from meshwright.serve.http.admission import OPEN


class Tracing:
    """A context in which spans are sent to a collector.

    endpoint: the collector's address, which takes OTLP over HTTP: http://collector:4318/v1/traces. model: the
    name in requests of the served model. exporter: an exporter in place of the collector's.
    """

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "meshwright"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("meshwright")

    def __enter__(self) -> "Tracing":
        return self

    def __exit__(self, *_: object) -> None:
        self._provider.shutdown()

    def request(self, scope: Scope) -> Any:
        """A context in which the request's span is open; the header `traceparent` names its parent."""
        return self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}",
            context=propagate.extract(dict(Headers(scope=scope))),
            kind=trace.SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "gen_ai.request.model": self._model,
            },
        )

    def answers(self, lifetimes: Sequence[Lifetime]) -> None:
        """Sends the spans of a request's answers, after all of them have finished."""
        offset = time.time_ns() - int(time.perf_counter() * 1e9)
        for number, lifetime in enumerate(lifetimes):
            attributes = {
                "meshwright.answer": number,
                "gen_ai.response.finish_reasons": [lifetime.reason or ""],
            }
            for phase, (began, ended) in lifetime.phases.items():
                span = self._tracer.start_span(
                    phase, start_time=offset + int(began * 1e9), attributes=attributes
                )
                span.end(offset + int(ended * 1e9))


class Traced:
    """Middleware with a span around each request, except for probes and scrapers."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        with self._tracing.request(scope) as span:

            async def noting_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, noting_send)

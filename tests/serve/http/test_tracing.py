"""Spans of requests: their parents, phases and statuses."""

import asyncio
from itertools import pairwise

import httpx
import pytest
from tests.serve.http.client import MODEL
from tests.serve.mock import MockRunner, byte_tokenizer, says

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra [otel] is not installed")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # pyright: ignore[reportMissingImports]
    InMemorySpanExporter,
)

from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.http.tracing import Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def spans(path: str, body: dict) -> list:
    """The spans of one request, in the order in which they ended."""
    kept = InMemorySpanExporter()

    async def main() -> None:
        with Engine(MockRunner(says("hello"))) as engine, Tracing("", MODEL, kept) as tracing:
            app = create_app(engine, byte_tokenizer(), MODEL, tracing=tracing)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                await http.get("/metrics")
                await http.post(path, json={"model": MODEL, "max_tokens": 4, **body}, headers=HEADERS)

    asyncio.run(main())
    return list(kept.get_finished_spans())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_with_the_phases_of_its_answers(stream):
    *phases, request = spans("/v1/completions", {"prompt": "x", "n": 2, "stream": stream})
    assert (request.name, request.attributes["http.response.status_code"]) == ("POST /v1/completions", 200)
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert [span.name for span in phases] == ["queue", "prefill", "generate"] * 2
    assert {span.parent.span_id for span in phases} == {request.context.span_id}
    assert [span.attributes["meshwright.answer"] for span in phases] == [0, 0, 0, 1, 1, 1]
    for first, second in pairwise(phases[:3]):
        assert first.start_time <= first.end_time == second.start_time
    assert request.start_time <= phases[0].start_time and phases[2].end_time <= request.end_time


def test_a_refused_request_has_a_span_too():
    (request,) = spans("/v1/completions", {"prompt": "x", "nonsense": 1})
    assert request.attributes["http.response.status_code"] == 400

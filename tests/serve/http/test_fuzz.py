"""Whatever is sent, the server answers it with a status below 500, soon, and keeps no slot."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.http.client import MODEL
from tests.serve.mock import MockRunner, byte_tokenizer, says

from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.http.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meshwright.serve.http.responses import ResponsesRequest

ENDPOINTS = {
    "/v1/completions": (CompletionRequest, {"model": MODEL, "prompt": "x"}),
    "/v1/chat/completions": (ChatRequest, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
    "/v1/responses": (ResponsesRequest, {"model": MODEL, "input": "hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
# Forms are compiled by a library of its own, and large random regular expressions would test that alone.
FORMS = {
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
}
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.integers(-2, 3)
    | st.floats(width=32)
    | st.text(max_size=8)
    | st.sampled_from([MODEL, "auto", "required", "none", "user", {"type": "text"}, {"role": "tool"}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """A sound request of some endpoint with some of its fields (or of no one's) made anything at all."""
    path = draw(st.sampled_from(sorted(ENDPOINTS)))
    kind, sound = ENDPOINTS[path]
    names = [*sorted(set(kind.model_fields) - FORMS), "unknown", "functions", "suffix", "priority"]
    fields = draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=3))
    content: dict[str, Any] = dict(sound)
    if path.endswith("completions"):
        content["max_tokens"] = 4
    body = json.dumps(content | fields).encode()
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(body)))
        body = body[:cut] + draw(st.binary(max_size=4)) + body[cut:]
    header = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)
    names = st.sampled_from(["Authorization", "Content-Type", "X-Request-Id", "Origin"])
    return path, body, draw(st.dictionaries(names, header, max_size=2))


async def statuses(asked: list[tuple[str, bytes, dict[str, str]]]) -> list[int]:
    with Engine(MockRunner(says("ok"))) as engine:
        transport = httpx.ASGITransport(
            create_app(engine, byte_tokenizer(), MODEL), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            found = []
            for path, body, headers in asked:
                async with asyncio.timeout(20):
                    response = await http.post(path, content=body, headers=headers)
                assert response.status_code < 500, (path, body, response.text)
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                found.append(response.status_code)
            metrics = (await http.get("/metrics")).text
            assert "meshwright_running_requests 0.0" in metrics
            return found


def check(asked: list[tuple[str, bytes, dict[str, str]]]) -> None:
    assert len(asyncio.run(statuses(asked))) == len(asked)


FEW = settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@FEW
@given(st.lists(requests(), min_size=40, max_size=40))
def test_generated_requests_are_answered(asked):
    check(asked)


@pytest.mark.slow
@settings(FEW, max_examples=50)
@given(st.lists(requests(), min_size=100, max_size=100))
def test_five_thousand_generated_requests_are_answered(asked):
    check(asked)

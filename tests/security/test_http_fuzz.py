"""Generated requests over HTTP, right ones with a few changes: each is answered in time, never with 5xx."""

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.security.mutations import changed_texts, changed_values
from tests.security.server import Served, served
from tests.security.test_file_fuzz import as_json
from tests.serve.http.client import MODEL

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow
NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "200"))
FUZZ = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
SAMPLING = {
    "n": 2, "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3,
    "stop": ["a", "b"],
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5},
    "stop_token_ids": [7], "bad_words": ["word"], "min_tokens": 1, "ignore_eos": False, "prompt_logprobs": 2,
    "allowed_token_ids": [1, 2, 3, 258], "skip_special_tokens": True, "priority": 0,
    "truncate_prompt_tokens": 4,
    "return_tokens_as_token_ids": True, "include_stop_str_in_output": True,
}  # fmt: skip
TEXT = {"model": MODEL, "prompt": "x", "echo": True, "logprobs": 2, "best_of": 2} | SAMPLING
HI = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}},
    "required": ["a"],
}
BODIES: list[tuple[str, Any]] = [
    ("/v1/completions", TEXT),
    ("/v1/completions", TEXT | {"prompt": [[1, 2], [3]]}),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "guided_json": SCHEMA, "max_tokens": 5}),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "guided_choice": ["a", "b"], "stream": True}),
    (
        "/v1/chat/completions",
        {"model": MODEL, "messages": [HI], "logprobs": True, "top_logprobs": 2} | SAMPLING,
    ),
    ("/v1/chat/completions", {"model": MODEL, "messages": [HI], "tools": [TOOL], "tool_choice": "required"}),
    (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "x"}, HI, {"role": "assistant", "content": "y"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 4,
        },
    ),
    (
        "/v1/responses",
        {"model": MODEL, "input": [HI | {"content": "x"}], "instructions": "i", "max_output_tokens": 4},
    ),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "encoding_format": "base64"}),
    ("/tokenize", {"model": MODEL, "prompt": "a b", "add_special_tokens": True}),
    ("/detokenize", {"model": MODEL, "tokens": [1, 2, 3]}),
]
# Values at the ends of what fields take: requests with several of them reach the engine.
EXTREMES: dict[str, list[Any]] = {
    "prompt": ["", "x", "é" * 3000, [0], [299] * 500, ["a", "b" * 70], [[1], [299] * 300]],
    "n": [1, 2, 128], "best_of": [1, 128], "max_tokens": [0, 1, 99, 2**62], "min_tokens": [0, 1, 98, 2**62],
    "temperature": [0, 5e-324, 1e-30, 2], "top_p": [0, 5e-324, 0.5, 1], "min_p": [0, 5e-324, 1],
    "top_k": [-1, 0, 1, 299, 300, 2**31 - 1], "seed": [-(10**4000), -1, 2**32, 2**63], "priority": [0],
    "repetition_penalty": [5e-324, 1e-40, 1, 10], "presence_penalty": [-2, 2], "frequency_penalty": [-2, 2],
    "logit_bias": [{"0": -100, "299": 100}, {str(i): -100 for i in range(300)}, {"0007": 1, "7": 99.5}],
    "stop": ["\0", "\ud7ff", ["o", "k", "ok", "x" * 1000]], "include_stop_str_in_output": [True],
    "stop_token_ids": [[0], [300], [2**31 - 1], list(range(300))], "ignore_eos": [True, False],
    "allowed_token_ids": [[0], [256], [299, 299], list(range(300))],
    "bad_words": [["o"], ["\0"], ["ok", "o", "k"]],
    "truncate_prompt_tokens": [-1, 1, 2**62], "prompt_logprobs": [0, 20], "logprobs": [0, 20],
    "echo": [True], "stream": [True], "return_tokens_as_token_ids": [True], "skip_special_tokens": [False],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "add_special_tokens": [False],
    "guided_choice": [["ok"], [""], ["é", "\0", "o"], ["o" * 300]],
    "guided_regex": ["", "o*", "[^o]+", "(o|k){1,9}", "\\b"],
    "guided_grammar": ['start: "o" "k"', "start: /.*/", 'start: "o" start | ""'],
    "guided_json": [
        SCHEMA, {}, {"type": "null"}, {"enum": [1, None, "\0"]}, {"type": "array", "minItems": 10**6},
    ],
}  # fmt: skip
EXTREME = st.lists(st.sampled_from(list(EXTREMES)), min_size=1, max_size=7, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(EXTREMES[name]) for name in names}).map(
        lambda fields: ("/v1/completions", as_json({"model": MODEL, "prompt": "x"} | fields))
    )
)
CHANGED = st.sampled_from(BODIES).flatmap(
    lambda request: st.tuples(
        st.just(request[0]), changed_values(request[1]).map(as_json) | changed_texts(as_json(request[1]))
    )
)
REQUESTS = CHANGED | EXTREME


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    template = (
        "{% if tools %}<tool_call>{{ tools }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with served(template, limits={"request_seconds": 20}) as running:
        assert running.complete().status_code == 200
        yield running


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def test_the_requests_that_are_changed_are_right(http: httpx.Client):
    """Otherwise the changes would all be refused for the same field."""
    for path, body in BODIES:
        response = http.post(path, content=as_json(body))
        assert response.status_code == 200, response.text


@FUZZ
@given(request=REQUESTS)
def test_generated_requests(server: Served, http: httpx.Client, request: tuple[str, str]):
    path, body = request
    before, began = server.resident_bytes, time.perf_counter()
    response = http.post(path, content=body.encode("utf-8", "surrogatepass"))
    assert response.status_code < 500, response.text
    assert time.perf_counter() - began < 25 and server.resident_bytes - before < 200e6
    if response.status_code >= 400:
        assert "\n" not in response.json()["error"]["message"]
    elif "text/event-stream" in response.headers["content-type"]:
        assert '"error"' not in response.text
    assert server.process.poll() is None


NAMES = st.sampled_from(
    ["Content-Type", "Content-Length", "Transfer-Encoding", "Authorization", "Host", "Origin", "X"]
)
VALUES = st.sampled_from(["", "0", "-1", "99999999999999999999", "chunked", "text/html", "a" * 5000, "\x01"])


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "TRACE", "\x00", "get"]),
    target=st.sampled_from(
        ["/", "/health", "/v1/models", "/v1/models/" + "a" * 3000, "*", "//", "/%00", "/?" + "a=b&" * 999]
    )
    | st.text(max_size=20),
    headers=st.lists(st.tuples(NAMES, VALUES), max_size=4),
    body=st.binary(max_size=100),
    cut=st.integers(0, 200) | st.none(),
)
def test_generated_messages(
    server: Served,
    http: httpx.Client,
    method: str,
    target: str,
    headers: list[tuple[str, str]],
    body: bytes,
    cut: int | None,
):
    """Bytes on a socket, most of them no HTTP."""
    import socket

    lines = [
        f"{method} {target} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers),
        "Connection: close",
    ]
    message = "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(message[:cut])
        connection.settimeout(0.05)
        try:
            answer = connection.recv(100)
        except (TimeoutError, ConnectionError):
            answer = b""
    assert b" 500 " not in answer, answer
    assert http.get("/health").status_code == 200

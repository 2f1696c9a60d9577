"""A real server process on a real port: the openai client, clients that leave, SIGTERM."""

import json
import re
import signal
import socket
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from tests.serve.http.client import MODEL
from tests.serve.http.mock_server import ANSWER
from tests.serve.http.process import server_process
from tests.serve.mock import MockRunner, byte_tokenizer

from meshwright.errors import DeviceError
from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.http.server import address, bind, running


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process() as (_, url):
        yield url


@pytest.fixture
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_the_openai_client_completes(client):
    completion = client.completions.create(
        model=MODEL, prompt="x", max_tokens=50, temperature=0, stop="answer"
    )
    assert completion.choices[0].text == ANSWER.removesuffix("answer")
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None and completion.usage.prompt_tokens == 1


def test_the_openai_client_streams_a_completion(client):
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=50, temperature=0, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_openai_client_chats(client):
    messages = [{"role": "user", "content": "hi"}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert first.choices[0].message.content == ANSWER
    # The client sends an answer back with all its fields.
    messages += [first.choices[0].message, {"role": "user", "content": "and?"}]
    again = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert again.choices[0].message.content == ANSWER


def test_the_openai_client_streams_a_chat(client):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER.encode()) + 1


def test_the_openai_client_reads_log_probabilities(client):
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, logprobs=True, top_logprobs=2
    )
    told = chat.choices[0].logprobs.content
    assert (told[0].token, told[0].bytes, len(told[0].top_logprobs)) == ("n", [*b"n"], 2)
    text = client.completions.create(model=MODEL, prompt="xy", max_tokens=1, echo=True, logprobs=1)
    assert text.choices[0].logprobs.tokens[:2] == ["x", "y"]
    assert text.choices[0].logprobs.token_logprobs[0] is None


def test_the_openai_client_makes_responses(client):
    response = client.responses.create(model=MODEL, input="hi", temperature=0)
    assert (response.output_text, response.status) == (ANSWER, "completed")
    events = list(client.responses.create(model=MODEL, input="hi", temperature=0, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert events[-1].type == "response.completed" and events[-1].response.output_text == ANSWER


def test_the_openai_client_lists_models_and_reads_errors(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'") as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="but the context holds 100000") as too_long:
        client.completions.create(model=MODEL, prompt="x", max_tokens=100_000)
    assert too_long.value.code == "context_length_exceeded"


def num_running(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return float(re.findall(r"^meshwright_running_requests (.*)$", text, re.MULTILINE)[0])


def wait_until_running(url: str, expected: float) -> None:
    deadline = time.monotonic() + 10
    while (running := num_running(url)) != expected:
        assert time.monotonic() < deadline, f"{running} requests run, not {expected}"
        time.sleep(0.02)


ENDLESS = {"model": MODEL, "prompt": "forever", "max_tokens": 90_000, "temperature": 0}


def test_a_client_that_leaves_a_stream_frees_its_slot(url):
    with httpx.stream("POST", f"{url}/v1/completions", json=ENDLESS | {"stream": True}) as response:
        lines = response.iter_lines()  # closing it closes the connection
        assert '"text":"r"' in next(lines)
        assert num_running(url) == 1
    wait_until_running(url, 0)


def test_a_client_that_leaves_while_it_waits_frees_its_slot(url):
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_until_running(url, 1)
    wait_until_running(url, 0)


def test_sigterm_finishes_what_is_under_way_and_closes_the_engine():
    with server_process() as (process, url):
        body = ENDLESS | {"stream": True, "max_tokens": 400}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=20) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert len(rest) == 400  # 399 more tokens and [DONE]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(20) == 0
        assert process.stdout is not None and process.stdout.read() == "closed\n"


def test_a_thread_serves_until_its_block_ends():
    with Engine(MockRunner()) as engine, bind("127.0.0.1", 0) as listener:
        with running(create_app(engine, byte_tokenizer(), MODEL), listener) as url:
            assert httpx.get(f"{url}/health", timeout=20).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health", timeout=1)


def test_a_port_in_use_is_named():
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert address(taken) == f"http://127.0.0.1:{port}"
        message = (
            f"port {port} on 127.0.0.1 is in use; choose another with --port, or --port 0 for any free one"
        )
        with pytest.raises(DeviceError) as error:
            bind("127.0.0.1", port)
        assert str(error.value) == message


def test_a_host_that_is_not_ours_is_named():
    with pytest.raises(
        DeviceError, match=r"^cannot listen on 192\.0\.2\.1, port 0: .*; choose another with --host$"
    ):
        bind("192.0.2.1", 0)


def test_addresses_of_ipv6_are_in_brackets():
    try:
        listener = bind("::1", 0)
    except DeviceError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert address(listener) == f"http://[::1]:{listener.getsockname()[1]}"

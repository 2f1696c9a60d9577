"""Connections that send slowly, too much or too often, wrong keys, and the ends of a server."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from tests.security.server import CONTEXT, Served, served
from tests.serve.http.client import MODEL

pytest.importorskip("llguidance")
TEXT = "/v1/completions"
ENDLESS = {"model": MODEL, "prompt": "forever", "max_tokens": CONTEXT - 100, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(limits={"max_connections": 40, "max_connections_per_address": 20}) as running:
        yield running


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(connection: socket.socket) -> bytes:
    """All that a server sends until it closes the connection."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def test_an_address_has_only_its_connections(server: Served):
    with ExitStack() as stack:
        for _ in range(19):
            stack.enter_context(connect(server)).sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        time.sleep(0.3)
        held = stack.enter_context(connect(server))
        time.sleep(0.2)
        refused = stack.enter_context(connect(server))
        assert answer(refused).startswith(b"HTTP/1.1 503")
        held.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer(held).startswith(b"HTTP/1.1 200")
    time.sleep(0.3)
    server.health_seconds()


def test_headers_are_limited_in_bytes(server: Served):
    before = server.resident_bytes
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        try:
            for _ in range(100):
                connection.sendall(b"a" * 1_000_000)
        except ConnectionError:
            pass
        connection.settimeout(5)
        assert answer(connection).startswith((b"HTTP/1.1 431", b""))
    many = b"".join(b"X-%d: %b\r\n" % (i, b"b" * 1000) for i in range(100))
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + many + b"\r\n")
        assert answer(connection).startswith(b"HTTP/1.1 431")
    assert server.resident_bytes - before < 50e6
    server.health_seconds()


def test_requests_that_wait_for_others_of_their_connection_are_limited(server: Served):
    before = server.resident_bytes
    with connect(server) as connection:
        connection.settimeout(5)
        try:
            for _ in range(20):  # and no answer is read
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        except (ConnectionError, TimeoutError):
            pass
        assert server.health_seconds() < 1
    assert server.resident_bytes - before < 50e6
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        connection.settimeout(1)
        try:
            answers = b""
            while part := connection.recv(65536):
                answers += part
        except TimeoutError:
            pass
        assert answers.count(b"HTTP/1.1 200") == 100


def test_bodies_and_headers_of_many_small_parts_are_refused(server: Served):
    chunks = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    headers = b"GET /health HTTP/1.1\r\n" + b"a:b\r\n" * 201 + b"\r\n"
    for message, status in ((chunks + b"1\r\na\r\n" * 20_000, b"400"), (headers, b"431")):
        with connect(server) as connection:
            connection.sendall(message)
            assert answer(connection).startswith(b"HTTP/1.1 " + status)
    body = json.dumps({"model": MODEL, "prompt": "x" * 5000, "max_tokens": 1}).encode()
    pieces = b"".join(b"a\r\n%b\r\n" % body[i : i + 10].ljust(10) for i in range(0, len(body), 10))
    with connect(server) as connection:  # a harmless one of some hundred pieces
        connection.sendall(chunks + pieces + b"0\r\n\r\n")
        connection.settimeout(5)
        assert connection.recv(20).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_a_client_that_never_reads_its_answer_is_left():
    long = {"model": MODEL, "prompt": [1] * 60_000, "max_tokens": 1, "echo": True, "logprobs": 20}
    body = json.dumps(long).encode()
    with served(limits={"stalled_seconds": 0.5}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            connection.sendall(head + body)
            connection.settimeout(20)
            assert connection.recv(1, socket.MSG_PEEK)
            time.sleep(2)
            received = answer(connection)
        length = int(received.partition(b"content-length: ")[2].split(b"\r")[0])
        assert len(received) < length  # the rest is not kept
        server.health_seconds()


@pytest.mark.slow
def test_headers_and_bodies_are_limited_in_time(server: Served):
    with connect(server) as slow, connect(server) as silent, connect(server) as blank:
        slow.sendall(b"GET /health HTTP/1.1\r\nHo")
        blank.sendall(b"\r\n")
        began = time.monotonic()
        for connection in (slow, silent, blank):
            assert answer(connection).startswith(b"HTTP/1.1 408")
        assert 8 < time.monotonic() - began < 15
    with connect(server) as body:
        body.settimeout(60)
        body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert answer(body).startswith(b"HTTP/1.1 408")
    server.health_seconds()


def test_wrong_keys_are_limited_and_right_ones_are_not():
    with served(limits={"api_keys": ["secret"]}) as server:
        statuses = [
            server.complete_as(f"wrong-{number}", {"X-Forwarded-For": f"10.0.0.{number}"}).status_code
            for number in range(40)
        ]
        assert statuses[:20] == [401] * 20 and set(statuses[20:]) <= {401, 429} and statuses[-1] == 429
        assert server.complete_as("secret").status_code == 200


def test_a_named_proxy_names_the_client():
    limits = {"requests_per_minute": 2, "trusted_proxies": ["127.0.0.0/8"]}
    with served(limits=limits) as server:
        for _ in range(2):  # a proxy appends the address that it sees; what a client wrote comes before
            first = {"X-Forwarded-For": "6.6.6.6, 10.0.0.1"}
            assert server.complete_as("", first).status_code == 200
        assert server.complete_as("", {"X-Forwarded-For": "7.7.7.7, 10.0.0.1"}).status_code == 429
        assert server.complete_as("", {"X-Forwarded-For": "10.0.0.2"}).status_code == 200
    with served(limits={"requests_per_minute": 2}) as server:
        statuses = [
            server.complete_as("", {"X-Forwarded-For": f"10.0.0.{number}"}).status_code for number in range(3)
        ]
        assert statuses == [200, 200, 429]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_streams_with_an_error_event(number: signal.Signals):
    signal.signal(number, signal.SIG_DFL)  # under nohup, processes start without SIGHUP
    with served() as server:
        with httpx.stream("POST", server.url + TEXT, json=ENDLESS | {"stream": True}, timeout=30) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.process.send_signal(number)
            assert any(_refuses(server) for _ in range(100)), "the first signal is not handled"
            assert server.process.poll() is None  # the stream goes on
            server.process.send_signal(number)
            began, last = time.monotonic(), ""
            for line in lines:
                last = line
                assert time.monotonic() - began < 20, "the stream goes on"
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is shutting down"
        assert server.process.wait(10) == 0 and time.monotonic() - began < 5
        assert "Traceback" not in server.log


def _refuses(server: Served) -> bool:
    """Whether the server takes no new connections, after a tenth of a second if it does."""
    try:
        with connect(server):
            time.sleep(0.1)
    except ConnectionRefusedError:
        return True
    return False


def test_clients_that_leave_are_not_in_the_log():
    with served() as server:
        for _ in range(5):
            body = json.dumps(ENDLESS).encode()
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            for sent in (head + body, head + body[:5], head[:20]):
                with connect(server) as connection:
                    connection.sendall(sent)
                    time.sleep(0.05)
        server.health_seconds()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert server.log == ""

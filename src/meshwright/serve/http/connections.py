"""Connections of clients: how many there are, how long they may be idle, and how long headers may be."""

import asyncio
import logging
import resource
from collections.abc import Collection
from ipaddress import IPv4Network, IPv6Network, ip_address
from itertools import islice
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meshwright.serve.http.admission import ByClient, network_of

logger = logging.getLogger(__name__)
_HEADER_BYTES, _MOST_HEADERS = 65_536, 200
_HEADER_SECONDS = 10.0
_MOST_PIPELINED = 100  # requests that wait for the answer to an earlier one of their connection
# A body may take this long, and longer if it arrives at this rate.
_BODY_SECONDS, _BODY_BYTES_PER_SECOND = 30.0, 16_000
# A body of more pieces must have this number of bytes in each: they cost the same time if they have one.
_MOST_PIECES, _LEAST_PIECE_BYTES = 2000, 64
# Connections whose reading goes on in one turn of the loop. A read takes up to 256 kB and 0.2 ms.
_READS_PER_TURN = 4
# A client that does not read an answer this fast is left.
_READ_BYTES_PER_SECOND = 1000
# Each takes some 22 kB while its request waits.
_MOST_CONNECTIONS = 8192
# Descriptors that connections leave to files, workers and listeners.
_RESERVED_DESCRIPTORS = 128


class Connections:
    """Counts of open connections, in all and by client (`network_of` an address).

    most: in all; None: as many as the process has descriptors for, up to 8,192. most_per_address: None for
    half of them. proxies: addresses to which that limit does not apply. stalled_seconds: time after which a
    client that reads nothing is disconnected.
    """

    def __init__(
        self,
        most: int | None = None,
        most_per_address: int | None = None,
        proxies: Collection[IPv4Network | IPv6Network] = (),
        stalled_seconds: float = 60.0,
    ) -> None:
        num_descriptors = _num_descriptors()
        self.most = most or min(max(16, num_descriptors - _RESERVED_DESCRIPTORS), _MOST_CONNECTIONS)
        self.most_per_address = most_per_address or max(8, self.most // 2)
        self.proxies, self.stalled_seconds = tuple(proxies), stalled_seconds
        self._open = ByClient()
        self.read_turns = ReadTurns()

    def open(self, address: str) -> bool:
        """Count a connection, and return True, unless there are too many."""
        client = network_of(address)
        if self._open.total >= self.most:
            return False
        if self._open[client] >= self.most_per_address and not self._is_proxy(address):
            return False
        self._open.add(client, 1)
        return True

    def close(self, address: str) -> None:
        self._open.add(network_of(address), -1)

    def _is_proxy(self, address: str) -> bool:
        try:
            return any(ip_address(address) in network for network in self.proxies)
        except ValueError:  # a socket of the file system
            return False


def _num_descriptors() -> int:
    """Descriptors of this process, after the soft limit is raised to the hard one, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


class ReadTurns:
    """Resumes reading from paused connections, a few in each turn of the loop, the earliest first.

    Resumed all at once, 200 clients that send long bodies would occupy each turn of the loop, and an answer
    to /health takes several turns.
    """

    def __init__(self) -> None:
        self._waiting: dict[ReadInTurns, None] = {}
        self._is_scheduled = False

    def add(self, flow: "ReadInTurns") -> None:
        self._waiting[flow] = None
        self._schedule()

    def remove(self, flow: "ReadInTurns") -> None:
        self._waiting.pop(flow, None)

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._is_scheduled = False
        for flow in list(islice(self._waiting, _READS_PER_TURN)):
            self.remove(flow)
            flow.resume_now()
        self._schedule()


class ReadInTurns(FlowControl):
    """Pauses and resumes a connection; reading goes on in its turn."""

    def __init__(self, transport: asyncio.Transport, turns: ReadTurns) -> None:
        super().__init__(transport)
        self._turns = turns

    def pause_reading(self) -> None:
        self._turns.remove(self)
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self._turns.add(self)

    def resume_now(self) -> None:
        super().resume_reading()


class Connection(HttpToolsProtocol):
    """An HTTP connection that ends if it sends too slowly or headers that are too long."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._open = connections
        self._address: str | None = None  # once it is counted
        self._timer: asyncio.TimerHandle | None = None
        self._writing_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = self._num_body_bytes = self._num_pieces = 0
        self._in_headers = True
        self._began = 0.0
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.flow = self._reading = ReadInTurns(transport, self._open.read_turns)
        address = self.client[0] if self.client else ""
        if not self._open.open(address):
            self._refuse(503, "too many connections")
            return
        self._address = address
        self._start(_HEADER_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._stop_writing_timer()
        self._open.read_turns.remove(self._reading)
        if self._address is not None:
            self._open.close(self._address)
            self._address = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._in_headers = True
            self._start(_HEADER_SECONDS)
        if self._in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._num_header_bytes > _HEADER_BYTES and not self._is_refused:
            self._refuse(431, f"the headers have more than {_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._sum_of_headers = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._sum_of_headers += len(name) + len(value)
        if self._sum_of_headers > _HEADER_BYTES:
            self._refuse(431, f"the headers have more than {_HEADER_BYTES} bytes")
            raise ValueError("headers too long")  # the parser stops
        if len(self.headers) >= _MOST_HEADERS:
            self._refuse(431, f"the request has more than {_MOST_HEADERS} headers")
            raise ValueError("too many headers")  # the parser stops
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._num_header_bytes = self._num_body_bytes = self._num_pieces = 0
        self._start(_BODY_SECONDS)
        if len(self.pipeline) >= _MOST_PIPELINED:
            self._refuse(429, f"more than {_MOST_PIPELINED} requests wait for earlier answers")
            raise ValueError("too many requests")  # the parser stops
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        self._num_pieces += 1
        if self._num_pieces > _MOST_PIECES and self._num_body_bytes < _LEAST_PIECE_BYTES * self._num_pieces:
            self._refuse(400, "the body arrives in too many pieces of a few bytes")
            raise ValueError("too many pieces")  # the parser stops
        super().on_body(body)
        if self.cycle.response_complete:  # the rest of a refused body is read in turns, too
            self.flow.pause_reading()
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._stop()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_writing_timer()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._writing_timer = self.loop.call_later(self._open.stalled_seconds, self._check_reading)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_writing_timer()

    def _stop_writing_timer(self) -> None:
        if self._writing_timer is not None:
            self._writing_timer.cancel()
            self._writing_timer = None

    def _check_reading(self) -> None:
        """End the connection, unless its client has read since."""
        seconds, num_unsent = self._open.stalled_seconds, self.transport.get_write_buffer_size()
        if self._num_unsent - num_unsent < _READ_BYTES_PER_SECOND * seconds:
            self.transport.abort()
            return
        self._num_unsent = num_unsent
        self._writing_timer = self.loop.call_later(seconds, self._check_reading)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self._open.stalled_seconds, self.transport.abort)  # if the end is never read

    def send_400_response(self, msg: str) -> None:
        if not self._is_refused:
            super().send_400_response(msg)

    def _start(self, seconds: float) -> None:
        self._stop()
        self._began = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._check_arrival)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_arrival(self) -> None:
        """End the connection, unless its body arrives fast enough."""
        seconds = _HEADER_SECONDS
        if not self._in_headers:
            seconds = _BODY_SECONDS + self._num_body_bytes / _BODY_BYTES_PER_SECOND
        left = self._began + seconds - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_arrival)
            return
        self._timer = None
        self._refuse(408, "the request took too long to arrive")

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error if nothing was answered yet, and close the connection."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started:
            content = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}'
            body = content % message.encode()
            self.transport.write(
                b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, len(body), body)
            )
        self.transport.close()
        # A client that reads nothing does not keep it.
        self.loop.call_later(1.0, self.transport.abort)

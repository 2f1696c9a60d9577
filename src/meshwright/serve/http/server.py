"""The application on a port."""

import asyncio
import errno
import gc
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import DeviceError
from meshwright.serve.engine.request import EngineStopped
from meshwright.serve.http.connections import Connection, Connections
from meshwright.serve.http.error_bodies import error_object
from meshwright.serve.turns import let_threads_in

# How long requests may go on after SIGTERM; Kubernetes kills after 30.
_SHUTDOWN_SECONDS = 20


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`, to be bound before the model loads; port 0 takes any free one.

    Clients that come while the model loads wait rather than fail.
    Raises DeviceError if the port is in use or the host is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise DeviceError(_bind_message(host, port, error)) from error


def _bind_message(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another with --port, or --port 0 for any free one"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights than you have; choose one above 1023 with --port"
    return f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another with --host"


def address(listener: socket.socket) -> str:
    """The URL of `listener`: `http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(
    app: Starlette,
    listener: socket.socket,
    on_ready: Callable[[str], None],
    connections: Connections | None = None,
    probes: socket.socket | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then finish running requests and return.

    A second signal ends running requests at once, as does the end of the time for them: `app.state` has the
    function `end_requests`. on_ready: called with the address once requests are answered.
    connections: limits on clients' connections; None for those of the process. probes: a socket for
    `app.state.probes`, which a thread of its own serves.
    """
    server = _Server(app, lambda: on_ready(address(listener)), connections or Connections())
    with ExitStack() as stack:
        stack.enter_context(_signals_end_quietly(server))
        if probes is not None:
            stack.enter_context(running(app.state.probes, probes))
        server.run(sockets=[listener])


@contextmanager
def running(app: Starlette, listener: socket.socket) -> Iterator[str]:
    """The address of the application, which a thread of this process serves until the block ends."""
    ready = threading.Event()
    server = _Server(app, ready.set, Connections())
    thread = threading.Thread(target=server.run, args=([listener],), name="meshwright-http", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()


class _Server(uvicorn.Server):
    is_hastened = False

    def __init__(self, app: Starlette, on_ready: Callable[[], None], connections: Connections) -> None:
        proxies = [str(network) for network in connections.proxies]
        super().__init__(
            uvicorn.Config(
                _EndsQuietly(app),
                http=partial(Connection, connections),  # pyright: ignore[reportArgumentType]
                ws="none",
                # By default any process of this machine could name the client.
                proxy_headers=bool(proxies),
                forwarded_allow_ips=proxies,
                log_level="error",  # clients could fill the log with warnings of invalid requests
                access_log=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS + 2,
            )
        )
        self._on_ready, self._state = on_ready, app.state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # The model's and the libraries' objects live until the server ends. Frozen, they are not visited
            # by garbage collections, which would stop the process for half a second each time.
            gc.collect()
            gc.freeze()
            let_threads_in()
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Streams then end with an error event, and other requests with 503.
        loop = asyncio.get_running_loop()
        timer = loop.call_later(_SHUTDOWN_SECONDS, self._end_requests)
        hastened = loop.create_task(self._hasten())
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            hastened.cancel()

    async def _hasten(self) -> None:
        """End running requests on a second signal."""
        while not self.is_hastened:
            await asyncio.sleep(0.05)
        self._end_requests()
        await asyncio.sleep(1)
        self.force_exit = True

    def _end_requests(self) -> None:
        getattr(self._state, "end_requests", lambda why: None)("the server is shutting down")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.is_hastened = self.should_exit
        self.should_exit = True


@dataclass(frozen=True)
class _EndsQuietly:
    """Ends a request that is cancelled at shutdown without a traceback."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:
            if has_begun:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                stopped = JSONResponse(error_object(EngineStopped("the server is shutting down")), 503)
                await stopped(scope, receive, send)


@contextmanager
def _signals_end_quietly(server: _Server) -> Iterator[None]:
    """Within, a signal that the server handled ends nothing more, and SIGHUP is one of them.

    uvicorn raises it again after its shutdown, for earlier handlers; by default that kills the process before
    the engine is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, server.handle_exit)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

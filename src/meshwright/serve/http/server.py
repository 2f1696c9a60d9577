"""The application on a port."""

import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

from meshwright.errors import DeviceError

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


def run(app: Starlette, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish running requests and return.

    on_ready: called with the address once requests are answered.
    """
    with _signals_end_quietly():
        _Server(app, lambda: on_ready(address(listener))).run(sockets=[listener])


@contextmanager
def running(app: Starlette, listener: socket.socket) -> Iterator[str]:
    """The address of the application, which a thread of this process serves until the block ends."""
    ready = threading.Event()
    server = _Server(app, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],), name="meshwright-http", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app, log_level="warning", access_log=False, timeout_graceful_shutdown=_SHUTDOWN_SECONDS
            )
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Within, a signal that uvicorn handled ends nothing more.

    uvicorn raises it again after its shutdown, for earlier handlers; by default that kills the process before
    the engine is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[signal.Signals, Any] = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

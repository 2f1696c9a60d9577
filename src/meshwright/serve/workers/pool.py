"""The server's side of its workers: calls of methods in processes with limits of time, memory and stack."""

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from meshwright.errors import CheckpointError, DeviceError, RequestError
from meshwright.serve.workers.client_turns import ClientTurns
from meshwright.serve.workers.frames import BEGUN, CALL, ERROR, HEADER, LAST, STAGE, frame

_MEMORY_BYTES = 2**30
_SECONDS = 10.0
_START_SECONDS = 30.0
# A call that takes longer gives way to steps of the model and to calls of others.
_LONG_SECONDS = 0.02
_NICENESS = 10
_FEWEST = 4  # workers, so that a client has two: one address may be many users


class Subject(Protocol):
    """An object whose methods are called; it can be pickled."""

    def prepare(self) -> None:
        """Load what calls need. Raises an error if that is impossible."""
        ...


class Calls(Protocol):
    """A way of calling methods of a subject from an asyncio loop."""

    async def call(
        self, client: str, method: str, *arguments: object, body: Sequence[bytes] | None = None
    ) -> Any:
        """The result of `method`. client: its name; a client cannot occupy all workers.

        body: bytes in parts, which the method takes as one more argument, joined.
        """
        ...


class InThreads:
    """Calls in threads of this process, without limits: for text that can be trusted."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    async def call(
        self, client: str, method: str, *arguments: object, body: Sequence[bytes] | None = None
    ) -> Any:
        whole = () if body is None else (b"".join(body),)
        return await asyncio.to_thread(getattr(self._subject, method), *arguments, *whole)


class TooComplexError(RequestError):
    """A request that crashed a worker, or took it past its time or memory."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="too_complex")


class _Worker:
    """A connection to a worker. has_ended: it takes no more calls."""

    def __init__(self, connection: socket.socket) -> None:
        # Without a transport of asyncio, which cannot be closed once its loop has ended.
        self._connection = connection
        self._thread_id: int | None = None
        self.has_ended = self._gives_way = False

    async def call(self, method: str, arguments: tuple[Any, ...], body: Sequence[bytes] | None) -> Any:
        """The result; raises RequestError for the subject's refusals, TooComplexError if the worker ends."""
        stage, seconds, began = "reading the request", _SECONDS, time.monotonic()
        long = asyncio.get_running_loop().call_later(_LONG_SECONDS, self._give_way)
        try:
            num_bytes = None if body is None else sum(map(len, body))
            for part in (frame(CALL, (method, seconds, arguments, num_bytes)), *(body or ())):
                await asyncio.get_running_loop().sock_sendall(self._connection, part)
            while True:
                kind, size = HEADER.unpack(await self._received(HEADER.size))
                value = pickle.loads(await self._received(size))
                if kind == BEGUN:
                    self._thread_id = value
                elif kind == STAGE:
                    (stage, seconds), began = value, time.monotonic()
                else:
                    break
        except (OSError, EOFError):
            self.close()
            # A little earlier: the worker's time begins before its message arrives.
            if time.monotonic() - began >= 0.8 * seconds:
                raise TooComplexError(f"{stage} takes longer than {seconds:g} s") from None
            raise TooComplexError(f"{stage} needs more memory or depth than this server allows") from None
        finally:
            long.cancel()
        if kind == LAST or self._gives_way:  # only root could raise its priority again
            self.close()
        if kind != ERROR:
            return value
        message, status, param, code = value
        if status == 500:
            raise RuntimeError(message)
        raise RequestError(message, status=status, param=param, code=code)

    async def _received(self, size: int) -> bytearray:
        """The next `size` bytes; raises EOFError if the worker has ended."""
        received = bytearray(size)
        rest = memoryview(received)
        while rest:
            count = await asyncio.get_running_loop().sock_recv_into(self._connection, rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return received

    def _give_way(self) -> None:
        if self._thread_id is not None:
            self._gives_way = True
            with contextlib.suppress(OSError):  # it has just ended
                os.setpriority(os.PRIO_PROCESS, self._thread_id, _NICENESS)

    def close(self) -> None:
        self.has_ended = True
        self._connection.close()


class WorkerPool:
    """Calls in worker processes, `num_workers` at once; a context manager.

    A client has at most half of the workers, so that others always find one soon. A worker that crashes,
    or exceeds its time or memory, costs its own call a RequestError; another is forked in its place.
    """

    def __init__(self, subject: Subject, num_workers: int | None = None) -> None:
        self._subject = subject
        self._num_workers = num_workers or min(max(_FEWEST, os.cpu_count() or 1), 8)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()
        self._turns = ClientTurns(self._num_workers, max(1, self._num_workers // 2))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "WorkerPool":
        self._control, remote = socket.socketpair()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "meshwright.serve.workers.nursery", str(remote.fileno())],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            )
        self._control.settimeout(_START_SECONDS)
        with contextlib.suppress(OSError):  # if it has died, `check` says so
            self._control.sendall(frame(CALL, (self._subject, _MEMORY_BYTES)))
        return self

    def check(self) -> None:
        """Wait until workers can be forked. Raises CheckpointError if the subject cannot be prepared."""
        try:
            with self._control.makefile("rb") as file:
                kind, size = HEADER.unpack(file.read(HEADER.size))
                message = pickle.loads(file.read(size))
        except Exception as error:  # the last message of a process that ends meanwhile may be cut anywhere
            raise CheckpointError(
                "the tokenizer or the chat template crashes, or takes too long, as it is loaded"
            ) from error
        if kind == ERROR:
            raise CheckpointError(message)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._control.close()
        for worker in self._workers:
            worker.close()
        try:
            self._process.wait(1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def call(
        self, client: str, method: str, *arguments: object, body: Sequence[bytes] | None = None
    ) -> Any:
        await self._turns.wait(client)
        # A client that leaves does not end the call, and could otherwise occupy one worker after another.
        calling = asyncio.ensure_future(self._call(client, method, arguments, body))
        calling.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(calling)

    async def _call(
        self, client: str, method: str, arguments: tuple[Any, ...], body: Sequence[bytes] | None
    ) -> Any:
        try:
            worker = self._idle.pop() if self._idle else self._forked()
            try:
                return await worker.call(method, arguments, body)
            finally:
                # Another is forked at once: the next request need not wait for it.
                self._idle.append(self._replaced(worker) if worker.has_ended else worker)
        finally:
            self._turns.end(client)

    def _replaced(self, worker: _Worker) -> _Worker:
        self._workers.discard(worker)
        return self._forked()

    def _forked(self) -> _Worker:
        near, far = socket.socketpair()
        with far:
            try:
                socket.send_fds(self._control, [b"w"], [far.fileno()])
            except OSError as error:
                near.close()
                raise DeviceError("the process that forks workers has ended") from error
        near.setblocking(False)
        worker = _Worker(near)
        self._workers.add(worker)
        return worker

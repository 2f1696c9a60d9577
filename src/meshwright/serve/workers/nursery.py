"""The process that forks workers: `python -m meshwright.serve.workers.nursery FD`.

It loads the object whose methods the workers call (once: they share its memory), then forks a worker for
each socket that it is sent. It has one thread, so a fork is safe, and a new worker takes milliseconds.
"""

import faulthandler
import gc
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.errors import RequestError
from meshwright.serve.workers.frames import BEGUN, CALL, ERROR, HEADER, LAST, RESULT, STAGE, frame
from meshwright.serve.workers.timed_stages import limit_by

# Half of the smallest stack of the server's threads, which do some of a worker's work again (a grammar is
# compiled in both): what did not overflow here does not overflow there.
_STACK_BYTES = 2**20
_LIMITS_MEMORY = sys.platform == "linux"  # macOS accepts the limit but does not enforce it
_REAL_SECONDS = 4  # limit in real time, per second of processor time
_PREPARE_SECONDS = 5.0  # for loading the object, before any worker is forked


def _receive(connection: socket.socket) -> tuple[bytes, Any] | None:
    """The next message; None if the server has closed the connection."""
    header = _exactly(connection, HEADER.size)
    if header is None:
        return None
    kind, size = HEADER.unpack(header)
    content = _exactly(connection, size)
    return None if content is None else (kind, pickle.loads(content))


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = connection.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return content


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server ends its workers itself
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for workers
    control = socket.socket(fileno=int(sys.argv[1]))
    received = _receive(control)
    if received is None:
        return
    _, (subject, memory_bytes) = received
    _end_after(_PREPARE_SECONDS)
    try:
        with _limited(_address_space() + memory_bytes):
            subject.prepare()
    except BaseException as error:  # panics of Rust are no Exception
        control.sendall(frame(ERROR, f"{error}" or type(error).__name__))
        return
    _end_never()
    control.sendall(frame(RESULT, None))
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _begin_worker(socket.socket(fileno=files[0]), subject, memory_bytes)
            os._exit(0)
        os.close(files[0])


def _begin_worker(connection: socket.socket, subject: object, memory_bytes: int) -> None:
    # The last words of a crash would fill the server's log.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    most_bytes = _address_space() + memory_bytes
    if _LIMITS_MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    # A worker with little memory left ends; the tokenizer keeps some for each word that it meets.
    worker = threading.Thread(target=_work, args=(connection, subject, most_bytes - memory_bytes // 2))
    worker.start()
    worker.join()


@contextmanager
def _limited(most_bytes: int) -> Iterator[None]:
    """Limit the address space of this process inside the block."""
    if not _LIMITS_MEMORY:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space() -> int:
    """Bytes of this process's address space; 0 if the platform does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    except OSError:
        return 0


def _end_after(seconds: float) -> None:
    """End this process after these seconds of processor time, or a multiple of real time.

    On a busy machine, harmless work would exceed its limit in real time. SIGPROF and a thread of C end
    the process: code that holds the interpreter cannot prevent either.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    faulthandler.dump_traceback_later(_REAL_SECONDS * seconds, exit=True)


def _end_never() -> None:
    """Cancel the last `_end_after`."""
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()


def _work(connection: socket.socket, subject: object, last_bytes: int) -> None:
    """Answer calls of `subject`'s methods until the server closes the connection.

    last_bytes: address space beyond which an answer is the last.
    """

    def begin(name: str, seconds: float) -> None:
        _end_after(seconds)
        connection.sendall(frame(STAGE, (name, seconds)))

    limit_by(begin)
    connection.sendall(frame(BEGUN, threading.get_native_id() if sys.platform == "linux" else os.getpid()))
    while (received := _receive(connection)) is not None:
        body = None
        kind, (method, seconds, arguments, num_bytes) = received
        assert kind == CALL
        if num_bytes is not None:
            body = _exactly(connection, num_bytes)
            if body is None:
                return
            arguments = (*arguments, bytes(body))
        _end_after(seconds)
        try:
            result = getattr(subject, method)(*arguments)
            is_last = _address_space() > last_bytes
            answer = frame(LAST if is_last else RESULT, result)
        except RequestError as error:
            answer = frame(ERROR, (str(error), error.status, error.param, error.code))
        except MemoryError:
            answer = frame(ERROR, ("the request needs more memory than it may have", 400, None, None))
        except RecursionError:
            answer = frame(ERROR, ("the request is nested too deeply", 400, None, None))
        except Exception as error:
            answer = frame(ERROR, (f"{type(error).__name__}: {error}", 500, None, None))
        _end_never()
        try:
            connection.sendall(answer)
        except OSError:  # the server has ended
            return
        del received, arguments, body, answer


if __name__ == "__main__":
    main()

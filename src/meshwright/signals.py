"""The end of a process that serves until a signal stops it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def end_event() -> threading.Event:
    """An event that SIGINT and SIGTERM set, from now on; to be called in the main thread.

    A KeyboardInterrupt that is raised while Python cleans up is lost; an event is not.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


@contextmanager
def ends_after(seconds: float, message: str) -> Iterator[None]:
    """Within, end the process with exit code 2 and a line on stderr if the block takes longer.

    For code of libraries that checks nothing and lets other threads run. Its own words on stderr, such as
    the traces of a panic, are dropped.
    """
    stderr = os.dup(2)

    def end() -> None:
        os.write(stderr, f"mw: {message} takes longer than {seconds:g} s\n".encode())
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        timer.cancel()
        os.dup2(stderr, 2)
        os.close(stderr)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Within, SIGINT and SIGTERM end the process without cleaning up; to be called in the main thread.

    For long imports and compilation: an exception in an import becomes an ImportError, or is lost.
    """
    previous = {
        number: signal.signal(number, lambda number, _: os._exit(128 + number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

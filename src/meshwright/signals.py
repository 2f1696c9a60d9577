"""The end of a process that serves until it is told to stop."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def end_event() -> threading.Event:
    """An event that SIGINT and SIGTERM set, from now on; to be called in the main thread.

    A KeyboardInterrupt that is raised while Python cleans up is lost; an event is not.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


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

"""The end of a process that serves until a signal stops it."""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

_MEMORY = Path("/proc/self/statm")  # in pages; the second is resident


def end_event() -> threading.Event:
    """An event that SIGINT and SIGTERM set, from now on; to be called in the main thread.

    A KeyboardInterrupt that is raised while Python cleans up is lost; an event is not.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended


@contextmanager
def ends_after(seconds: float, message: str, most_bytes: float = inf) -> Iterator[None]:
    """End the process with exit code 2 and a line on stderr if the block exceeds a limit.

    For library code that cannot be interrupted but lets other threads run. Its own output on stderr, such as
    the trace of a panic, is dropped. most_bytes: limit of the memory that the block adds.
    """
    stderr, is_over, before = os.dup(2), threading.Event(), _resident_bytes()

    def watch() -> None:
        deadline = time.monotonic() + seconds
        while not is_over.wait(0.05):
            if _resident_bytes() - before > most_bytes:
                end(f"needs more than {most_bytes / 1e6:.0f} MB")
            if time.monotonic() > deadline:
                end(f"takes longer than {seconds:g} s")

    def end(why: str) -> None:
        os.write(stderr, f"mw: {message} {why}\n".encode())
        os._exit(2)

    threading.Thread(target=watch, daemon=True).start()
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        is_over.set()
        os.dup2(stderr, 2)
        os.close(stderr)


def _resident_bytes() -> int:
    """The resident memory of this process; on other systems than Linux its peak.

    Linux hands the peak on from a parent to its child, whose limit would begin at the parent's memory.
    """
    try:
        pages = int(_MEMORY.read_text(encoding="ascii").split()[1])
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
    return pages * resource.getpagesize()


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

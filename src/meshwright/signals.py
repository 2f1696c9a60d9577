"""The end of a process that serves until it is told to stop."""

import signal
import threading


def end_event() -> threading.Event:
    """An event that SIGINT and SIGTERM set, from now on; to be called in the main thread.

    A KeyboardInterrupt that is raised while Python cleans up is lost; an event is not.
    """
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    return ended

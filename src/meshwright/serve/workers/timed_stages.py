"""Stages of a call in a worker, each with a time limit."""

from collections.abc import Callable

_listeners: list[Callable[[str, float], None]] = []


def begin_stage(name: str, seconds: float) -> None:
    """Begin a stage, such as `the chat template`; a worker that takes longer ends.

    In the server's own process, stages have no limits.
    """
    for listener in _listeners:
        listener(name, seconds)


def limit_by(listener: Callable[[str, float], None]) -> None:
    """Call `listener` with the name and seconds of each stage in this process."""
    _listeners.append(listener)

"""Decisions to stop and to save, the same on all processes."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

# Interval between agreements of several processes, well within the grace time after a signal to one.
_AGREE_SECONDS = 1.0


class Agreement:
    """The common decision of all processes after a step: to stop, and to save a checkpoint.

    stop: set when this process receives a signal to stop. save_seconds: time between checkpoints, by the
    clock of process 0. run_seconds: time after which to stop, by the first clock that reaches it. A single
    process decides after every step. Several processes exchange their wishes after certain steps; each
    exchange determines the next such step from the step time of process 0.
    """

    def __init__(self, stop: threading.Event, save_seconds: float, run_seconds: float = math.inf) -> None:
        self._stop, self._save_seconds = stop, save_seconds
        self._saved = self._agreed = time.monotonic()
        self._end = self._saved + run_seconds
        self._agreed_step, self._next = 0, 0

    def anew(self) -> "Agreement":
        """A new agreement on the same signal to stop, without an end by time, that counts its own steps."""
        return Agreement(self._stop, self._save_seconds)

    def after(self, step: int) -> tuple[bool, bool]:
        """(stop, save) after `step`."""
        now = time.monotonic()
        stop, save = self._stop.is_set() or now >= self._end, now - self._saved >= self._save_seconds
        if jax.process_count() > 1:
            if step < self._next:
                return False, False
            step_seconds = (now - self._agreed) / max(step - self._agreed_step, 1)
            wishes = multihost_utils.process_allgather(np.asarray([stop, save, step_seconds], np.float32))
            stop, save = bool(np.any(wishes[:, 0])), bool(wishes[0, 1])
            self._next = step + max(1, int(_AGREE_SECONDS / max(float(wishes[0, 2]), 1e-6)))
            self._agreed, self._agreed_step = now, step
        return stop, save

    def saved(self) -> None:
        """Note that a checkpoint has begun."""
        self._saved = time.monotonic()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second signal has its usual effect.

    It is never set outside the main thread, where Python allows no handlers.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in signals}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request(number: int, frame: object) -> None:
        stop.set()
        restore()

    for number in signals:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()

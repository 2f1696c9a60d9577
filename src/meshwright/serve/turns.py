"""Pauses of a long task, so that other tasks of its asyncio loop and other threads run."""

import asyncio
import sys
import time

# As short as a step of a small model.
_SECONDS = 0.001
_SWITCH_SECONDS = 0.0002  # a fifth of it, so that a waiting thread asks several times in each turn


def let_threads_in() -> None:
    """Let waiting threads of this process have the interpreter within a turn of `Turns`, from now on.

    By default a thread asks for the interpreter after 5 ms of waiting, and the 5 ms begin again each time
    that another thread releases it. The loop releases it in each pause, every millisecond, and takes it back
    before a waiting thread has woken up. The engine's thread would thus wait until a long task has ended.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)


class Turns:
    """Lets other tasks run each time that this one has run for a millisecond."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Note that other tasks have just run."""
        self._began = time.perf_counter()

    async def take(self) -> None:
        """Let other tasks run if this one has run for a millisecond; called between parts of its work."""
        if time.perf_counter() - self._began > _SECONDS:
            await asyncio.sleep(0)
            self.begin()

"""Pauses of a long task, so that other tasks of its asyncio loop and other threads run."""

import asyncio
import sys
import time

# As short as a step of a small model.
_SECONDS = 0.001
_SWITCH_SECONDS = 0.0002


def let_threads_in() -> None:
    """Let a thread of this process that waits for the interpreter have it within a turn, for good.

    Otherwise the engine's thread waits until all turns of a task are over. A thread asks for the interpreter
    only after 5 ms of waiting, and waits anew each time that another releases it. The loop does so in each
    pause, every millisecond, and takes it back before the thread is awake.
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

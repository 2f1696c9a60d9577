"""Pauses of a long task, so that other tasks of its asyncio loop run."""

import asyncio
import time

# As short as a step of a small model. The engine's thread runs in the pauses, too, since the loop releases
# the interpreter when it polls for input.
_SECONDS = 0.001


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

"""Workers of the server: long calls give way to others, and a worker that ends is replaced."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import RequestError
from meshwright.serve.workers.pool import WorkerPool


class Sleeper:
    """A subject with short and long calls."""

    def prepare(self) -> None:
        pass

    def niceness(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpriority(os.PRIO_PROCESS, 0)

    def end(self) -> None:
        os._exit(1)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux only")
def test_long_calls_give_way_and_ended_workers_are_replaced(monkeypatch: pytest.MonkeyPatch):
    async def call() -> tuple[int, int, int, int]:
        first = await pool.call("a", "niceness", 0.0)
        long = await pool.call("a", "niceness", 0.5)
        assert len(pool._idle) == 1
        with pytest.raises(RequestError, match="more memory or depth"):
            await pool.call("a", "end")
        return first, long, len(pool._idle), await pool.call("a", "niceness", 0.0)

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with WorkerPool(Sleeper(), 2) as pool:
        pool.check()
        first, long, num_idle, after = asyncio.run(call())
    assert (first, after, num_idle) == (own, own, 1)
    assert long >= min(own + 1, 19)

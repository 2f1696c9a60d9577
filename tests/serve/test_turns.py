"""Pauses of long tasks: others run in them."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from meshwright.serve.turns import Turns, let_threads_in


async def _busy(seconds: float) -> None:
    turns, began = Turns(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        sum(range(1000))
        await turns.take()


@pytest.fixture
def _same_interval_afterwards() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_same_interval_afterwards")
def test_a_thread_runs_beside_a_long_task() -> None:
    num_runs, ends = 0, threading.Event()

    def engine() -> None:
        nonlocal num_runs
        while not ends.is_set():
            time.sleep(0.001)  # a step, in which the thread does not hold the interpreter
            num_runs += 1

    let_threads_in()
    thread = threading.Thread(target=engine)
    thread.start()
    asyncio.run(_busy(0.5))
    ends.set()
    thread.join()
    assert num_runs > 10  # about 330; without `let_threads_in` 2

"""Events on their way from the device thread to the coroutines that wait for them."""

import asyncio
import threading
from typing import Any

import pytest

from meshwright.serve.engine.request import Event, TokenScore
from meshwright.serve.engine.sequence import Lifetime
from meshwright.serve.engine.token_stream import TokenStream


def stream() -> TokenStream:
    return TokenStream([Lifetime()], lambda index, reason: None)


def event(token: int, *, last: bool = False) -> Event:
    return Event(0, TokenScore(token, 0.0), "length" if last else None)


async def tokens(one: TokenStream) -> list[int]:
    return [event.token async for event in one]


def from_a_thread(*puts: tuple[TokenStream, Event]) -> None:
    thread = threading.Thread(target=lambda: [one.put(item) for one, item in puts])
    thread.start()
    thread.join()


def test_a_step_of_many_streams_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        loop, calls = asyncio.get_running_loop(), 0
        call = loop.call_soon_threadsafe

        def counted(*rest: Any) -> asyncio.Handle:
            nonlocal calls
            calls += 1
            return call(*rest)

        streams = [stream() for _ in range(8)]
        readers = [asyncio.ensure_future(tokens(one)) for one in streams]
        await asyncio.sleep(0)  # all wait now
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        for step in range(3):
            from_a_thread(*((one, event(10 * step + n, last=step == 2)) for n, one in enumerate(streams)))
            for _ in range(3):
                await asyncio.sleep(0)
        assert calls == 3
        monkeypatch.undo()
        assert await asyncio.gather(*readers) == [[n, 10 + n, 20 + n] for n in range(8)]

    asyncio.run(run())


def test_events_that_came_before_anyone_waited_are_in_order() -> None:
    async def run() -> list[int]:
        one = stream()
        from_a_thread(*((one, event(number, last=number == 4)) for number in range(5)))
        return await tokens(one)

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]


def test_nobody_reads_behind_a_closed_loop() -> None:
    async def run() -> TokenStream:
        return stream()

    one = asyncio.run(run())
    from_a_thread((one, event(1)), (one, event(2)))

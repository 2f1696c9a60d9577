"""The road from the device thread back to the coroutine that asked."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from meshwright.serve.sequence import EngineError, Event, FinishReason, Lifetime


class TokenStream:
    """An asynchronous iterator over the events of the requests submitted together.

        with engine.submit(request) as stream:
            async for event in stream: ...

    Leaving the block cancels what has not finished and frees its slots. lifetimes: of the requests, in order.
    Raises EngineError where the engine fails before the last event.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], release: Callable[[int, FinishReason], None]) -> None:
        self.lifetimes = lifetimes
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Event | EngineError] = asyncio.Queue()
        self._unfinished = set(range(len(lifetimes)))
        self._release = release

    def put(self, item: Event | EngineError) -> None:
        """Hand over an event, from any thread."""
        # RuntimeError: the loop is closed, so nobody reads any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def finish(self, index: int, reason: FinishReason) -> None:
        """End one request early; its later events are dropped."""
        if index in self._unfinished:
            self._unfinished.remove(index)
            self._release(index, reason)

    def close(self) -> None:
        """Cancel every request that has not finished."""
        for index in sorted(self._unfinished):
            self.finish(index, "cancelled")

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Event:
        while self._unfinished:
            item = await self._items.get()
            if isinstance(item, EngineError):
                raise item
            if item.index in self._unfinished:
                if item.finish_reason:
                    self._unfinished.remove(item.index)
                return item
        raise StopAsyncIteration

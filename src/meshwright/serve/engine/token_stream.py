"""Events on their way from the device thread to the coroutine that submitted the request."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from meshwright.serve.engine.request import EngineError, Event, FinishReason
from meshwright.serve.engine.sequence import Lifetime
from meshwright.serve.turns import Turns


class _Mailbox:
    """Items from other threads for the streams of one loop, which is woken once for all of them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[TokenStream, Event | EngineError]] = deque()
        self._is_called = False

    def put(self, loop: asyncio.AbstractEventLoop, stream: "TokenStream", item: Event | EngineError) -> None:
        """Hand over an item, from any thread."""
        self._waiting.append((stream, item))
        if self._is_called:
            return
        self._is_called = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and no stream is read any more
            self._is_called = False
            self._waiting.clear()

    def _deliver(self) -> None:
        self._is_called = False  # first: later items are delivered too, or call again
        while self._waiting:
            stream, item = self._waiting.popleft()
            stream.take(item)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = WeakKeyDictionary()


class TokenStream:
    """An asynchronous iterator over the events of the requests submitted together.

        with engine.submit(request) as stream:
            async for event in stream: ...

    Leaving the block cancels unfinished requests and frees their slots. lifetimes: of the requests, in order.
    Raises EngineError if the engine fails before the last event.
    """

    def __init__(self, lifetimes: Sequence[Lifetime], release: Callable[[int, FinishReason], None]) -> None:
        self.lifetimes = lifetimes
        self._loop = asyncio.get_running_loop()
        self._mailbox = _mailboxes.setdefault(self._loop, _Mailbox())
        self._items: deque[Event | EngineError] = deque()
        self._arrival: asyncio.Future[None] | None = None  # of the next item, if it is awaited
        self._unfinished = set(range(len(lifetimes)))
        self._release = release
        self._turns = Turns()

    def put(self, item: Event | EngineError) -> None:
        """Hand over an event, from any thread."""
        self._mailbox.put(self._loop, self, item)

    def take(self, item: Event | EngineError) -> None:
        """Hand over an event, from the loop."""
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def finish(self, index: int, reason: FinishReason) -> None:
        """End one request early; its later events are dropped."""
        if index in self._unfinished:
            self._unfinished.remove(index)
            self._release(index, reason)

    def close(self) -> None:
        """Cancel every request that has not finished."""
        for index in sorted(self._unfinished):
            self.finish(index, "cancelled")
        # The sequences refer to this stream: without a cycle, their tokens are freed at once.
        self._release = lambda index, reason: None

    def __enter__(self) -> "TokenStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> Event:
        if (event := await self.next_event()) is None:
            raise StopAsyncIteration
        return event

    async def next_event(self) -> Event | None:
        """The next event; None after the last."""
        while self._unfinished:
            while not self._items:
                self._arrival = self._loop.create_future()
                await self._arrival
                self._turns.begin()
            await self._turns.take()
            item = self._items.popleft()
            if isinstance(item, EngineError):
                raise item
            if item.index in self._unfinished:
                if item.finish_reason:
                    self._unfinished.remove(item.index)
                return item
        return None

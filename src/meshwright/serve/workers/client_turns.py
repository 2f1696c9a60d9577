"""The order of clients' calls: one client after another, each with a limited number at once."""

import asyncio
from collections import Counter, OrderedDict, deque


class ClientTurns:
    """Lets `most` calls run at once, and `most_of_client` of them for one client. Of one asyncio loop.

    A call that ends wakes only the next one: thousands may wait.
    """

    def __init__(self, most: int, most_of_client: int) -> None:
        self._most, self._most_of_client = most, most_of_client
        self._num_running = Counter[str]()
        # The clients whose calls wait, the next one first.
        self._waiting = OrderedDict[str, deque[asyncio.Future[None]]]()

    async def wait(self, client: str) -> None:
        """Wait until a call may run; `end` must follow."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._begin_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just begun
                self.end(client)
            raise

    def end(self, client: str) -> None:
        """Note that a call has ended."""
        self._num_running -= Counter([client])  # a client with none is forgotten
        self._begin_next()

    def _begin_next(self) -> None:
        while self._num_running.total() < self._most and (client := self._next_client()) is not None:
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns  # after the other clients
            if not turn.done():  # its client has not left
                self._num_running[client] += 1
                turn.set_result(None)

    def _next_client(self) -> str | None:
        """The first client that may run one more call."""
        clients = self._waiting
        return next((each for each in clients if self._num_running[each] < self._most_of_client), None)

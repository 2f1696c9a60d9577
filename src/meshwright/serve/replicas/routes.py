"""The routing of requests to servers: to the one that has the prompt's prefix cached, unless it is busy."""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

# Characters of a prompt that are compared at once, and of how many of them a server's cache is remembered.
_BLOCK_CHARS, _MOST_BLOCKS = 256, 100_000
_MOST_CHARS = 512 * _BLOCK_CHARS  # of a prompt
# Bytes of a body that must contain the beginning of its prompt.
_MOST_BEFORE_PROMPT = 2**18
_PROMPT_KEY = re.compile(rb'"(?:prompt|messages|input)"')

Beginning = tuple[int, ...]
"""A prompt by its beginnings: hashes of its first block, of its first two, and so on."""


def beginning_of(prompt: str) -> Beginning:
    """A prompt's text, as far as it fills blocks.

    >>> first = beginning_of("a" * 600)
    >>> len(first), first == beginning_of("a" * 512 + "b" * 600)[:2]
    (2, True)
    """
    beginnings, before = [], 0
    for start in range(0, min(len(prompt), _MOST_CHARS) - _BLOCK_CHARS + 1, _BLOCK_CHARS):
        before = hash((before, prompt[start : start + _BLOCK_CHARS]))
        beginnings.append(before)
    return tuple(beginnings)


def prompt_in(body: bytes) -> str:
    """The text from a body's prompt on, as far as it is compared; empty without a prompt.

    It is not parsed: bodies of many objects would stop the process that forwards all requests.

    >>> prompt_in(b'{"model": "x", "prompt": "once upon a time"}')
    ': "once upon a time"}'
    """
    key = _PROMPT_KEY.search(body, 0, _MOST_BEFORE_PROMPT)
    return "" if key is None else body[key.end() : key.end() + _MOST_CHARS].decode("utf-8", "replace")


class _Server:
    """The requests under way at one server, and the beginnings that it was sent, the latest last."""

    def __init__(self) -> None:
        self.requests: set[str] = set()
        self._sent: OrderedDict[int, None] = OrderedDict()

    @property
    def num_sent(self) -> int:
        return len(self._sent)

    def num_known(self, beginning: Beginning) -> int:
        return next((i for i, part in enumerate(beginning) if part not in self._sent), len(beginning))

    def send(self, beginning: Beginning) -> None:
        for part in beginning:
            self._sent[part] = None
            self._sent.move_to_end(part)
        while len(self._sent) > _MOST_BLOCKS:
            self._sent.popitem(last=False)


class Routing:
    """The servers that there are, by name. Plain Python; may be used from several threads.

    most_ahead: how many more requests than the idlest the server with the longest cached prefix may have.
    """

    def __init__(self, most_ahead: int = 4) -> None:
        self.most_ahead = most_ahead
        self._servers: dict[str, _Server] = {}
        self._open: set[str] = set()
        self._lock = threading.Lock()

    @property
    def servers(self) -> list[str]:
        with self._lock:
            return sorted(self._servers)

    def keep(self, names: Iterable[str]) -> None:
        """Set the servers to `names`, and forget all others."""
        with self._lock:
            self._servers = {name: self._servers.get(name) or _Server() for name in names}

    def ranked(self, beginning: Beginning, names: Sequence[str]) -> list[str]:
        """`names`, the best first: the longest known beginning, then the fewest requests and prompts.

        For a server with far more requests than the idlest, the known beginning does not count.
        """
        with self._lock:
            servers = {name: self._servers.setdefault(name, _Server()) for name in names}
            idlest = min((len(server.requests) for server in servers.values()), default=0)

            def rank(name: str) -> tuple[int, int, int]:
                server = servers[name]
                is_near = len(server.requests) - idlest <= self.most_ahead
                known = server.num_known(beginning) if is_near else 0
                return -known, len(server.requests), server.num_sent

            return sorted(names, key=rank)

    def open(self, request: str) -> None:
        """Record a new request; `end` removes it."""
        with self._lock:
            self._open.add(request)

    def send(self, request: str, beginning: Beginning, name: str) -> None:
        """Assign the request to server `name` only, unless its client has left."""
        with self._lock:
            self._remove(request)
            server = self._servers.setdefault(name, _Server())
            server.send(beginning)
            if request in self._open:
                server.requests.add(request)

    def end(self, request: str) -> None:
        with self._lock:
            self._open.discard(request)
            self._remove(request)

    def _remove(self, request: str) -> None:
        for server in self._servers.values():
            server.requests.discard(request)

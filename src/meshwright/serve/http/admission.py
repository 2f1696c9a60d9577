"""Keys, rates, sizes and times of clients, checked before the engine hears of a request."""

import asyncio
import hmac
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from ipaddress import IPv4Address, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import RequestError
from meshwright.serve.http.client_limits import ClientLimits
from meshwright.serve.http.error_bodies import error_object, headers_of

# Open to all: probes and scrapers of the cluster have no keys, and the page asks for one itself.
OPEN = ("/health", "/ready", "/metrics", "/")
_MOST_CLIENTS = 10_000
_CLIENT = "meshwright.client"
_LONGEST_WAIT_SECONDS = 2.0  # of a request whose client had too many refused
# Bodies up to this size are counted apart from longer ones, so that these leave room for them.
_SMALL_BYTES = 65_536
_MOST_BODIES, _MOST_SMALL_BODIES = 32, 1024  # of the largest size


class _Buckets:
    """A bucket of tokens for each client: a minute's at most, and at first, refilled evenly.

    The clients that asked longest ago are forgotten first, so that strangers cannot fill the memory.
    """

    def __init__(self, per_minute: float) -> None:
        self.per_second, self._size = per_minute / 60, max(1.0, per_minute)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def added(self, client: str, now: float, tokens: float = 0.0) -> float:
        """The tokens of a client after these are added; negative if more were taken than it had."""
        filled, at = self._buckets.pop(client, (self._size, now))
        filled = min(self._size, filled + (now - at) * self.per_second + tokens)
        self._buckets[client] = filled, now
        while len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return filled


class Rates:
    """A token of its bucket for each request of a client."""

    def __init__(self, per_minute: float) -> None:
        self._buckets = _Buckets(per_minute)

    def wait_seconds(self, client: str, now: float) -> float:
        """0 if the request may go on, and count it; otherwise the seconds to wait."""
        missing = 1 - self._buckets.added(client, now)
        if missing > 0:
            return missing / self._buckets.per_second
        self._buckets.added(client, now, -1)
        return 0.0


class Refusals:
    """Slows clients most of whose requests are refused, while requests of others are under way.

    A refused request takes a token of its client, and an accepted one returns it. A client without tokens
    waits before each request for the next token, but not for long: many users may share an address.
    """

    def __init__(self, per_minute: float) -> None:
        self._buckets, self._under_way = _Buckets(per_minute), ByClient()

    def wait_seconds(self, client: str, now: float) -> float:
        """The seconds that the client's next request must wait."""
        if self._under_way.total == self._under_way[client]:
            return 0.0
        missing = 1 - self._buckets.added(client, now)
        return min(max(0.0, missing) / self._buckets.per_second, _LONGEST_WAIT_SECONDS)

    def begin(self, client: str) -> None:
        """Count a request as under way; `end` must follow."""
        self._under_way.add(client, 1)

    def end(self, client: str, status: int, now: float) -> None:
        """Count the request as over, and as accepted or refused by the status of its answer.

        status: 0 without an answer. Rates and full queues (429) and faults of the server count as neither.
        """
        self._under_way.add(client, -1)
        if 0 < status < 400:
            self._buckets.added(client, now, 1)
        elif 400 <= status < 500 and status != 429:
            # At most the longest wait is owed, so that waits end soon after the refusals.
            lowest = -_LONGEST_WAIT_SECONDS * self._buckets.per_second
            self._buckets.added(client, now, max(-1.0, lowest - self._buckets.added(client, now)))


class Gate:
    """Middleware that refuses requests without a key (401), beyond the rate (429) or too large (413).

    Requests of clients with many refusals wait (`Refusals`).
    """

    def __init__(self, app: ASGIApp, limits: ClientLimits) -> None:
        self._app, self._limits = app, limits
        self._rates = Rates(limits.requests_per_minute) if limits.requests_per_minute else None
        self._wrong_keys = Rates(limits.wrong_keys_per_minute)
        self._refusals = Refusals(limits.refused_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except RequestError as error:
            response = JSONResponse(error_object(error), error.status, headers_of(error))
            await response(scope, receive, send)
            return
        await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an admitted request on, at once or after its client's wait."""
        client, status = client_of(scope), 0
        if wait := self._refusals.wait_seconds(client, time.monotonic()):
            await asyncio.sleep(wait)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._refusals.begin(client)
        try:
            await self._app(scope, receive, noted)
        finally:
            self._refusals.end(client, status, time.monotonic())

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        client = scope[_CLIENT] = self._client(headers, scope)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limits.max_body_bytes:
            raise _too_large(self._limits.max_body_bytes)
        wait = self._rates.wait_seconds(client, time.monotonic()) if self._rates else 0.0
        if wait > 0:
            raise RequestError(
                f"more than {self._limits.requests_per_minute:g} requests a minute;"
                f" retry in {math.ceil(wait)} s",
                status=429,
                code="rate_limit_exceeded",
                retry_after_seconds=math.ceil(wait),
            )

    def _client(self, headers: Headers, scope: Scope) -> str:
        """The key of a request, or where there are no keys the address that it came from."""
        address = network_of((scope.get("client") or ("",))[0])
        if not self._limits.api_keys:
            return address
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Every key is compared in full, so that the time tells nothing of them.
        matches = [hmac.compare_digest(given.encode(), key.encode()) for key in self._limits.api_keys]
        if scheme.lower() != "bearer" or not any(matches):
            if given and (wait := self._wrong_keys.wait_seconds(address, time.monotonic())):
                raise RequestError(
                    f"too many wrong API keys from {address}; retry in {math.ceil(wait)} s",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after_seconds=math.ceil(wait),
                )
            raise RequestError(
                "no valid API key; send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        return given


def network_of(address: str) -> str:
    """The part of an address that names a client: an IPv6 one's first 64 bits, as a client has all others.

    >>> network_of("2001:db8::7"), network_of("::ffff:10.0.0.1"), network_of("10.0.0.1")
    ('2001:db8::/64', '10.0.0.1', '10.0.0.1')
    """
    try:
        of_client = ip_address(address)
    except ValueError:  # a socket of the file system
        return address
    if isinstance(of_client, IPv4Address):
        return address
    if of_client.ipv4_mapped is not None:
        return str(of_client.ipv4_mapped)
    return str(ip_network((int(of_client), 64), strict=False))


def client_of(scope: Scope) -> str:
    """The name of a request's client, which the Gate has noted: its key or its address."""
    return scope.get(_CLIENT, "")


class ByClient:
    """A number in all and of each client; clients with 0 are forgotten."""

    def __init__(self) -> None:
        self.total, self._counts = 0, Counter[str]()

    def __getitem__(self, client: str) -> int:
        return self._counts[client]

    def add(self, client: str, number: int) -> None:
        self.total += number
        self._counts[client] += number
        if not self._counts[client]:
            del self._counts[client]


class _Held:
    """Bytes that a server holds for clients: at most `most`, and at most half of it for one client."""

    def __init__(self, most: int, kind: str) -> None:
        self._most, self._kind, self._bytes = most, kind, ByClient()

    def add(self, client: str, num_bytes: int) -> None:
        """Count bytes. Raises RequestError 429 if there are now too many."""
        self._bytes.add(client, num_bytes)
        if self._bytes.total > self._most or self._bytes[client] > self._most // 2:
            raise RequestError(
                f"the server holds too many {self._kind} bodies of requests; retry later",
                status=429,
                code="queue_full",
            )

    def remove(self, client: str, num_bytes: int) -> None:
        self._bytes.add(client, -num_bytes)


class Bodies:
    """The bodies of requests that a server holds, each of at most `most_bytes`.

    Long bodies together have at most `_MOST_BODIES` times that number of bytes, and those of one client half.
    Short ones are `_MOST_SMALL_BODIES` of the longest of them, and those of one client half.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._long = _Held(_MOST_BODIES * most_bytes, "long")
        self._short = _Held(_MOST_SMALL_BODIES * _SMALL_BYTES, "short")

    @asynccontextmanager
    async def parts(self, request: Request) -> AsyncGenerator[Sequence[bytes]]:
        """The request's body in the parts that arrived, which count as held until the block ends.

        Raises RequestError 413 as soon as it is too long, 429 if the server holds too many.
        """
        # Not joined: copying megabytes holds the interpreter's lock for milliseconds.
        parts, client, held, num_bytes = list[bytes](), client_of(request.scope), self._short, 0
        try:
            async for chunk in request.stream():
                if not chunk:
                    continue
                parts.append(chunk)
                if num_bytes + len(chunk) > self._most_bytes:
                    raise _too_large(self._most_bytes)
                if num_bytes + len(chunk) > _SMALL_BYTES and held is self._short:
                    held.remove(client, num_bytes)
                    held = self._long
                    held.add(client, num_bytes)
                num_bytes += len(chunk)
                held.add(client, len(chunk))
            yield parts
        finally:
            held.remove(client, num_bytes)


def _too_large(max_body_bytes: int) -> RequestError:
    return RequestError(f"the body has more than {max_body_bytes} bytes", status=413)

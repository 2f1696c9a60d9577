"""Prefill in other processes: one kind of server fills pages, the other fetches them and generates.

A server that generates asks for the full pages of a prompt and caches them as if it had computed them. It
computes the rest of the prompt, less than a page, and every token of the answer. So an answer does not depend
on the server that prefilled, and without pages the server computes them itself.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from meshwright.errors import RequestError
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import GREEDY, EngineError, Request

logger = logging.getLogger(__name__)

Tokens = tuple[int, ...]

# Offers that may wait at once, since each holds its pages, and for how long.
_MOST_OFFERS, _OFFER_SECONDS = 64, 60.0
# A prompt is prefilled here instead, where its pages do not come in time.
_PREFILL_SECONDS = 60.0


@dataclass(frozen=True)
class Offer:
    """Pages that wait to be pulled from `address`, under a number; `server` tells who offers them."""

    address: str
    number: int
    num_pages: int
    server: str = ""


class PageChannel(Protocol):
    """One process's end of transfers of pages: `page_transfer.PageTransfer`."""

    def offer(self, num_pages: int, exported: object, server: str = "") -> Offer: ...

    async def pull(self, offer: Offer, seconds: float) -> object: ...

    def withdraw(self, offer: Offer) -> None: ...


class Prefiller:
    """Fills pages for other servers, in the process that prefills.

    server: its name in offers, so that a server that pulled pages can report it.
    """

    def __init__(self, engine: Engine, channel: PageChannel, server: str = "") -> None:
        self.engine = engine
        self._channel, self._server = channel, server
        self._room = asyncio.Semaphore(_MOST_OFFERS)
        self._waiting: dict[int, asyncio.TimerHandle] = {}

    async def prefill(self, prompt: Tokens) -> Offer | None:
        """An offer of the full pages of a prompt; None if it fills no page.

        Raises RequestError for a prompt that does not fit, and EngineError if the engine has stopped.
        """
        await self._room.acquire()
        pages, offer = None, None
        try:
            request = Request(prompt, 1, GREEDY, exports_pages=True)
            with self.engine.submit(request) as stream:
                async for event in stream:
                    pages = event.pages
            if pages is not None:
                offer = self._channel.offer(self.engine.num_exported(len(prompt)), pages, self._server)
                late = asyncio.get_running_loop().call_later(_OFFER_SECONDS, self._withdraw, offer)
                self._waiting[offer.number] = late
        finally:
            if offer is None:
                self._room.release()
        return offer

    def pulled(self, number: int) -> None:
        """The pages of this offer have arrived."""
        if late := self._waiting.pop(number, None):
            late.cancel()
            self._room.release()

    def _withdraw(self, offer: Offer) -> None:
        logger.warning("%d pages were offered for %g s and not pulled", offer.num_pages, _OFFER_SECONDS)
        del self._waiting[offer.number]
        self._room.release()
        self._channel.withdraw(offer)


class Prefills(Protocol):
    """The servers that prefill, in any process."""

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exceptions of a request to a server that has died."""
        ...

    async def prefill(self, prompt: Tokens) -> Offer | None:
        """The offer of one of the servers (see Prefiller.prefill)."""
        ...

    async def pulled(self, offer: Offer) -> None:
        """Tells the server of the offer that its pages have arrived."""
        ...


class PrefilledElsewhere:
    """Has prompts prefilled by other servers, in the process that generates."""

    def __init__(self, engine: Engine, channel: PageChannel, servers: Prefills) -> None:
        self._engine, self._channel, self._servers = engine, channel, servers
        self._failures = (EngineError, RequestError, TimeoutError, *servers.failures)

    async def fetch(self, prompts: Sequence[Tokens]) -> None:
        """Cache the full pages of `prompts` that are not yet cached here."""
        await asyncio.gather(*(self._fetch(prompt) for prompt in dict.fromkeys(prompts)))

    async def _fetch(self, prompt: Tokens) -> None:
        # One that is too long is refused where it is submitted.
        if len(prompt) >= self._engine.context or self._engine.num_unknown_pages(prompt) < 1:
            return
        try:
            async with asyncio.timeout(_PREFILL_SECONDS):
                offer = await self._servers.prefill(prompt)
            if offer is None:
                return
            pages = await self._channel.pull(offer, _PREFILL_SECONDS)
            with suppress(*self._failures):  # it takes the offer back by itself
                await self._servers.pulled(offer)
        except self._failures as error:
            logger.warning("a prompt of %d tokens is prefilled here: %s", len(prompt), error)
            self._engine.metrics.fetched_prompts.labels("failed").inc()
            return
        self._engine.take_pages(prompt[: offer.num_pages * self._engine.page_size], pages)
        self._engine.metrics.fetched_prompts.labels("fetched").inc()

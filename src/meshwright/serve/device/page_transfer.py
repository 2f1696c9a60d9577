"""Pages of the cache on their way from one process to another, by `jax.experimental.transfer`."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import jax
from jax.experimental import transfer

from meshwright.serve.device.prefill_pool import Offer
from meshwright.serve.engine.request import EngineError

# A pull from an address without a listener would block for ever.
_PROBE_SECONDS, _POLL_SECONDS = 2.0, 0.001


class PageTransfer:
    """This process's end of transfers, at an address of `host`. JAX must know its devices.

    page_types: the types and shardings of a number of exported pages; the same at both ends.
    """

    def __init__(self, host: str, page_types: Callable[[int], Any]) -> None:
        self._page_types = page_types
        client = jax.devices()[0].client
        self._server = transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"])
        self._numbers = count()
        self._connections: dict[str, transfer.TransferConnection] = {}

    def offer(self, num_pages: int, exported: object, server: str = "") -> Offer:
        """Holds exported pages until they are pulled, once."""
        made = Offer(self._server.address(), next(self._numbers), num_pages, server)
        self._server.await_pull(made.number, exported)
        return made

    async def pull(self, offer: Offer, seconds: float) -> Any:
        """The pages that another process offers. Raises EngineError where they do not come in `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await _probe(offer.address)
                pages = self._dispatch(offer)
                while not all(leaf.is_ready() for leaf in jax.tree.leaves(pages)):
                    await asyncio.sleep(_POLL_SECONDS)
                return jax.block_until_ready(pages)  # raises what went wrong
        except (OSError, jax.errors.JaxRuntimeError) as error:
            self._connections.pop(offer.address, None)
            why = f"within {seconds:g} s" if isinstance(error, TimeoutError) else f"({error})"
            raise EngineError(f"{offer.num_pages} pages from {offer.address} did not come {why}") from error

    def withdraw(self, offer: Offer) -> None:
        """Release the pages of an offer that was not pulled, by pulling them: only a pull ends an offer."""
        self._dispatch(offer)

    def _dispatch(self, offer: Offer) -> Any:
        if offer.address not in self._connections:
            self._connections[offer.address] = self._server.connect(offer.address)
        return self._connections[offer.address].pull(offer.number, self._page_types(offer.num_pages))


async def _probe(address: str) -> None:
    """Raise OSError if no process listens at the address."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_PROBE_SECONDS):
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()

"""Prefill in other processes: the same answers, pages fetched once, and no harm where nobody prefills."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import httpx
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.serve.http.client import MODEL
from tests.serve.mock import MockRunner, answer_to, byte_tokenizer, count_up, tokens_of

from meshwright.serve.device import prefill_pool
from meshwright.serve.device.page_transfer import PageTransfer
from meshwright.serve.device.prefill_pool import Offer, PrefilledElsewhere, Prefiller, Tokens
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import EngineError, Request, SamplingParams
from meshwright.serve.http.app import create_app

GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(range(10))  # two whole pages of four, and two tokens


class Wires:
    """Transfers within this process."""

    def __init__(self) -> None:
        self.offered: dict[int, object] = {}
        self.fails = False
        self._numbers = count()

    def offer(self, num_pages: int, exported: object, server: str = "") -> Offer:
        made = Offer("here", next(self._numbers), num_pages, server)
        self.offered[made.number] = exported
        return made

    async def pull(self, offer: Offer, seconds: float) -> object:
        if self.fails:
            raise EngineError("the wire is cut")
        return self.offered.pop(offer.number)

    def withdraw(self, offer: Offer) -> None:
        del self.offered[offer.number]


class Died(Exception):
    """What a call raises whose server has died."""


class Servers:
    """The one server that prefills, as those that generate ask it."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller
        self.asked: list[Tokens] = []
        self.is_dead = False

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        return (Died,)

    async def prefill(self, prompt: Tokens) -> Offer | None:
        self.asked.append(prompt)
        if self.is_dead:
            raise Died
        return await self._prefiller.prefill(prompt)

    async def pulled(self, offer: Offer) -> None:
        self._prefiller.pulled(offer.number)


class Pools:
    """A server that prefills and one that generates, with the wires between them."""

    def __init__(self) -> None:
        self.wires, self.prefills, self.generates = Wires(), MockRunner(), MockRunner()

    @contextmanager
    def open(self) -> Iterator[None]:
        with Engine(self.prefills) as prefiller, Engine(self.generates) as self.engine:
            self.servers = Servers(Prefiller(prefiller, self.wires))
            self.elsewhere = PrefilledElsewhere(self.engine, self.wires, self.servers)
            yield

    async def answer(self, *prompts: Tokens, num_tokens: int = 5) -> list[list[int]]:
        await self.elsewhere.fetch(prompts)
        return await tokens_of(self.engine, *(Request(prompt, num_tokens, GREEDY) for prompt in prompts))


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    with made.open():
        yield made


def fetched(pools: Pools, result: str) -> float:
    return pools.engine.metrics.fetched_prompts.labels(result)._value.get()


def test_one_server_prefills_and_the_other_generates(pools):
    assert asyncio.run(pools.answer(PROMPT)) == [answer_to(count_up, PROMPT, 5)]
    assert (pools.prefills.num_generated, pools.generates.num_generated) == (1, 5)
    # The pages were full of eight tokens; the other two are computed where the answer is.
    assert pools.generates.num_accepted == 2 and pools.generates.batches[0] == [2]
    assert not pools.wires.offered and fetched(pools, "fetched") == 1


def test_what_is_cached_is_not_asked_for_again(pools):
    for last in (20, 30):
        prompt = (*PROMPT, last)
        assert asyncio.run(pools.answer(prompt)) == [answer_to(count_up, prompt, 5)]
    assert len(pools.servers.asked) == 1


def test_prompts_of_one_request_are_fetched_at_once_and_equal_ones_once(pools):
    prompts = [PROMPT, PROMPT, tuple(range(30, 45)), (1, 2)]
    answers = asyncio.run(pools.answer(*prompts))
    assert answers == [answer_to(count_up, prompt, 5) for prompt in prompts]
    assert pools.servers.asked == [PROMPT, prompts[2]]  # the last fills no page


@pytest.mark.parametrize("is_dead", [False, True])
def test_where_no_pages_come_the_prompt_is_computed_here(pools, is_dead):
    pools.servers.is_dead, pools.wires.fails = is_dead, not is_dead
    assert asyncio.run(pools.answer(PROMPT)) == [answer_to(count_up, PROMPT, 5)]
    assert pools.generates.batches[0] == [10] and fetched(pools, "failed") == 1


def test_a_prompt_as_long_as_the_context_is_not_sent(pools):
    asyncio.run(pools.elsewhere.fetch([tuple(range(64))]))
    assert pools.servers.asked == []


def test_offers_that_nobody_pulls_are_withdrawn(pools, monkeypatch):
    monkeypatch.setattr(prefill_pool, "_OFFER_SECONDS", 0.05)
    pools.wires.fails = True

    async def main() -> None:
        for last in range(70):  # more than may wait at once
            await pools.answer((*range(last, last + 9),), num_tokens=1)
        async with asyncio.timeout(10):
            while pools.wires.offered:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_server_of_http_fetches_before_it_answers(pools):
    async def main() -> httpx.Response:
        app = create_app(pools.engine, byte_tokenizer(), MODEL, prefilled=pools.elsewhere)
        body = {"model": MODEL, "prompt": list(PROMPT), "max_tokens": 5, "temperature": 0}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/completions", json=body)

    assert asyncio.run(main()).status_code == 200
    assert pools.servers.asked == [PROMPT] and pools.generates.batches[0] == [2]


SHAPE, DTYPE = (4, 8), "bfloat16"


def two_devices() -> jax.ShapeDtypeStruct:
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    return jax.ShapeDtypeStruct(SHAPE, DTYPE, sharding=NamedSharding(mesh, P(None, "tensor")))


OFFERS = """
import sys
import jax, numpy as np
from tests.serve.device.test_prefill_pool import SHAPE, two_devices
from meshwright.serve.device.page_transfer import PageTransfer
kind = two_devices()
transfer = PageTransfer("127.0.0.1", lambda num_pages: [kind])
for number in range(2):
    values = np.arange(32).reshape(SHAPE) + number
    offer = transfer.offer(3, [jax.device_put(values.astype(kind.dtype), kind.sharding)])
    if number:
        transfer.withdraw(offer)
    print(offer.address, offer.number, flush=True)
sys.stdin.read()
"""


def test_pages_come_from_another_process_onto_the_same_devices_and_a_dead_one_is_named():
    transfer = PageTransfer("127.0.0.1", lambda num_pages: [two_devices()])
    # As many devices as here, whatever another test has left in the environment.
    alike = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={len(jax.devices())}"}
    with subprocess.Popen(
        [sys.executable, "-c", OFFERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alike
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        (address, number), (_, withdrawn) = (other.stdout.readline().split() for _ in range(2))
        [pages] = asyncio.run(transfer.pull(Offer(address, int(number), 3), 30))
        assert pages.sharding == two_devices().sharding
        np.testing.assert_array_equal(np.asarray(pages, np.float32), np.arange(32).reshape(SHAPE))
        with pytest.raises(EngineError, match=r"^3 pages from \S+ did not come within 0.2 s$"):
            asyncio.run(transfer.pull(Offer(address, int(withdrawn), 3), 0.2))
        other.stdin.close()
    with pytest.raises(EngineError, match=r"^3 pages from \S+ did not come"):
        asyncio.run(transfer.pull(Offer(address, 0, 3), 5))

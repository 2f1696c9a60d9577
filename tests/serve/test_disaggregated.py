"""Prefill on one engine and generation on another: the same answers, pages copied, nothing left behind."""

import asyncio
import random

import pytest
from tests.serve.mock import EOS, MockRunner, answer_to, count_up, script, tokens_of

from meshwright.errors import RequestError
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import EngineError, Request, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def pair(prefill: MockRunner, generate: MockRunner, max_waiting: int = 256) -> Engine:
    return Engine(prefill, generator=Engine(generate), max_waiting=max_waiting)


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def is_empty(engine: Engine) -> bool:
    counts = engine._occupancy()
    return (counts.waiting, counts.running, counts.held_pages) == (0, 0, 0)


def test_one_prefills_and_the_other_generates():
    prefill, generate = MockRunner(), MockRunner()
    prompt = tuple(range(10))
    with pair(prefill, generate) as engine:
        [answer] = asyncio.run(tokens_of(engine, Request(prompt, 5, GREEDY)))
        assert is_empty(engine)
    assert answer == answer_to(count_up, prompt, 5)
    assert (prefill.num_generated, generate.num_generated) == (1, 4)
    # Two of the prompt's pages of four were full; the rest and the first token are computed anew.
    assert generate.num_accepted == 2 and generate.batches[0] == [3]


def test_pages_that_are_there_are_not_copied_again():
    prefill, generate = MockRunner(), MockRunner()
    with pair(prefill, generate) as engine:
        for last in (20, 30):
            asyncio.run(tokens_of(engine, Request((*range(10), last), 3, GREEDY)))
    assert generate.num_accepted == 2


@pytest.mark.parametrize("seed", range(3))
def test_many_requests_are_answered_as_by_one_engine(seed):
    random_ = random.Random(seed)
    requests = [
        Request(tuple(random_.choices(range(250), k=random_.randint(1, 30))), random_.randint(1, 20), GREEDY)
        for _ in range(30)
    ]
    # So few pages that sequences lose theirs, on both sides.
    prefill, generate = (MockRunner(num_slots=4, num_pages=20, chunk=8) for _ in range(2))
    with pair(prefill, generate) as engine:
        answers = asyncio.run(tokens_of(engine, *requests))
        assert is_empty(engine)
    assert answers == [answer_to(count_up, one.prompt, one.max_tokens or 0) for one in requests]


def test_an_answer_of_one_token_stays_where_it_began():
    prefill, generate = MockRunner(script(7)), MockRunner(script(7))
    with pair(prefill, generate) as engine:
        asked = (Request((1,), 1, GREEDY), Request((2,), None, GREEDY, frozenset({7})))
        assert asyncio.run(tokens_of(engine, *asked)) == [[7], [7]]
    assert generate.batches == []


def test_a_client_that_leaves_frees_the_place_wherever_it_is():
    prefill, generate = MockRunner(script(*[5] * 60), context=128), MockRunner(script(*[5] * 60), context=128)

    async def main(engine: Engine) -> None:
        for num_events in (1, 2, 5):
            with engine.submit(Request(tuple(range(9)), 50, GREEDY)) as stream:
                for _ in range(num_events):
                    await anext(stream)
        generate.gate.clear()  # the next one arrives, and is not yet adopted
        with engine.submit(Request((3,), 50, GREEDY), Request((4,), 50, GREEDY)) as stream:
            await anext(stream)
        generate.gate.set()
        await until(lambda: is_empty(engine))

    with pair(prefill, generate) as engine:
        asyncio.run(main(engine))


def test_the_end_of_the_generator_ends_its_answers_and_takes_no_more():
    prefill, generate = MockRunner(), MockRunner()
    generate.failure = ValueError("no memory")

    async def main(engine: Engine) -> None:
        with engine.submit(Request((1, 2), 9, GREEDY)) as stream:
            await anext(stream)
            with pytest.raises(EngineError, match="ValueError: no memory"):
                await anext(stream)
        assert "no memory" in (engine.stopped or "")
        with pytest.raises(EngineError, match="no memory"):
            engine.submit(Request((1,), 2, GREEDY))

    with pair(prefill, generate) as engine:
        asyncio.run(main(engine))


def test_what_waits_for_the_generator_counts_against_the_queue():
    prefill, generate = MockRunner(num_slots=1), MockRunner(num_slots=1)

    async def main(engine: Engine) -> None:
        generate.gate.clear()
        with engine.submit(*[Request((i,), 9, GREEDY) for i in range(3)]) as stream:
            for _ in range(3):
                await anext(stream)
            with pytest.raises(RequestError, match="the queue has room for") as full:
                engine.submit(*[Request((9,), 2, GREEDY)] * 3)
            assert full.value.status == 429
            generate.gate.set()
            async for _ in stream:
                pass

    with pair(prefill, generate, max_waiting=2) as engine:
        asyncio.run(main(engine))


def test_metrics_are_of_both():
    with pair(MockRunner(script(7, EOS)), MockRunner(script(7, EOS))) as engine:
        asked = Request(tuple(range(10)), 9, GREEDY, frozenset({EOS}))
        asyncio.run(tokens_of(engine, asked))
        text = engine.metrics.text().decode()
    for line in (
        "meshwright_generated_tokens_total 2.0",
        "meshwright_prompt_tokens_total 10.0",
        'meshwright_finished_requests_total{reason="stop"} 1.0',
        "meshwright_generate_seconds_count 1.0",
    ):
        assert line in text.splitlines(), line

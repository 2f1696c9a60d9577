"""Requests that generate nothing: scores and embeddings go through the scheduler as prompts do."""

import asyncio
import random

import numpy as np
import pytest
from tests.serve.mock import MockRunner, answer_to, count_up, embedding_of
from tests.serve.test_disaggregated import is_empty, pair

from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.policy import MODES
from meshwright.serve.engine.request import Event, Request, SamplingParams, Scores

GREEDY = SamplingParams(temperature=0.0, top_logprobs=2)


async def events_of(engine: Engine, *requests: Request) -> list[list[Event]]:
    found: list[list[Event]] = [[] for _ in requests]
    with engine.submit(*requests) as stream:
        async for event in stream:
            found[event.index].append(event)
    return found


def check(runner: MockRunner, request: Request, events: list[Event]) -> None:
    first, last = events[0], events[-1]
    if request.scores_prompt:
        assert list(first.prompt) == runner.scores(list(request.prompt), 2)
    if request.max_tokens == 0:
        assert len(events) == 1 and first.score is None
    else:
        assert request.max_tokens is not None
        assert [one.token for one in events] == answer_to(count_up, request.prompt, request.max_tokens)
    assert last.finish_reason == "length"
    assert (last.embedding is not None) == request.embeds
    if last.embedding is not None:
        assert last.embedding.tolist() == embedding_of(request.prompt).tolist()


def some_request(chance: random.Random) -> Request:
    begin = tuple(range(20))[: chance.choice([0, 9, 20])]
    prompt = begin + tuple(chance.randrange(50) for _ in range(chance.randint(1, 12)))
    kind = chance.choice(["score", "embed", "answer", "score and answer", "prefill"])
    return Request(
        prompt,
        chance.randint(1, 12) if "answer" in kind else 0,
        GREEDY,
        scores_prompt="score" in kind,
        embeds=kind == "embed",
        priority=chance.choice([0, 0, 1]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_prompts_are_read_in_any_mixture(seed: int):
    """In chunks, with pages that run out, cached prefixes and pages on the host; answers beside them."""
    chance = random.Random(seed)
    runner = MockRunner(
        count_up,
        num_slots=chance.choice([1, 2, 4]),
        context=48,
        num_pages=chance.choice([12, 16, 60]),
        chunk=chance.choice([4, 8, 64]),
        num_host_pages=chance.choice([0, 6]),
    )
    runner.prepare_reads()
    requests = [some_request(chance) for _ in range(16)]

    async def main(engine: Engine) -> list[list[list[Event]]]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(events_of(engine, request) for request in requests))

    with Engine(runner, mode=chance.choice(MODES), prefix_cache=chance.random() < 0.7) as engine:
        for request, [events] in zip(requests, asyncio.run(main(engine)), strict=True):
            check(runner, request, events)
        assert is_empty(engine)


def test_a_long_prompt_that_is_scored_holds_up_no_step():
    runner = MockRunner(count_up, num_slots=2, context=256, chunk=8)
    runner.prepare_reads()
    asked = Request((7,), 30, GREEDY), Request(tuple(range(200)), 0, GREEDY, scores_prompt=True)
    with Engine(runner) as engine:
        for request, events in zip(asked, asyncio.run(events_of(engine, *asked)), strict=True):
            check(runner, request, events)
    assert max(map(sum, runner.batches)) <= 9
    assert sum(1 for batch in runner.batches if sorted(batch) == [1, 8]) >= 24


def test_an_engine_that_only_prefills_keeps_them():
    prefill, generate = MockRunner(), MockRunner()
    prefill.prepare_reads()
    asked = Request((1, 2, 3), 0, embeds=True), Request((4, 5), 0, GREEDY, scores_prompt=True)
    with pair(prefill, generate) as engine:
        for request, events in zip(asked, asyncio.run(events_of(engine, *asked)), strict=True):
            check(prefill, request, events)
        assert is_empty(engine)
    assert generate.batches == []


def test_scores_are_iterated_as_they_are_indexed():
    num_tokens = 150
    draw = np.random.default_rng(0)
    tokens, ids = draw.integers(0, 99, num_tokens), draw.integers(0, 99, (num_tokens, 3))
    scores = Scores(tokens, draw.normal(size=num_tokens), ids, draw.normal(size=(num_tokens, 3)))
    assert list(scores) == [scores[i] for i in range(num_tokens)]

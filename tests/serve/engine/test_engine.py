"""The engine on a model worked by hand: what arrives, what is freed, what is refused."""

import asyncio
import random
import threading
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from tests.serve.mock import EOS, VOCAB_SIZE, MockRunner, answer_to, count_up, script, tokens_of

from meshwright.errors import RequestError
from meshwright.models.layer_kinds import Window
from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.pages import NO_PAGE
from meshwright.serve.engine.policy import MODES
from meshwright.serve.engine.request import EngineError, Request, SamplingParams
from meshwright.serve.engine.sequence import Lifetime, TokenSequence
from meshwright.serve.engine.speculate import Drafter, ModelDrafter

GREEDY = SamplingParams(temperature=0.0)


def greedy(*prompt: int, max_tokens: int | None = 4, stop_ids: frozenset[int] = frozenset()) -> Request:
    return Request(prompt, max_tokens, GREEDY, stop_ids)


def serve(runner: MockRunner, *requests: Request) -> list[list[int]]:
    with Engine(runner) as engine:
        return asyncio.run(tokens_of(engine, *requests))


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def metric(engine: Engine, name: str) -> float:
    lines = engine.metrics.text().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name + " ")))


def test_more_requests_than_slots_are_each_answered_as_if_alone():
    runner = MockRunner(num_slots=2)
    answers = serve(runner, greedy(3, 4), greedy(10, max_tokens=2), greedy(20, max_tokens=6), greedy(7))
    assert answers == [[5, 6, 7, 8], [11, 12], [21, 22, 23, 24, 25, 26], [8, 9, 10, 11]]
    assert runner.prefilled == [[3, 4], [10], [20], [7]]  # first come, first served


def test_requests_share_a_step():
    runner = MockRunner(num_slots=2)
    serve(runner, greedy(1, max_tokens=8), greedy(2, max_tokens=8))
    assert runner.batches == [[1, 1]] * 8


@pytest.mark.parametrize(
    ("request_", "answer", "reason"),
    [
        (greedy(5, max_tokens=1), [6], "length"),
        (greedy(5, max_tokens=3), [6, 7, 8], "length"),
        (greedy(5, max_tokens=3, stop_ids=frozenset({7})), [6, 7], "stop"),
        (greedy(5, max_tokens=1, stop_ids=frozenset({6})), [6], "stop"),
        (greedy(5, 6, 7, max_tokens=None), [8, 9, 10, 11, 12], "length"),
    ],
)
def test_an_answer_ends_at_a_stop_token_the_limit_or_the_context(request_, answer, reason):
    async def main(engine: Engine):
        with engine.submit(request_) as stream:
            return [event async for event in stream]

    with Engine(MockRunner(context=8)) as engine:
        events = asyncio.run(main(engine))
    assert [event.token for event in events] == answer
    assert [event.finish_reason for event in events] == [None] * (len(answer) - 1) + [reason]
    assert all(-0.01 < event.logprob <= 0 for event in events)


@pytest.mark.parametrize(
    ("request_", "message", "param", "code"),
    [
        (
            greedy(*range(8)),
            "the prompt has 8 tokens, but the context holds 8; send at most 7",
            "prompt",
            "context_length_exceeded",
        ),
        (
            greedy(1, 2, 3, max_tokens=6),
            "3 prompt tokens and max_tokens = 6 make 9, but the context holds 8; ask for at most 5",
            "max_tokens",
            "context_length_exceeded",
        ),
        (
            greedy(1, VOCAB_SIZE),
            f"token {VOCAB_SIZE} is not in the vocabulary of {VOCAB_SIZE} tokens",
            "prompt",
            None,
        ),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_queued(request_, message, param, code):
    async def main(engine: Engine):
        with pytest.raises(RequestError) as error:
            engine.submit(greedy(1), request_)
        return error.value

    with Engine(MockRunner(context=8)) as engine:
        error = asyncio.run(main(engine))
        assert metric(engine, "meshwright_waiting_requests") == 0
    assert (str(error), error.status, error.param, error.code) == (message, 400, param, code)


def test_a_full_queue_is_429():
    runner = MockRunner(num_slots=1)

    async def main(engine: Engine):
        runner.gate.clear()
        with engine.submit(greedy(1), greedy(2)) as stream:
            with pytest.raises(RequestError, match="room for 0; retry later") as error:
                engine.submit(greedy(3))
            runner.gate.set()
            return error.value.status, len([event async for event in stream])

    with Engine(runner, max_waiting=1) as engine:
        assert asyncio.run(main(engine)) == (429, 8)


def test_leaving_the_stream_frees_the_slot_at_once():
    runner = MockRunner(num_slots=1, context=100_000)

    async def main(engine: Engine):
        with engine.submit(greedy(1, max_tokens=None)) as endless:
            await anext(endless)
            assert metric(engine, "meshwright_running_requests") == 1
        assert metric(engine, "meshwright_running_requests") == 0
        return await tokens_of(engine, greedy(50))

    with Engine(runner) as engine:
        assert asyncio.run(main(engine)) == [[51, 52, 53, 54]]
        assert metric(engine, 'meshwright_finished_requests_total{reason="cancelled"}') == 1


def test_cancelling_a_waiting_request_takes_it_off_the_queue():
    runner = MockRunner(num_slots=1)

    async def main(engine: Engine):
        runner.gate.clear()
        running = engine.submit(greedy(1))
        await until(lambda: metric(engine, "meshwright_running_requests") == 1)
        engine.submit(greedy(2)).close()
        assert metric(engine, "meshwright_waiting_requests") == 0
        runner.gate.set()
        return [event.token async for event in running]

    with Engine(runner) as engine:
        assert asyncio.run(main(engine)) == [2, 3, 4, 5]
    assert [2] not in runner.prefilled


def test_finishing_one_answer_leaves_the_others_alone():
    async def main(engine: Engine):
        seen: list[tuple[int, int]] = []
        with engine.submit(greedy(1, max_tokens=40), greedy(100)) as stream:
            async for event in stream:
                seen.append((event.index, event.token))
                stream.finish(0, "stop")
        return seen

    with Engine(MockRunner()) as engine:
        seen = asyncio.run(main(engine))
    assert [token for index, token in seen if index == 1] == [101, 102, 103, 104]
    assert [token for index, token in seen if index == 0] == [2]


def test_clients_that_come_and_go_disturb_nobody():
    async def one(engine: Engine, start: int, leaves_after: int | None) -> None:
        seen: list[int] = []
        with engine.submit(greedy(start, max_tokens=10)) as stream:
            async for event in stream:
                seen.append(event.token)
                if len(seen) == leaves_after:
                    break
        assert seen == list(range(start + 1, start + 1 + (leaves_after or 10)))

    async def main(engine: Engine) -> None:
        async with asyncio.timeout(30):
            await asyncio.gather(*(one(engine, start, [None, 1, 4][start % 3]) for start in range(1, 61)))

    with Engine(MockRunner(num_slots=3)) as engine:
        asyncio.run(main(engine))
        assert metric(engine, "meshwright_running_requests") == 0
        assert metric(engine, "meshwright_waiting_requests") == 0


def test_a_seed_gives_the_same_answer_alone_and_in_any_company():
    def request(seed: int) -> Request:
        return Request((9,), 12, SamplingParams(temperature=1.0, top_p=0.9, seed=seed))

    def answers(*seeds: int) -> list[list[int]]:
        return serve(MockRunner(count_up, num_slots=3, spread=4.0), *(request(seed) for seed in seeds))

    [alone] = answers(42)
    crowd = answers(1, 2, 42, 3, 42)
    assert crowd[2] == crowd[4] == alone
    assert len({tuple(answer) for answer in crowd}) == 4


def test_a_failing_device_fails_every_request_and_stops_the_engine(caplog):
    runner = MockRunner(num_slots=1)

    async def main(engine: Engine):
        runner.gate.clear()
        streams = [engine.submit(greedy(1)), engine.submit(greedy(2))]
        runner.failure = ValueError("out of memory")
        runner.gate.set()
        for stream in streams:
            with pytest.raises(EngineError, match=r"^the engine failed: ValueError: out of memory$"):
                await anext(stream)
        with pytest.raises(EngineError, match="out of memory"):
            engine.submit(greedy(3))

    with Engine(runner) as engine:
        asyncio.run(main(engine))
        assert engine.stopped == "the engine failed: ValueError: out of memory"
        assert metric(engine, "meshwright_running_requests") == 0
    assert "the engine failed" in caplog.text


def test_logits_that_are_not_finite_fail_only_their_own_request():
    runner = MockRunner()
    healthy = runner.logits
    runner.logits = lambda prompt, answer: healthy(prompt, answer) * (float("nan") if prompt == [9] else 1)

    async def main(engine: Engine):
        sick, well = engine.submit(greedy(9)), engine.submit(greedy(20))
        with pytest.raises(EngineError, match=r"^the model's logits at position 1 are not finite$"):
            await anext(sick)
        return [event.token async for event in well], engine.stopped

    with Engine(runner) as engine:
        assert asyncio.run(main(engine)) == ([21, 22, 23, 24], None)


class Panic(BaseException):
    """Like a panic of a native library, which is no Exception."""


class Faulty:
    """A constraint that fails in one of its methods, the second time that it is called."""

    def __init__(self, fault: str, error: BaseException) -> None:
        self.fault, self.error, self.calls = fault, error, Counter[str]()
        self._may_fail("__init__", 1)

    def _may_fail(self, method: str, call: int) -> None:
        self.calls[method] += 1
        if method == self.fault and self.calls[method] == call:
            raise self.error

    def allowed(self) -> np.ndarray:
        self._may_fail("allowed", 2)
        return np.ones(VOCAB_SIZE, bool)

    def accept(self, token: int) -> None:
        self._may_fail("accept", 2)


@pytest.mark.parametrize("error", [ValueError("deep"), Panic("deep")], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fault", ["__init__", "allowed", "accept"])
def test_an_error_of_one_request_fails_only_that_request(fault, error, caplog):
    runner = MockRunner(num_slots=3)

    async def main(engine: Engine):
        faulty = replace(greedy(9, max_tokens=5), new_constraint=lambda: Faulty(fault, error))
        for _ in range(2):
            streams = [engine.submit(one) for one in (greedy(20, max_tokens=6), faulty, greedy(30))]
            with pytest.raises(EngineError, match=rf"^the request failed: {type(error).__name__}: deep$"):
                async for _ in streams[1]:
                    pass
            assert [[event.token async for event in stream] for stream in streams[::2]] == [
                [*range(21, 27)],
                [*range(31, 35)],
            ]

    with Engine(runner) as engine:
        asyncio.run(main(engine))
        assert engine.stopped is None
        assert metric(engine, "meshwright_running_requests") == 0
        assert metric(engine, "meshwright_held_pages") == 0
    assert caplog.text.count("a request failed") == 2


def test_an_error_of_an_answer_that_its_client_has_left_ends_no_other():
    runner, has_begun, may_end = MockRunner(num_slots=2), threading.Event(), threading.Event()

    def slow() -> Faulty:
        has_begun.set()
        may_end.wait(30)
        raise Panic("late")

    async def main(engine: Engine):
        with engine.submit(replace(greedy(9), new_constraint=slow), greedy(20)) as stream:
            await asyncio.to_thread(has_begun.wait, 30)
            stream.finish(0, "cancelled")
            may_end.set()
            return [event.token async for event in stream]

    with Engine(runner) as engine:
        assert asyncio.run(main(engine)) == [21, 22, 23, 24]
        assert engine.stopped is None


def test_leaving_the_engine_ends_what_is_under_way():
    async def main():
        runner = MockRunner(context=100_000)
        engine = Engine(runner)
        with pytest.raises(EngineError, match=r"^the engine has not started$"):
            engine.submit(greedy(1))
        with engine:
            stream = engine.submit(greedy(1, max_tokens=None))
            await anext(stream)
        with pytest.raises(EngineError, match=r"^the server is shutting down$"):
            async for _ in stream:
                pass

    asyncio.run(main())


def test_metrics_count_tokens_and_times():
    with Engine(MockRunner(script(7, 8, 9))) as engine:
        asyncio.run(tokens_of(engine, greedy(1, 2), greedy(3, max_tokens=9, stop_ids=frozenset({EOS}))))
        assert metric(engine, "meshwright_prompt_tokens_total") == 3
        assert metric(engine, "meshwright_generated_tokens_total") == 4 + 4
        assert metric(engine, "meshwright_time_to_first_token_seconds_count") == 2
        assert metric(engine, "meshwright_time_per_output_token_seconds_count") == 2
        assert metric(engine, 'meshwright_finished_requests_total{reason="length"}') == 1
        assert metric(engine, 'meshwright_finished_requests_total{reason="stop"}') == 1


class Told:
    """A forecast of a second a token, and of a byte of weights a step."""

    def seconds(self, batch: Batch) -> float:
        return float(batch.num_tokens)

    def bytes(self, batch: Batch) -> dict[str, int]:
        return {"weights": 1}


def test_metrics_put_the_planned_steps_beside_the_measured():
    with Engine(MockRunner(), forecast=Told()) as engine:
        asyncio.run(tokens_of(engine, greedy(1, 2, 3, max_tokens=4)))
        steps = {kind: f'{{kind="{kind}"}}' for kind in ("prefill", "generate")}
        counts = [metric(engine, f"meshwright_step_seconds_count{kind}") for kind in steps.values()]
        assert counts == [1, 3]
        planned = [metric(engine, f"meshwright_planned_steps_seconds_total{kind}") for kind in steps.values()]
        assert planned == [3, 3]
        assert metric(engine, 'meshwright_read_bytes_total{what="weights"}') == 4
        assert metric(engine, "meshwright_step_tokens_sum") == 6
        assert metric(engine, 'meshwright_step_seconds_sum{kind="generate"}') > 0


def test_metrics_count_pages_and_what_prefixes_saved():
    runner = MockRunner(page_size=4, num_slots=1, context=64)
    with Engine(runner) as engine:
        for _ in range(2):
            asyncio.run(tokens_of(engine, greedy(*range(10), max_tokens=2)))
        assert metric(engine, "meshwright_prefix_queries_total") == 20
        assert metric(engine, "meshwright_prefix_hits_total") == 8
        pages = [metric(engine, f"meshwright_{name}") for name in ("pages", "held_pages", "cached_pages")]
        assert pages == [16, 0, 2]
        assert metric(engine, "meshwright_free_pages") == 14


def test_evicted_pages_wait_in_the_hosts_memory():
    """A conversation that others have pushed out of the cache is not computed again."""
    runner = MockRunner(page_size=4, num_slots=1, context=32, num_pages=8, num_host_pages=8)
    with Engine(runner) as engine:
        for first in (0, 100, 0):
            prompt = range(first, first + 24)
            assert asyncio.run(tokens_of(engine, greedy(*prompt, max_tokens=3))) == [
                [first + 24, first + 25, first + 26]
            ]
        assert metric(engine, "meshwright_prefix_hits_total") == 20
        assert runner.num_moved["in"] >= 4 == metric(engine, 'meshwright_moved_pages_total{direction="in"}')
        assert metric(engine, "meshwright_host_pages") == 8 >= metric(engine, "meshwright_cached_host_pages")


def test_a_preempted_request_gets_its_pages_back():
    """Two answers of up to eight pages in a cache of ten: less of the later one is prefilled again."""
    prefilled = {}
    for num_host_pages in (0, 8):
        runner = MockRunner(page_size=4, context=32, num_pages=10, num_host_pages=num_host_pages)
        requests = [greedy(*range(first, first + 16), max_tokens=16) for first in (0, 100)]
        with Engine(runner) as engine:
            assert asyncio.run(tokens_of(engine, *requests)) == [
                answer_to(count_up, request.prompt, 16) for request in requests
            ]
            assert metric(engine, "meshwright_preemptions_total") > 0
        prefilled[num_host_pages] = sum(count for step in runner.batches for count in step if count > 1)
    assert prefilled[8] < prefilled[0]


def test_metrics_see_the_pages_of_answers_under_way():
    runner = MockRunner(page_size=4, num_slots=1, context=64)

    async def main(engine: Engine) -> None:
        with engine.submit(greedy(*range(10), max_tokens=30)) as stream:
            await anext(stream)
            runner.gate.clear()
            assert metric(engine, "meshwright_held_pages") >= 3
            assert metric(engine, "meshwright_cache_usage") >= 3 / 16
            runner.gate.set()

    with Engine(runner) as engine:
        asyncio.run(main(engine))


def test_a_lifetime_tells_its_phases():
    lifetime = Lifetime(submitted_seconds=1.0)
    lifetime.finished_seconds = 2.0
    assert lifetime.phases == {"queue": (1.0, 2.0)}
    lifetime.started_seconds = 1.25
    assert lifetime.phases == {"queue": (1.0, 1.25), "prefill": (1.25, 2.0)}
    lifetime.first_token_seconds = 1.5
    assert lifetime.phases["generate"] == (1.5, 2.0) and next(iter(lifetime.phases)) == "queue"


class GoodGuesser(Drafter):
    """Draws most of its drafts from the answer that the model will give, and the rest wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.num_right = 0

    def pays(self, num_sequences: int) -> bool:
        return self._random.random() < 0.8

    def draft(self, sequence: TokenSequence) -> list[int]:
        drafts = answer_to(of_all_tokens, tuple(sequence.tokens), self._random.randint(0, 3))
        return [token if self._random.random() < 0.7 else (token + 1) % 50 for token in drafts]

    def logits(self, sequence: TokenSequence) -> tuple[()]:
        return ()

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.num_right += num_accepted


def of_all_tokens(prompt: list[int], answer: list[int]) -> int:
    tokens = prompt + answer
    return (7 * sum(i * token for i, token in enumerate(tokens, 1)) + len(tokens)) % 50


@pytest.mark.parametrize("seed", range(24))
def test_answers_are_the_same_however_they_are_computed(seed):
    """Few pages or many, chunks, prefixes, drafts, batches, priorities, clients that leave: any mixture.

    Every other model has a sliding window, with as few pages as one sequence needs; some of the others have
    pages in the host's memory.
    """
    chance = random.Random(seed)
    page_size, num_slots = chance.choice([2, 4, 8]), chance.choice([1, 2, 3, 5])
    num_pages = max(48 // page_size, chance.choice([1, 2, 4]) * num_slots * 48 // page_size // 4)
    runner = MockRunner(
        of_all_tokens,
        num_slots=num_slots,
        context=48,
        page_size=page_size,
        num_pages=num_pages,
        chunk=chance.choice([4, 8, 64]),
        window=[None, Window(3), None, Window(6, chunked=True), None, Window(17)][seed % 6],
        num_host_pages=[0, 0, 9, 0, 2, 0][seed % 6],
    )
    begin = tuple(chance.randrange(50) for _ in range(20))
    prompts = [
        begin[: chance.choice([0, 9, 20])] + tuple(chance.randrange(50) for _ in range(chance.randint(1, 9)))
        for _ in range(10)
    ]
    requests = [
        Request(prompt, chance.randint(1, 48 - len(prompt)), GREEDY, priority=chance.choice([0, 0, 1]))
        for prompt in prompts
    ]
    leaves = {number for number in range(10) if chance.random() < 0.15}
    guesser = GoodGuesser(seed) if chance.random() < 0.5 else None

    async def one(engine: Engine, number: int) -> list[int]:
        found: list[int] = []
        with engine.submit(requests[number]) as stream:
            async for event in stream:
                found.append(event.token)
                if number in leaves:
                    break
        return found

    async def main(engine: Engine) -> list[list[int]]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(one(engine, number) for number in range(10)))

    mode, prefix_cache = chance.choice(MODES), chance.random() < 0.7
    with Engine(runner, mode=mode, prefix_cache=prefix_cache, drafter=guesser) as engine:
        found = asyncio.run(main(engine))
    for number, request in enumerate(requests):
        assert request.max_tokens is not None
        num_tokens = 1 if number in leaves else request.max_tokens
        assert found[number] == answer_to(of_all_tokens, request.prompt, num_tokens)
    free = sum(replica.pool.num_free for replica in engine._scheduler.replicas)
    assert free + engine._occupancy().cached_pages == num_pages
    _assert_no_window_page_is_lost(engine)
    counts = engine._occupancy()
    [replica] = engine._scheduler.replicas
    assert (
        replica.host_pool is None or replica.host_pool.num_free + counts.cached_on_host == counts.host_pages
    )
    # Where pages are that few, sequences run one by one, and some never long enough to guess.
    assert guesser is None or guesser.num_right or runner.limits.window


def _assert_no_window_page_is_lost(engine: Engine) -> None:
    for replica in engine._scheduler.replicas:
        if replica.window_pool is not None:
            nodes = replica.prefixes._nodes if replica.prefixes is not None else ()
            kept = sum(node.window_page != NO_PAGE for node in nodes)
            assert replica.window_pool.num_free + kept == replica.window_pool.num_pages


@pytest.mark.parametrize("draft_rule", [of_all_tokens, count_up])
def test_a_draft_model_changes_no_answer(draft_rule):
    """One that is always right takes fewer steps; one that is wrong is left off by itself."""
    prompts = [(1, 2, 3), (7,), tuple(range(20)), (4, 4)]
    requests = [Request(prompt, 12, GREEDY) for prompt in prompts]
    small = MockRunner(draft_rule, num_slots=2, context=48)
    drafter = ModelDrafter(small, 3, lambda num_sequences: 2.0)
    runner = MockRunner(of_all_tokens, num_slots=2, context=48)

    async def one(engine: Engine, request: Request) -> list[int]:
        return [event.token async for event in engine.submit(request)]

    async def main(engine: Engine) -> list[list[int]]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(one(engine, request) for request in requests))

    with Engine(runner, drafter=drafter) as engine:
        assert asyncio.run(main(engine)) == [answer_to(of_all_tokens, prompt, 12) for prompt in prompts]
    if draft_rule is of_all_tokens:
        assert len(runner.batches) < 2 * 12  # two batches of two sequences, of 12 steps each
        assert any(3 + 1 in batch for batch in runner.batches)
    else:
        assert not drafter.pays(2)


def test_a_draft_model_samples_with_the_noise_of_the_answer():
    """Sampled guesses of the same distribution are all right, and the answer is that without guesses.

    Greedy guesses would be right with the probability of the most likely token only.
    """
    prompts = [(1, 2, 3), (7,), tuple(range(20)), (4, 4)]
    drawn = [SamplingParams(temperature=1.0, seed=seed) for seed in range(len(prompts))]
    requests = [Request(prompt, 16, how) for prompt, how in zip(prompts, drawn, strict=True)]

    async def one(engine: Engine, request: Request) -> list[int]:
        return [event.token async for event in engine.submit(request)]

    async def main(engine: Engine) -> list[list[int]]:
        async with asyncio.timeout(30):
            return await asyncio.gather(*(one(engine, request) for request in requests))

    def runner() -> MockRunner:
        return MockRunner(of_all_tokens, num_slots=2, context=48, spread=1.0)

    class Counting(ModelDrafter):
        counts: ClassVar = [0, 0]

        def verified(self, num_drafts: int, num_accepted: int) -> None:
            self.counts[0] += num_drafts
            self.counts[1] += num_accepted
            super().verified(num_drafts, num_accepted)

    with Engine(runner()) as engine:
        expected = asyncio.run(main(engine))
    greedy = [answer_to(of_all_tokens, prompt, 16) for prompt in prompts]
    assert expected != greedy, "the spread leaves no room for sampling"
    drafter = Counting(runner(), 3, lambda num_sequences: 1.5)
    with Engine(runner(), drafter=drafter) as engine:
        assert asyncio.run(main(engine)) == expected
    num_drafts, num_accepted = drafter.counts
    assert num_drafts == num_accepted > 0

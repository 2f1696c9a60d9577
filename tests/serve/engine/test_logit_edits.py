"""What a request changes in its logits, as its answer grows."""

import asyncio

import numpy as np
from tests.serve.mock import EOS, VOCAB_SIZE, MockRunner, count_up, says

from meshwright.serve.device.sampling import batch_edits
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.logit_edits import LogitEdits
from meshwright.serve.engine.request import Event, Request, SamplingParams
from meshwright.serve.engine.sequence import TokenSequence


def edits(request: Request) -> LogitEdits:
    return LogitEdits(request, VOCAB_SIZE)


def test_a_request_without_edits_has_none():
    sequence = TokenSequence(Request((1,)), 1, 0, lambda _: None)
    sequence.prepare_edits(VOCAB_SIZE)
    assert sequence.edits is None
    assert batch_edits([(SamplingParams(), None)], VOCAB_SIZE) is None


def test_counts_grow_with_the_answer_and_the_prompt_stays():
    found = edits(Request((3, 3, 4), sampling=SamplingParams(presence_penalty=1.0)))
    for token in (7, 7, 8):
        found.accept(token)
    assert np.flatnonzero(found.prompt).tolist() == [3, 4]
    assert {int(token): int(found.counts[token]) for token in np.flatnonzero(found.counts)} == {7: 2, 8: 1}


def test_bias_allowed_tokens_and_stop_tokens_before_their_time():
    params = SamplingParams(logit_bias=((5, 2.0), (6, -100.0)), allowed_ids=(5, 6, EOS), min_tokens=1)
    found = edits(Request((1,), sampling=params, stop_ids=frozenset({EOS})))
    found.prepare()
    before = found.bias
    assert (before[5], before[6], before[EOS], before[0]) == (2.0, -100.0, -np.inf, -np.inf)
    found.accept(5)
    found.prepare()
    assert found.bias[EOS] == 0.0


def test_stop_tokens_that_the_model_does_not_have_change_nothing():
    request = Request(
        (1,), 3, SamplingParams(0.0, min_tokens=2), stop_ids=frozenset({EOS, VOCAB_SIZE, 2**31 - 1})
    )
    [events] = answers(MockRunner(count_up), request)
    assert [event.token for event in events] == [2, 3, 4]


def test_rows_without_edits_stand_beside_those_with():
    with_bias = SamplingParams(logit_bias=((5, 2.0),), repetition_penalty=1.5)
    both = batch_edits(
        [(SamplingParams(), None), (with_bias, edits(Request((9,), None, with_bias)))], VOCAB_SIZE
    )
    assert both is not None
    assert np.asarray(both.bias)[:, 5].tolist() == [0.0, 2.0]
    assert np.asarray(both.prompt)[:, 9].tolist() == [False, True]
    assert np.asarray(both.repetition).tolist() == [1.0, 1.5]


def answers(runner: MockRunner, *requests: Request) -> list[list[Event]]:
    async def main(engine: Engine) -> list[list[Event]]:
        found: list[list[Event]] = [[] for _ in requests]
        with engine.submit(*requests) as stream:
            async for event in stream:
                found[event.index].append(event)
        return found

    with Engine(runner) as engine:
        return asyncio.run(main(engine))


def tokens(events: list[Event]) -> list[int]:
    return [event.token for event in events]


def greedy(**params) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)


def test_the_engine_applies_edits_to_their_own_row_alone():
    plain = Request((1,), 4, greedy())
    bias = Request((1,), 4, greedy(logit_bias=((50, 100.0),)))
    repeats = MockRunner(lambda prompt, answer: 5)
    assert [tokens(found) for found in answers(repeats, plain, bias)] == [[5] * 4, [50] * 4]
    # The likeliest token leads by 20 nats: at 8 nats a repetition the third one is another.
    frequency = Request((1,), 4, greedy(frequency_penalty=8.0))
    assert tokens(answers(MockRunner(lambda prompt, answer: 5), frequency)[0])[:4] == [5, 5, 5, 0]


def test_min_tokens_puts_the_end_off():
    request = Request((1,), 10, greedy(min_tokens=4), frozenset({EOS}))
    [found] = answers(MockRunner(says("ab")), request)
    assert len(found) == 5 and found[-1].token == EOS and found[-1].finish_reason == "stop"


class Alternating:
    """A constraint: an even token, then an odd one."""

    def __init__(self) -> None:
        self.parity = 0

    def allowed(self) -> np.ndarray:
        return np.arange(VOCAB_SIZE) % 2 == self.parity

    def accept(self, token: int) -> None:
        assert token % 2 == self.parity
        self.parity ^= 1


def test_a_constraint_is_followed_token_by_token():
    requests = [Request((8,), 5, greedy(), new_constraint=Alternating), Request((8,), 5, greedy())]
    constrained, free = answers(MockRunner(lambda prompt, answer: 41), *requests)
    assert [token % 2 for token in tokens(constrained)] == [0, 1, 0, 1, 0]
    assert tokens(constrained)[1::2] == [41, 41] and tokens(free) == [41] * 5


def test_alternatives_and_scores_of_the_prompt_come_with_the_events():
    asked = Request((3, 4, 9), 2, greedy(top_logprobs=2), scores_prompt=True)
    runner = MockRunner(count_up)
    runner.prepare_reads()
    [first, second] = answers(runner, asked)[0]
    assert [score.token for score in first.prompt] == [4, 9] and second.prompt == ()
    assert first.prompt[0].logprob > -0.01 and first.prompt[1].logprob < -19  # 4 follows 3, 9 not 4
    assert [score.top[0][0] for score in first.prompt] == [4, 5]
    assert [len(score.top) for score in (*first.prompt, first.score, second.score) if score] == [2] * 4
    assert first.score and first.score.top[0] == (10, first.logprob)

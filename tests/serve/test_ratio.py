"""Speculation by the ratio test, with a model and a draft model of other weights."""

import asyncio
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tests.serve.answers import layout

from meshwright.models.presets import load_model
from meshwright.nn.params import init_params
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Request, SamplingParams
from meshwright.serve.engine.speculate import ModelDrafter

_VOCABULARY, _TOKENS, _REQUESTS, _SLOTS = 8, 8, 320, 8
_TEMPERATURE = 1.0


class _Counting(ModelDrafter):
    num_drafts = num_accepted = 0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        # Drafts after a refused one are not tested.
        self.num_drafts += min(num_drafts, num_accepted + 1)
        self.num_accepted += num_accepted
        super().verified(num_drafts, num_accepted)


def _runner(seed: int, **how: Any) -> JaxRunner:
    config, split = replace(load_model("tiny"), vocab_size=_VOCABULARY), layout(1)
    mesh = device_mesh(split, jax.devices()[:1])
    runner = JaxRunner(
        init_params(config, as_read(split), mesh, seed),
        config,
        split,
        mesh,
        num_slots=_SLOTS,
        context=16,
        page_size=8,
        chunk=8,
        block=8,
        **how,
    )
    runner.warm_up()
    return runner


def _counts(engine: Engine, first_seed: int) -> np.ndarray:
    """How often each token is at each place of an answer to the same prompt, [place, V]."""

    async def answer(seed: int) -> list[int]:
        request = Request((1, 2, 3), _TOKENS, SamplingParams(_TEMPERATURE, seed=seed))
        return [event.token async for event in engine.submit(request)]

    async def main() -> list[list[int]]:
        answers = list[list[int]]()
        # Next to prompts nothing is drafted, so that requests come in waves.
        for first in range(first_seed, first_seed + _REQUESTS, _SLOTS):
            answers += await asyncio.gather(*(answer(first + seed) for seed in range(_SLOTS)))
        return answers

    answers = np.array(asyncio.run(main()))
    return np.array([np.bincount(column, minlength=_VOCABULARY) for column in answers.T])


@pytest.mark.slow
def test_answers_have_the_distribution_of_answers_without_drafts() -> None:
    """By a chi-square test at each place, and with more right drafts than by equal noise."""
    with Engine(_runner(0)) as engine:
        plain = _counts(engine, 10_000)
    shares = {}
    for by_ratio in (True, False):
        drafter = _Counting(_runner(1, keeps_logits=by_ratio), 3, lambda _: 0.5, by_ratio=by_ratio)
        runner = _runner(0, num_drafts=3, by_ratio=by_ratio)
        with Engine(runner, drafter=drafter) as engine:
            found = _counts(engine, 0)
        assert drafter.num_accepted > 50
        shares[by_ratio] = drafter.num_accepted / drafter.num_drafts
        for place in range(_TOKENS):
            both = plain[place] + found[place]
            used = both > 0
            chi_square = np.sum((plain[place] - found[place])[used] ** 2 / both[used])
            assert chi_square < 26.1, "the 99.95th percentile for 7 degrees of freedom"
    assert shares[True] > shares[False] + 0.02

"""Speculation by the ratio test, with a model and a draft model of other weights."""

import asyncio
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.serve.answers import layout

from meshwright.models import transformer
from meshwright.models.at_layer import Places
from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import build, flatten, init_params
from meshwright.nn.products.quantised import as_read
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.draft_head import HeadDrafter
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


class _CountingHead(HeadDrafter):
    num_drafts = num_accepted = 0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += min(num_drafts, num_accepted + 1)
        self.num_accepted += num_accepted
        super().verified(num_drafts, num_accepted)


_PROMPT, _PLACES = (1, 2, 3), 4


def _probabilities(config: ModelConfig, weights: dict[str, jax.Array]) -> np.ndarray:
    """Probability of each token at each place after the prompt, [place, V], summed over all answers."""
    answers = np.indices((_VOCABULARY,) * (_PLACES - 1)).reshape(_PLACES - 1, -1).T
    tokens = np.concatenate([np.tile(_PROMPT, (len(answers), 1)), answers], axis=1)
    split = layout(1)
    ops, w = JaxOps(config, split), build(config, lambda path, _: weights[path])
    places = Places(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape))

    @jax.jit
    def forward(tokens: jax.Array) -> jax.Array:
        x = transformer.enter(config, ops, w, tokens, places)
        x, _ = transformer.through(config, ops, w, x, places, None, config.layers)
        logits = transformer.final_norm(config, ops, w, x) @ w["unembed"]
        return jax.nn.softmax(logits[:, len(_PROMPT) - 1 :] / _TEMPERATURE)

    with jax.set_mesh(device_mesh(split, jax.devices()[:1])):
        given = np.array(forward(tokens), np.float64)  # [answer, place, V]
    chance, rows = np.ones(len(answers)), np.arange(len(answers))
    marginals = []
    for place in range(_PLACES):
        # Answers that differ only in tokens from this place on are counted once.
        marginals.append(chance @ given[:, place] / _VOCABULARY ** (_PLACES - 1 - place))
        if place < _PLACES - 1:
            chance = chance * given[rows, place, answers[:, place]]
    return np.array(marginals)


@pytest.mark.slow
def test_drafts_of_a_head_leave_the_distribution_unchanged() -> None:
    """By a chi-square test at each place against the exact probabilities, drafts refused and accepted."""
    model = replace(load_model("tiny"), vocab_size=_VOCABULARY, num_layers=1, draft_head="joint")
    split = layout(1)
    mesh = device_mesh(split, jax.devices()[:1])
    weights = flatten(init_params(model, as_read(split), mesh, 0))
    # Model and head disagree, so that a wrong test would show.
    weights["unembed"] *= 1.5
    weights["draft_norm"] *= -1.5

    def runner(part: ModelConfig, **how: Any) -> JaxRunner:
        params = build(part, lambda path, _: weights[path])
        sizes = {"num_slots": _SLOTS, "context": 16, "page_size": 8, "chunk": 8, "block": 8, "num_drafts": 2}
        runner = JaxRunner(params, part, split, mesh, **sizes, keeps_hidden=True, **how)
        runner.warm_up()
        return runner

    head = _CountingHead(runner(model.head, keeps_logits=True), 2, lambda _: 0.5, by_ratio=True)
    with Engine(runner(model.base, by_ratio=True), drafter=head) as engine:
        found = _counts(engine, 0)[:_PLACES]
    assert head.num_accepted > 50 and head.num_drafts - head.num_accepted > 50
    expected = _REQUESTS * _probabilities(model.base, weights)
    assert expected.sum(axis=1) == pytest.approx(_REQUESTS)
    for place in range(_PLACES):
        assert _chi_square(found[place], expected[place]) < 26.1, (
            "the 99.95th percentile for 7 degrees of freedom"
        )


def _chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of counts; tokens that are expected less than five times are one class."""
    rare = expected < 5
    found, expected = (np.append(each[~rare], each[rare].sum()) for each in (found, expected))
    used = expected > 0
    return float(np.sum((found - expected)[used] ** 2 / expected[used]))

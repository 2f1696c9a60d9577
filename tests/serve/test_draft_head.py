"""Drafts by the model's own head: its guesses are those of the forward pass, and answers are the same."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.nn.small_models import DELTA
from tests.serve.answers import CONTEXT, PROMPTS, generate, greedy, layout

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
from meshwright.serve.engine.sequence import TokenSequence

MODEL = replace(load_model("tiny"), vocab_size=64, draft_head="joint")


@cache
def _weights(config: ModelConfig, seed: int = 0) -> dict[str, jax.Array]:
    split = layout(1)
    mesh = device_mesh(split, jax.devices()[:1])
    return flatten(init_params(config, as_read(split), mesh, seed))


def _params(model: ModelConfig, part: ModelConfig) -> dict[str, Any]:
    return build(part, lambda path, _: _weights(model)[path])


def _runner(model: ModelConfig, part: ModelConfig, **how: Any) -> JaxRunner:
    split = layout(1)
    sizes: dict[str, Any] = {
        "num_slots": 2,
        "context": CONTEXT,
        "page_size": 8,
        "chunk": 16,
        "block": 8,
    } | how
    mesh = device_mesh(split, jax.devices()[:1])
    runner = JaxRunner(_params(model, part), part, split, mesh, **sizes)
    runner.warm_up()
    return runner


class _Noting(HeadDrafter):
    """Notes the tokens before each list of guesses."""

    num_drafts = num_accepted = 0

    def draft(self, sequence: TokenSequence) -> list[int]:
        guesses = super().draft(sequence)
        if not hasattr(self, "noted"):
            self.noted: list[tuple[Sequence[int], list[int]]] = []
        self.noted.append((list(sequence.tokens), guesses))
        return guesses

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        self.num_drafts += min(num_drafts, num_accepted + 1)
        self.num_accepted += num_accepted


@cache
def _forward() -> tuple[Any, Any]:
    """Jitted: hidden states of tokens[1, CONTEXT], and the head's states of tokens and hidden states."""
    split = layout(1)
    ops, head, w = JaxOps(MODEL, split), MODEL.head, _params(MODEL, MODEL)
    places = Places(jnp.arange(CONTEXT)[None])

    def of_model(tokens: jax.Array) -> jax.Array:
        x = transformer.enter(MODEL, ops, w, tokens, places)
        x, _ = transformer.through(MODEL, ops, w, x, places, None, MODEL.layers)
        return transformer.final_norm(MODEL, ops, w, x)

    def of_head(tokens: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = transformer.enter_draft(head, ops, w, tokens, hidden)
        x, _ = transformer.through(head, ops, w, x, places, None, head.layers)
        x = transformer.final_norm(head, ops, w, x)
        return x, jnp.argmax(x @ w["unembed"], axis=-1)

    return jax.jit(of_model), jax.jit(of_head)


def _expected_guesses(tokens: Sequence[int], count: int) -> list[int]:
    """The head's greedy guesses after `tokens`, by the whole forward pass and without a cache."""
    of_model, of_head = _forward()
    with jax.set_mesh(device_mesh(layout(1), jax.devices()[:1])):
        ids = np.zeros((1, CONTEXT), np.int32)
        ids[0, : len(tokens)] = tokens
        hidden, ahead, guesses = np.array(of_model(ids)), np.roll(ids, -1, axis=1), list[int]()
        for place in range(len(tokens) - 2, len(tokens) - 2 + count):
            states, chosen = of_head(ahead, hidden)
            guesses.append(int(chosen[0, place]))
            hidden[0, place + 1], ahead[0, place + 1] = states[0, place], guesses[-1]
    return guesses


@pytest.mark.slow
def test_guesses_are_those_of_the_forward_pass_and_answers_stay() -> None:
    requests = [greedy(prompt) for prompt in PROMPTS]
    expected = generate(_runner(MODEL, MODEL.base), *requests)
    model = _runner(MODEL, MODEL.base, num_drafts=3, keeps_hidden=True)
    drafter = _Noting(_runner(MODEL, MODEL.head, num_drafts=3, keeps_hidden=True), 3, lambda _: 0.1)
    assert generate(model, *requests, drafter=drafter) == expected
    made = [(tokens, guesses) for tokens, guesses in drafter.noted if guesses]
    assert len(made) > 5
    for tokens, guesses in made[:: max(1, len(made) // 5)]:
        assert guesses == _expected_guesses(tokens, len(guesses))


@pytest.mark.slow
def test_answers_stay_if_layers_have_states() -> None:
    """A wrong guess leaves the states; most guesses of an untrained head are wrong."""
    model = replace(DELTA, num_layers=2, draft_head="joint")
    requests = [greedy(prompt) for prompt in PROMPTS]
    expected = generate(_runner(model, model.base), *requests)
    runner = _runner(model, model.base, num_drafts=2, keeps_hidden=True)
    drafter = _Noting(_runner(model, model.head, num_drafts=2, keeps_hidden=True), 2, lambda _: 0.1)
    assert generate(runner, *requests, drafter=drafter) == expected
    assert drafter.num_drafts > 5

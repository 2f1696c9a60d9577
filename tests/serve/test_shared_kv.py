"""Serving of layers that share a cache: token for token what a plain forward pass of the whole text says.

The reference is that of training (tests/nn/test_shared_kv.py), which has no cache.
"""

import asyncio
import dataclasses
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from tests.nn.small_models import SHARED, SHARED_BY_FOUR
from tests.nn.test_shared_kv import reference_logits
from tests.serve.answers import CONTEXT, NUM_SLOTS, NUM_TOKENS, PAGE, PROMPTS, generate, greedy, layout

from meshwright.cost.record_inference import cache_bytes
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import kv_bytes_per_token
from meshwright.nn.params import init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Request

# Every layer sees its last seven positions, so that caches keep no more.
WINDOWED = replace(SHARED, name="windowed", sliding_window=7, global_every=0)


@cache
def _params(config: ModelConfig) -> Any:
    alone = layout(1)
    return jax.tree.map(np.asarray, init_params(config, alone, device_mesh(alone), seed=0))


@cache
def _answer(config: ModelConfig, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
    """The most likely token after the prompt, then after that, and so on."""
    text = list(prompt)
    run = jax.jit(lambda w, rows: reference_logits(config, w, rows))
    for _ in range(num_tokens):
        rows = np.zeros((1, CONTEXT), np.int32)
        rows[0, : len(text)] = text
        with jax.numpy_rank_promotion("allow"):
            logits = np.asarray(run(_params(config), rows))[0, len(text) - 1]
        first, second = np.sort(logits)[[-1, -2]]
        assert first - second > 1e-4, "equal tokens would be luck"
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def _runner(config: ModelConfig, split: Layout, *, chunk: int | None = 8) -> JaxRunner:
    mesh = device_mesh(split)
    params = init_params(config, split, mesh, seed=0)
    sizes = {"num_slots": NUM_SLOTS, "context": CONTEXT, "page_size": PAGE, "chunk": chunk, "block": 8}
    runner = JaxRunner(params, config, split, mesh, **sizes)
    runner.warm_up(only_greedy=True)
    return runner


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (SHARED, 2),
        pytest.param(SHARED_BY_FOUR, 1, marks=pytest.mark.slow),
        pytest.param(WINDOWED, 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else f"tensor={value}",
)
def test_tokens_are_those_of_the_whole_text(
    config: ModelConfig, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of eight, several at once; pages that run out and are made again; known starts."""
    runner = _runner(config, layout(tensor))
    expected = [_answer(config, tuple(prompt)) for prompt in PROMPTS]
    assert generate(runner, *map(greedy, PROMPTS)) == expected
    monkeypatch.setattr(runner, "limits", dataclasses.replace(runner.limits, num_pages=6))
    assert generate(runner, *map(greedy, PROMPTS), prefix_cache=False) == expected
    turns, prompt = [], PROMPTS[3]
    with Engine(runner) as engine:
        for _ in range(2):
            answer = asyncio.run(_answered(engine, greedy(prompt, 5)))
            turns.append((prompt, answer))
            prompt = [*prompt, *answer, 7]
        assert engine._occupancy().cached_pages > 0
    for prompt, answer in turns:
        assert answer == _answer(config, tuple(prompt), 5)


async def _answered(engine: Engine, request: Request) -> list[int]:
    return [event.token async for event in engine.submit(request)]


@pytest.mark.parametrize("config", [SHARED, SHARED_BY_FOUR], ids=lambda config: config.name)
def test_a_group_has_one_cache(config: ModelConfig) -> None:
    """The engine's pools are what is planned: of each group the keys and values of one layer."""
    split = layout(1)
    mesh = device_mesh(split)
    runner = JaxRunner(_params(config), config, split, mesh, num_slots=2, context=32, page_size=8)
    pools = runner._programs.cache.pools()
    assert {name: len(layers) for name, layers in pools.items()} == {"k": 2, "v": 2}
    held = sum(pool.size * pool.dtype.itemsize for layers in pools.values() for pool in layers)
    assert held == 2 * 32 * kv_bytes_per_token(config, "f32")
    assert held == cache_bytes(config, split.at("generate").replace(kv_dtype="f32"), 2, 32)

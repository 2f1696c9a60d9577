"""Requests to an engine and its answers, where tests of several modules ask for them.

Without torch, which tests/serve/device/test_runner.py needs for its reference.
"""

import asyncio
from typing import Any

import numpy as np

from meshwright.layout import Layout
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Event, Request, SamplingParams

CONTEXT, NUM_SLOTS, PAGE = 40, 2, 8
# A prompt that fills its blocks, one that passes them by a token, short ones, and one so long that little
# room is left.
PROMPT_LENGTHS = (1, 16, 5, 17, 32, 3, 9)
PROMPTS = [np.random.default_rng(n).integers(0, 64, n).tolist() for n in PROMPT_LENGTHS]
NUM_TOKENS = 8


def layout(tensor: int, dtype: str = "f32") -> Layout:
    return Layout.of(tensor=tensor, weights_dtype=dtype, compute_dtype=dtype)


def greedy(prompt: list[int], max_tokens: int = NUM_TOKENS) -> Request:
    return Request(tuple(prompt), max_tokens, SamplingParams(temperature=0.0), frozenset())


def generate(runner: JaxRunner, *requests: Request, **how: Any) -> list[list[int]]:
    """The answers to the requests, all sent at once."""
    return [[event.token for event in events] for events in events_of(runner, *requests, **how)]


def events_of(runner: JaxRunner, *requests: Request, **how: Any) -> list[list[Event]]:
    async def one(engine: Engine, request: Request) -> list[Event]:
        return [event async for event in engine.submit(request)]

    async def main(engine: Engine) -> list[list[Event]]:
        return await asyncio.gather(*(one(engine, request) for request in requests))

    with Engine(runner, **how) as engine:
        return asyncio.run(main(engine))

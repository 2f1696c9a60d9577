"""Rollouts of prompts by the engine on devices of this process, and their rows for training."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from meshwright.layout import Layout
from meshwright.layout.page_sizes import DEFAULT_PAGE
from meshwright.models.config import ModelConfig
from meshwright.serve.device.runner import JaxRunner
from meshwright.serve.engine.engine import Engine
from meshwright.serve.engine.request import Request
from meshwright.train.row_codes import BEGINS, UNCOUNTED


@dataclass(frozen=True)
class Rollout:
    """Tokens of an answer and their log-probabilities by the engine. cut: it has no stop token."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    cut: bool


class Rolled(NamedTuple):
    """The rollouts of requests in their order.

    began: when the engine began, by `time.perf_counter`, which processes of a host share. seconds: until the
    last rollout ended. message_seconds: of requests and rollouts on their way between processes.
    """

    rollouts: list[Rollout]
    began: float
    seconds: float
    message_seconds: float = 0.0


class Generator(Protocol):
    """An engine whose weights change between rollouts."""

    num_devices: int

    def load(self, params: Mapping[str, Any]) -> None:
        """Take the trainer's parameters. No rollouts are under way."""
        ...

    def start(self, requests: Sequence[Request]) -> None:
        """Begin rollouts, which may run until `collect`."""
        ...

    def collect(self) -> Rolled:
        """The rollouts that were started last."""
        ...

    def close(self) -> None: ...


class EngineOnDevices:
    """The engine under a layout on a mesh, made when weights are first loaded.

    Rollouts depend only on weights and requests, bit for bit: all requests are submitted together, and the
    scheduler is bounded by its limits and not by measured seconds.
    """

    def __init__(
        self, config: ModelConfig, layout: Layout, mesh: jax.sharding.Mesh, *, num_slots: int, context: int
    ) -> None:
        self._runner = JaxRunner(
            {},
            config,
            layout,
            mesh,
            num_slots=num_slots,
            context=context,
            page_size=min(DEFAULT_PAGE, context),
        )
        self._stack = ExitStack()
        self._engine: Engine | None = None

    def load(self, params: Mapping[str, Any]) -> None:
        self._runner.load(params)
        if self._engine is None:
            self._runner.warm_up()
            self._runner.idle_seconds = None
            self._engine = self._stack.enter_context(
                Engine(self._runner, max_waiting=1_000_000, prefix_cache=False)
            )

    def roll_out(self, requests: Sequence[Request]) -> Rolled:
        """The answers to all requests."""
        engine = self._engine
        assert engine is not None, "weights are loaded first"
        started = time.perf_counter()
        rollouts = asyncio.run(_answers(engine, requests))
        return Rolled(rollouts, started, time.perf_counter() - started)

    def close(self) -> None:
        self._stack.close()


async def _answers(engine: Engine, requests: Sequence[Request]) -> list[Rollout]:
    tokens: list[list[int]] = [[] for _ in requests]
    log_probs: list[list[float]] = [[] for _ in requests]
    cut = [True] * len(requests)
    with engine.submit(*requests) as stream:
        async for event in stream:
            tokens[event.index].append(event.token)
            log_probs[event.index].append(event.logprob)
            cut[event.index] = event.finish_reason != "stop"
    return [Rollout(tuple(a), tuple(b), c) for a, b, c in zip(tokens, log_probs, cut, strict=True)]


def seed_of(seed: int, index: int, sample: int) -> int:
    """The seed of a rollout: of a sample of the prompt at `index` in the order of a run."""
    return int(np.random.SeedSequence([seed, index, sample]).generate_state(1)[0])


class PackedRollouts(NamedTuple):
    """Rollouts packed into rows [n, T+1], several in a row if they fit.

    tokens: coded as `train.row_codes` says. rollout: the number of the rollout whose answer has this token;
    -1 for prompts and padding. log_probs: by the engine.
    """

    tokens: np.ndarray
    rollout: np.ndarray
    log_probs: np.ndarray

    def part(self, rows: Sequence[int], num_rows: int) -> "PackedRollouts":
        """Some rows, filled up to `num_rows` with padding."""
        added = num_rows - len(rows)
        fills = (_PADDING, -1, 0.0)
        return PackedRollouts(
            *(
                np.concatenate([array[list(rows)], np.full((added, array.shape[1]), fill, array.dtype)])
                for array, fill in zip(self, fills, strict=True)
            )
        )


_PADDING = UNCOUNTED


def pack_rollouts(
    prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], seq_len: int
) -> PackedRollouts:
    """Rows of prompts with their answers: each into the first row with enough space."""
    lengths = [len(prompt) + len(one.tokens) for prompt, one in zip(prompts, rollouts, strict=True)]
    places, used = [], list[int]()
    for length in lengths:
        row = next((n for n, taken in enumerate(used) if taken + length <= seq_len + 1), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row]))
        used[row] += length
    shape = len(used), seq_len + 1
    tokens = np.full(shape, _PADDING, np.int32)
    of, log_probs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    for number, (row, start) in enumerate(places):
        prompt, answer = prompts[number], rollouts[number]
        begin, end = start + len(prompt), start + lengths[number]
        tokens[row, start:begin] = np.asarray(prompt) | UNCOUNTED
        tokens[row, start] |= BEGINS
        tokens[row, begin:end] = answer.tokens
        of[row, begin:end] = number
        log_probs[row, begin:end] = answer.log_probs
        if end <= seq_len:
            tokens[row, end] |= BEGINS  # padding, or the next rollout
    return PackedRollouts(tokens, of, log_probs)

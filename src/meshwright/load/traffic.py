"""Requests of a load test and their arrivals, from a seed: the same on every machine."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import DataError, nearest, shorten


class Turn(NamedTuple):
    """Prompt tokens (without earlier turns) and new tokens of a request."""

    prompt_tokens: int
    output_tokens: int


class Chat(NamedTuple):
    """Consecutive turns, each sent with the earlier ones; a single request is a chat of one turn.

    arrival_seconds: time of sending the first turn, from the start of the test.
    """

    arrival_seconds: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Load:
    """The requests of a load test.

    concurrency: maximum number of concurrent chats, None for no limit (open loop). prefix_tokens: length of
    the text at the start of every chat. chat: send requests to /v1/chat/completions. until_seconds: no chat
    begins after it; a closed loop repeats its chats until then.
    """

    chats: Sequence[Chat]
    concurrency: int | None
    prefix_tokens: int = 0
    chat: bool = False
    seed: int = 0
    until_seconds: float = inf

    @property
    def repeats(self) -> bool:
        """Whether chats are repeated until the load's time is over."""
        return self.concurrency is not None and self.until_seconds < inf


@dataclass(frozen=True)
class Lengths:
    """A distribution of prompt and output tokens: log-normal around the means, or exact if spread is 0.

    spread: standard deviation of the logarithm.
    """

    prompt_mean: float
    output_mean: float
    spread: float = 0.0

    def draw(self, rng: np.random.Generator, num_turns: int) -> list[Turn]:
        """The lengths of `num_turns` requests, each at least one token."""
        prompts = self._draw(self.prompt_mean, rng, num_turns)
        outputs = self._draw(self.output_mean, rng, num_turns)
        return [Turn(p, o) for p, o in zip(prompts.tolist(), outputs.tolist(), strict=True)]

    def _draw(self, mean: float, rng: np.random.Generator, count: int) -> np.ndarray:
        # The mean of a log-normal is exp(mu + spread^2 / 2).
        tokens = rng.lognormal(log(mean) - self.spread**2 / 2, self.spread, count)
        return np.maximum(1, np.rint(tokens)).astype(int)


# Mean tokens of the two datasets: Kwon et al. 2023 (arXiv 2309.06180), figure 11. Their spread is not
# stated there; with 1.0 one prompt in a hundred exceeds 1,600 tokens, as the figure shows.
LENGTHS = {
    "sharegpt": Lengths(161.31, 337.99, spread=1.0),
    "alpaca": Lengths(19.31, 58.45, spread=1.0),
    "fixed": Lengths(256, 128),
}


def named_lengths(name: str, prompt_tokens: int | None, output_tokens: int | None) -> Lengths:
    """The distribution `name`, with other means if given. Raises DataError for an unknown name."""
    if name not in LENGTHS:
        if "." in name:
            raise DataError(
                f"--lengths takes a distribution; for the requests of a file write --trace {name}"
            )
        if match := re.fullmatch(r"(\d+[kK]?)\D(\d+[kK]?)", name):
            raise DataError(
                f"--lengths takes a distribution; write --prompt-tokens {match[1]} --output-tokens {match[2]}"
            )
        raise DataError(f"lengths {name!r} are unknown; {nearest(name, list(LENGTHS))}")
    known = LENGTHS[name]
    return Lengths(prompt_tokens or known.prompt_mean, output_tokens or known.output_mean, known.spread)


def chats(
    lengths: Lengths, num_requests: int, num_turns: int, arrivals: Iterator[float], seed: int
) -> list[Chat]:
    """`num_requests` requests as chats of `num_turns` turns (the last chat may be shorter)."""
    turns = lengths.draw(np.random.default_rng(seed), num_requests)
    grouped = [tuple(turns[first : first + num_turns]) for first in range(0, num_requests, num_turns)]
    return [Chat(next(arrivals), group) for group in grouped]


def at_once() -> Iterator[float]:
    """Arrivals of a closed loop: all at the start, from when they wait."""
    while True:
        yield 0.0


def poisson(rate_per_second: float, burst: int, seed: int) -> Iterator[float]:
    """Arrivals of `rate_per_second` on average, `burst` at a time, with exponential times between them."""
    rng, now = np.random.default_rng([seed, 1]), 0.0
    while True:
        for gap in rng.exponential(burst / rate_per_second, 1024).tolist():
            now += gap
            for _ in range(burst):
                yield now


def read_trace(path: Path) -> list[Chat]:
    """The requests of a JSON-lines file, each line with arrival_seconds, prompt_tokens and output_tokens.

    Raises DataError if one of them is missing in a line or out of range.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"trace {path}: cannot be read as text: {getattr(error, 'strerror', error)}"
        ) from error
    chats = [_traced(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not chats:
        raise DataError(f"trace {path} holds no request")
    return sorted(chats, key=lambda chat: chat.arrival_seconds)


def _traced(line: str, where: str) -> Chat:
    try:
        row: Mapping[str, Any] = json.loads(line)
        arrival, turn = (
            float(row["arrival_seconds"]),
            Turn(int(row["prompt_tokens"]), int(row["output_tokens"])),
        )
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(
            f"{where}: {shorten(line.strip())} is no request; a line reads"
            ' {"arrival_seconds": 0.5, "prompt_tokens": 128, "output_tokens": 64}'
        ) from error
    if not 0 <= arrival < float("inf") or turn.prompt_tokens < 1 or turn.output_tokens < 1:
        raise DataError(f"{where}: {line.strip()}: arrival_seconds from 0 on, both token counts from 1 on")
    return Chat(arrival, (turn,))


def within(chats: list[Chat], context: int | None, prefix_tokens: int) -> list[Chat]:
    """`chats` with turns cut so that prefix, earlier turns and answers stay within `context` tokens.

    A turn that would have less than 2 tokens is left out. context: None if the limit is not known.
    Raises DataError if no turn is left.
    """
    if context is None:
        return chats
    kept = [_fitting(chat, context, prefix_tokens) for chat in chats]
    kept = [chat for chat in kept if chat.turns]
    if not kept:
        raise DataError(
            f"a prefix of {prefix_tokens} tokens leaves no room in the server's context of {context}"
        )
    return kept


def num_cut(asked: Iterable[Chat], kept: Iterable[Chat]) -> int:
    """The number of turns that `within` has shortened or left out."""
    before, after = (Counter(turn for chat in chats for turn in chat.turns) for chats in (asked, kept))
    return (before - after).total()


def _fitting(chat: Chat, context: int, prefix_tokens: int) -> Chat:
    turns = tuple(_cut(chat.turns, context, prefix_tokens))
    return chat if turns == chat.turns else Chat(chat.arrival_seconds, turns)


def _cut(turns: tuple[Turn, ...], context: int, prefix_tokens: int) -> Iterator[Turn]:
    # The tokens of texts are approximate, and a chat template adds some to each turn.
    left = int(0.9 * context) - prefix_tokens - 16
    for turn in turns:
        if left < 2:
            return
        output = min(turn.output_tokens, max(1, left // 2))
        prompt = min(turn.prompt_tokens, left - output)
        left -= prompt + output + 16
        yield turn if turn == (cut := Turn(prompt, output)) else cut

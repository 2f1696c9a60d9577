"""The figures of a load test: percentiles, throughput, goodput."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np

from meshwright.load.settings import LatencyTargets
from meshwright.load.timed_answer import TimedAnswer

_PERCENTILES = (50, 95, 99)


def load_figures(answers: Sequence[TimedAnswer], targets: LatencyTargets) -> dict[str, Any]:
    """The figures of `answers` under stable keys, in seconds and tokens.

    goodput: requests per second that met the targets. new_tokens_per_second: tokens of answers without
    error, over the time from the first request to the end of the last answer.
    """
    whole = [answer for answer in answers if answer.error is None]
    seconds = max((answer.end_seconds for answer in answers), default=0.0) - min(
        (answer.start_seconds for answer in answers), default=0.0
    )
    rate = 1 / seconds if seconds > 0 else 0.0
    new_tokens = sum(answer.num_tokens for answer in whole)
    times = _Times.of(answers)
    is_whole = np.array([answer.error is None for answer in answers], dtype=bool)
    of_whole = {name: getattr(times, name)[is_whole] for name in _TIMES}
    return {
        "requests": len(answers),
        "errors": len(answers) - len(whole),
        "error_messages": dict(Counter(answer.error for answer in answers if answer.error)),
        "seconds": seconds,
        "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in whole),
        "new_tokens": new_tokens,
        "new_tokens_per_second": new_tokens * rate,
        "requests_per_second": len(whole) * rate,
        "goodput": targets.num_met(of_whole["ttft_seconds"], of_whole["tpot_seconds"]) * rate,
        "targets": {"ttft_seconds": targets.ttft_seconds, "tpot_seconds": targets.tpot_seconds},
        "ttft_seconds": percentiles(_known(of_whole["ttft_seconds"])),
        "tpot_seconds": percentiles(_known(of_whole["tpot_seconds"])),
        "itl_seconds": percentiles(_known(times.gaps[np.repeat(is_whole, times.num_pieces)])),
        "request_seconds": percentiles(of_whole["seconds"]),
        "answers": times.rows(answers),
    }


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """`mean`, `p50`, `p95`, `p99` and `max`, each None without values."""
    if not len(values):
        return dict.fromkeys(["mean", *(f"p{p}" for p in _PERCENTILES), "max"])
    values = np.asarray(values)
    quantiles = np.percentile(values, _PERCENTILES)
    by_name = {f"p{p}": float(value) for p, value in zip(_PERCENTILES, quantiles, strict=True)}
    return {"mean": float(np.mean(values)), **by_name, "max": float(values.max())}


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


_TIMES = ("start_seconds", "seconds", "ttft_seconds", "tpot_seconds", "longest_gap_seconds")


@dataclass(frozen=True)
class _Times:
    """The times of answers, an entry for each, in seconds; NaN if not measured.

    num_pieces: pieces of each answer. gaps: time before each piece of all answers, NaN before the first
    piece of an answer.
    """

    start_seconds: np.ndarray
    seconds: np.ndarray
    ttft_seconds: np.ndarray
    tpot_seconds: np.ndarray
    longest_gap_seconds: np.ndarray
    num_pieces: np.ndarray
    gaps: np.ndarray

    @classmethod
    def of(cls, answers: Sequence[TimedAnswer]) -> "_Times":
        """The times of all answers, computed at once: a test of an hour has a million gaps."""
        counts = np.array([len(answer.piece_seconds) for answer in answers], dtype=int)
        pieces = np.concatenate([(), *(answer.piece_seconds for answer in answers)])
        begin = (np.cumsum(counts) - counts)[counts > 0]
        gaps = np.diff(pieces, prepend=nan)
        gaps[begin] = nan
        start = np.array([answer.start_seconds for answer in answers])
        end = np.array([answer.end_seconds for answer in answers])
        tokens = np.array([answer.num_tokens for answer in answers], dtype=int)
        ttft, tpot, longest = (np.full(len(answers), nan) for _ in range(3))
        if len(begin):
            first, last = pieces[begin], pieces[begin + counts[counts > 0] - 1]
            ttft[counts > 0] = first - start[counts > 0]
            longest[counts > 0] = np.fmax.reduceat(gaps, begin)
            tpot[counts > 0] = (last - first) / np.maximum(tokens[counts > 0] - 1, 1)
            tpot[(counts < 2) | (tokens < 2)] = nan
        return cls(start, end - start, ttft, tpot, longest, counts, gaps)

    def rows(self, answers: Sequence[TimedAnswer]) -> list[dict[str, Any]]:
        """The record of each answer."""
        times = [getattr(self, name) for name in _TIMES]
        columns = [
            *([None if time != time else time for time in column.tolist()] for column in times),
            [answer.prompt_tokens for answer in answers],
            [answer.num_tokens for answer in answers],
            [answer.error for answer in answers],
        ]
        names = (*_TIMES, "prompt_tokens", "new_tokens", "error")
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

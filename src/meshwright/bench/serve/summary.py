"""The figures of a load test: percentiles, throughput, goodput."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.bench.serve.client import Answer

_PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class LatencyTargets:
    """What a good answer takes at most, in seconds; None: no target."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    def met_by(self, answer: Answer) -> bool:
        """Whether the answer is whole and within both targets; one token has no TPOT and meets it."""
        first = answer.ttft_seconds
        if answer.error or first is None:
            return False
        late = self.ttft_seconds is not None and first > self.ttft_seconds
        slow = self.tpot_seconds is not None and (answer.tpot_seconds or 0.0) > self.tpot_seconds
        return not late and not slow


def summary(answers: Sequence[Answer], targets: LatencyTargets) -> dict[str, Any]:
    """The figures of `answers` under stable keys, seconds and tokens.

    goodput: requests per second that met the targets. new_tokens_per_second: of whole answers alone,
    over the time from the first request sent to the last answer's end.
    """
    whole = [answer for answer in answers if answer.error is None]
    seconds = max((answer.end_seconds for answer in answers), default=0.0) - min(
        (answer.start_seconds for answer in answers), default=0.0
    )
    rate = 1 / seconds if seconds > 0 else 0.0
    new_tokens = sum(answer.num_tokens for answer in whole)
    gaps = [answer.gaps_seconds for answer in answers]
    rows = [_row(answer, gap) for answer, gap in zip(answers, gaps, strict=True)]
    rows_of_whole = [row for row in rows if row["error"] is None]
    gaps_of_whole = [gap for gap, answer in zip(gaps, answers, strict=True) if answer.error is None]
    return {
        "requests": len(answers),
        "errors": len(answers) - len(whole),
        "error_messages": dict(Counter(answer.error for answer in answers if answer.error)),
        "seconds": seconds,
        "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in whole),
        "new_tokens": new_tokens,
        "new_tokens_per_second": new_tokens * rate,
        "requests_per_second": len(whole) * rate,
        "goodput": sum(map(targets.met_by, answers)) * rate,
        "targets": {"ttft_seconds": targets.ttft_seconds, "tpot_seconds": targets.tpot_seconds},
        "ttft_seconds": percentiles(_known(rows_of_whole, "ttft_seconds")),
        "tpot_seconds": percentiles(_known(rows_of_whole, "tpot_seconds")),
        "itl_seconds": percentiles(np.concatenate(gaps_of_whole) if whole else ()),
        "request_seconds": percentiles(_known(rows_of_whole, "seconds")),
        "answers": rows,
    }


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """`mean`, `p50`, `p95`, `p99` and `max`, each None where nothing was measured."""
    if not len(values):
        return dict.fromkeys(["mean", *(f"p{p}" for p in _PERCENTILES), "max"])
    values = np.asarray(values)
    found = np.percentile(values, _PERCENTILES)
    by_name = {f"p{p}": float(value) for p, value in zip(_PERCENTILES, found, strict=True)}
    return {"mean": float(np.mean(values)), **by_name, "max": float(values.max())}


def _known(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row[key] is not None]


def _row(answer: Answer, gaps: np.ndarray) -> dict[str, Any]:
    return {
        "start_seconds": answer.start_seconds,
        "seconds": answer.end_seconds - answer.start_seconds,
        "ttft_seconds": answer.ttft_seconds,
        "tpot_seconds": answer.tpot_seconds,
        "longest_gap_seconds": float(gaps.max()) if len(gaps) else None,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.num_tokens,
        "error": answer.error,
    }

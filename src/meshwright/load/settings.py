"""The settings of a load test: its requests, its targets, and the servers of a simulation."""

from dataclasses import dataclass
from math import ceil, inf
from pathlib import Path

import numpy as np

from meshwright.errors import DataError
from meshwright.load import traffic
from meshwright.options import option
from meshwright.units import (
    parse_count,
    parse_rate,
    parse_seconds,
    parse_seconds_per_token,
    parse_seconds_to_first_token,
)

_CLOSED_LOOP = 8
_REQUESTS = 64
# Different lengths of a closed loop that ends by time; a load with more requests repeats them in order.
_DRAWN = 4096
# Standard deviations of the Poisson count of arrivals, which are drawn in addition to its mean.
_SPARE = 6
_MOST_REQUESTS = 10_000_000  # drawn at the start; more take gigabytes


@dataclass(frozen=True)
class Traffic:
    """The requests of a load test and their times of arrival."""

    requests: int | None = option(None, parser=parse_count, help="Number of requests.", unset=str(_REQUESTS))
    duration: float | None = option(
        None, above=0, parser=parse_seconds, help="Begin chats for this time, in place of --requests: 60s."
    )
    concurrency: int | None = option(
        None, least=1, help="Closed loop: requests in flight.", unset=str(_CLOSED_LOOP)
    )
    rate: float | None = option(None, parser=parse_rate, help="Open loop: requests per second, Poisson.")
    burst: int = option(1, least=1, help="With --rate: requests that arrive together.")
    trace: Path | None = option(None, help="JSON lines of arrival_seconds, prompt_tokens, output_tokens.")
    lengths: str = option("sharegpt", help="Distribution of lengths: sharegpt, alpaca or fixed.")
    prompt_tokens: int | None = option(
        None, parser=parse_count, help="Mean length of prompts.", unset="from --lengths"
    )
    output_tokens: int | None = option(
        None, parser=parse_count, help="Mean length of answers.", unset="from --lengths"
    )
    prefix_tokens: int = option(0, least=0, help="Length of the prefix that all prompts share.")
    turns: int = option(1, least=1, help="Turns of a chat; each prompt repeats the earlier turns.")
    chat: bool = option(False, help="Send chats to /v1/chat/completions.")
    ignore_eos: bool = option(True, help="Generate the full length that was drawn (vLLM's ignore_eos).")
    seed: int = option(0, least=0, help="Seed of lengths, texts and arrivals.")

    @property
    def closed(self) -> int | None:
        """Concurrent chats of a closed loop; None for an open loop."""
        return None if self.rate or self.trace else self.concurrency or _CLOSED_LOOP

    def chats(self) -> list[traffic.Chat]:
        """The chats, drawn or read.

        Raises DataError for unknown lengths, an unreadable trace, and for no or too many requests.
        """
        if self.trace:
            return traffic.read_trace(self.trace)
        arrivals = traffic.poisson(self.rate, self.burst, self.seed) if self.rate else traffic.at_once()
        lengths = traffic.named_lengths(self.lengths, self.prompt_tokens, self.output_tokens)
        number = self._num_drawn()
        if number > _MOST_REQUESTS:
            raise DataError(f"a load of more than {_MOST_REQUESTS:,} requests; send fewer, or for less time")
        chats = traffic.chats(lengths, int(number), self.turns, arrivals, self.seed)
        begun = [chat for chat in chats if chat.arrival_seconds < self.until_seconds]
        if not begun:
            raise DataError(
                f"--duration {self.duration:g}s: no request arrives in that time at --rate {self.rate:g}"
            )
        return begun

    @property
    def until_seconds(self) -> float:
        """The time after which no chat begins; infinite without --duration."""
        return inf if self.duration is None else self.duration

    def _num_drawn(self) -> float:
        """The number of requests to draw, a whole one unless it is infinite."""
        if self.duration is None:
            return self.requests or _REQUESTS
        if self.rate is None:
            return _DRAWN
        bursts = self.rate * self.duration / self.burst
        drawn = bursts + _SPARE * bursts**0.5 + _SPARE
        return self.turns * self.burst * (ceil(drawn) if drawn < _MOST_REQUESTS else inf)

    def to_dict(self) -> dict[str, object]:
        """The key `traffic` of `mw bench serve --json`."""
        return {
            "arrivals": "trace" if self.trace else "poisson" if self.rate else "closed",
            "rate_per_second": self.rate,
            "duration_seconds": self.duration,
            "burst": self.burst,
            "concurrency": self.closed,
            "lengths": str(self.trace) if self.trace else self.lengths,
            "prefix_tokens": self.prefix_tokens,
            "turns": self.turns,
            "chat": self.chat,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class LatencyTargets:
    """The maximum latencies of a good answer; None for no target."""

    ttft_seconds: float | None = option(
        None,
        flag="--ttft",
        least=0,
        parser=parse_seconds_to_first_token,
        help="Goodput target: time to first token: 0.5, 500ms.",
    )
    tpot_seconds: float | None = option(
        None,
        flag="--tpot",
        least=0,
        parser=parse_seconds_per_token,
        help="Goodput target: time per output token: 0.03, 30ms.",
    )

    def num_met(self, ttft_seconds: np.ndarray, tpot_seconds: np.ndarray) -> int:
        """The number of complete answers that meet both targets.

        A time that was not measured is NaN: an answer of one token has no TPOT, and meets that target.
        """
        late = ttft_seconds > (inf if self.ttft_seconds is None else self.ttft_seconds)
        slow = tpot_seconds > (inf if self.tpot_seconds is None else self.tpot_seconds)
        return int(np.sum(~np.isnan(ttft_seconds) & ~late & ~slow))


@dataclass(frozen=True)
class SimulatedServers:
    """The servers of a simulation.

    replicas: 0 for the smallest number that meets the targets in 95% of the answers.
    """

    mode: str = option(
        "interleaved", help="With --plan: interleaved, batched or disaggregated prefill; all compares them."
    )
    ideal: bool = option(False, help="With --plan: price a pure roofline.")
    replicas: int = option(1, least=0, help="With --plan: servers; 0 finds the fewest that meet the targets.")
    prefill_replicas: int | None = option(
        None, least=1, help="With --mode disaggregated: servers that only prefill.", unset="1"
    )
    prefix_cache: bool = option(True, help="With --plan: reuse cached pages of shared prompt prefixes.")
    num_drafts: int = option(0, flag="--drafts", least=0, most=16, help="With --plan: draft tokens per step.")
    acceptance: float = option(
        0.0, least=0, most=1, help="With --drafts: probability that a draft token is accepted."
    )

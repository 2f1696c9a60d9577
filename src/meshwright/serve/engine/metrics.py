"""Metrics of the server for Prometheus, under stable names."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.occupancy import Occupancy
from meshwright.serve.engine.request import Event
from meshwright.serve.engine.sequence import TokenSequence

# Seconds, four a decade: from a token of a small model to a long prompt in a long queue.
_BUCKETS = 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10, 20, 30, 60
_TOKEN_BUCKETS = tuple(2**power for power in range(18))


class Forecast(Protocol):
    """Planned seconds and bytes of the steps of an engine."""

    def seconds(self, batch: Batch) -> float | None:
        """None without a plan, which names the machine to price it for."""
        ...

    def bytes(self, batch: Batch) -> dict[str, int]:
        """Bytes of weights and of the cache that a chip reads from its memory."""
        ...


class Metrics:
    """The counters of one server, in their own registry, so that two servers can share a process.

    occupancy: of the scheduler, called whenever the metrics are read.
    """

    def __init__(self, occupancy: Callable[[], Occupancy], forecast: Forecast | None = None) -> None:
        self._registry, self._forecast = CollectorRegistry(), forecast
        self.http_requests = self._counter(
            "http_requests", "HTTP requests answered, by endpoint and status", "endpoint", "status"
        )
        self._finished = self._counter(
            "finished_requests", "Generation requests finished: stop, length, cancelled or failed", "reason"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were prefilled")
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self._looked_up = self._counter("prefix_queries", "Prompt tokens looked up among cached prefixes")
        self._hits = self._counter("prefix_hits", "Tokens among them whose keys and values were found")
        self._preemptions = self._counter(
            "preemptions", "Times that a request gave its pages back, to be computed again"
        )
        self._moved = self._counter(
            "moved_pages", "Pages copied between the cache and the host's memory: out or in", "direction"
        )
        self.fetched_prompts = self._counter(
            "fetched_prompts",
            "Prompts whose pages servers that prefill were asked for: fetched or failed",
            "result",
        )
        self._drafts = self._counter("draft_tokens", "Draft tokens verified")
        self._accepted = self._counter("accepted_draft_tokens", "Draft tokens that were right")
        self._bytes = self._counter(
            "read_bytes",
            "Bytes that steps read from a chip's memory by the model's sizes: weights or cache",
            "what",
        )
        self._planned_seconds = self._counter(
            "planned_steps_seconds",
            "Planned seconds of all steps so far; 0 where the server has no plan",
            "kind",
        )
        self._step_seconds = self._seconds(
            "step_seconds", "Measured seconds of a step: it only generates, or prefills, too", "kind"
        )
        self._step_tokens = self._tokens("step_tokens", "Tokens that a step computes")
        self._time_to_first_token = self._seconds(
            "time_to_first_token_seconds", "Seconds from arrival to the first token, queueing included"
        )
        self._time_per_output_token = self._seconds(
            "time_per_output_token_seconds", "Mean seconds between a request's tokens after the first"
        )
        self.inter_token = self._seconds(
            "inter_token_seconds", "Seconds between two tokens of a request, as handed to its reader"
        )
        self.request_seconds = self._seconds(
            "request_seconds", "Seconds from a request's arrival to its last token"
        )
        self._phases = {
            "queue": self._seconds("queue_seconds", "Seconds from arrival to a request's first step"),
            "prefill": self._seconds("prefill_seconds", "Seconds from the first step to the first token"),
            "generate": self._seconds("generate_seconds", "Seconds from the first token to the last"),
        }
        self._request_prompt_tokens = self._tokens("request_prompt_tokens", "Prompt tokens of a request")
        self._request_generated_tokens = self._tokens("request_generated_tokens", "Tokens of an answer")
        self.planned_step = self._gauge(
            "planned_step_seconds", "Planned seconds of a generate step; NaN where the server has no plan"
        )
        self.planned_step.set(math.nan)
        now: dict[str, tuple[str, Callable[[Occupancy], float]]] = {
            "waiting_requests": ("Requests that wait for a slot", lambda now: now.waiting),
            "running_requests": ("Requests that hold a slot", lambda now: now.running),
            "pages": ("Pages of the cache", lambda now: now.pages),
            "free_pages": ("Pages without a holder", lambda now: now.free_pages),
            "held_pages": ("Pages of requests that hold a slot", lambda now: now.held_pages),
            "cached_pages": ("Pages kept for prompts with the same beginning", lambda now: now.cached_pages),
            "host_pages": ("Pages of the host's memory", lambda now: now.host_pages),
            "cached_host_pages": ("Pages kept in the host's memory", lambda now: now.cached_on_host),
            "cache_usage": ("Held pages over all pages", lambda now: now.held_pages / now.pages),
        }
        for name, (what, figure) in now.items():
            self._gauge(name, what).set_function(lambda figure=figure: figure(occupancy()))

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"meshwright_{name}", what, labels, registry=self._registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"meshwright_{name}", what, registry=self._registry)

    def _seconds(self, name: str, what: str, *labels: str) -> Histogram:
        return Histogram(f"meshwright_{name}", what, labels, registry=self._registry, buckets=_BUCKETS)

    def _tokens(self, name: str, what: str) -> Histogram:
        return Histogram(f"meshwright_{name}", what, registry=self._registry, buckets=_TOKEN_BUCKETS)

    def step(self, batch: Batch, seconds: float) -> None:
        """Note the measured seconds of a step."""
        _, _, chunks, _ = batch.figures
        kind = "prefill" if chunks else "generate"
        self._step_seconds.labels(kind).observe(seconds)
        self._step_tokens.observe(batch.num_tokens)
        for move in (move for move in batch.moves if not move.of_states):
            self._moved.labels("out" if move.is_out else "in").inc()
        if self._forecast is None:
            return
        self._planned_seconds.labels(kind).inc(self._forecast.seconds(batch) or 0.0)
        for what, count in self._forecast.bytes(batch).items():
            self._bytes.labels(what).inc(count)

    def drafted(self, num_drafts: int, num_accepted: int) -> None:
        """Note the verified drafts of one sequence."""
        self._drafts.inc(num_drafts)
        self._accepted.inc(max(num_accepted, 0))

    def prefilled(self, sequence: TokenSequence) -> None:
        """Note a request with its first token, or with its prompt if it generates none."""
        num_prompt = len(sequence.request.prompt)
        self.prompt_tokens.inc(num_prompt)
        self._looked_up.inc(num_prompt)
        self._hits.inc(sequence.num_cached)
        self._request_prompt_tokens.observe(num_prompt)
        if sequence.num_generated:
            self._time_to_first_token.observe(sequence.time_to_first_token_seconds)

    def finish(self, sequence: TokenSequence) -> None:
        """Note the end of a request."""
        lifetime = sequence.lifetime
        self._finished.labels(lifetime.reason).inc()
        self._preemptions.inc(sequence.num_preempted)
        self._request_generated_tokens.observe(sequence.num_generated)
        for phase, (began, ended) in lifetime.phases.items():
            self._phases[phase].observe(ended - began)
        if sequence.num_generated > 1:
            seconds = sequence.time_per_output_token_seconds(lifetime.finished_seconds)
            self._time_per_output_token.observe(seconds)

    def text(self, model_name: str = "") -> bytes:
        """All metrics in Prometheus' text format: as meshwright_NAME, meshwright:NAME and by vLLM's names.

        model_name: the value of a label that vLLM's dashboards and routers select by.
        """
        return generate_latest(_Named(self._registry, model_name))


# vLLM's names.
_VLLM = {
    "meshwright_running_requests": "vllm:num_requests_running",
    "meshwright_waiting_requests": "vllm:num_requests_waiting",
    "meshwright_prompt_tokens": "vllm:prompt_tokens",
    "meshwright_generated_tokens": "vllm:generation_tokens",
    "meshwright_finished_requests": "vllm:request_success",
    "meshwright_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "meshwright_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "meshwright_inter_token_seconds": "vllm:inter_token_latency_seconds",
    "meshwright_request_seconds": "vllm:e2e_request_latency_seconds",
    "meshwright_queue_seconds": "vllm:request_queue_time_seconds",
    "meshwright_prefill_seconds": "vllm:request_prefill_time_seconds",
    "meshwright_generate_seconds": "vllm:request_decode_time_seconds",
    "meshwright_request_prompt_tokens": "vllm:request_prompt_tokens",
    "meshwright_request_generated_tokens": "vllm:request_generation_tokens",
    "meshwright_step_tokens": "vllm:iteration_tokens_total",
    "meshwright_cache_usage": "vllm:kv_cache_usage_perc",
    "meshwright_prefix_queries": "vllm:prefix_cache_queries",
    "meshwright_prefix_hits": "vllm:prefix_cache_hits",
    "meshwright_preemptions": "vllm:num_preemptions",
    "meshwright_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "meshwright_accepted_draft_tokens": "vllm:spec_decode_num_accepted_tokens",
}
_VLLM_LABELS = {"reason": "finished_reason"}


@dataclass(frozen=True)
class _Named:
    """A registry's metrics, and the same ones under their other names."""

    registry: CollectorRegistry
    model_name: str

    def collect(self) -> Iterator[Metric]:
        for metric in self.registry.collect():
            yield metric
            yield _renamed(metric, metric.name.replace("meshwright_", "meshwright:", 1))
            if metric.name in _VLLM:
                yield _renamed(metric, _VLLM[metric.name], {"model_name": self.model_name, "engine": "0"})


def _renamed(metric: Metric, name: str, labels: Mapping[str, str] | None = None) -> Metric:
    """`metric` as `name`; with further labels, which are vLLM's, its labels have vLLM's names too."""
    unit = metric.unit if name.endswith(metric.unit) else ""
    renamed = Metric(name, metric.documentation, metric.type, unit)
    for sample in metric.samples:
        kept = {_VLLM_LABELS.get(key, key) if labels else key: value for key, value in sample.labels.items()}
        suffix = sample.name.removeprefix(metric.name)
        all_labels = kept | dict(labels or {})
        renamed.add_sample(name + suffix, all_labels, sample.value, sample.timestamp, sample.exemplar)
    return renamed


class Latencies:
    """Observes the times between tokens, and the times of requests, for requests submitted together."""

    def __init__(self, metrics: Metrics, num_requests: int) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._last: list[float | None] = [None] * num_requests

    def take(self, event: Event) -> None:
        now = time.perf_counter()
        if (before := self._last[event.index]) is not None:
            self._metrics.inter_token.observe(now - before)
        self._last[event.index] = now
        if event.finish_reason:
            self._metrics.request_seconds.observe(now - self._started)

"""What the server counts, under stable names, for Prometheus."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

from meshwright.serve.sequence import Event

# Seconds, four a decade: from a token of a small model to a long prompt in a long queue.
_BUCKETS = (
    0.001,
    0.002,
    0.003,
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    1,
    2,
    3,
    5,
    10,
    20,
    30,
    60,
)


class Metrics:
    """One server's counters, in a registry of their own so that two servers can share a process."""

    def __init__(self, num_waiting: Callable[[], int], num_running: Callable[[], int]) -> None:
        registry = self._registry = CollectorRegistry()
        self.http_requests = Counter(
            "meshwright_http_requests",
            "HTTP requests answered, by endpoint and status",
            ["endpoint", "status"],
            registry=registry,
        )
        self.finished = Counter(
            "meshwright_finished_requests",
            "Generation requests finished: stop, length, cancelled or failed",
            ["reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter("meshwright_prompt_tokens", "Prompt tokens prefilled", registry=registry)
        self.generated_tokens = Counter("meshwright_generated_tokens", "Tokens generated", registry=registry)
        self.time_to_first_token = Histogram(
            "meshwright_time_to_first_token_seconds",
            "Seconds from arrival to the first token, queueing included",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "meshwright_time_per_output_token_seconds",
            "Mean seconds between a request's tokens after the first",
            buckets=_BUCKETS,
            registry=registry,
        )
        waiting = Gauge("meshwright_waiting_requests", "Requests that wait for a slot", registry=registry)
        running = Gauge("meshwright_running_requests", "Requests that hold a slot", registry=registry)
        waiting.set_function(num_waiting)
        running.set_function(num_running)

        self.inter_token = Histogram(
            "meshwright_inter_token_seconds",
            "Seconds between two tokens of a request, as handed to its reader",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "meshwright_request_seconds",
            "Seconds from a request's arrival to its last token",
            buckets=_BUCKETS,
            registry=registry,
        )
        self.planned_step = Gauge(
            "meshwright_planned_step_seconds",
            "Planned seconds of a generate step; NaN where the server has no plan",
            registry=registry,
        )
        self.planned_step.set(math.nan)

    def text(self, model_name: str = "") -> bytes:
        """All metrics in Prometheus' text format: ours, with `meshwright:` too, and by vLLM's names.

        model_name: the label that vLLM's dashboards and routers select by.
        """
        return generate_latest(_Named(self._registry, model_name))


# vLLM's name of each of our metrics that it has.
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
    """`metric` as `name`, with further labels, and its own as vLLM calls them if there are further ones."""
    found = Metric(name, metric.documentation, metric.type, metric.unit if name.endswith(metric.unit) else "")
    for sample in metric.samples:
        own = {_VLLM_LABELS.get(key, key) if labels else key: value for key, value in sample.labels.items()}
        suffix = sample.name.removeprefix(metric.name)
        found.add_sample(
            name + suffix, own | dict(labels or {}), sample.value, sample.timestamp, sample.exemplar
        )
    return found


class Latencies:
    """Observes the times between tokens, and of whole requests, of requests that were submitted together."""

    def __init__(self, metrics: Metrics, num_requests: int) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._last: list[float | None] = [None] * num_requests

    def take(self, event: Event) -> None:
        now = time.perf_counter()
        before = self._last[event.index]
        if before is not None:
            self._metrics.inter_token.observe(now - before)
        self._last[event.index] = now
        if event.finish_reason:
            self._metrics.request_seconds.observe(now - self._started)

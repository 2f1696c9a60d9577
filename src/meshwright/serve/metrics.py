"""What the server counts, under stable names, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

"""The figures of a load test that are in the metrics of a server."""

from prometheus_client.parser import text_string_to_metric_families

NAME = "meshwright:planned_step_seconds"
# The names of vLLM's, which our server has as well.
DRAFTS, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


def planned_step_seconds(metrics: str) -> float | None:
    """Planned seconds of a generate step, None if the metrics do not have them."""
    return _values(metrics).get(NAME) or None


def draft_counts(metrics: str) -> tuple[float, float]:
    """Draft tokens verified so far, and accepted ones; zeros if the metrics do not have them."""
    values = _values(metrics)
    return values.get(DRAFTS, 0.0), values.get(ACCEPTED, 0.0)


def _values(metrics: str) -> dict[str, float]:
    """The values above 0 by name."""
    try:
        samples = [s for family in text_string_to_metric_families(metrics) for s in family.samples]
    except ValueError:  # another server's metrics, in another format
        return {}
    return {sample.name: sample.value for sample in samples if sample.value > 0}

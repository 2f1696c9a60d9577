"""The planned step time in the metrics of a meshwright server."""

from prometheus_client.parser import text_string_to_metric_families

NAME = "meshwright:planned_step_seconds"


def planned_step_seconds(metrics: str) -> float | None:
    """Planned seconds of a generate step, None if the metrics do not have them."""
    try:
        samples = [s for family in text_string_to_metric_families(metrics) for s in family.samples]
    except ValueError:  # another server's metrics, in another format
        return None
    return next((sample.value for sample in samples if sample.name == NAME and sample.value > 0), None)

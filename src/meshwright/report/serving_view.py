"""A load test of a server: its facts in lines, distributions for the terminal, and a page of charts."""

from collections.abc import Sequence
from pathlib import Path

from meshwright import __version__
from meshwright.errors import DataError
from meshwright.report import templating
from meshwright.report.charts import Chart, chart, libraries, script_json, series
from meshwright.report.run_files import JsonDocument, read_json
from meshwright.units import format_seconds

ROWS = {
    "ttft_seconds": "time to first token",
    "tpot_seconds": "time per output token",
    "itl_seconds": "between tokens",
    "request_seconds": "whole request",
}
"""The measured times of the document by key, in words."""

_PARTS = ("traffic", "requests", "errors", "seconds", "targets", "answers", "results", "goodput")
_BAR = 60  # characters of the longest bar
_BINS = 16
_MS = 1e3  # in a second


def read_load_test(path: Path) -> JsonDocument | None:
    """The document of `mw bench serve -o PATH`; None where `path` is something else.

    Raises DataError where the file says that it is one and lacks a part.
    """
    if path.suffix != ".json" or not path.is_file():
        return None
    document = read_json(path)
    if document is None or document.get("kind") != "serving":
        return None
    for key in (*ROWS, *_PARTS):
        if key not in document:
            raise DataError(
                f"{path} is a load test without {key!r}; write it anew with `mw bench serve -o {path}`"
            )
    return document


def facts(document: JsonDocument) -> list[str]:
    """What the document says besides times, a line each."""
    lines = [
        f"{document['requests']} requests ({_arrivals(document['traffic'])}), {document['errors']} errors, "
        f"in {format_seconds(document['seconds'])}",
        f"{document['new_tokens_per_second']:.1f} new tokens/s, "
        f"{document['requests_per_second']:.2f} requests/s, "
        f"goodput {document['goodput']:.2f} requests/s ({_targets(document['targets'])})",
    ]
    lines += [f"  {count} x {message}" for message, count in document["error_messages"].items()]
    planned = document["results"][0]["predicted_seconds"]
    if "simulated" in document:
        lines.append(_simulated(document["simulated"]))
    elif planned:
        lines.append(
            f"planned step {format_seconds(planned)}: measured {document['results'][0]['ratio']:.2f} times"
        )
    return lines


def _simulated(found: JsonDocument) -> str:
    """What stood behind the answers of a load test without a server."""
    of_each, more = found["replicas"], found["prefill_replicas"]
    servers = f"{of_each} replica{'s' * (of_each > 1)}" + (f" and {more} that prefill" if more else "")
    return (
        f"simulated on {servers} of {found['hardware']} (chips: {found['chips']}), {found['mode']}: devices "
        f"busy {found['busy_share']:.0%}, {found['prefix_hit_rate']:.0%} of prompt tokens from cached pages, "
        f"{found['preempted']} preempted"
    )


def _arrivals(traffic: JsonDocument) -> str:
    if traffic["arrivals"] == "closed":
        return f"{traffic['concurrency']} at once"
    if traffic["arrivals"] == "trace":
        return f"as in {traffic['lengths']}"
    bursts = f", {traffic['burst']} together" if traffic["burst"] > 1 else ""
    return f"{traffic['rate_per_second']:g}/s{bursts}"


def _targets(targets: JsonDocument) -> str:
    words = {"ttft_seconds": "first token", "tpot_seconds": "per token"}
    asked = [
        f"{words[key]} within {format_seconds(value)}" for key, value in targets.items() if value is not None
    ]
    return ", ".join(asked) or "no target"


def terminal_histograms(document: JsonDocument) -> str:
    """Histograms of time to first token and time per output token, as text."""
    keys = ("ttft_seconds", "tpot_seconds")
    plots = [_histogram(ROWS[key], _values(document, key)) for key in keys]
    return "\n\n".join(plot for plot in plots if plot)


def _values(document: JsonDocument, key: str) -> list[float]:
    return [row[key] for row in document["answers"] if row["error"] is None and row[key] is not None]


def _histogram(title: str, values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    width = (high - low) / _BINS or 1.0
    counts = [0] * _BINS
    for value in values:
        counts[min(int((value - low) / width), _BINS - 1)] += 1
    if low == high:
        counts = counts[:1]
    lines = [
        f"{format_seconds(low + number * width):>10} |{'#' * round(count / max(counts) * _BAR)} {count}"
        for number, count in enumerate(counts)
    ]
    return "\n".join([f"{title}, {len(values)} answers", *lines])


def serving_html(document: JsonDocument) -> str:
    """The document of `mw bench serve` as one HTML page that loads nothing."""
    environment = templating.environment()
    environment.filters["seconds"] = format_seconds
    return environment.get_template("serving.html.jinja").render(
        title=f"{document['model']} at {document['url']}",
        version=__version__,
        facts=facts(document),
        rows=[(name, document[key]) for key, name in ROWS.items()],
        charts={name: script_json(figure) for name, figure in _figures(document).items()},
        libraries=libraries(),
    )


def _figures(document: JsonDocument) -> dict[str, Chart]:
    return {
        "distributions": _cumulative(document),
        "requests": _over_time(document),
    }


def _cumulative(document: JsonDocument) -> Chart:
    """The share of answers within a time, for the times of a whole answer."""
    curves = []
    for number, key in enumerate(("ttft_seconds", "tpot_seconds"), start=1):
        values = [_MS * value for value in sorted(_values(document, key))]
        share = [(rank + 1) / len(values) for rank in range(len(values))]
        curves.append(series(ROWS[key], "steps", values, share, number))
    return chart(curves, "milliseconds", "share of answers", logarithmic="x")


def _over_time(document: JsonDocument) -> Chart:
    """Time to first token of each request by when it was sent; failed ones on the axis."""
    whole = [row for row in document["answers"] if row["error"] is None and row["ttft_seconds"] is not None]
    failed = [row for row in document["answers"] if row["error"] is not None]
    starts = [row["start_seconds"] for row in whole]
    curves = [
        series(ROWS["ttft_seconds"], "points", starts, [_MS * row["ttft_seconds"] for row in whole], 1),
        series(
            "failed",
            "points",
            [row["start_seconds"] for row in failed],
            [0.0 for _ in failed],
            3,
            notes=[row["error"] for row in failed],
        ),
    ]
    return chart(curves, "seconds since the start", "milliseconds to the first token")

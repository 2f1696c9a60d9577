"""A measured load test compared with the simulation of its plan, and its anchor."""

from pathlib import Path
from typing import Any

from meshwright.errors import DataError
from meshwright.files import parse_json, read_text

_FIGURES = (
    ("ttft_seconds", "p50"),
    ("ttft_seconds", "p95"),
    ("tpot_seconds", "p50"),
    ("tpot_seconds", "p95"),
)


def beside(measured: dict[str, Any], planned: dict[str, Any]) -> dict[str, Any]:
    """The document of a load test, with a row in `results` for each figure that was also simulated.

    Its `anchor` is the ratio of times per token, for `mw bench serve --anchor`.
    """
    rows = [
        _row(f"{name} {share}", measured[name][share], planned[name][share], "seconds")
        for name, share in _FIGURES
    ]
    name = "new_tokens_per_second"
    rows.append(_row(name, measured[name], planned[name], name))
    [factor] = [row["ratio"] for row in rows if row["name"] == "tpot_seconds p50"]
    price = dict(planned["price"])
    if price["per_million_tokens"] is not None and measured[name]:
        price["per_million_tokens"] *= planned[name] / measured[name]
    results = [*measured["results"], *rows]
    return measured | {"results": results, "anchor": {"step_seconds": factor}, "price": price}


def _row(name: str, measured: float | None, planned: float | None, unit: str) -> dict[str, Any]:
    ratio = measured / planned if measured and planned else None
    return {"name": name, unit: measured, f"predicted_{unit}": planned, "ratio": ratio}


def factor_of(path: Path) -> float:
    """The factor of step times that a run's document has. Raises DataError without one."""
    try:
        document = parse_json(read_text(path, DataError))
    except ValueError:
        document = None
    anchor = document.get("anchor") if isinstance(document, dict) else None
    factor = anchor.get("step_seconds") if isinstance(anchor, dict) else None
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < float("inf"):
        raise DataError(f"{path}: has no anchor; mw bench serve --url URL --plan PLAN -o {path} writes one")
    return float(factor)

"""The JSON documents of a run, read from its folder, and single figures from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.errors import DataError, PlanError
from meshwright.files import parse_json, read_text
from meshwright.plan_file import PLAN_FILE
from meshwright.report.text import ABSENT

JsonDocument = Mapping[str, Any]
_IDLE = ("1", "0", "", "none", "False", "false")  # degrees and switches without effect


@dataclass(frozen=True)
class Run:
    """The documents of a run folder. A missing document is None, missing metrics are ()."""

    path: Path
    plan: JsonDocument | None
    plan_text: str | None
    metrics: tuple[JsonDocument, ...]
    corpus: JsonDocument | None
    audit: JsonDocument | None
    completion: JsonDocument | None


def read_run(path: Path) -> Run:
    """Read the documents of a run folder, or a single plan file and its JSON.

    Raises PlanError if there is neither a plan nor metrics, DataError for a file that is not JSON or text.
    """
    if not path.exists() and not path.with_suffix(".json").is_file():
        raise PlanError(f"{path}: no such file or folder; give a run folder or a plan")
    run = _read_folder(path) if path.is_dir() else _read_plan_file(path)
    if run.plan is None and run.plan_text is None and not run.metrics:
        raise PlanError(
            f"{path} holds neither plan.toml, plan.json nor metrics.jsonl; give a run folder or a plan"
        )
    if run.plan is not None and ("frontier" in run.plan or "phase" in run.plan):
        raise serving_plan(path)
    return run


def serving_plan(path: Path) -> PlanError:
    """The error for a plan of `mw plan serve` without its frontier."""
    return PlanError(
        f"{path} is of one phase, or has no .json next to it; a report needs both files of mw plan serve -o"
    )


def winner(plan: JsonDocument) -> JsonDocument | None:
    """The chosen candidate: `best`, or the first of `candidates`."""
    best = plan.get("best")
    candidates = plan.get("candidates") or []
    if isinstance(best, int):
        return candidates[best]
    return best or (candidates[0] if candidates else None)


def bound_text(entry: JsonDocument) -> str:
    """The bound of a candidate or operation, by the machine's own name for its links."""
    return str(entry.get("bound_name") or entry.get("bound") or ABSENT)


def last_value(metrics: Sequence[JsonDocument], key: str) -> float | None:
    """The newest value of `key` in the metrics."""
    return next((line[key] for line in reversed(metrics) if line.get(key) is not None), None)


def measured_step_seconds(metrics: Sequence[JsonDocument]) -> float | None:
    """The median over the logged steps: one stall on a busy host should not move the headline."""
    times = [line["step_seconds"] for line in metrics if line.get("step_seconds") is not None]
    return median(times) if times else None


def step_seconds_of_plan(run: Run) -> float | None:
    """The planned step time in the metrics, otherwise in the plan."""
    best = winner(run.plan) if run.plan else None
    return last_value(run.metrics, "planned_step_seconds") or (best or {}).get("step_seconds")


def layout_degrees(layout: str | JsonDocument) -> dict[str, str]:
    """`data=2,fsdp=4,remat=full` as a dict of text, in order."""
    if isinstance(layout, str):
        return {key: value for key, _, value in (part.partition("=") for part in layout.split(",") if part)}
    return {key: str(value) for key, value in layout.items()}


def layout_text(layout: str | JsonDocument) -> str:
    """The layout without degrees and switches that have no effect: `fsdp=4,tensor=2`."""
    degrees = layout_degrees(layout)
    kept = {key: value for key, value in degrees.items() if value not in _IDLE or key == "zero"}
    return ",".join(f"{key}={value}" for key, value in (kept or degrees).items())


def bytes_total(candidate: JsonDocument) -> int | None:
    """Total bytes per chip; the sum of the parts if there is no total."""
    parts = candidate.get("bytes_per_chip")
    if isinstance(parts, Mapping):
        return parts.get("total", sum(value for value in parts.values() if value))
    return parts


def axes_text(axes: str | Sequence[str] | None) -> str:
    return axes if isinstance(axes, str) else ",".join(axes or ())


def audit_rows(audit: JsonDocument) -> list[JsonDocument]:
    """The audit, tensor by tensor. A document without `rows` lists only the differences."""
    if audit.get("rows"):
        return list(audit["rows"])
    sides = (("missing", "planned"), ("unplanned", "emitted"))
    return [
        {"tensor": c.get("tensor"), "direction": c.get("direction"), side: c, "status": status}
        for status, side in sides
        for c in audit.get(status) or []
    ]


def collective_text(collective: JsonDocument | None) -> str:
    """One collective in the notation, with its repeats: `AllGather_fsdp ×4`."""
    if not collective:
        return ABSENT
    op = "".join(word.capitalize() for word in str(collective.get("op", "")).split("_"))
    axes = axes_text(collective.get("axes"))
    count = collective.get("count")
    subscript = f"_{{{axes}}}" if "," in axes else f"_{axes}" if axes else ""
    return f"{op}{subscript}" + (f" ×{count:,g}" if count is not None and count != 1 else "")


def _read_folder(folder: Path) -> Run:
    return Run(
        path=folder,
        plan=read_json(folder / "plan.json"),
        plan_text=_read_text(folder / PLAN_FILE),
        metrics=_read_lines(folder / "metrics.jsonl"),
        corpus=read_json(folder / "data" / "corpus.json"),
        audit=read_json(folder / "audit.json"),
        completion=read_json(folder / "completion.json"),
    )


def _read_plan_file(path: Path) -> Run:
    if path.suffix not in (".toml", ".json"):
        raise PlanError(f"{path} is not a plan: a plan is a .toml, with its figures in the .json next to it")
    toml, document = path.with_suffix(".toml"), path.with_suffix(".json")
    plan, text = read_json(document), _read_text(toml)
    if plan is not None and text is None and winner(plan) is None:
        raise PlanError(
            f"{document} is not a plan of mw plan train -o: it has neither best nor candidates; "
            "a model's config.json is for mw model and mw plan train --model"
        )
    return Run(path, plan, text, (), None, None, None)


def _read_text(path: Path) -> str | None:
    return read_text(path, DataError) if path.is_file() else None


def read_json(path: Path) -> JsonDocument | None:
    """The JSON object in a file; None without a file. Raises DataError for any other content."""
    text = _read_text(path)
    return None if text is None else _parse_object(text, str(path))


def _read_lines(path: Path) -> tuple[JsonDocument, ...]:
    lines = enumerate((_read_text(path) or "").splitlines(), start=1)
    return tuple(_parse_object(line, f"{path}:{number}") for number, line in lines if line.strip())


def _parse_object(text: str, where: str) -> JsonDocument:
    try:
        value = parse_json(text)
    except ValueError as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, JSONDecodeError) else error
        raise DataError(f"{where} is not JSON: {what}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} holds a JSON {type(value).__name__}, not an object")
    return value

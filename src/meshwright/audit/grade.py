"""The grade of a difference: wrong numbers, a dear step, or a note.

    wrong   the step computes another function than planned, or in too few bits; or the twin's numbers differ
    dear    it takes over 1% of the planned step more, or memory that is not planned, or calls its host
    note    less than that

A document has the worst grade of its findings, and their seconds together.
"""

from collections.abc import Iterable, Mapping
from typing import Any

GRADES = ("wrong", "dear", "note")
# Kinds of findings that are about numbers, at any cost.
_OF_NUMBERS = ("state", "update", "elementwise")
_OF_COSTS = ("memory", "exposure", "host")
_DEAR_SHARE = 0.01


def graded(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with `grade` and `extra_seconds`, and a `grade` for each finding."""
    planned = (document.get("step_seconds") or {}).get("planned")
    missing = {one["tensor"] for one in document.get("missing", ())}
    findings = [
        {**finding, "grade": _of_finding(finding, planned, missing), **_remarked(finding, document)}
        for finding in document["findings"]
    ]
    grades = {one["grade"] for one in findings}
    if (document.get("numerics") or {}).get("agrees") is False:
        grades.add("wrong")
    if document["not_understood"] or (document["verdict"] == "differs" and not grades):
        grades.add("note")
    return {
        **document,
        "findings": findings,
        "grade": worst(grades),
        "extra_seconds": sum(one["extra_seconds"] or 0.0 for one in findings),
    }


def worst(grades: Iterable[str | None]) -> str | None:
    """The first of `GRADES` among some; None if there is none."""
    given = set(grades)
    return next((grade for grade in GRADES if grade in given), None)


def _of_finding(finding: Mapping[str, Any], planned: float | None, missing: set[str]) -> str:
    kind, seconds = finding["kind"], finding["extra_seconds"]
    is_of_types = kind == "dtype" and seconds is None
    if kind in _OF_NUMBERS or is_of_types or (kind == "collective" and finding["tensor"] in missing):
        return "wrong"
    if kind == "product" and "planned 0" not in finding["what"] and (seconds or 0.0) < 0:
        return "wrong"
    if kind in _OF_COSTS or (planned and seconds and abs(seconds) > _DEAR_SHARE * planned):
        return "dear"
    return "note"


def _remarked(finding: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, str]:
    """The compiler's own warning about the finding's tensor."""
    for warning in document.get("compiler_warnings") or ():
        if warning["tensor"] and warning["tensor"] == finding["tensor"]:
            return {"compiler": warning["what"]}
    return {}

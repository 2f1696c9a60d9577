"""The audit as the page shows it: one row a collective, totals, and how many of each status."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.report.documents import Document, audit_rows, collective_text
from meshwright.report.figures import ABSENT, bytes_text
from meshwright.units import format_bytes, format_count

STATUS_TONE = {
    "match": "good",
    "equivalent": "fine",
    "unplanned": "warn",
    "missing": "bad",
    "differs": "warn",
}


@dataclass(frozen=True)
class AuditRow:
    tensor: str
    direction: str
    planned: str
    emitted: str
    planned_bytes: str
    emitted_bytes: str
    status: str
    tone: str
    note: str


def rows(audit: Document) -> list[AuditRow]:
    return [
        AuditRow(
            tensor=str(row.get("tensor") or ABSENT),
            direction=str(row.get("direction") or ABSENT),
            planned=collective_text(row.get("planned")),
            emitted=collective_text(row.get("emitted")),
            planned_bytes=bytes_text((row.get("planned") or {}).get("bytes")),
            emitted_bytes=bytes_text((row.get("emitted") or {}).get("bytes")),
            status=str(row.get("status", ABSENT)),
            tone=STATUS_TONE.get(str(row.get("status")), ""),
            note=str(row.get("note") or ""),
        )
        for row in audit_rows(audit)
    ]


def totals(audit: Document) -> list[tuple[str, str, str, str]]:
    """Name, planned, compiled and their ratio; what the compiler does not tell is "unavailable"."""
    formats = {"bytes": format_bytes, "flops": format_count, "memory": format_bytes}
    names = {"bytes": "bytes moved", "flops": "FLOPs", "memory": "memory per device"}
    rows = []
    for key, write in formats.items():
        sides = audit.get(key) or {}
        planned, compiled = sides.get("planned"), sides.get("compiled")
        texts = ["unavailable" if value is None else write(value) for value in (planned, compiled)]
        rows.append((names[key], *texts, f"{compiled / planned:.2f}×" if planned and compiled else ABSENT))
    return rows


def status_counts(audit: Document) -> list[tuple[str, int, str]]:
    """Each status that occurs, how often, and its tone."""
    found = [str(row.get("status")) for row in audit_rows(audit)]
    return [(status, found.count(status), STATUS_TONE.get(status, "")) for status in dict.fromkeys(found)]


def notes(rows: Sequence[AuditRow]) -> list[tuple[str, str]]:
    """Each note once, with the tensors that it speaks of."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            found.setdefault(row.note, []).append(row.tensor)
    return [(note, ", ".join(dict.fromkeys(tensors))) for note, tensors in found.items()]

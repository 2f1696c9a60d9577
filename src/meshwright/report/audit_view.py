"""The audit as the page shows it: one row a collective, totals, and how many of each status."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.report.figures import ABSENT, bytes_text
from meshwright.report.run_files import JsonDocument, audit_rows, collective_text
from meshwright.units import format_bytes, format_count, format_seconds

STATUS_TONE = {
    "match": "good",
    "equivalent": "fine",
    "unplanned": "warn",
    "missing": "bad",
    "differs": "warn",
}

# What a collective runs beside where it runs beside nothing.
NOTHING_BESIDE = "nothing"
# Collectives that move less than this share of a step's bytes are left out; so are buffers of a peak.
_LEAST_SHARE = 0.01
_MOST_BUFFERS = 8


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


def rows(audit: JsonDocument) -> list[AuditRow]:
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


def totals(audit: JsonDocument) -> list[tuple[str, str, str, str]]:
    """Name, planned, compiled and their ratio; what the compiler does not tell is "unavailable"."""
    formats = {
        "bytes": ("bytes moved", format_bytes),
        "sent": ("bytes sent", format_bytes),
        "flops": ("FLOPs", format_count),
        "memory": ("memory per device", format_bytes),
        "step_seconds": ("step, as scheduled", format_seconds),
    }
    rows = []
    for key, (name, write) in formats.items():
        if key not in audit:
            continue
        sides = audit[key] or {}
        planned, compiled = sides.get("planned"), sides.get("compiled", sides.get("scheduled"))
        texts = ["unavailable" if value is None else write(value) for value in (planned, compiled)]
        rows.append((name, *texts, f"{compiled / planned:.2f}×" if planned and compiled else ABSENT))
    return rows


def memory_rows(audit: JsonDocument) -> list[tuple[str, str, str]]:
    """Bytes of one device: cause, planned, compiled. Of causes a compiler knows inputs and temporaries."""
    memory = audit.get("memory") or {}
    planned, compiled = memory.get("planned_by_cause"), memory.get("compiled_by_cause")
    if not planned:
        return []
    causes = {
        "arguments": ("weights", "optimizer", "cache"),
        "temporaries": ("gradients", "activations", "buffers"),
        "outputs": (),
    }
    rows = []
    for name, known in causes.items():
        parts = [part for part in known if part in planned]  # training has no cache, inference no optimizer
        detail = ", ".join(f"{part} {format_bytes(planned[part])}" for part in parts)
        total = format_bytes(sum(planned[part] for part in parts))
        found = "unavailable" if not compiled else format_bytes(compiled[name])
        rows.append((f"{name}: {detail}" if detail else f"{name} besides", total, found))
    return rows


def beside(audit: JsonDocument) -> list[tuple[str, str]] | None:
    """The collectives that move most, and the products that run meanwhile; None where unavailable."""
    emitted = [one for one in audit.get("emitted") or [] if one.get("overlaps") is not None]
    if not emitted:
        return None
    moved: dict[str, int] = {}
    products: dict[str, dict[str, None]] = {}
    for one in emitted:
        name = f"{one['tensor']} {one['direction']} {one['op']}"
        moved[name] = moved.get(name, 0) + one["bytes"] * (one["count"] or 1)
        products.setdefault(name, {}).update(dict.fromkeys(one["overlaps"]))
    least = _LEAST_SHARE * sum(moved.values())
    names = sorted((name for name in moved if moved[name] >= least), key=lambda name: -moved[name])
    return [(name, _short(list(products[name]))) for name in names]


def _short(products: list[str]) -> str:
    more = f" and {len(products) - 2} more" if len(products) > 2 else ""
    return ", ".join(products[:2]) + more if products else NOTHING_BESIDE


def largest_buffers(audit: JsonDocument) -> tuple[list[tuple[str, str, str]], str] | None:
    """Tensor, shape and bytes of the largest buffers at the peak, and of how much; None where unavailable."""
    memory = audit.get("memory") or {}
    found = memory.get("peak")
    if found is None:
        return None
    shown = [one for one in found["buffers"][:_MOST_BUFFERS] if one["bytes"] >= _LEAST_SHARE * found["bytes"]]
    rows = [(one["tensor"] or one["instruction"], one["shape"], bytes_text(one["bytes"])) for one in shown]
    rest = found["bytes"] - sum(one["bytes"] for one in shown)
    given = memory.get("compiled_by_cause")
    known = f" of {bytes_text(given['temporaries'])} that the compiler counts" if given else ""
    caption = f"{bytes_text(found['bytes'])} of temporaries by the order of the schedule{known}"
    return [*rows, ("all others", "", bytes_text(rest))], caption


def remarks(audit: JsonDocument) -> list[tuple[str, str, str, str]]:
    """Findings and the compiler's warnings: title, what, where, change."""
    said = [("the compiler", one["what"], one) for one in audit.get("compiler_warnings") or []]
    found = [
        (f"{one['tensor']} {one['direction']}", f"{one['what']} ({cost_text(one)})", one)
        for one in audit.get("findings") or []
    ]
    return [(title, what, one["where"], one["change"]) for title, what, one in found + said]


def cost_text(finding: JsonDocument) -> str:
    """What a finding costs a device, beyond the plan: bytes held, time, or bytes sent and time."""
    size, seconds = finding["extra_bytes"], finding["extra_seconds"]
    if finding.get("kind") == "memory":
        return f"each device holds {_signed(size, format_bytes)}"
    time = "time unavailable" if seconds is None else _signed(seconds, format_seconds)
    if finding.get("kind") in ("product", "dtype", "exposure"):
        return f"{time} per step"
    return f"each device sends {_signed(size, format_bytes)} per step, {time}"


def _signed(value: float, write: Callable[[float], str]) -> str:
    """A difference to the plan, its sign always shown."""
    return f"{'-' if value < 0 else '+'}{write(abs(value))}"


def status_counts(audit: JsonDocument) -> list[tuple[str, int, str]]:
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

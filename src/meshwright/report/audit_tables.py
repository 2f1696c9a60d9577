"""An audit as tables: a row for each collective, totals, memory, overlap, and remarks."""

from collections.abc import Callable

from meshwright.report.run_documents import JsonDocument, audit_rows, collective_text
from meshwright.report.table import Cell, Table
from meshwright.report.text import ABSENT, UNAVAILABLE, bytes_text
from meshwright.units import and_more, format_bytes, format_count, format_seconds

STATUS_TONE = {
    "match": "good",
    "equivalent": "fine",
    "unplanned": "warn",
    "missing": "bad",
    "differs": "warn",
}
# Collectives that move less than this share of a step's bytes are left out; so are buffers of a peak.
_LEAST_SHARE = 0.01
_MOST_BUFFERS = 8


def collectives_table(audit: JsonDocument) -> Table:
    """A row for each pair of collectives, planned and emitted."""
    rows = [
        (
            str(row.get("tensor") or ABSENT),
            str(row.get("direction") or ABSENT),
            *(
                text
                for side in ("planned", "emitted")
                for text in (collective_text(row.get(side)), bytes_text((row.get(side) or {}).get("bytes")))
            ),
            Cell(str(row.get("status", ABSENT)), STATUS_TONE.get(str(row.get("status")), "")),
        )
        for row in audit_rows(audit)
    ]
    return Table.of(
        "Planned against emitted collectives",
        (
            "tensor|code",
            "direction",
            "planned|notation",
            "bytes|number",
            "emitted|notation",
            "bytes|number",
            "status",
        ),
        rows,
    )


def totals(audit: JsonDocument) -> list[tuple[str, str, str, str]]:
    """Name, planned, compiled and their ratio. A figure that the compiler lacks is "unavailable"."""
    formats: dict[str, tuple[str, Callable[[float], str]]] = {
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
        texts = [UNAVAILABLE if value is None else write(value) for value in (planned, compiled)]
        rows.append((name, *texts, f"{compiled / planned:.2f}×" if planned and compiled else ABSENT))
    return rows


def memory_rows(audit: JsonDocument) -> list[tuple[str, str, str]]:
    """Bytes of one device: cause, planned, compiled. A compiler reports inputs, outputs and temporaries."""
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
        text = bytes_text(compiled[name]) if compiled else UNAVAILABLE
        rows.append((f"{name}: {detail}" if detail else f"other {name}", total, text))
    return rows


def memory_table(audit: JsonDocument) -> Table | None:
    """The bytes of one device by cause; None if the plan's are unknown."""
    rows, columns = memory_rows(audit), ("", "planned|number", "compiled|number")
    return Table.of("Memory of one device", columns, rows) if rows else None


def overlap_table(audit: JsonDocument) -> Table | str | None:
    """The largest collectives and the products that run meanwhile; a line of text if that is unknown."""
    if not audit.get("emitted"):
        return None
    emitted = [one for one in audit["emitted"] if one.get("overlaps") is not None]
    if not emitted:
        return "overlap with collectives: unavailable, none is asynchronous"
    moved: dict[str, int] = {}
    products: dict[str, dict[str, None]] = {}
    for row in emitted:
        name = f"{row['tensor']} {row['direction']} {row['op']}"
        moved[name] = moved.get(name, 0) + row["bytes"] * (row["count"] or 1)
        products.setdefault(name, {}).update(dict.fromkeys(row["overlaps"]))
    least = _LEAST_SHARE * sum(moved.values())
    rows = []
    for name in sorted((name for name in moved if moved[name] >= least), key=lambda name: -moved[name]):
        named = list(products[name])
        more = and_more(len(named) - 2)
        rows.append((name, Cell(", ".join(named[:2]) + more) if named else Cell("nothing", "warn")))
    columns = ("collective|code", "products meanwhile|code")
    return Table.of("Overlap of the largest collectives", columns, rows)


def buffers_table(audit: JsonDocument) -> Table | str | None:
    """The largest buffers at the peak of memory; a line of text if the program has no schedule."""
    memory = audit.get("memory") or {}
    if "peak" not in memory:
        return None
    peak = memory["peak"]
    if peak is None:
        return "buffers at the peak: unavailable, the program has no schedule"
    shown = [one for one in peak["buffers"][:_MOST_BUFFERS] if one["bytes"] >= _LEAST_SHARE * peak["bytes"]]
    rows = [(one["tensor"] or one["instruction"], one["shape"], bytes_text(one["bytes"])) for one in shown]
    rest = peak["bytes"] - sum(one["bytes"] for one in shown)
    given = memory.get("compiled_by_cause")
    known = f", out of {bytes_text(given['temporaries'])} that the compiler counts" if given else ""
    return Table.of(
        "Largest buffers at the peak",
        ("tensor|code", "shape|code", "bytes|number"),
        [*rows, ("all others", "", bytes_text(rest))],
        f"{bytes_text(peak['bytes'])} of temporaries by the order of the schedule{known}",
    )


def remarks(audit: JsonDocument) -> list[tuple[str, str, str, str]]:
    """Findings, then the compiler's warnings: title, problem, place, change."""
    rows = [
        (
            f"{finding['tensor']} {finding['direction']}",
            f"{finding['what']} ({cost_text(finding)})"
            + (f"; the compiler: {finding['compiler']}" if "compiler" in finding else ""),
            finding["where"],
            finding["change"],
        )
        for finding in audit.get("findings") or []
    ]
    joined = {finding.get("compiler") for finding in audit.get("findings") or []}
    warned = [one for one in audit.get("compiler_warnings") or [] if one["what"] not in joined]
    return rows + [("the compiler", one["what"], one["where"], one["change"]) for one in warned]


def cost_text(finding: JsonDocument) -> str:
    """The cost of a finding for one device, beyond the plan: bytes held, time, or bytes sent and time."""
    size, seconds = finding["extra_bytes"], finding["extra_seconds"]
    if finding.get("kind") == "memory":
        return f"each device holds {_signed(size, format_bytes)}"
    time = "time unavailable" if seconds is None else _signed(seconds, format_seconds)
    if finding.get("kind") in ("product", "dtype", "exposure"):
        return f"{time} per step"
    return f"each device sends {_signed(size, format_bytes)} per step, {time}"


def _signed(value: float, write: Callable[[float], str]) -> str:
    """A difference from the plan, with its sign."""
    return f"{'-' if value < 0 else '+'}{write(abs(value))}"


def status_counts(audit: JsonDocument) -> list[tuple[str, int, str]]:
    """Each status that occurs, its number of rows, and its tone."""
    statuses = [str(row.get("status")) for row in audit_rows(audit)]
    return [
        (status, statuses.count(status), STATUS_TONE.get(status, "")) for status in dict.fromkeys(statuses)
    ]


def notes(audit: JsonDocument) -> list[tuple[str, str]]:
    """Each note once, with the tensors that it is about."""
    by_status: dict[str, list[str]] = {}
    for row in audit_rows(audit):
        if row.get("note"):
            by_status.setdefault(str(row["note"]), []).append(str(row.get("tensor") or ABSENT))
    return [(note, ", ".join(dict.fromkeys(tensors))) for note, tensors in by_status.items()]

"""Audits on the terminal: of a plan's program, and of a program without a plan."""

from collections.abc import Iterable, Mapping

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from meshwright.report.audit_tables import (
    buffers_table,
    collectives_table,
    memory_table,
    overlap_table,
    remarks,
    status_counts,
    totals,
)
from meshwright.report.run_documents import JsonDocument
from meshwright.report.table import Table
from meshwright.report.terminal.tables import rich_table
from meshwright.report.text import UNAVAILABLE, bytes_text, seconds_text
from meshwright.units import format_number_of


def audit_table(audit: JsonDocument) -> Group:
    """Planned against compiled totals, a row for each collective, and the verdict; for each phase."""
    phases = {"generate": audit, "prefill": audit["prefill"]} if "prefill" in audit else {"": audit}
    parts: list[RichTable | Text] = []
    for phase, document in phases.items():
        parts += [Text(phase.capitalize(), style="bold")] if phase else []
        parts += _program(document)
    server = [server_line(audit["server"])] if audit.get("server") else []
    return Group(_verdict(audit["verdict"], phases), *parts, *server)


def server_line(server: JsonDocument) -> Text:
    """The programs of a server, and whether it starts: the key `server` of a plan or an audit."""
    counts = server["programs"]
    number = f"{sum(counts.values())} programs ({counts['samplers']} choose tokens)"
    size = server["program_bytes"]
    code = "of unknown size" if size is None else f"of {bytes_text(size)}"
    if server["boots"] is None:
        return Text(f"server: {number} {code}")
    verdict = Text("starts", style="green") if server["boots"] else Text("does not start", style="red")
    sizes = f"{bytes_text(server['bytes'])} of {bytes_text(server['usable_bytes'])} a chip"
    weights = "weights and cache without them" if size is None else "with weights and cache"
    return Text("server: ").append(verdict).append(f": {number} {code}, {weights} {sizes}")


def _program(audit: JsonDocument) -> list[RichTable | Text]:
    columns = ("", "planned|number", "compiled|number", "compiled / planned|number")
    tables = [collectives_table(audit), Table.of("Totals", columns, totals(audit))]
    tables_shown = [rich_table(table) for table in (*tables, memory_table(audit)) if table]
    lines = [_remark(*remark) for remark in remarks(audit)]
    return [*tables_shown, *_code(audit), *schedule_tables(audit), *lines, *_numerics(audit)]


def _code(audit: JsonDocument) -> list[Text]:
    """The size of the compiled program, if the compiler tells it."""
    program = audit.get("program") or {}
    if not program.get("bytes"):
        return []
    text = f"program: {bytes_text(program['bytes'])} of code, {bytes_text(program['constants'])} of constants"
    return [Text(text, style="dim")]


def schedule_tables(audit: JsonDocument) -> list[RichTable | Text]:
    """The overlap of collectives and the largest buffers, or a line for each if that is unknown."""
    tables = [overlap_table(audit), buffers_table(audit)]
    return [Text(one, style="dim") if isinstance(one, str) else rich_table(one) for one in tables if one]


def _numerics(audit: JsonDocument) -> list[Text]:
    """The largest differences of a tiny twin's numbers from the formulas'."""
    numerics = audit.get("numerics")
    if not numerics:
        return []
    if numerics["agrees"] is None:
        return [Text("numerics: ").append("not run", style="yellow").append(f": {numerics['why']}")]
    verdict = Text("agrees", style="green") if numerics["agrees"] else Text("differs", style="red")
    checks = [check for check in numerics["checks"] if not check["agrees"]] or numerics["checks"]
    words = ", ".join(
        f"{check['what']} {'within' if check['agrees'] else 'by'} {_difference(check)}"
        + (f" ({check['worst']})" if check["worst"] else "")
        + ("" if check["agrees"] else f", allowed {check['tolerance']:.0e}")
        for check in checks
    )
    twin = f" with the formulas (tiny twin, {numerics['layout']}): "
    lines = [Text("numerics: ").append(verdict).append(twin + words)]
    if "not_run" in numerics:
        lines.append(Text("numerics: ").append("not run", style="yellow").append(f": {numerics['not_run']}"))
    return lines


def _difference(check: JsonDocument) -> str:
    return "nan" if check["difference"] is None else f"{check['difference']:.1e}"


def _remark(title: str, what: str, where: str, change: str, style: str = "") -> Text:
    """A difference or a warning: the problem with its cost, its place, and what to change."""
    text = Text(f"{title}: ", style=f"bold {style}".strip()).append(what, style="not bold default")
    for label, words in (("where", where), ("change", change)):
        if words:
            text.append(f"\n  {label}: ", style="not bold dim").append(words, style="not bold default")
    return text


def _verdict(verdict: str, phases: Mapping[str, JsonDocument]) -> Text:
    """phases: the audited programs by phase; the phase of a training step has no name."""
    text = Text("verdict: ").append(verdict, style=f"bold {'green' if verdict == 'match' else 'yellow'}")
    counts = {
        phase: ", ".join(f"{count} {status}" for status, count, _ in status_counts(audit))
        for phase, audit in phases.items()
    }
    words = "; ".join(f"{phase}: {count}" if phase else count for phase, count in counts.items() if count)
    for phase, audit in phases.items():
        text.append(_grades(phase, audit))
    text.append(f" ({words})" if words else "")
    compiler = next(iter(phases.values())).get("compiler")
    return text.append(f", compiled by {compiler}" if compiler else "")


_TONES = {"wrong": "bold red", "dear": "yellow", "note": "dim"}


def _grades(phase: str, audit: JsonDocument) -> Text:
    """The number of findings of each grade, and their seconds: `, 2 wrong, 1 dear: +120 ms a step (3.1%)`."""
    text, findings = Text(), audit.get("findings") or []
    counts = {name: sum(one.get("grade") == name for one in findings) for name in _TONES}
    counts["wrong"] += (audit.get("numerics") or {}).get("agrees") is False
    for name, count in counts.items():
        if count:
            text.append(", ").append(f"{count} {name}", style=_TONES[name])
            text.append(f" in {phase}" if phase else "")
    extra, planned = audit.get("extra_seconds"), (audit.get("step_seconds") or {}).get("planned")
    if extra and planned:
        text.append(
            f": {'+' if extra > 0 else '-'}{seconds_text(abs(extra))} a step ({extra / planned:+.1%})"
        )
    return text


def program_table(audit: JsonDocument) -> Group:
    """A program without a plan: the verdict, a row for each collective, then warnings and gaps."""
    emitted = sorted(_merged(audit["emitted"]), key=_cost, reverse=True)
    rows = [
        (
            row["tensor"],
            row["direction"],
            row["op"],
            "·".join(row["axes"]) or f"groups of {row['group_size']}",
            bytes_text(row["bytes"]),
            UNAVAILABLE if row["count"] is None else f"{row['count']:,}",
            seconds_text(row["seconds"], UNAVAILABLE),
        )
        for row in emitted
    ]
    columns = ("tensor", "direction", "collective", "over", "bytes|number", "times|number")
    table = rich_table(Table.of("Collectives of a step", (*columns, "seconds per step|number"), rows))
    table.box, table.padding = None, (0, 2)
    warnings, lines = audit.get("compiler_warnings", []), []
    for warning in audit["warnings"]:
        time = seconds_text(warning["seconds"], UNAVAILABLE)
        cost = f"{bytes_text(warning['bytes'])} per device and step, time {time}"
        lines.append(
            _remark(
                warning["kind"], f"{warning['what']} ({cost})", warning["where"], warning["change"], "magenta"
            )
        )
    if warnings is None:
        lines.append(Text(f"compiler's warnings: {UNAVAILABLE}", style="dim"))
    for warning in warnings or []:
        lines.append(_remark("the compiler", warning["what"], warning["where"], warning["change"], "magenta"))
    lines += [Text(line, style="dim") for line in audit.get("branches", [])]
    lines += [Text(f"not understood: {line}", style="magenta") for line in audit["not_understood"]]
    return Group(_program_verdict(audit), table, *schedule_tables(audit), *lines)


def _merged(rows: Iterable[JsonDocument]) -> list[JsonDocument]:
    """Rows that differ only in how often they run are added up."""
    groups: dict[tuple[object, ...], JsonDocument] = {}
    for row in rows:
        same = ("tensor", "direction", "op", "bytes", "group_size")
        key = (*(row[name] for name in same), *row["axes"], row["count"] is None)
        before = groups.get(key)
        groups[key] = (
            row
            if before is None
            else {**before, **{n: _sum(before[n], row[n]) for n in ("count", "seconds")}}
        )
    return list(groups.values())


def _sum(first: float | None, other: float | None) -> float | None:
    return None if first is None or other is None else first + other


def _cost(row: JsonDocument) -> tuple[float, int]:
    return row["seconds"] or 0.0, row["bytes"] * (row["count"] or 1)


def _program_verdict(audit: JsonDocument) -> Text:
    good = audit["verdict"] == "match"
    text = Text("verdict: ").append(audit["verdict"], style=f"bold {'green' if good else 'yellow'}")
    collectives = format_number_of(len(audit["emitted"]), "collective")
    warnings = format_number_of(len(audit["warnings"]), "warning")
    text.append(f" ({collectives}, {warnings}, {len(audit['not_understood'])} not understood)")
    priced = audit["hardware"] and audit["seconds"] is not None
    seconds = seconds_text(audit["seconds"], UNAVAILABLE)
    return text.append(f", {seconds} of communication per step on {audit['hardware']}" if priced else "")

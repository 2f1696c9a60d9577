"""Plans, audits and runs on the terminal: rich tables, and the panel that ends a demo.

Text from documents is wrapped in `Text`, so that `[D_fsdp]` is never read as rich's markup.
"""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshwright.report.audit_view import AuditRow, memory_rows, remarks, status_counts, totals
from meshwright.report.audit_view import rows as audit_rows
from meshwright.report.figures import percent_text, seconds_text
from meshwright.report.fitted import AtCommas
from meshwright.report.plan_view import CandidateRow, candidate_rows
from meshwright.report.run_files import JsonDocument, Run, bound_text
from meshwright.report.schedule_tables import schedule_tables
from meshwright.report.summary import cards

# Wide enough for the tables where the output is piped and there is no terminal to ask.
PIPED_WIDTH = 140
# None of yellow, cyan or white, which a light terminal does not show.
_STYLE = {"good": "green", "fine": "blue", "warn": "magenta", "bad": "red"}


def plan_table(plan: JsonDocument) -> Table:
    """The ranked candidates of `mw plan train --json`, the chosen one in bold."""
    rows, known = candidate_rows(plan), len(plan.get("candidates") or [])
    table = _table("Layouts by planned step time", "#", "layout")
    table.collapse_padding = True
    captions = [f"the best {len(rows)} of {known:,}"] if known > len(rows) else []
    if sum(row.tie for row in rows) > 1:
        captions.append("= within 2% of the best: ties, the simplest first")
    table.caption = "; ".join(captions) or None
    for heading in ("step time", "MFU", "memory/chip"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for row in rows:
        table.add_row(*_candidate_cells(row), style="bold" if row.chosen else "" if row.fits else "dim")
    return table


def breakdown_table(candidate: JsonDocument) -> Table:
    """The operations of one candidate's step, the longest first."""
    table = _table("Where the step goes", "operation")
    for heading in ("time", "share"):
        table.add_column(heading, justify="right")
    table.add_column("bound")
    for item in sorted(candidate.get("breakdown") or [], key=lambda item: -item["seconds"]):
        table.add_row(
            Text(str(item["name"])),
            seconds_text(item["seconds"]),
            percent_text(item.get("share")),
            Text(bound_text(item)),
        )
    return table


def operations_table(operations: Sequence[JsonDocument], most: int = 12) -> Table:
    """What traced operations took beside what was planned, those that took most longer first."""
    table = _table("Traced operations, a step on the mean device", "operation", "pass", "")
    for heading in ("measured", "planned"):
        table.add_column(heading, justify="right")
    for item in operations[:most]:
        planned = item["planned_seconds"]
        table.add_row(
            Text(str(item["name"])),
            Text(str(item["direction"])),
            Text("collective" if item["kind"] == "collective" else ""),
            seconds_text(item["measured_seconds"]),
            seconds_text(planned) if planned is not None else "not planned",
        )
    return table


def audit_table(audit: JsonDocument) -> Group:
    """The verdict, planned against compiled totals, and one row for each collective; of each phase."""
    phases = {"generate": audit, "prefill": audit["prefill"]} if "prefill" in audit else {"": audit}
    tables = [
        part
        for phase, document in phases.items()
        for part in ([Text(phase.capitalize(), style="bold")] if phase else []) + _program_parts(document)
    ]
    return Group(*tables, _verdict(audit["verdict"], phases))


def _program_parts(audit: JsonDocument) -> list[Table | Text]:
    """What an audit says of one program."""
    table = _table("Planned against emitted collectives", "tensor", "direction", "planned")
    table.add_column("bytes", justify="right")
    table.add_column("emitted")
    table.add_column("bytes", justify="right")
    table.add_column("status")
    for row in audit_rows(audit):
        table.add_row(*_audit_cells(row))
    said = [*(_remark(*remark) for remark in remarks(audit)), *_numerics(audit)]
    at_once = schedule_tables(audit)
    return [table, _totals_table(audit), *_memory_table(audit), *at_once, *said]


def plain_text(*renderables: object) -> str:
    """Tables and text as `mw` prints them where there is no terminal."""
    console = Console(file=StringIO(), width=PIPED_WIDTH, highlight=False)
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable, markup=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()


def summary_panel(run: Run, places: Mapping[str, str | Path]) -> Panel:
    """What a demo ends with: each headline of the run, then where everything is (`places`: name to path)."""
    grid = Table.grid(padding=(0, 2))
    for card in cards(run):
        value = Text(card.value, style=f"bold {_STYLE.get(card.tone, '')}".strip())
        grid.add_row(Text(card.label, style="dim"), value, Text(card.detail, style="dim"))
    parts: list[Table | Text] = [grid]
    if run.completion:
        parts += [Text(), _completion(run.completion)]
    if places:
        found = Table.grid(padding=(0, 2))
        for name, path in places.items():
            found.add_row(Text(name, style="dim"), Text(str(path), style="bold", overflow="fold"))
        parts += [Text(), found]
    return Panel(Group(*parts), title="meshwright", title_align="left", border_style="blue", padding=(1, 2))


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)


def _candidate_cells(row: CandidateRow) -> list[str | Text | AtCommas]:
    fits = Text("yes", style="green") if row.fits else Text("no", style="red")
    mark = f"{row.rank} *" if row.chosen else f"{row.rank} =" if row.tie else str(row.rank)
    return [mark, AtCommas(row.layout), row.step, row.mfu, row.memory, fits, Text(row.bound)]


def _audit_cells(row: AuditRow) -> list[str | Text]:
    status = Text(row.status, style=_STYLE.get(row.tone, ""))
    planned, emitted = Text(row.planned), Text(row.emitted)
    return [
        Text(row.tensor),
        Text(row.direction),
        planned,
        row.planned_bytes,
        emitted,
        row.emitted_bytes,
        status,
    ]


def _totals_table(audit: JsonDocument) -> Table:
    table = _table("Totals", "")
    for heading in ("planned", "compiled", "compiled / planned"):
        table.add_column(heading, justify="right")
    for name, *figures in totals(audit):
        table.add_row(name, *figures)
    return table


def _memory_table(audit: JsonDocument) -> list[Table]:
    found = memory_rows(audit)
    if not found:
        return []
    table = _table("Memory of one device", "")
    for heading in ("planned", "compiled"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found:
        table.add_row(*row)
    return [table]


def _numerics(audit: JsonDocument) -> list[Text]:
    """How far loss and gradients of the tiny model are from those of one device."""
    found = audit.get("numerics")
    if not found:
        return []
    worst, loss = found["worst"], found["loss"]["difference"]
    verdict = Text("agrees", style="green") if found["agrees"] else Text("differs", style="red")
    return [
        Text("numerics: ")
        .append(verdict)
        .append(
            f" with one device (tiny model, {found['layout']}): loss within {_share(loss)}, "
            f"{len(found['gradients'])} gradients within {_share(worst['difference'])} ({worst['tensor']})"
        )
    ]


def _share(difference: float | None) -> str:
    return "unavailable" if difference is None else f"{difference:.1e}"


def _remark(title: str, what: str, where: str, change: str) -> Text:
    """One difference or warning: what, what it costs a step, where, and what to change."""
    text = Text(f"{title}: ", style="bold").append(what, style="not bold")
    for label, words in (("where", where), ("change", change)):
        if words:
            text.append(f"\n  {label}: ", style="dim").append(words, style="not bold")
    return text


def _verdict(verdict: str, phases: Mapping[str, JsonDocument]) -> Text:
    """phases: the audited programs by phase; one without a name of a plan that has one step."""
    text = Text("verdict: ").append(verdict, style=f"bold {'green' if verdict == 'match' else 'yellow'}")
    counts = {
        phase: ", ".join(f"{count} {status}" for status, count, _ in status_counts(audit))
        for phase, audit in phases.items()
    }
    told = "; ".join(f"{phase}: {count}" if phase else count for phase, count in counts.items() if count)
    text.append(f" ({told})" if told else "")
    compiler = next(iter(phases.values())).get("compiler")
    return text.append(f", compiled by {compiler}" if compiler else "")


def _completion(completion: JsonDocument) -> Text:
    """Prompt and text, cut to a few lines: the whole stands in the report."""
    lines = str(completion.get("text", "")).splitlines()
    text = Text(str(completion.get("prompt", "")), style="bold blue")
    return text.append("\n".join(lines[:4]) + ("\n…" if len(lines) > 4 else ""), style="not bold default")

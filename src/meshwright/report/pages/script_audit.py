"""The audit of a script's step as a page: communication with and without its findings, and a patch."""

from pathlib import Path

from meshwright.report.answer import answer_of_script
from meshwright.report.cards import Card
from meshwright.report.run_documents import JsonDocument
from meshwright.report.table import Cell, Row, Table
from meshwright.report.templating import render
from meshwright.units import format_bytes, format_number_of, format_seconds


def script_html(document: JsonDocument) -> str:
    """The document of `mw audit train.py:step` as one HTML page that loads nothing."""
    return render(
        "script.html.jinja",
        title=f"Audit of {document['script']}",
        written=f"{format_number_of(document['devices'], 'device')}, {document['hardware'] or 'not priced'}",
        cards=_cards(document),
        answer=answer_of_script(document),
        lines=_lines(document),
        findings=document["warnings"],
        patch=document["patch"],
        notes=[*document["notes"], *document["not_understood"]],
    )


def _cards(document: JsonDocument) -> list[Card]:
    seconds, extra = document["seconds"], document["extra_seconds"]
    sent = document["bytes"]["compiled"]
    cards = [Card("Findings", str(len(document["warnings"])), f"{len(document['emitted'])} collectives")]
    if seconds is not None:
        cards.append(Card("Communication now", format_seconds(seconds), "per step, hidden or exposed"))
        cards.append(
            Card(
                "Without the findings",
                format_seconds(max(seconds - (extra or 0.0), 0.0)),
                f"{format_seconds(extra or 0.0)} less",
                "good" if extra else "",
            )
        )
    return [*cards, Card("Sent", format_bytes(sent), "by each device in a step")]


def _lines(document: JsonDocument) -> Table:
    rows = []
    for line in document["lines"]:
        path, _, number = line["where"].rpartition(":")
        where = f"{Path(path).name}:{number}" if path else line["where"]
        times = dict.fromkeys(line["collectives"])
        rows.append(
            Row(
                [
                    Cell(where),
                    Cell(format_seconds(line["seconds"]) if document["hardware"] else ""),
                    Cell(format_bytes(line["bytes"])),
                    Cell(", ".join(times)),
                ]
            )
        )
    columns = ("line|code", "seconds a step|number", "bytes|number", "collectives")
    return Table.of("", columns, rows, "A gradient's collectives are of the line of its forward pass.")

"""A plan of `mw plan serve --rate` as a page: the servers, the candidates as a table, and the launch line."""

from pathlib import Path

from meshwright.errors import PlanError
from meshwright.load.rated_verdict import pools_words
from meshwright.report.answer import answer_of_plan
from meshwright.report.cards import Card
from meshwright.report.launching import boot_lines, launch_lines
from meshwright.report.run_documents import JsonDocument, read_json
from meshwright.report.serving_points import point_layout, requests_text
from meshwright.report.table import Cell, Row, Table
from meshwright.report.templating import render
from meshwright.units import format_bytes, format_number_of, format_seconds

_COLUMNS = ("servers", "hardware|code", "layout|layout", "weights", "chips|number", "an hour|number",
    "first token, p95|number", "per token, p95|number", "why not|words")  # fmt: skip


def read_servers_plan(path: Path) -> JsonDocument | None:
    """The document of a plan of `mw plan serve --rate`, given it or its TOML file; None for any other file.

    Raises PlanError if an earlier version wrote it.
    """
    document = read_json(path.with_suffix(".json")) if path.suffix in (".toml", ".json") else None
    if document is None or not {"rate_per_second", "cheaper"} <= document.keys():
        return None
    if "verdict" not in document:
        raise PlanError(
            f"{path} is of an earlier version, without its verdict; write it again with `mw plan serve -o`"
        )
    return document


def servers_table(document: JsonDocument) -> Table:
    """The best servers, cheaper ones that miss a target, and the fewest of another chip."""
    best, other = document["best"], document["other"]
    rows = [_row(best, "chosen"), *(_row(servers, "unfit") for servers in document["cheaper"])]
    simulated = [(each["hardware"], each["layout"], each["chips"]) for each in document["cheaper"]]
    if other and (other["hardware"], other["layout"], other["chips"]) not in simulated:
        rows.append(_row({**other, "missed": "at least this many, by the time of its devices"}, ""))
    caption = (
        f"{document['rate_per_second']:g} requests/s; "
        f"{format_number_of(document['simulated'], 'choice')} simulated, of "
        f"{format_number_of(document['considered'], 'layout')}."
    )
    return Table.of("", _COLUMNS, rows, caption)


def _row(servers: JsonDocument, tone: str) -> Row:
    hourly = servers["price_per_hour"]
    times = [servers.get(key) for key in ("ttft_p95_seconds", "tpot_p95_seconds")]
    return Row(
        [
            Cell(pools_words(servers)),
            Cell(servers["hardware"]),
            Cell(point_layout(servers), badge="chosen" if tone == "chosen" else ""),
            Cell(servers["weights_dtype"]),
            Cell(f"{servers['chips']:,}"),
            Cell("" if hourly is None else f"{hourly:,.2f}"),
            *(Cell("" if seconds is None else format_seconds(seconds)) for seconds in times),
            Cell(servers["missed"] or ""),
        ],
        tone,
    )


def servers_cards(document: JsonDocument) -> list[Card]:
    """The headlines of the best servers."""
    best, boot = document["best"], document["boot"]
    cards = [
        Card("Servers", pools_words(best), f"of {best['hardware']}, {point_layout(best)}"),
        Card("Chips", f"{best['chips']:,}", f"weights in {best['weights_dtype']}"),
        Card("First token", format_seconds(best["ttft_p95_seconds"]), "95% of requests, simulated"),
        Card("Time per token", format_seconds(best["tpot_p95_seconds"]), "95% of requests, simulated"),
    ]
    if boot:
        parts = ("weights", "activations", "caches", "outside")
        needed, chip = sum(boot[part] for part in parts), format_bytes(boot["device"])
        cards.append(
            Card("Memory per chip", format_bytes(needed), f"of {chip}", "good" if boot["boots"] else "bad")
        )
    if best["price_per_hour"] is not None:
        cards.append(
            Card(
                "Price of an hour",
                f"{best['price_per_hour']:,.2f}",
                f"{document['price_per_day']:,.0f} a day",
            )
        )
    return cards


def servers_plan_html(document: JsonDocument, plan_text: str | None = None) -> str:
    """The document of `mw plan serve --rate` as one HTML page that loads nothing.

    plan_text: its plan.toml.
    """
    _, *settings = launch_lines(document["launch"])
    return render(
        "servers.html.jinja",
        title=f"Servers of {document['model']['name']} for {document['rate_per_second']:g} requests/s",
        written=requests_text(document["requests"]),
        cards=servers_cards(document),
        answer=answer_of_plan({**document, "ranges": document["best"]["ranges"]}),
        table=servers_table(document),
        command=document["launch"]["command"],
        lines=[*settings, *boot_lines(document["boot"])],
        plan_text=plan_text,
    )

"""The ranked layouts of a plan as a table, and its explanation as headed lists."""

from meshwright.report.run_documents import JsonDocument, bound_text, bytes_total, layout_text, winner
from meshwright.report.table import Cell, Row, Table
from meshwright.report.text import bytes_text, percent_text, seconds_text

MAX_CANDIDATES = 12


def shown_candidates(plan: JsonDocument, most: int = MAX_CANDIDATES) -> list[JsonDocument]:
    """The candidates that a table has rows for."""
    return list(plan.get("candidates") or [])[:most]


def candidates_table(plan: JsonDocument, chosen_mark: str = "", most: int = MAX_CANDIDATES) -> Table:
    """The first `most` of the ranked candidates; the chosen layout and ties with the best are marked."""
    shown, best = shown_candidates(plan, most), winner(plan)
    num_candidates = len(plan.get("candidates") or [])
    # Whole entries are compared, since two candidates may differ in a dtype that their layout's text leaves
    # out.
    chosen = next((rank for rank, one in enumerate(shown) if best and one.items() <= best.items()), None)
    rows = []
    for rank, candidate in enumerate(shown):
        seconds, mfu, size, fits = (
            candidate.get("step_seconds"),
            candidate.get("mfu"),
            bytes_total(candidate),
            candidate.get("fits", True),
        )
        mark = chosen_mark if rank == chosen else "=" if candidate.get("tie") else ""
        cells = [
            Cell(f"{rank + 1} {mark}".rstrip(), value=rank),
            Cell(layout_text(candidate.get("layout", "")), badge="chosen" if rank == chosen else ""),
            Cell(seconds_text(seconds), "strong", value=seconds or 0),
            Cell(percent_text(mfu), value=mfu or 0),
            Cell(bytes_text(size), value=size or 0),
            Cell("yes", "good") if fits else Cell("no", "bad"),
            Cell(bound_text(candidate)),
        ]
        rows.append(Row(cells, "chosen" if rank == chosen else "" if fits else "unfit"))
    remarks = [f"the best {len(shown)} of {num_candidates:,}"] if num_candidates > len(shown) else []
    if sum(bool(one.get("tie")) for one in shown) > 1:
        remarks.append("= within 2% of the best: ties, the simplest first")
    within_error = sum(bool(one.get("as_fast_within_interval")) and one.get("fits", True) for one in shown)
    if within_error > 1:
        remarks.append(f"{within_error} are equally fast within the error of published runs")
    return Table.of(
        "Layouts by planned step time",
        ("#", "layout|layout", "step time|number", "MFU|number", "memory/chip|number", "fits", "bound"),
        rows,
        "; ".join(remarks),
    )


def explanation(plan: JsonDocument) -> list[tuple[str, list[str]]]:
    """Headings and points, as `mw plan train --explain` prints them; [] if the plan has none."""
    sections = []
    for block in str(plan.get("explanation") or "").split("\n\n"):
        title, *points = block.splitlines() or [""]
        if points:
            sections.append((title, [point.removeprefix("- ") for point in points]))
    return sections

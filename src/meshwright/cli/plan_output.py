"""What `mw plan train` shows on a terminal, and the files that -o writes."""

from pathlib import Path

from meshwright.api import document as documents
from meshwright.cli.common import note, show
from meshwright.plan.explain.explanation import Explanation
from meshwright.plan.explain.fitting import Change
from meshwright.plan.smallest import Smallest
from meshwright.plan.train import Search
from meshwright.plan_file import Plan
from meshwright.units import format_bytes, format_number_of, format_seconds

# Lines of prose longer than this tire the eye, however wide the terminal.
_PROSE_WIDTH = 100


def write_plan_files(path: Path, written: Plan, document: dict) -> None:
    """Writes both files and says so."""
    beside = documents.write_plan(path, written, document)
    note(f"wrote {path} and {beside}")


def shortage_words(found: Search, change: Change | None) -> str:
    """The bytes that the best layout lacks, and the cheapest change with which it fits."""
    best, lack = found.best, found.best.shortage
    which = "nothing fits; the nearest is" if found.considered > 1 else "does not fit:"
    return (
        f"{which} {best.layout}, which needs {format_bytes(lack.needed_bytes)} {lack.where}, "
        f"{format_bytes(lack.over_bytes)} more than the {format_bytes(lack.usable_bytes)} available; "
        + (str(change) if change else "take more chips (--smallest finds how many)")
    )


def show_plan(
    document: dict,
    found: Search,
    said: Explanation | None,
    *,
    in_words: bool,
    sizing: Smallest | None,
) -> None:
    """The ranked layouts, where the best one's step goes, and what was asked for besides."""
    from meshwright.report.terminal.tables import breakdown_table, plan_table

    sections = [s for s in said.sections if in_words or s.title in _asked(said)] if said else []
    show(
        *found.notices,
        documents.heading(document, found.best.layout),
        *([_sizes(sizing)] if sizing else []),
        "",
        plan_table(document),
        *([found.faster_words, ""] if found.faster_words else []),
        *map(_opinion, document.get("audit", [])),
        *([] if in_words else [breakdown_table(document["best"])]),
        *(prose(section.title, section.paragraphs) for section in sections),
        prose("Assumptions", tuple(document["assumptions"])),
        f"{format_number_of(found.considered, 'layout')} considered in {format_seconds(found.seconds)}"
        + ("" if in_words else "; --explain says why in words"),
    )


def _opinion(opinion: dict) -> str:
    """The compiler's memory of a layout beside the planned one."""
    compiled, planned = opinion["compiled_bytes"], opinion["planned_bytes"]
    start = f"audited {opinion['layout']}: "
    if compiled is None:
        return f"{start}unavailable, {opinion['reason']}"
    fits = "fits" if opinion["fits"] else "does not fit"
    if opinion["scheduled_seconds"]:
        scheduled, priced = (format_seconds(opinion[f"{key}_seconds"]) for key in ("scheduled", "planned"))
        fits += f"; its schedule takes {scheduled}, planned {priced}"
    return (
        f"{start}{format_bytes(compiled)} per chip by {opinion['compiler']}, {compiled / planned:.0%} of the "
        f"planned {format_bytes(planned)}: {fits}"
    )


def _asked(said: Explanation) -> tuple[str, ...]:
    """The sections that options asked for without --explain."""
    return (*(("Batch",) if said.critical_batch else ()), *(("Budget",) if said.budget else ()))


def _sizes(sizing: Smallest) -> str:
    """The sizes tried before the answer."""
    others = [tried for tried in sizing.tried if tried.why_not]
    text = f"the smallest of {len(sizing.tried)} sizes tried"
    if others:
        nearest = max(
            others, key=lambda tried: (tried.num_chips < sizing.hardware.num_chips, tried.num_chips)
        )
        text += f"; on {nearest.hardware}: {nearest.why_not}"
    return text


def prose(title: str, paragraphs: tuple[str, ...]) -> object:
    """A heading and its points, no wider than reads well."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.table import Table
    from rich.text import Text

    from meshwright.report.terminal.fitted import AtCommas

    points = Table.grid(padding=(0, 1, 0, 0))
    for paragraph in paragraphs:
        points.add_row("-", AtCommas(paragraph))
    return Constrain(Group(Text(title, style="bold"), points, Text()), _PROSE_WIDTH)

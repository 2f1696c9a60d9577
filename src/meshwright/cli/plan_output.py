"""The terminal output of `mw plan train`, and the files of -o."""

from pathlib import Path

from meshwright.api import document as documents
from meshwright.cli.console import note, show
from meshwright.files import write_whole
from meshwright.plan.explain.explanation import Explanation
from meshwright.plan.explain.fitting import Change
from meshwright.plan.launch_settings import LaunchSettings
from meshwright.plan.smallest import Smallest
from meshwright.plan.train import Search
from meshwright.plan.verdict import verdict_lines
from meshwright.plan_file import Plan
from meshwright.units import format_bytes, format_number_of, format_seconds

# Longer lines of prose are hard to read on any terminal.
_PROSE_WIDTH = 100
# Layouts of an answer that fits a screen.
_FEW = 5


def write_plan_files(path: Path, written: Plan, document: dict, launch: LaunchSettings | None = None) -> None:
    """Write the plan, its document and the settings of other software, and note their paths."""
    figures = documents.write_plan(path, written, document)
    note(f"wrote {path} and {figures}")
    if launch is not None:
        suffix, text = launch.file
        note(f"wrote {write_whole(path.with_suffix(suffix), text)}")


def shortage_words(search: Search, change: Change | None) -> str:
    """The missing memory of the best layout, and the cheapest change that makes it fit."""
    best, lack = search.best, search.best.shortage
    which = "nothing fits; the nearest is" if search.considered > 1 else "does not fit:"
    return (
        f"{which} {best.layout}, which needs {format_bytes(lack.needed_bytes)} {lack.where}, "
        f"{format_bytes(lack.over_bytes)} more than the {format_bytes(lack.usable_bytes)} available; "
        + (str(change) if change else "take more chips (--smallest finds how many)")
    )


def show_plan(
    document: dict,
    search: Search,
    explanation: Explanation | None,
    *,
    in_words: bool,
    sizing: Smallest | None,
) -> None:
    """Print the verdict and the first layouts; with `in_words` more of them, and the reasons in full."""
    from meshwright.report.terminal.tables import MAX_CANDIDATES, plan_table

    sections = (
        [s for s in explanation.sections if in_words or s.title in _asked(explanation)] if explanation else []
    )
    show(
        *search.notices,
        documents.heading(document, search.best.layout),
        *verdict_lines(document["verdict"] | {"asked": _conditions(document["asked"])}),
        *([_sizes(sizing)] if sizing else []),
        "",
        plan_table(document, MAX_CANDIDATES if in_words else _FEW),
        *([search.faster_words, ""] if search.faster_words else []),
        *map(_opinion, document.get("audit", [])),
        *_launch(document.get("launch")),
        *([] if in_words else [_where(document["best"], is_alone=len(document["candidates"]) == 1)]),
        *(prose(section.title, section.paragraphs) for section in sections),
        *([prose("Assumptions", tuple(document["assumptions"]))] if in_words else []),
        f"{format_number_of(search.considered, 'layout')} considered in {format_seconds(search.seconds)}"
        + ("" if in_words else "; --explain has more of them, the reasons and the assumptions"),
    )


def _where(best: dict, *, is_alone: bool) -> object:
    """The parts of the best layout's step: a table if there are no other layouts, else a line."""
    from meshwright.report.terminal.tables import breakdown_line, breakdown_table

    return breakdown_table(best) if is_alone else breakdown_line(best)


def _conditions(asked: dict[str, str]) -> str | None:
    """The conditions of a search, which the heading lacks; None without any."""
    flags = {"given": "--given", "software": "--software", "for": "--for"}
    return ", ".join(f"{flags[key]} {value}" for key, value in asked.items()) or None


def _launch(launch: dict | None) -> list[str]:
    """The settings of the software that the plan is for."""
    if launch is None:
        return []
    lines = launch["settings"].splitlines()
    is_line = launch["form"] == "arguments"
    command = " \\\n    ".join([launch["command"], *lines]) if is_line else launch["command"]
    return [
        f"With {launch['version']}, start on every node:",
        *([command] if is_line else [f"  {command}", "with", launch["settings"]]),
        f"It also needs {'; '.join(launch['needs'])}.",
        "",
    ]


def _opinion(opinion: dict) -> str:
    """A comparison of a layout's memory by the compiler with the planned memory."""
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


def _asked(explanation: Explanation) -> tuple[str, ...]:
    """The sections that options request without --explain."""
    batch, budget = explanation.critical_batch, explanation.budget
    return (*(("Batch",) if batch else ()), *(("Budget",) if budget else ()))


def _sizes(sizing: Smallest) -> str:
    """The sizes that were tried."""
    others = [tried for tried in sizing.tried if tried.why_not]
    text = f"the smallest of {len(sizing.tried)} sizes tried"
    if others:
        nearest = max(
            others, key=lambda tried: (tried.num_chips < sizing.hardware.num_chips, tried.num_chips)
        )
        text += f"; on {nearest.hardware}: {nearest.why_not}"
    return text


def prose(title: str, paragraphs: tuple[str, ...]) -> object:
    """A heading and its points, at a width that is easy to read."""
    from rich.console import Group
    from rich.constrain import Constrain
    from rich.table import Table
    from rich.text import Text

    from meshwright.report.terminal.fitted import AtCommas

    points = Table.grid(padding=(0, 1, 0, 0))
    for paragraph in paragraphs:
        points.add_row("-", AtCommas(paragraph))
    return Constrain(Group(Text(title, style="bold"), points, Text()), _PROSE_WIDTH)

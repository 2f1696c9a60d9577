"""The trials of `mw tune` as a table for the terminal."""

from rich.console import Group
from rich.text import Text

from meshwright.report.run_documents import JsonDocument
from meshwright.report.table import Cell, Table
from meshwright.report.terminal.tables import rich_table
from meshwright.report.text import bytes_text, percent_text, seconds_text

_TONE = {"faster": "good", "fits": "good", "as planned": "chosen", "slower": "faint", "refused": "bad"}


def tune_table(tuned: JsonDocument) -> Group:
    """A row for each trial in its order, and the figure they were ranked by."""
    rows = [
        (
            trial["change"],
            seconds_text(trial["planned_seconds"]),
            seconds_text(trial["scheduled_seconds"]),
            bytes_text(trial["bytes_per_chip"]),
            percent_text(trial["gain"]),
            Cell(trial["verdict"], _TONE.get(trial["verdict"], "")),
        )
        for trial in tuned["trials"]
    ]
    figures = (f"{name}|number" for name in ("planned", "scheduled", "memory/chip", "gain"))
    table = rich_table(Table.of("Trials", ("change", *figures, "verdict"), rows))
    table.columns[0].overflow, table.columns[0].ratio, table.columns[-1].no_wrap = "fold", 1, True
    reasons = [Text(f"{one['change']}: {one['reason']}") for one in tuned["trials"] if one["reason"]]
    return Group(table, *reasons, Text(_ranked_by(tuned)), Text(f"best: {tuned['best']['change']}"))


def _ranked_by(tuned: JsonDocument) -> str:
    within = f"differences under {tuned['resolution']:.0%} count as equal"
    if tuned["priced_by"] == "schedule":
        return f"ranked by the schedule of {tuned['compiler']}; {within}"
    return (
        f"{tuned['compiler']} prints no time of a schedule: ranked by the plan's step time, and XLA's "
        f"options are not tried; {within}"
    )

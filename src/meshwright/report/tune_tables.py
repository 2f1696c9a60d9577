"""The trials of `mw tune` as a table for the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.report.figures import ABSENT, bytes_text, percent_text, seconds_text
from meshwright.report.run_files import JsonDocument

_STYLE = {"faster": "green", "fits": "green", "as planned": "bold", "slower": "dim", "refused": "red"}


def tune_table(tuned: JsonDocument) -> Group:
    """A row for each trial in its order, and what they were ranked by."""
    table = Table(title="Trials", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("change", overflow="fold", ratio=1)
    for heading in ("planned", "scheduled", "memory/chip", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for trial in tuned["trials"]:
        size, gain = trial["bytes_per_chip"], trial["gain"]
        table.add_row(
            Text(trial["change"]),
            seconds_text(trial["planned_seconds"]),
            seconds_text(trial["scheduled_seconds"]),
            ABSENT if size is None else bytes_text(size),
            ABSENT if gain is None else percent_text(gain),
            Text(trial["verdict"], style=_STYLE.get(trial["verdict"], "")),
        )
    reasons = [Text(f"{one['change']}: {one['reason']}") for one in tuned["trials"] if one["reason"]]
    return Group(table, *reasons, Text(_ranked_by(tuned)), Text(f"best: {tuned['best']['change']}"))


def _ranked_by(tuned: JsonDocument) -> str:
    within = f"differences under {tuned['resolution']:.0%} are not told apart"
    if tuned["priced_by"] == "schedule":
        return f"ranked by the schedule of {tuned['compiler']}; {within}"
    return (
        f"{tuned['compiler']} prints nothing that tells a schedule's time: ranked by the plan's step time, "
        f"and XLA's options are not tried; {within}"
    )

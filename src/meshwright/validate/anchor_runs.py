"""Measured runs, to anchor prices, from a table of published results."""

from pathlib import Path

from meshwright.errors import PlanError
from meshwright.plan.anchor import MeasuredRun
from meshwright.validate.choice import fastest_mix
from meshwright.validate.published import MEMORY, PublishedRow, read_rows
from meshwright.validate.reproduce import reproduce


def runs_of(table: Path) -> list[MeasuredRun]:
    """The runs of a table's rows with a step time or a throughput.

    Raises PlanError if there is no such row, and MeshwrightError for a row that cannot be expressed.
    """
    runs = []
    for row in read_rows(table):
        if isinstance(row, PublishedRow) and row.metric != MEMORY:
            case = reproduce(row)
            layout = fastest_mix(case).mix.layout
            runs.append(MeasuredRun(case.config, case.hardware, case.workload, layout, row.seconds()))
    if not runs:
        raise PlanError(f"--anchor {table}: no row has a step time or a throughput")
    return runs

"""A table of published results as runs that anchor prices."""

from pathlib import Path

from meshwright.errors import PlanError
from meshwright.plan.anchor import MeasuredRun
from meshwright.validate.choice import choose
from meshwright.validate.published import MEMORY, PublishedRow, read_rows
from meshwright.validate.reproduce import reproduce


def runs_of(table: Path) -> list[MeasuredRun]:
    """The runs of a table's rows of step times.

    Raises PlanError for a table without one, and MeshwrightError for a row that cannot be expressed.
    """
    found = []
    for row in read_rows(table):
        if isinstance(row, PublishedRow) and row.metric != MEMORY:
            case = reproduce(row)
            layout = choose(case).mix.layout
            found.append(MeasuredRun(case.config, case.hardware, case.workload, layout, row.seconds()))
    if not found:
        raise PlanError(f"--anchor {table}: no row has a step time or a throughput")
    return found

"""mw report: one HTML file of a run or a plan."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import Json, emit

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a plan.toml with its .json beside it.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write a run, or a plan, as one HTML file that opens without a network.

    \b
    mw report runs/demo -o report.html
    """
    from meshwright.report.html import write_report

    path = write_report(run, output)
    if as_json:
        emit({"path": str(path)})
    else:
        print(path)

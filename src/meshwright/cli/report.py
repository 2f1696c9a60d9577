"""mw report: one HTML file of a run or a plan, and its figures as files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, progress
from meshwright.errors import PlanError
from meshwright.files import check_page, check_writable, read_text, well_formed, write_whole
from meshwright.options import option

if TYPE_CHECKING:
    from meshwright.plan.study.priced_plan import PricedPlan

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_NUM_CANDIDATES = 10


@command(app)
def report(
    run: Annotated[
        Path,
        typer.Argument(help="A run's folder, a plan.toml with its .json next to it, or a load test's JSON."),
    ],
    output: Path = option(Path("report.html"), flag="-o --output", help="The HTML file."),
    plots: Path | None = option(
        None, metavar="DIR", help="Also write each figure of the plan to a file in this folder."
    ),
    as_json: bool = JSON,
) -> None:
    """Write a run, or a plan, as one HTML file that opens without a network.

    \b
    mw report runs/demo -o report.html
    mw report plan.toml -o report.html --plots figures
    """
    check_page(output)
    if plots:
        check_writable(plots / "figure.svg")
    with well_formed(f"{run}: a report cannot be made of it", PlanError):
        _write(run, output, plots, as_json)


def _write(run: Path, output: Path, plots: Path | None, as_json: bool) -> None:
    """Write the page of a run's folder, a plan or a load test, and its figures."""
    from meshwright.report.draw.figure import write_figures
    from meshwright.report.pages.frontier import frontier_figure, read_serving_plan, serving_plan_html
    from meshwright.report.pages.load import load_test_html, read_load_test
    from meshwright.report.pages.post_training import post_training_html, read_post_training
    from meshwright.report.pages.run_page import read_report, report_html
    from meshwright.report.pages.servers import read_servers_plan, servers_plan_html

    if (tested := read_load_test(run)) is not None:
        if plots:
            raise PlanError(f"{run} is a load test, whose charts are in the page; leave out --plots")
        _finish(write_whole(output, load_test_html(tested)), [], as_json)
        return
    plan = run.with_suffix(".toml")
    if (loaded := read_servers_plan(run)) is not None:
        if plots:
            raise PlanError(f"{run} is a plan of servers for a load, which has no figures; leave out --plots")
        _finish(write_whole(output, servers_plan_html(loaded, _text(plan))), [], as_json)
        return
    if (served := read_serving_plan(run)) is not None:
        path = write_whole(output, serving_plan_html(served, _text(plan)))
        _finish(path, write_figures([frontier_figure(served)], plots) if plots else [], as_json)
        return
    if (planned := read_post_training(run)) is not None:
        if plots:
            raise PlanError(
                f"{run} is a plan of post-training, whose charts are in the page; leave out --plots"
            )
        _finish(write_whole(output, post_training_html(planned)), [], as_json)
        return
    with progress() as update:
        read = read_report(run, _describe, update)
    if plots and not read.figures:
        raise PlanError(f"{run}: {read.missing or 'it holds no plan.toml'}, so there is nothing for --plots")
    path = write_whole(output, report_html(read))
    _finish(path, write_figures(read.figures, plots) if plots else [], as_json)


def _text(plan: Path) -> str | None:
    """The text of a plan, None without one."""
    return read_text(plan, PlanError) if plan.is_file() else None


def _finish(page: Path, plots: list[Path], as_json: bool) -> None:
    """Print the paths of the written files."""
    if as_json:
        emit({"path": str(page)} | ({"plots": [str(plot) for plot in plots]} if plots else {}))
    else:
        print(page, *plots, sep="\n")


def _describe(priced: "PricedPlan") -> dict:
    """The document of `mw plan train --json` for a plan without a .json file."""
    from meshwright.api.document import plan_document
    from meshwright.plan.explain.explanation import explain

    plan, search = priced.plan, priced.as_chosen
    explanation = explain(plan.model, priced.hardware, search)
    document = plan_document(
        plan.model, priced.hardware, plan.workload.num_tokens, search, _NUM_CANDIDATES, explanation
    )
    # By rank, since a plan edited by hand may not be the best.
    return document | {"candidates": [candidate.to_dict() for candidate in priced.top]}

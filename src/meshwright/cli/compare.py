"""mw compare: plans side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import meshwright as mw
from meshwright.api.results import PricedLayout
from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, emit, load_hardware, note, show, waiting
from meshwright.errors import PlanError
from meshwright.files import check_page, write_whole
from meshwright.hardware.prices import ChipPrices
from meshwright.options import option
from meshwright.plan.chosen import plan_of
from meshwright.plan.plan_costs import plan_costs
from meshwright.plan_file import Plan, load_plan
from meshwright.units import parse_count, parse_length

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DOES_NOT_FIT = 1


@command(app)
def compare(
    *,
    plans: Annotated[
        list[str],
        typer.Argument(
            help="Plans of mw plan train or serve, or MODEL@HARDWARE[@LAYOUT].", metavar="PLAN_OR_SPEC..."
        ),
    ],
    batch_tokens: int | None = option(
        None, parser=parse_count, help="Tokens per step of each MODEL@HARDWARE: 4M."
    ),
    seq_len: int | None = option(
        None, parser=parse_length, help="Tokens per sequence of each MODEL@HARDWARE: 8k."
    ),
    prices: ChipPrices,
    output: Path | None = option(None, flag="-o --output", help="Also write the comparison as an HTML page."),
    as_json: bool = JSON,
) -> None:
    """Compare plans: time, chips, memory, bound, price and energy per million tokens.

    MODEL@HARDWARE means its best layout, MODEL@HARDWARE@LAYOUT that layout. Exits 1 if one does not
    fit.

    \b
    mw compare v5p.toml h100.toml --price v5p=4.2,h100=2.5
    mw compare llama-3-8b@v5p:4x4x4 llama-3-8b@h100:8x8 --batch-tokens 4M --seq-len 8k
    mw compare v5p.toml h100.toml -o compare.html
    """
    if output:
        check_page(output)
    planned = []
    for name in plans:
        with waiting(f"planning {name}"):
            planned.append(_planned(name, batch_tokens, seq_len))
    machines = prices.of([load_hardware(plan.hardware) for plan in planned])
    documents = [
        {"plan": name, **plan_costs(plan, machine)}
        for name, plan, machine in zip(plans, planned, machines, strict=True)
    ]
    if output:
        from meshwright.report.pages.compared_plans import comparison_html

        write_whole(output, comparison_html(documents))
        note(f"wrote {output}")
    show_compared(documents, as_json=as_json)


def show_compared(plans: Sequence[dict], *, as_json: bool) -> None:
    """Print the documents of `plan_costs`, each with its name as `plan`. Exits 1 if a plan does not fit."""
    if as_json:
        emit({"plans": list(plans)})
    else:
        from meshwright.report.answer import answer_lines, answer_of_comparison

        show(*answer_lines(answer_of_comparison(plans)), _table(plans))
        if any(plan["phase"] == "generate" for plan in plans):
            note(
                "Of a plan that serves, this is one generate step after whole contexts, without prefill; "
                "mw plan serve prices requests of their lengths."
            )
    if not all(plan["fits"] for plan in plans):
        raise typer.Exit(_DOES_NOT_FIT)


def plan_to_compare(priced: PricedLayout) -> Plan:
    """The plan of a layout, also of one that does not fit."""
    return plan_of(priced.model, priced.hardware, priced.workload, priced.candidate)


def _planned(name: str, batch_tokens: int | None, seq_len: int | None) -> Plan:
    """The plan of a file, or of MODEL@HARDWARE[@LAYOUT]. Raises PlanError for other text."""
    model, *rest = name.split("@")
    if not rest:
        path = Path(name)
        if not path.suffix and not path.exists():
            if ":" in name:
                fits = f"{name.partition(':')[0]}@{name.partition(':')[2]}"
                raise PlanError(f"{name} is no plan's file; of a model on a machine, write {fits}")
            raise PlanError(f"{name} is no plan's file; of a model, write {name}@HARDWARE: {name}@v5p:4x4x4")
        return load_plan(path)
    if len(rest) > 2:
        raise PlanError(f"{name!r} is not MODEL@HARDWARE[@LAYOUT]: it has {len(rest)} @")
    if batch_tokens is None or seq_len is None:
        raise PlanError(f"{name} needs a batch; add --batch-tokens 4M --seq-len 8k")
    machine, work = load_hardware(rest[0]), mw.Train(batch_tokens, seq_len)
    if len(rest) == 2:
        return plan_to_compare(mw.price(model, machine, work, rest[1]))
    return plan_to_compare(mw.plan(model, machine, work).best)


def _table(plans: Sequence[dict]) -> object:
    """A table with a column for each plan."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from meshwright.report.pages.compared_plans import short_names, table_of_plans
    from meshwright.report.terminal.fitted import AtCommas

    table = Table("", *short_names(plans), box=SIMPLE_HEAD)
    for name, *cells in table_of_plans(plans):
        table.add_row(name, *map(AtCommas, cells))
    return table

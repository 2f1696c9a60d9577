"""mw compare: plans side by side."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import Json, emit, load_hardware, show
from meshwright.hardware.prices import parse_prices, priced
from meshwright.plan.compare import compared
from meshwright.plan_file import load_plan
from meshwright.units import format_bytes, format_count, format_seconds

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_DOES_NOT_FIT = 1


@app.command()
def compare(
    plans: Annotated[
        list[Path], typer.Argument(help="Plans of mw plan train or serve.", metavar="PLAN.toml...")
    ],
    price: Annotated[
        str | None, typer.Option(help="Price of a chip-hour: v5p=4.2,h100=2.5. [the catalog's]")
    ] = None,
    currency: Annotated[str | None, typer.Option(help="Currency of --price. [USD]")] = None,
    as_json: Json = False,
) -> None:
    """Put plans side by side: time, chips, memory, what limits each, price and energy of a million tokens.

    Exits 1 where one does not fit its chips.

    \b
    mw compare v5p.toml h100.toml --price v5p=4.2,h100=2.5
    """
    prices = parse_prices(price or "")
    found = []
    for path in plans:
        plan = load_plan(path)
        machine = priced(load_hardware(plan.hardware), prices, currency)
        found.append({"plan": str(path), **compared(plan, machine)})
    if as_json:
        emit({"plans": found})
    else:
        show(_table(found))
    if not all(plan["fits"] for plan in found):
        raise typer.Exit(_DOES_NOT_FIT)


def _table(plans: list[dict]) -> object:
    """One column a plan."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("", *(plan["plan"] for plan in plans), box=SIMPLE_HEAD)
    rows = {
        "model": lambda p: p["model"],
        "phase": lambda p: p["phase"],
        "hardware": lambda p: f"{p['hardware']} ({p['chips']:,} chips)",
        "layout": lambda p: p["layout"],
        "weights": lambda p: p["weights_dtype"],
        "sequences": lambda p: f"{p['num_sequences']:,} x {p['seq_len']:,}",
        "step": lambda p: format_seconds(p["step_seconds"]),
        "tokens/s a chip": lambda p: f"{p['tokens_per_second_per_chip']:,.1f}",
        "MFU": lambda p: f"{p['mfu']:.1%}",
        "memory/chip": lambda p: format_bytes(p["bytes_per_chip"]["total"]),
        "fits": lambda p: "yes" if p["fits"] else "no",
        "bound": lambda p: p["bound_name"],
        "price an hour": lambda p: _money(p, "price_per_hour"),
        "price of 1M tokens": lambda p: _money(p, "price"),
        "energy of 1M tokens": lambda p: "" if p["joules"] is None else f"{format_count(p['joules'])}J",
    }
    for name, cell in rows.items():
        table.add_row(name, *(Text(cell(plan)) for plan in plans))
    return table


def _money(plan: dict, key: str) -> str:
    return "unavailable" if plan[key] is None else f"{plan[key]:,.2f} {plan['currency']}"

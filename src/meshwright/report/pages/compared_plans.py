"""Plans side by side: their figures as rows, and a page with bars."""

from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from meshwright.report.answer import answer_of_comparison
from meshwright.report.draw.figure import HALF, PHONE, Figure, Panel, at_widths
from meshwright.report.draw.marks import bar, fitted, label
from meshwright.report.run_documents import JsonDocument
from meshwright.report.table import Table
from meshwright.report.templating import render
from meshwright.units import format_bytes, format_joules, format_seconds

_BAR, _ROW, _TOP = 16.0, 46.0, 34.0


def short_names(plans: Sequence[JsonDocument]) -> list[str]:
    """The plans' names; files without their folders, if these names differ."""
    names = [name if "@" in name else Path(name).name for name in (plan["plan"] for plan in plans)]
    return names if len(set(names)) == len(names) else [plan["plan"] for plan in plans]


def table_of_plans(plans: Sequence[JsonDocument]) -> list[list[str]]:
    """A row for each figure: its name, then its text for each plan."""
    rows: dict[str, Callable[[JsonDocument], str]] = {
        "model": lambda p: p["model"],
        "phase": lambda p: p["phase"],
        "hardware": lambda p: f"{p['hardware']} ({p['chips']:,} chips)",
        "layout": lambda p: p["layout"],
        "weights": lambda p: p["weights_dtype"],
        "sequences": lambda p: f"{p['num_sequences']:,} x {p['seq_len']:,}",
        "step": lambda p: format_seconds(p["step_seconds"]),
        "tokens/s per chip": lambda p: f"{p['tokens_per_second_per_chip']:,.1f}",
        "MFU": lambda p: f"{p['mfu']:.1%}",
        "memory/chip": lambda p: format_bytes(p["bytes_per_chip"]["total"]),
        "fits": lambda p: "yes" if p["fits"] else "no",
        "bound": lambda p: p["bound_name"],
        "price per hour": lambda p: _money(p, "price_per_hour"),
        "price per 1M tokens": lambda p: _money(p, "price"),
        "energy per 1M tokens": lambda p: (
            "unavailable" if p["joules"] is None else format_joules(p["joules"])
        ),
    }
    return [[name, *map(cell, plans)] for name, cell in rows.items()]


def _money(plan: JsonDocument, key: str) -> str:
    return "unavailable" if plan[key] is None else f"{plan[key]:,.2f} {plan['currency']}"


def comparison_html(plans: Sequence[JsonDocument]) -> str:
    """The documents of `compared`, each with its name as `plan`, as one HTML page that loads nothing."""
    return render(
        "compare.html.jinja",
        title="Plans compared",
        written="Figures of a step, priced with the same model of cost.",
        answer=answer_of_comparison(plans),
        figure=_figure(plans),
        table=Table.of("", ("", *(f"{name}|layout" for name in short_names(plans))), table_of_plans(plans)),
    )


def _figure(plans: Sequence[JsonDocument]) -> Figure:
    """Bars of the plans' rates and, if every plan has a price, of their prices."""
    panels = [_bars(plans, "tokens/s per chip", "tokens_per_second_per_chip", "{:,.1f}".format)]
    if all(plan["price"] is not None for plan in plans):
        unit = f"{plans[0]['currency']} per million tokens"
        panels.append(_bars(plans, unit, "price", "{:,.3g}".format))
    remark = "A plan that does not fit its memory has a pale bar."
    return Figure.of("plans", "Rate and price", remark, *panels)


def _bars(plans: Sequence[JsonDocument], title: str, key: str, text: Callable[[float], str]) -> Panel:
    """A bar for each plan, its name above it."""
    longest = max(plan[key] for plan in plans) or 1.0

    def draw(width: float) -> Panel:
        marks = [label(title, 0, 14, weight=600)]
        for place, (name, plan) in enumerate(zip(short_names(plans), plans, strict=True)):
            y, length = _TOP + place * _ROW, (width - 90) * plan[key] / longest
            colour = "compute" if plan["fits"] else "hidden"
            marks += [
                label(fitted(name, width), 0, y + 8),
                bar(0, y + 14, max(length, 1), _BAR, colour, title=f"{name}\n{text(plan[key])} {title}"),
                label(text(plan[key]), length + 6, y + 27),
            ]
        return Panel(width, _TOP + len(plans) * _ROW, Markup().join(marks))

    return at_widths(draw, HALF, PHONE)

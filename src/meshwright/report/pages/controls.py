"""The local page with controls of `mw ui`, with the cards, figures and tables of the report.

Its state is its query; ui_server.py has its addresses.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from markupsafe import Markup

from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.layout.absorb import SPLITTING
from meshwright.layout.axes import CONTEXT, DATA, EXPERT, FSDP, PIPE, TENSOR
from meshwright.layout.pipelines import SCHEDULES
from meshwright.layout.schedule import REMATS
from meshwright.models.presets import PRESETS
from meshwright.page_policy import content_security_policy
from meshwright.plan.assumptions import intervals_of
from meshwright.plan.candidate import Candidate
from meshwright.programs.launcher import LAUNCHERS
from meshwright.report.answer import answer_of_plan
from meshwright.report.cards import Card, cards
from meshwright.report.draw.chart import Chart, ChartAxis, padded_ends
from meshwright.report.draw.figure import PHONE, TABLET, WIDE, Figure, Panel, at_widths
from meshwright.report.draw.marks import disc
from meshwright.report.pages.frontier import frontier_figure, point_cards
from meshwright.report.pages.servers import servers_cards, servers_table
from meshwright.report.pictures.bars import memory_bars, step_bars
from meshwright.report.plan_table import candidates_table
from meshwright.report.run_documents import JsonDocument, Run, bytes_total
from meshwright.report.serving_points import PAGE, point_cells
from meshwright.report.table import Cell, Row, Table
from meshwright.report.templating import render
from meshwright.units import format_bytes, format_count, format_seconds

# The state of a page whose address gives none.
DEFAULT_STATE = {
    "tab": "train",
    "model": "llama-3-8b",
    "hardware": "v5e:8x8",
    "batch": "1Mi",
    "seq": "4096",
    "layout": "fsdp=64,remat=full",
    "hardware2": "",
    "layout2": "",
    "weights": "",
    "software": "",
    "given": "",
    "price": "",
    "prompt": "1k",
    "output": "256",
    "ttft": "",
    "tpot": "",
    "rate": "",
}
TABS = {"train": "Training", "serve": "Serving", "fit": "Does it fit?"}
# The controls that each tab's search reads.
SEARCHED = {
    "train": ("model", "hardware", "batch", "seq", "weights", "software", "given", "price"),
    "serve": ("model", "hardware", "weights", "price", "prompt", "output", "ttft", "tpot", "rate"),
    "fit": ("model", "hardware", "seq"),
}
_LISTED = 150  # layouts of a ranking
_SCATTER_HEIGHT = 380
_MOST_POINTS = 14  # rows of a frontier
_DEGREES = tuple(2**n for n in range(14))
_AXES = (*(axis.name for axis in (DATA, FSDP, TENSOR, CONTEXT, PIPE, EXPERT)), "microbatches")
_FIGURES = {
    "step": ("Time of a step", "The thin bar is communication that overlaps with compute.", step_bars),
    "memory": ("Memory of a chip", "Bytes on one chip at the peak of the step.", memory_bars),
}
_EXPORTS = ("plan.toml", "plan.json", "step.svg", "memory.svg")


@dataclass(frozen=True)
class ShownLayout:
    """One priced layout. notices: remarks on the batch if it differs from the given one.

    remats: the policies that its model allows. plan_toml, plan_json: make the files of `mw plan train -o`.
    """

    candidate: Candidate
    notices: tuple[str, ...]
    remats: tuple[str, ...]
    plan_toml: Callable[[], str]
    plan_json: Callable[[], str]


@dataclass(frozen=True)
class Planner:
    """price(words): one layout priced. search(words): its ranking, None while the search runs.

    Both take `model`, `hardware`, `batch` and `seq`; price also takes `layout`. They raise MeshwrightError.
    near(words, moved): the layout nearest to the given one that uses all chips and keeps the word `moved`.
    reach(words, choices): the choices of each word that the given layout can take, if others change with it.
    """

    price: Callable[[Mapping[str, str]], ShownLayout]
    search: Callable[[Mapping[str, str]], JsonDocument | None]
    near: Callable[[Mapping[str, str], str], str | None] = lambda state, moved: None
    reach: Callable[[Mapping[str, str], Mapping[str, tuple[str, ...]]], dict[str, list[str]]] = (
        lambda state, choices: {}
    )


@dataclass(frozen=True)
class ComparedLayout:
    """One of the compared layouts, or the reason why it has no price."""

    title: str
    priced: ShownLayout | None
    error: str = ""

    @property
    def cards(self) -> list[Card]:
        """Its headlines, without the hardware that is in the title."""
        assert self.priced
        candidate = self.priced.candidate
        machine, priced = candidate.hardware, candidate.to_dict() | intervals_of(candidate)
        hardware = {"num_chips": machine.num_chips, "usable_bytes": machine.chip.program_bytes}
        document = {"best": priced, "candidates": [priced], "hardware": hardware}
        run = Run(Path(), document, None, (), None, None, None)
        shown = [card for card in cards(run) if card.label != "Hardware"]
        hourly, million = candidate.price_per_hour, candidate.price_per_million_tokens
        if hourly is None or million is None:
            return shown
        each = f"{million:,.3g} per million tokens, {machine.chip.price_per_chip_hour:,.2f} per chip-hour"
        return [*shown, Card("Price", f"{hourly:,.2f} {machine.chip.currency} an hour", each)]

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.priced is None:
            return self.error
        candidate = self.priced.candidate
        fits = "fits" if candidate.fits else "does not fit"
        return f"{format_seconds(candidate.step_seconds)} per step, {candidate.mfu:.1%} MFU, {fits}"


def state_of(query: str) -> dict[str, str]:
    """The value of each control in a page's query, or its default."""
    given = {key: value[:400] for key, value in parse_qsl(query) if key in DEFAULT_STATE}
    state = DEFAULT_STATE | given
    return state if state["tab"] in TABS else {**state, "tab": "train"}


def ui_page(state: Mapping[str, str]) -> str:
    """The page with its controls set."""
    return render(
        "ui.html.jinja",
        state=state,
        defaults=DEFAULT_STATE,
        models=list(PRESETS),
        machines=catalog.names(),
        axes=_AXES,
        degrees=_DEGREES,
        remats=REMATS,
        schedules=SCHEDULES,
        tabs=TABS,
        searched=SEARCHED,
        software=LAUNCHERS.names,
    )


@cache
def page_policy() -> str:
    """The Content-Security-Policy of the page."""
    return content_security_policy(ui_page(DEFAULT_STATE))


def answer(planner: Planner, state: Mapping[str, str], moved: str = "") -> dict[str, Any]:
    """The priced layouts: `html`, the summary `said`, `seconds` taken, and `remats` that the model allows.

    moved: the control that was changed. If the layout then has no price, the nearest one that has is taken;
    an empty `moved`, as while a layout is typed, changes nothing. layout: the priced first layout. remats:
    None if no layout has a price. suggestions: values for controls that the error names.
    """
    started = time.perf_counter()
    first, note = _side(planner, state, state["hardware"], state["layout"]), ""
    if first.priced is None and moved and (near := planner.near(state, moved)):
        state, note = {**state, "layout": near}, f"{state['layout']} became {near}; "
        first = _side(planner, state, state["hardware"], near)
    sides = [first]
    if state["layout2"] or state["hardware2"]:
        other = (state["hardware2"] or state["hardware"], state["layout2"] or state["layout"])
        sides.append(_side(planner, state, *other))
    shown = [side.priced for side in sides if side.priced]
    priced, query = [one.candidate for one in shown], urlencode(state)
    html = render(
        "ui_answer.html.jinja",
        sides=sides,
        figures=[figure(name, priced) for name in _FIGURES] if priced else [],
        exports=[(name, f"{name}?{query}") for name in _EXPORTS] if sides[0].priced else [],
    )
    return {
        "html": html,
        "said": note + "; ".join(side.summary for side in sides),
        "layout": _with_microbatches(state["layout"], first.priced),
        "remats": shown[0].remats if shown else None,
        "suggestions": [] if first.priced else suggestions(first.error, state),
        "seconds": time.perf_counter() - started,
    }


def _with_microbatches(text: str, priced: ShownLayout | None) -> str:
    """The text of a layout with the number of microbatches that a pipeline was priced with."""
    if priced is None or priced.candidate.layout.pipe == 1 or "microbatches=" in text:
        return text
    return f"{text},microbatches={priced.candidate.layout.schedule.microbatches}"


def suggestions(message: str, state: Mapping[str, str]) -> list[dict[str, str]]:
    """The values that an error names, each as the control's name and a value for it."""
    control = message.split(":", 1)[0].split(" ", 1)[0]
    if control not in ("model", "hardware", "layout"):
        return []
    named = re.search(r"(?:did you mean|write|fits:) (.+?)\??$", message)
    values = re.split(r" or |, (?=[a-z]+=)", named[1]) if named else []
    good = r"[\w=,]+=[\w,=]*\w" if control == "layout" else r"[\w.*:-]+"
    values = [value for value in values if re.fullmatch(good, value)]
    if control == "layout":  # the error names degrees only: other words stay
        words = {word.split("=")[0]: word for word in state["layout"].split(",") if word}
        kept = {name: word for name, word in words.items() if name not in SPLITTING}
        values = [
            ",".join([value, *(word for name, word in kept.items() if f",{name}=" not in f",{value}")])
            for value in values
        ]
    if control == "hardware":  # a chip without a topology takes the one of the control
        _, colon, topology = state["hardware"].partition(":")
        values = [value if ":" in value else f"{value}{colon}{topology}" for value in values]
    return [{"control": control, "value": value} for value in values[:4]]


def reachable_choices(planner: Planner, state: Mapping[str, str]) -> dict[str, list[str]]:
    """The values of each control of the layout that end in a price, if other axes change with them."""
    choices = {axis: tuple(map(str, _DEGREES)) for axis in _AXES}
    choices |= {"zero": ("", "1", "2"), "schedule": ("", *SCHEDULES), "sequence_parallel": ("", "true")}
    return planner.reach(state, choices)


def command_of(state: Mapping[str, str]) -> list[str]:
    """The command of `mw` whose JSON document a tab shows."""
    options = {
        "train": {
            "--model": "model", "--hardware": "hardware", "--batch-tokens": "batch", "--seq-len": "seq",
            "--weights-dtype": "weights", "--for": "software", "--given": "given", "--price": "price",
        },
        "serve": {
            "--model": "model", "--hardware": "hardware", "--weights-dtype": "weights", "--price": "price",
            "--prompt-tokens": "prompt", "--output-tokens": "output",
            **({"--rate": "rate", "--ttft-p95": "ttft", "--tpot-p95": "tpot"} if state["rate"] else
               {"--ttft": "ttft", "--tpot": "tpot"}),
        },
        "fit": {"--hardware": "hardware", "--seq-len": "seq"},
    }[state["tab"]]  # fmt: skip
    words = [f"{flag}={state[name]}" for flag, name in options.items() if state[name]]
    match state["tab"]:
        case "train":
            return ["plan", "train", *words, f"--top={_LISTED}", "--json"]
        case "serve":
            return ["plan", "serve", *words, *(["--engine=vllm"] if state["rate"] else []), "--json"]
        case _:
            return ["fit", state["model"], *words, "--json"]


def ranking(planner: Planner, state: Mapping[str, str]) -> dict[str, Any]:
    """`html` of the tab's search, and `done`: whether it has ended."""
    try:
        search = planner.search(state)
    except MeshwrightError as error:
        return {"html": "", "said": str(error), "done": True, "suggestions": suggestions(str(error), state)}
    if search is None:
        doing = {"train": "searching layouts", "serve": "planning to serve", "fit": "fitting"}[state["tab"]]
        return {"html": "", "said": doing, "done": False}
    shown = {"train": _ranked, "serve": _served, "fit": _fitting}[state["tab"]]
    return {**shown(search), "done": True}


def _ranked(search: JsonDocument) -> dict[str, str]:
    table = candidates_table(search)
    html = render(
        "ui_ranking.html.jinja",
        table=table,
        search=search.get("search"),
        figures=[scatter(search)] if search.get("candidates") and "hardware" in search else [],
        sentences=answer_of_plan(search),
    )
    return {"html": html, "said": f"{len(search.get('candidates') or [])} layouts ranked"}


def scatter(search: JsonDocument) -> Figure:
    """The ranked layouts by memory and step time, each to be clicked."""
    candidates, best = search["candidates"], search["candidates"][0]
    usable = float(search["hardware"]["usable_bytes"])
    x = ChartAxis(
        "memory of one chip",
        format_bytes,
        padded_ends([usable, *(float(bytes_total(each) or usable) for each in candidates)], 0.04),
        True,
    )
    y = ChartAxis(
        "step time", format_seconds, padded_ends([each["step_seconds"] for each in candidates], 0.06), True
    )

    def draw(width: float) -> Panel:
        chart = Chart(x, y, width, _SCATTER_HEIGHT)
        marks = [chart.upright(usable, f"{format_bytes(usable)} usable")]
        for each in reversed(candidates):
            size = bytes_total(each) or usable
            title = f"{each['layout']}\n{format_seconds(each['step_seconds'])}, {format_bytes(size)}"
            colour = "ink" if each is best else "compute" if each["fits"] else "hidden"
            mark = disc(
                *chart.place(size, each["step_seconds"]),
                6 if each is best else 4.5,
                colour,
                hollow=not each["fits"],
                title=title,
            )
            marks.append(Markup('<g class="pick" data-layout="{}">{}</g>').format(each["layout"], mark))
        return chart.panel("", *marks)

    caption = (
        "Each dot is a layout; click it to price it above. Rings do not fit. The black dot is the fastest."
    )
    return Figure.of("scatter", "All ranked layouts", caption, at_widths(draw, WIDE, TABLET, PHONE))


def _served(document: JsonDocument) -> dict[str, str]:
    """The frontier of serving, or the servers of a load."""
    if "frontier" not in document:
        return _loaded(document)
    best = document.get("best")
    if best is None:
        return {"html": "", "said": str(document.get("reason") or "nothing fits")}
    points = document["frontier"]
    step = -(-len(points) // _MOST_POINTS) or 1
    shown = [*(each for each in points[::step] if each != best), best]
    rows = [Row(point_cells(one, "chosen" * (one == best)), "chosen" if one == best else "") for one in shown]
    html = render(
        "ui_served.html.jinja",
        cards=point_cards(best),
        figures=[frontier_figure(document)],
        table=Table.of("", PAGE, rows, "Price per million generated tokens."),
        lines=[],
    )
    return {"html": html, "said": f"{len(points)} points on the frontier; the best is {best['hardware']}"}


def _loaded(document: JsonDocument) -> dict[str, str]:
    best = document["best"]
    html = render(
        "ui_served.html.jinja",
        cards=servers_cards(document),
        figures=[],
        table=servers_table(document),
        lines=[document["launch"]["command"]],
    )
    return {"html": html, "said": f"{best['replicas']} of {best['hardware']}, {best['chips']} chips"}


def _fitting(document: JsonDocument) -> dict[str, str]:
    """The ways to train and serve that fit a machine."""
    columns = ("way", "fits", "memory/chip|number", "sequences at once|number", "longest|number",
        "tokens/s|number", "one stream|number", "remark")  # fmt: skip
    rows = [
        [
            way["way"],
            Cell("yes", "good") if way["fits"] else Cell("no", "bad"),
            format_bytes(way["needed_bytes"]) if way["needed_bytes"] else "",
            f"{way['max_batch']:,}" if way["fits"] else "",
            f"{way['max_context']:,}" if way["max_context"] else "",
            *(format_count(way[key]) if way[key] else "" for key in ("tokens_per_second", "one_stream")),
            way["why_not"] or (f"planned; does not run yet: {way['not_run']}" if way["not_run"] else ""),
        ]
        for way in document["ways"]
    ]
    table = Table.of("", columns, rows, f"Sequences of {document['seq_len']:,} tokens.")
    html = render("ui_served.html.jinja", cards=[], figures=[], table=table, lines=[])
    fits = sum(bool(way["fits"]) for way in document["ways"])
    summary = f"{fits} of {len(rows)} ways fit {document['model']} on {document['hardware']}"
    return {"html": html, "said": summary}


def figure(name: str, candidates: list[Candidate]) -> Figure:
    """The figure `step` or `memory` of these layouts, as in the report."""
    title, caption, bars = _FIGURES[name]
    return Figure.of(name, title, caption, bars(candidates, candidates[0]))


def _side(planner: Planner, state: Mapping[str, str], hardware: str, layout: str) -> ComparedLayout:
    title = f"{state['model']} on {hardware}: {layout}"
    try:
        return ComparedLayout(title, planner.price({**state, "hardware": hardware, "layout": layout}))
    except MeshwrightError as error:
        return ComparedLayout(title, None, str(error))

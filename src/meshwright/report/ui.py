"""A local page with controls: what `mw ui` serves. Its cards, figures and tables are those of the report.

    /                    the page; its query is its whole state
    /price?...           the layouts asked for, priced: HTML and one line that says the result
    /search?...          the ranking of layouts for the first machine, once it is there
    /plan.toml, /plan.json, /step.svg, /memory.svg    of the first layout, to keep

It is made of the standard library's server: planning needs no more than planning's packages.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from jinja2 import Environment

from meshwright import __version__
from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.layout.schedule import REMATS
from meshwright.models.presets import PRESETS
from meshwright.plan.candidate import Candidate
from meshwright.report import plan_view, summary, templating
from meshwright.report.bars_view import memory_panel, step_panel
from meshwright.report.figure import Figure
from meshwright.report.run_files import JsonDocument, Run
from meshwright.units import format_bytes, format_number_of, format_seconds

# What a page is about where its address does not say.
DEFAULTS = {
    "model": "llama-3-8b",
    "hardware": "v5e:8x8",
    "batch": "1Mi",
    "seq": "4096",
    "layout": "fsdp=64,remat=full",
    "hardware2": "",
    "layout2": "",
}
_DEGREES = tuple(2**n for n in range(14))
_AXES = ("data", "fsdp", "tensor", "context", "pipe", "expert", "microbatches")
_HTML, _JSON = "text/html; charset=utf-8", "application/json"
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
    ]
)


@dataclass(frozen=True)
class ShownLayout:
    """One layout as the page shows it. notices: of the batch that was planned in place of the one asked.

    remats: the policies that its model can have. plan_toml, plan_json: what `mw plan train -o` writes, made
    when they are asked for.
    """

    candidate: Candidate
    notices: tuple[str, ...]
    remats: tuple[str, ...]
    plan_toml: Callable[[], str]
    plan_json: Callable[[], str]


@dataclass(frozen=True)
class Planner:
    """What the page asks. price(words) prices one layout; search(words): its ranking, None while it runs.

    Both take `model`, `hardware`, `batch` and `seq`, and price also `layout`. They raise MeshwrightError.
    """

    price: Callable[[Mapping[str, str]], ShownLayout]
    search: Callable[[Mapping[str, str]], JsonDocument | None]


@dataclass(frozen=True)
class ComparedLayout:
    """One of the layouts that are compared, or why it has no price."""

    title: str
    priced: ShownLayout | None
    error: str = ""

    @property
    def cards(self) -> list[summary.Card]:
        assert self.priced
        best = self.priced.candidate
        machine, found = best.hardware, best.to_dict()
        hardware = {"num_chips": machine.num_chips, "usable_bytes": machine.chip.program_bytes}
        document = {"best": found, "candidates": [found], "hardware": hardware}
        cards = summary.cards(Run(Path(), document, None, (), None, None, None))
        return [card for card in cards if card.label != "Hardware"]  # the heading says it


def state_of(query: str) -> dict[str, str]:
    """What a page's query says of each control; what it leaves out has its default."""
    given = {key: value[:400] for key, value in parse_qsl(query) if key in DEFAULTS}
    return {**DEFAULTS, **given}


def ui_page(state: Mapping[str, str]) -> str:
    """The page with its controls set."""
    return (
        _environment()
        .get_template("ui.html.jinja")
        .render(
            state=state,
            defaults=DEFAULTS,
            version=__version__,
            models=list(PRESETS),
            machines=catalog.names(),
            axes=_AXES,
            degrees=_DEGREES,
            remats=REMATS,
        )
    )


def answer(planner: Planner, state: Mapping[str, str]) -> dict[str, Any]:
    """The priced layouts: `html`, `said` in one line, `remats` of the model, and `seconds` that it took.

    remats: those that the page may offer; None where no layout has a price, and so none is known.
    """
    started = time.perf_counter()
    sides = [_side(planner, state, state["hardware"], state["layout"])]
    if state["layout2"] or state["hardware2"]:
        other = (state["hardware2"] or state["hardware"], state["layout2"] or state["layout"])
        sides.append(_side(planner, state, *other))
    shown = [side.priced for side in sides if side.priced]
    priced = [one.candidate for one in shown]
    html = (
        _environment()
        .get_template("ui_answer.html.jinja")
        .render(
            sides=sides,
            figures=[figure(name, priced) for name in _PANELS] if priced else [],
            exports=_exports(state) if sides[0].priced else [],
        )
    )
    said = "; ".join(_said(side) for side in sides)
    remats = shown[0].remats if shown else None
    return {"html": html, "said": said, "remats": remats, "seconds": time.perf_counter() - started}


def ranking(planner: Planner, state: Mapping[str, str]) -> dict[str, Any]:
    """`html` of the ranking and `done`: whether the search has come to an end."""
    try:
        found = planner.search(state)
    except MeshwrightError as error:
        return {"html": "", "said": str(error), "done": True}
    if found is None:
        return {"html": "", "said": "searching layouts", "done": False}
    rows = plan_view.candidate_rows(found)
    html = _environment().get_template("ui_ranking.html.jinja").render(rows=rows, search=found.get("search"))
    return {"html": html, "said": f"{len(rows)} layouts ranked", "done": True}


_PANELS = {
    "step": ("Where the step goes", "Under a bar, the communication that runs beneath it.", step_panel),
    "memory": ("What fills a chip", "Bytes on one chip at the peak of the step.", memory_panel),
}


def figure(name: str, candidates: list[Candidate]) -> Figure:
    """`step` or `memory` of these layouts, as the report draws it."""
    title, caption, panel = _PANELS[name]
    return Figure.of(name, title, caption, panel(candidates, candidates[0]))


def _side(planner: Planner, state: Mapping[str, str], hardware: str, layout: str) -> ComparedLayout:
    title = f"{state['model']} on {hardware}: {layout}"
    try:
        return ComparedLayout(title, planner.price({**state, "hardware": hardware, "layout": layout}))
    except MeshwrightError as error:
        return ComparedLayout(title, None, str(error))


def _said(side: ComparedLayout) -> str:
    if side.priced is None:
        return side.error
    one = side.priced.candidate
    fits = "fits" if one.fits else "does not fit"
    return f"{format_seconds(one.step_seconds)} per step, {one.mfu:.1%} MFU, {fits}"


def _exports(state: Mapping[str, str]) -> list[tuple[str, str]]:
    query = urlencode(state)
    return [(name, f"{name}?{query}") for name in ("plan.toml", "plan.json", "step.svg", "memory.svg")]


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = templating.environment()
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes, "number_of": format_number_of}
    return environment


class _Handler(BaseHTTPRequestHandler):
    """Answers GET alone, and this machine alone: a page of another site cannot name this one as its host."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            self._send(403, "text/plain", "this page answers at 127.0.0.1 only\n")
            return
        parts = urlsplit(self.path)
        try:
            self._send(200, *self._body(parts.path, state_of(parts.query)))
        except KeyError:
            self._send(404, "text/plain", f"{parts.path}: no such page\n")
        except MeshwrightError as error:
            self._send(400, "text/plain", f"{error}\n")

    def _body(self, path: str, state: Mapping[str, str]) -> tuple[str, str]:
        """(type, text) of what a path stands for. Raises KeyError for one that stands for nothing."""
        assert isinstance(self.server, Server)
        planner = self.server.planner

        def drawn(name: str) -> str:
            return figure(name, [planner.price(state).candidate]).standalone()

        makers: dict[str, Callable[[], tuple[str, str]]] = {
            "/": lambda: (_HTML, ui_page(state)),
            "/price": lambda: (_JSON, json.dumps(answer(planner, state))),
            "/search": lambda: (_JSON, json.dumps(ranking(planner, state))),
            "/plan.toml": lambda: ("application/toml", planner.price(state).plan_toml()),
            "/plan.json": lambda: (_JSON, planner.price(state).plan_json()),
            "/step.svg": lambda: ("image/svg+xml", drawn("step")),
            "/memory.svg": lambda: ("image/svg+xml", drawn("memory")),
        }
        return makers[path]()

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the address alone."""


class Server(ThreadingHTTPServer):
    """The page's server on this machine. port: 0 takes a free one."""

    daemon_threads = True

    def __init__(self, planner: Planner, port: int) -> None:
        self.planner = planner
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing for a page that was left before its answer came; else as usual."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

"""The local page with controls of `mw ui`, with the cards, figures and tables of the report.

    /                    the page; its query is its whole state
    /price?...           the price of the given layouts: HTML, and the result in one line
    /search?...          the ranking of layouts for the first machine, once it is known
    /plan.toml, /plan.json, /step.svg, /memory.svg    of the first layout, as files

It uses the server of the standard library, so that it needs only the packages of planning.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.layout.axes import CONTEXT, DATA, EXPERT, FSDP, PIPE, TENSOR
from meshwright.layout.schedule import REMATS
from meshwright.models.presets import PRESETS
from meshwright.page_policy import policy_of
from meshwright.plan.candidate import Candidate
from meshwright.report.cards import Card, cards
from meshwright.report.documents import JsonDocument, Run
from meshwright.report.draw.figure import Figure
from meshwright.report.pictures.bars import memory_bars, step_bars
from meshwright.report.plan_table import candidates_table
from meshwright.report.templating import render
from meshwright.units import format_seconds

# The state of a page whose address gives none.
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
_AXES = (*(axis.name for axis in (DATA, FSDP, TENSOR, CONTEXT, PIPE, EXPERT)), "microbatches")
_FIGURES = {
    "step": ("Where the step goes", "The thin bar is communication that overlaps with compute.", step_bars),
    "memory": ("Memory of a chip", "Bytes on one chip at the peak of the step.", memory_bars),
}
_EXPORTS = ("plan.toml", "plan.json", "step.svg", "memory.svg")
_HTML, _JSON = "text/html; charset=utf-8", "application/json"


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
    """

    price: Callable[[Mapping[str, str]], ShownLayout]
    search: Callable[[Mapping[str, str]], JsonDocument | None]


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
        machine, priced = self.priced.candidate.hardware, self.priced.candidate.to_dict()
        hardware = {"num_chips": machine.num_chips, "usable_bytes": machine.chip.program_bytes}
        document = {"best": priced, "candidates": [priced], "hardware": hardware}
        run = Run(Path(), document, None, (), None, None, None)
        return [card for card in cards(run) if card.label != "Hardware"]

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
    return DEFAULTS | {key: value[:400] for key, value in parse_qsl(query) if key in DEFAULTS}


def ui_page(state: Mapping[str, str]) -> str:
    """The page with its controls set."""
    return render(
        "ui.html.jinja",
        state=state,
        defaults=DEFAULTS,
        models=list(PRESETS),
        machines=catalog.names(),
        axes=_AXES,
        degrees=_DEGREES,
        remats=REMATS,
    )


@cache
def _policy() -> str:
    return policy_of(ui_page(DEFAULTS))


def answer(planner: Planner, state: Mapping[str, str]) -> dict[str, Any]:
    """The priced layouts: `html`, the summary `said`, `seconds` taken, and `remats` that the model allows.

    remats: None if no layout has a price.
    """
    started = time.perf_counter()
    sides = [_side(planner, state, state["hardware"], state["layout"])]
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
        "said": "; ".join(side.summary for side in sides),
        "remats": shown[0].remats if shown else None,
        "seconds": time.perf_counter() - started,
    }


def ranking(planner: Planner, state: Mapping[str, str]) -> dict[str, Any]:
    """`html` of the ranking, and `done`: whether the search has ended."""
    try:
        search = planner.search(state)
    except MeshwrightError as error:
        return {"html": "", "said": str(error), "done": True}
    if search is None:
        return {"html": "", "said": "searching layouts", "done": False}
    table = candidates_table(search)
    html = render("ui_ranking.html.jinja", table=table, search=search.get("search"))
    return {"html": html, "said": f"{len(table.rows)} layouts ranked", "done": True}


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


class _Handler(BaseHTTPRequestHandler):
    """Answers only GET, and only under this machine's own name: no other site can use the page."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self._is_own(self.headers.get("Host") or ""):
            self._send(403, "text/plain", "this page answers at 127.0.0.1 only\n")
            return
        # A page of another site may send requests, although it cannot read the answers.
        origin = self.headers.get("Origin")
        is_foreign = origin is not None and not self._is_own(origin.removeprefix("http://"))
        is_link = urlsplit(self.path).path == "/"  # which leads here from any site
        if is_foreign or (
            not is_link and self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        ):
            self._send(403, "text/plain", "pages of other sites cannot use this one\n")
            return
        parts = urlsplit(self.path)
        try:
            self._send(200, *self._body(parts.path, state_of(parts.query)))
        except KeyError:
            self._send(404, "text/plain", f"{parts.path}: no such page\n")
        except MeshwrightError as error:
            self._send(400, "text/plain", f"{error}\n")

    def _is_own(self, host: str) -> bool:
        """Whether `host:port` is this server, so that no other name leads to it (DNS rebinding)."""
        assert isinstance(self.server, Server)
        name, _, port = host.rpartition(":")
        return name in ("127.0.0.1", "localhost", "[::1]") and port == str(self.server.server_address[1])

    def _body(self, path: str, state: Mapping[str, str]) -> tuple[str, str]:
        """(type, text) of a path. Raises KeyError for an unknown path."""
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
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _policy(),
            "X-Content-Type-Options": "nosniff",
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal shows only the address."""


class Server(ThreadingHTTPServer):
    """The page's server on this machine. port: 0 takes a free one."""

    daemon_threads = True

    def __init__(self, planner: Planner, port: int) -> None:
        self.planner = planner
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a page that was left before its answer came."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

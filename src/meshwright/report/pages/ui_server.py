"""The server of the page of `mw ui`: its addresses, for this machine only.

    /                    the page; its query is its whole state
    /price?...           the price of the given layouts: HTML, and the result in one line
    /reach?...           the values of each control that the first layout can take
    /search?...          once it is known, the ranking of layouts for the first machine; in the tab Serving
                         the frontier, or the servers for a load; in the last tab the ways that fit
    /plan.toml, /plan.json, /step.svg, /memory.svg    of the first layout, as files

It uses the server of the standard library, so that it needs only the packages of planning.
"""

import json
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from meshwright.errors import MeshwrightError
from meshwright.report.pages.controls import (
    Planner,
    answer,
    figure,
    page_policy,
    ranking,
    reachable_choices,
    state_of,
    ui_page,
)

_HTML, _JSON = "text/html; charset=utf-8", "application/json"


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
            moved = dict(parse_qsl(parts.query)).get("moved", "")
            made = self._maker(parts.path, state_of(parts.query), moved)
            if made is None:
                self._send(404, "text/plain", f"{parts.path}: no such page\n")
            else:
                self._send(200, *made())
        except MeshwrightError as error:
            self._send(400, "text/plain", f"{error}\n")

    def _is_own(self, host: str) -> bool:
        """Whether `host:port` is this server, so that no other name leads to it (DNS rebinding)."""
        assert isinstance(self.server, PageServer)
        name, _, port = host.rpartition(":")
        return name in ("127.0.0.1", "localhost", "[::1]") and port == str(self.server.server_address[1])

    def _maker(self, path: str, state: Mapping[str, str], moved: str) -> Callable[[], tuple[str, str]] | None:
        """Makes (type, text) of a path; None for an unknown path."""
        assert isinstance(self.server, PageServer)
        planner = self.server.planner

        def drawn(name: str) -> str:
            return figure(name, [planner.price(state).candidate]).standalone()

        makers: dict[str, Callable[[], tuple[str, str]]] = {
            "/": lambda: (_HTML, ui_page(state)),
            "/price": lambda: (_JSON, json.dumps(answer(planner, state, moved))),
            "/reach": lambda: (_JSON, json.dumps(reachable_choices(planner, state))),
            "/search": lambda: (_JSON, json.dumps(ranking(planner, state))),
            "/plan.toml": lambda: ("application/toml", planner.price(state).plan_toml()),
            "/plan.json": lambda: (_JSON, planner.price(state).plan_json()),
            "/step.svg": lambda: ("image/svg+xml", drawn("step")),
            "/memory.svg": lambda: ("image/svg+xml", drawn("memory")),
        }
        return makers.get(path)

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": page_policy(),
            "X-Content-Type-Options": "nosniff",
        }
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal shows only the address."""


class PageServer(ThreadingHTTPServer):
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

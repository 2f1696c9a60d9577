"""mw ui: a local page that prices layouts as controls move."""

import json
import subprocess
import sys
import threading
import webbrowser
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import typer

from meshwright.cli.command_options import command
from meshwright.cli.console import JSON, WITHOUT_LINES, emit, note
from meshwright.errors import PlanError
from meshwright.options import option
from meshwright.signals import end_event

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_KEPT = 16  # rankings


@command(app)
def ui(
    model: str | None = option(None, help="Initial model.", unset="llama-3-8b"),
    hardware: str | None = option(None, help="Initial hardware.", unset="v5e:8x8"),
    port: int = option(8765, least=0, most=65535, help="The port to listen on; 0 takes a free one."),
    browser: bool = option(True, flag="--open/--no-open", help="Open the page in a browser."),
    as_json: bool = JSON,
) -> None:
    """Explore layouts in a local web page, with controls for model, hardware, batch and layout.

    The page prices a layout as soon as a control moves, and other axes make up for a moved one, while a
    search ranks layouts in the background. Tabs plan training and serving, and show what fits the machine.
    Its address holds its state. Two layouts can be compared, and the plan and its figures saved. Ctrl-C ends
    it.

    \b
    mw ui
    mw ui --model llama-3-70b --hardware v5p:8x8x8 --port 9000
    """
    from urllib.parse import urlencode

    from meshwright.report.pages.controls import Planner
    from meshwright.report.pages.ui_server import PageServer

    if model:
        _model(model)
    if hardware:
        _hardware(hardware)
    searches = _Searches()
    try:
        server = PageServer(Planner(price_of, searches.find, near_of, reach_of), port)
    except OSError as error:
        raise PlanError(f"--port {port}: {error.strerror}; name another, or 0 for a free one") from None
    given = {key: value for key, value in (("model", model), ("hardware", hardware)) if value}
    address = server.address + (f"?{urlencode(given)}" if given else "")
    ended = end_event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    emit({"address": address}) if as_json else print(address)
    sys.stdout.flush()
    if browser and sys.stdout.isatty():
        webbrowser.open(address)
    ended.wait()
    note("  ended")
    server.shutdown()
    searches.stop()
    server.server_close()


@lru_cache(maxsize=64)
def _hardware(spec: str, software: str = "", price: str = "") -> Any:
    from meshwright.api.inputs import Conditions
    from meshwright.hardware import catalog
    from meshwright.hardware.prices import ChipPrices

    machine = Conditions(launcher=software or None).of(catalog.load(spec))
    return ChipPrices(price).of([machine])[0] if price else machine


@lru_cache(maxsize=64)
def _model(spec: str) -> Any:
    from meshwright.models.presets import load_model

    return load_model(spec)


def _machine_of(state: Mapping[str, str]) -> Any:
    return _hardware(state["hardware"], state["software"], state["price"])


def _dividing(state: Mapping[str, str]) -> tuple[int, Callable[[str], bool]]:
    """The number of chips, and a test of layouts: whether one divides them, the model and the batch."""
    import meshwright as mw
    from meshwright.api.inputs import SearchOptions
    from meshwright.errors import MeshwrightError
    from meshwright.layout.layout_checks import check_fits, layout_for
    from meshwright.plan.train import nearest_batch

    model, machine = _model(state["model"]), _machine_of(state)
    workload = mw.Train(state["batch"], state["seq"]).workload(model)
    weights, computes = SearchOptions(state["weights"] or None).dtypes(machine.chip)

    def divides(text: str) -> bool:
        try:
            layout = layout_for(model, text, weights_dtype=weights, compute_dtype=computes[0])
            if layout.mesh.num_devices != machine.num_chips:
                return False
            planned = nearest_batch(workload, layout)
            check_fits(layout, model, planned.num_sequences, planned.seq_len, padded=True)
        except MeshwrightError:
            return False
        return True

    return machine.num_chips, divides


def near_of(state: Mapping[str, str], moved: str) -> str | None:
    """The layout nearest to the given one that keeps the word `moved`, None if there is none."""
    from meshwright.errors import MeshwrightError
    from meshwright.layout.absorb import absorbed

    try:
        num_chips, divides = _dividing(state)
    except MeshwrightError:
        return None
    return absorbed(state["layout"], moved, num_chips, divides)


def reach_of(state: Mapping[str, str], choices: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """The values of each word that the layout can take; {} if the model or the machine is unknown."""
    from meshwright.errors import MeshwrightError
    from meshwright.layout.absorb import reachable

    try:
        num_chips, divides = _dividing(state)
    except MeshwrightError:
        return {}
    return reachable(state["layout"], choices, num_chips, divides)


def price_of(state: Mapping[str, str]) -> Any:
    """The layout of the controls with its price. Raises MeshwrightError if it does not divide."""
    import meshwright as mw
    from meshwright.layout.layout_checks import remats_of
    from meshwright.report.pages.controls import ShownLayout

    model, work = _model(state["model"]), mw.Train(state["batch"], state["seq"])
    priced = mw.price(
        model, _machine_of(state), work, state["layout"], weights_dtype=state["weights"] or None
    )

    def saved(name: str) -> str:
        with TemporaryDirectory() as folder:
            priced.save(Path(folder) / "plan.toml")
            return (Path(folder) / name).read_text(encoding="utf-8")

    return ShownLayout(
        priced.candidate,
        priced.search.notices,
        remats_of(model),
        lambda: saved("plan.toml"),
        lambda: saved("plan.json"),
    )


class _Searches:
    """Documents of commands. Each command has its own process, so that a search does not delay prices.

    One search runs at a time. A new one ends the previous.
    """

    def __init__(self) -> None:
        self._rankings: OrderedDict[tuple[str, ...], tuple[int, str, str]] = OrderedDict()
        self._running: tuple[tuple[str, ...], subprocess.Popen[str]] | None = None
        self._lock = threading.Lock()

    def find(self, state: Mapping[str, str]) -> dict | None:
        """The document of a tab's command, None while it runs. Raises PlanError if it failed."""
        from meshwright.report.pages.controls import command_of

        asked = tuple(command_of(state))
        with self._lock:
            if asked not in self._rankings and (self._running is None or self._running[0] != asked):
                self._start(asked)
            if asked not in self._rankings:
                return None
            code, text, problem = self._rankings[asked]
        if not text:
            raise PlanError(problem.strip().rpartition("\n")[2].removeprefix("mw: ") or f"exit code {code}")
        return json.loads(text)

    def _start(self, asked: tuple[str, ...]) -> None:
        self._end()
        command = [sys.executable, "-c", WITHOUT_LINES, *asked]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, text=True)
        self._running = (asked, process)
        threading.Thread(target=self._wait, args=(asked, process), daemon=True).start()

    def _wait(self, asked: tuple[str, ...], process: "subprocess.Popen[str]") -> None:
        text, problem = process.communicate()
        with self._lock:
            if process.returncode >= 0:  # otherwise `_end` has killed it
                self._rankings[asked] = (process.returncode, text, problem)
                while len(self._rankings) > _KEPT:
                    self._rankings.popitem(last=False)

    def _end(self) -> None:
        if self._running and self._running[1].poll() is None:
            self._running[1].kill()

    def stop(self) -> None:
        with self._lock:
            self._end()

"""Pages in headless Chromium: what it says of them, and screenshots. Needs playwright and `chromium` on PATH.

    python -m tests.report.browser report.html FOLDER

writes the six screenshots of a page, each width in both themes, and

    python -m tests.report.browser

those that are kept in `references/`, at half their size. Look at each before it is committed.
"""

import base64
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS, THEMES = (390, 768, 1280), ("dark", "light")
REFERENCES = Path(__file__).parent / "references"
_SCRIPT = (Path(__file__).parent / "browser.js").read_text(encoding="utf-8")


_SMALLEST = 11  # pixels of a text
_CUT = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
_NO_TEXT = (
    "* { -webkit-text-fill-color: transparent !important; transition: none !important }"
    "svg text, svg text * { fill: transparent !important; stroke: transparent !important }"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium, as playwright's Browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--hide-scrollbars"])
        yield opened
        opened.close()


@contextmanager
def viewed(browser: Any, address: str, width: int, theme: str) -> Iterator[Any]:
    """A page of this width and theme; an error on its console, or any of its policy, fails the test."""
    page, failures = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme), []
    page.on("console", lambda message: failures.append(message.text))
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert failures == []


@dataclass(frozen=True)
class Seen:
    """The findings of a browser: elements wider than the window, its size, charts drawn, seconds to draw it.

    cut: tables of which columns are out of sight. small: texts of less than 11 pixels. seconds: processor
    time of the page's thread, which other work on the machine does not lengthen.
    """

    wide: list[str]
    cut: list[str]
    small: list[str]
    width: int
    scroll: int
    height: int
    charts: int
    seconds: float


def see(browser: Any, page: Path, width: int, theme: str, screenshot: Path | None = None) -> Seen:
    """What Chromium finds in a file of this width; a screenshot of all of it, if asked."""
    with viewed(browser, page.resolve().as_uri(), width, theme) as shown:
        seen = Seen(
            seconds=drawing_seconds(shown),
            wide=wide(shown),
            cut=shown.locator(".scroll").evaluate_all(_CUT),
            small=[one["words"] for one in _run(shown, "texts()") if one["size"] < _SMALLEST],
            charts=shown.locator(".figures svg:visible").count(),
            **_run(shown, "size"),
        )
        if screenshot:
            shown.screenshot(path=screenshot, full_page=True)
    return seen


def drawing_seconds(shown: Any) -> float:
    """Processor time that a page takes to load and to be drawn, on its own thread: it is loaded again."""
    session = shown.context.new_cdp_session(shown)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def busy() -> float:
        found = session.send("Performance.getMetrics")["metrics"]
        return next(one["value"] for one in found if one["name"] == "TaskDuration")

    before = busy()
    shown.reload()
    shown.screenshot()
    return busy() - before


def wide(shown: Any) -> list[str]:
    """The elements that end beyond the window's right edge, but for those in what scrolls."""
    return _run(shown, "wide")


def faint(browser: Any, shown: Any) -> list[str]:
    """The texts of a page, folds open, that have less contrast than WCAG's AA asks, with their ratio."""
    shown.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    texts = _run(shown, "texts")
    assert texts
    # No element: the page's policy permits only its own.
    sheet = "const sheet = new CSSStyleSheet(); sheet.replaceSync(text);"
    shown.evaluate(f"(text) => {{ {sheet} document.adoptedStyleSheets.push(sheet); }}", _NO_TEXT)
    address = _address("png", shown.screenshot(full_page=True))
    shown.evaluate("document.adoptedStyleSheets.pop()")
    with viewed(browser, "about:blank", 500, "light") as blank:
        found = _run(blank, "contrasts", [address, texts])
    return [f"{one['ratio']:.2f} {one['words']}" for one in found if one["ratio"] < one["least"]]


def difference(browser: Any, first: Path, second: Path) -> tuple[float, float]:
    """The share of two pictures' drawn cells that differ in brightness, and how much taller the second is."""
    found = _pictures(browser, first, second)
    return found["differing"], found["taller"]


def keep(browser: Any, screenshot: Path, reference: Path) -> None:
    """Writes a screenshot at half its size, as WebP."""
    written = _pictures(browser, screenshot, screenshot)["half"].partition(",")[2]
    reference.write_bytes(base64.b64decode(written))


def _pictures(browser: Any, first: Path, second: Path) -> dict[str, Any]:
    addresses = [_address(path.suffix[1:], path.read_bytes()) for path in (first, second)]
    width = int(first.stem.rpartition("-")[2])
    with viewed(browser, "about:blank", 500, "light") as blank:
        return _run(blank, "pictures", [addresses, width // 8])


def _run(shown: Any, function: str, words: Any = None) -> Any:
    """What a function of browser.js returns in a page."""
    return shown.evaluate(f"(() => {{ {_SCRIPT}\nreturn {function}; }})()", words)


def _address(kind: str, image: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def shots(browser: Any, page: Path, folder: Path) -> list[tuple[Path, Seen]]:
    """A screenshot of each width in both themes, with what the browser found."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {(w, t): folder / f"{page.stem}-{t}-{w}.png" for w, t in product(WIDTHS, THEMES)}
    return [(path, see(browser, page, *how, path)) for how, path in names.items()]


def record(browser: Any) -> None:
    """Writes the references anew."""
    from tests.report.sample_run import write_pages

    with tempfile.TemporaryDirectory() as folder:
        pages = write_pages(Path(folder))
        for page in (pages["run"], pages["plan"]):
            for path, _ in shots(browser, page, Path(folder)):
                keep(browser, path, REFERENCES / f"{path.stem}.webp")


if __name__ == "__main__":
    with chromium() as opened:
        if len(sys.argv) > 1:
            for shot, seen_there in shots(opened, Path(sys.argv[1]), Path(sys.argv[2])):
                print(shot, seen_there)
        else:
            REFERENCES.mkdir(exist_ok=True)
            record(opened)

"""Pages in headless Chromium: what it says of them, and screenshots. Needs `chromium` on PATH.

    python -m tests.report.browser report.html FOLDER

writes the six screenshots of a page, each width in both themes, and

    python -m tests.report.browser

those that are kept in `references/`, at half their size. Look at each before it is committed.
"""

import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from html import unescape
from itertools import product
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS, THEMES = (390, 768, 1280), {"dark": 0, "light": 1}
_PROBE = """<script>
const failures = [];
addEventListener("error", (event) => failures.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => failures.push("CSP " + event.violatedDirective));
addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement, wide = [];
  for (const one of document.querySelectorAll("body *")) {
    const box = one.getBoundingClientRect();
    const scrolls = one.closest(".scroll, .pane, .contents, pre, .frame");
    if (box.right > root.clientWidth + 1 && !scrolls) wide.push(`${one.tagName}.${one.className}`);
  }
  parent.postMessage({
    failures, wide, width: root.clientWidth, scroll: root.scrollWidth, height: root.scrollHeight,
    charts: document.querySelectorAll(".chart svg").length, seconds: performance.now() / 1000,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
  }, "*");
}, 1000));
</script>"""
# Chromium's windows are at least 500 pixels wide; a frame is as narrow as a phone.
_FRAME = """<!doctype html><style>body{margin:0}iframe{border:0;display:block}</style>
<iframe src="page.html" width="%d" height="%d"></iframe><script>
addEventListener("message", (event) => { document.body.dataset.probe = JSON.stringify(event.data); });
</script>"""

# Two pictures drawn on grids of 8 pixels a cell, each cell the brightness of its part, from 0 to 1; and the
# first at half its size.
_PICTURES = """<!doctype html><script>
const grid = (image, width, height) => {
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(image, 0, 0, width, height);
  return canvas;
};
const brightness = (canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const cell = (i) => (data[4 * i] + data[4 * i + 1] + data[4 * i + 2]) / 765;
  return Array.from({ length: data.length / 4 }, (_, i) => cell(i));
};
addEventListener("load", () => {
  const images = [...document.images], [first, second] = images;
  const cells = [%d, Math.round(%d * first.naturalHeight / first.naturalWidth)];
  const [a, b] = images.map((image) => brightness(grid(image, ...cells)));
  // What is drawn: all that is not of the page's own brightness, which most cells have.
  const page = [...a].sort((x, y) => x - y)[Math.floor(a.length / 2)];
  const far = (value) => Math.abs(value - page) > 0.06;
  const drawn = a.map((value, i) => i).filter((i) => far(a[i]) || far(b[i]));
  const half = grid(first, first.naturalWidth / 2, first.naturalHeight / 2);
  document.documentElement.dataset.pictures = JSON.stringify({
    differing: drawn.filter((i) => Math.abs(a[i] - b[i]) > 0.08).length / drawn.length,
    taller: (second.naturalHeight / second.naturalWidth) / (first.naturalHeight / first.naturalWidth),
    half: half.toDataURL("image/webp", 0.6),
  });
});
</script><img src="%s"><img src="%s">"""
REFERENCES = Path(__file__).parent / "references"


@dataclass(frozen=True)
class Seen:
    """What a browser found: uncaught errors, elements wider than the window, its size, charts drawn."""

    failures: list[str]
    wide: list[str]
    width: int
    scroll: int
    height: int
    charts: int
    seconds: float
    dark: bool


def see(page: Path, width: int, theme: str, screenshot: Path | None = None) -> Seen:
    """What Chromium finds in a page of this width; a screenshot of all of it, if asked."""
    with tempfile.TemporaryDirectory() as folder:
        probed, frame = Path(folder) / "page.html", Path(folder) / "frame.html"
        html = page.read_text(encoding="utf-8").replace("<head>", f"<head>{_PROBE}", 1)
        probed.write_text(html, encoding="utf-8")
        frame.write_text(_FRAME % (width, 900), encoding="utf-8")
        done = _chromium(folder, frame, width, 900, theme, "--dump-dom", "--virtual-time-budget=5000")
        found = re.search(r'data-probe="([^"]*)"', done.stdout)
        assert found, done.stderr[-2000:]
        seen = Seen(**json.loads(unescape(found[1])))
        logged = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        seen.failures.extend(logged)
        if screenshot:
            frame.write_text(_FRAME % (width, seen.height), encoding="utf-8")
            _chromium(
                folder, frame, width, seen.height, theme, f"--screenshot={screenshot.resolve()}",
                "--virtual-time-budget=5000",
            )  # fmt: skip
    return seen


def difference(first: Path, second: Path) -> tuple[float, float]:
    """The share of two pictures' drawn cells that differ in brightness, and how much taller the second is."""
    found = _pictures(first, second)
    return found["differing"], found["taller"]


def keep(screenshot: Path, reference: Path) -> None:
    """Writes a screenshot at half its size, as WebP."""
    written = _pictures(screenshot, screenshot)["half"].partition(",")[2]
    reference.write_bytes(base64.b64decode(written))


def _pictures(first: Path, second: Path) -> dict:
    written = [
        f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"
        for path in (first, second)
    ]
    cells = int(re.findall(r"\d+", first.stem)[-1]) // 8
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "pictures.html"
        page.write_text(_PICTURES % (cells, cells, *written), encoding="utf-8")
        done = _chromium(folder, page, 500, 500, "light", "--dump-dom", "--virtual-time-budget=20000")
    found = re.search(r'data-pictures="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


def _chromium(
    folder: str, page: Path, width: int, height: int, theme: str, *options: str
) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--enable-logging=stderr", f"--user-data-dir={folder}/profile", f"--window-size={width},{height}",
        f"--blink-settings=preferredColorScheme={THEMES[theme]}", *options, f"file://{page}",
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def shots(page: Path, folder: Path) -> list[tuple[Path, Seen]]:
    """A screenshot of each width in both themes, with what the browser found."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {(w, t): folder / f"{page.stem}-{t}-{w}.png" for w, t in product(WIDTHS, THEMES)}
    return [(path, see(page, *how, path)) for how, path in names.items()]


def record() -> None:
    """Writes the references anew."""
    from tests.report.sample_run import write_pages

    with tempfile.TemporaryDirectory() as folder:
        pages = write_pages(Path(folder))
        for page in (pages["run"], pages["plan"]):
            for path, _ in shots(page, Path(folder)):
                keep(path, REFERENCES / f"{path.stem}.webp")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for shot, seen_there in shots(Path(sys.argv[1]), Path(sys.argv[2])):
            print(shot, seen_there)
    else:
        REFERENCES.mkdir(exist_ok=True)
        record()

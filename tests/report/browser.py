"""Pages in headless Chromium: what it says of them, and screenshots. Needs `chromium` on PATH.

    python -m tests.report.browser report.html FOLDER

writes the six screenshots of a page, each width in both themes.
"""

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


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    for pixels, name in product(WIDTHS, THEMES):
        shot = target / f"{Path(sys.argv[1]).stem}-{pixels}-{name}.png"
        print(shot, see(Path(sys.argv[1]), pixels, name, shot))

"""The page in a browser: no error, no overflow, every chart drawn, at three widths in both themes."""

from itertools import product
from pathlib import Path

import pytest
from tests.report.browser import CHROMIUM, THEMES, WIDTHS, see
from tests.report.sample_run import write_run

from meshwright.cli.main import main
from meshwright.report.collectives_view import collectives_html
from meshwright.report.html import write_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
_TALLEST = {390: 9000, 768: 7000, 1280: 5000}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run's page, a plan's with its figures, and one of measured collectives."""
    folder = tmp_path_factory.mktemp("pages")
    write_report(write_run(folder / "demo"), folder / "run.html")
    plan = [
        "plan",
        "train",
        "--model",
        "tiny",
        "--hardware",
        "h100:8",
        "--batch-tokens",
        "64Ki",
        "--seq-len",
        "64",
    ]
    assert main([*plan, "--tokens", "1B", "-o", str(folder / "plan.toml")]) == 0
    assert main(["report", str(folder / "plan.toml"), "-o", str(folder / "plan.html")]) == 0
    common = {"op": "all_gather", "axes": ["X"], "num_devices": 8, "predicted_seconds": 1e-5}
    results = [{**common, "bytes": 2**n, "seconds": 2e-6 * n} for n in range(10, 20)]
    document = {"hardware": "cpu:8", "mesh": {"X": 8}, "results": results}
    (folder / "collectives.html").write_text(collectives_html(document))
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.mark.parametrize(("page", "charts"), [("run", 2), ("plan", 0), ("collectives", 1)])
@pytest.mark.parametrize(("width", "theme"), list(product(WIDTHS, THEMES)))
def test_no_error_and_no_overflow(
    page: str, charts: int, width: int, theme: str, pages: dict[str, Path], tmp_path: Path
):
    seen = see(pages[page], width, theme, tmp_path / "page.png")
    assert seen.failures == [] and seen.wide == []
    assert seen.width == seen.scroll == width and seen.dark == (theme == "dark")
    assert seen.charts >= charts
    assert seen.height < _TALLEST[width]
    # Half of what the page took is the second that the probe waits.
    assert seen.seconds < 3.0
    assert (tmp_path / "page.png").stat().st_size > 10_000

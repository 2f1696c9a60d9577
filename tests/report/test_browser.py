"""The page in a browser: no error, no overflow, every chart drawn, at three widths in both themes."""

from itertools import product
from pathlib import Path

import pytest
from tests.report.browser import CHROMIUM, REFERENCES, THEMES, WIDTHS, difference, see
from tests.report.sample_run import write_pages

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
_TALLEST = {390: 9000, 768: 7000, 1280: 5000}


# The share of a picture's drawn cells that may differ from the reference: fonts, figures that moved.
_DIFFERING = 0.2


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_pages(tmp_path_factory.mktemp("pages"))


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
    if page != "collectives":
        reference = REFERENCES / f"{page}-{theme}-{width}.webp"
        differing, taller = difference(reference, tmp_path / "page.png")
        assert differing < _DIFFERING and 0.9 < taller < 1.1, "python -m tests.report.browser records anew"


def test_another_page_is_not_the_reference():
    light, dark = (REFERENCES / f"run-{theme}-768.webp" for theme in ("light", "dark"))
    assert difference(light, dark)[0] > 0.5
    assert difference(light, light) == (0, 1)
    assert difference(light, REFERENCES / "plan-light-768.webp")[0] > _DIFFERING

"""The page in a browser: no error, no overflow, every chart drawn, at three widths in both themes."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.report.browser import REFERENCES, THEMES, WIDTHS, difference, faint, see, viewed
from tests.report.sample_run import write_pages

pytestmark = pytest.mark.slow
_TALLEST = {390: 9000, 768: 7000, 1280: 5000}
_DRAWN_WITHIN = 2.0  # seconds
_SCREEN = 1280  # pixels, where the width does not matter


# The share of a picture's drawn cells that may differ from the reference: fonts, figures that moved.
_DIFFERING = 0.2


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_pages(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize(("page", "charts"), [("run", 5), ("plan", 8), ("collectives", 1)])
@pytest.mark.parametrize(("width", "theme"), list(product(WIDTHS, THEMES)))
def test_no_error_and_no_overflow(
    page: str, charts: int, width: int, theme: str, pages: dict[str, Path], browser: Any, tmp_path: Path
):
    picture = tmp_path / f"{page}-{theme}-{width}.png"
    seen = see(browser, pages[page], width, theme, picture)
    assert seen.wide == [] == seen.small
    assert width < _SCREEN or seen.cut == []
    assert seen.width == seen.scroll == width
    assert seen.charts >= charts
    assert seen.height < _TALLEST[width]
    assert seen.seconds < _DRAWN_WITHIN
    if page != "collectives":
        differing, taller = difference(browser, REFERENCES / f"{picture.stem}.webp", picture)
        assert differing < _DIFFERING and 0.9 < taller < 1.1, "python -m tests.report.browser records anew"


@pytest.mark.parametrize(("page", "theme"), list(product(("run", "plan", "collectives"), THEMES)))
def test_every_text_has_the_contrast_of_aa(page: str, theme: str, pages: dict[str, Path], browser: Any):
    with viewed(browser, pages[page].as_uri(), _SCREEN, theme) as shown:
        assert faint(browser, shown) == []


def test_a_faint_text_is_found(pages: dict[str, Path], browser: Any):
    with viewed(browser, pages["plan"].as_uri(), _SCREEN, "light") as shown:
        shown.evaluate("document.querySelector('h1').style.color = '#aaa'")
        [found] = faint(browser, shown)
    assert found.startswith("2.32 ")


@pytest.mark.parametrize("key", ["ArrowRight", "ArrowLeft"])
def test_the_words_of_a_mark_come_by_keyboard(key: str, pages: dict[str, Path], browser: Any):
    with viewed(browser, pages["plan"].as_uri(), _SCREEN, "light") as shown:
        marks = shown.locator("#figure-step .large rect[role=img]")
        assert marks.count() > 3
        marks.first.focus()
        tip = shown.locator(".tip")
        assert tip.inner_text() == marks.first.locator("title").text_content()
        shown.keyboard.press(key)
        other = marks.nth(1 if key == "ArrowRight" else marks.count() - 1)
        assert tip.inner_text() == other.locator("title").text_content()
        assert other.evaluate("(mark) => mark === document.activeElement && mark.tabIndex === 0")
        assert shown.locator("#figure-step .large [tabindex='0']").count() == 1
        shown.keyboard.press("Escape")
        assert tip.is_hidden()


def test_a_finger_beside_a_mark_means_the_mark(pages: dict[str, Path], browser: Any):
    with viewed(browser, pages["plan"].as_uri(), _SCREEN, "light") as shown:
        mark = shown.locator("#figure-step .large rect[role=img]").first
        mark.scroll_into_view_if_needed()
        at = mark.bounding_box()
        shown.mouse.click(at["x"] + at["width"] / 2, at["y"] - 5)
        assert shown.locator(".tip").inner_text() == mark.locator("title").text_content()


@pytest.mark.parametrize(("width", "kind"), [(_SCREEN, "large"), (390, "small")])
def test_the_points_of_a_chart_have_words_by_keyboard_and_pointer(
    width: int, kind: str, pages: dict[str, Path], browser: Any
):
    with viewed(browser, pages["run"].as_uri(), width, "dark") as shown:
        tip = shown.locator(".tip")
        marks = shown.locator(f"#figure-loss .{kind} circle[role=img]")
        marks.first.hover(force=True)
        assert tip.inner_text() == marks.first.locator("title").text_content()
        shown.locator(f"#figure-loss .{kind} [tabindex='0']").focus()
        words = tip.inner_text()
        assert words.startswith("step ")
        shown.keyboard.press("ArrowRight")
        assert tip.inner_text().startswith("step ") and tip.inner_text() != words


def test_another_page_is_not_the_reference(browser: Any):
    light, dark = (REFERENCES / f"run-{theme}-768.webp" for theme in THEMES)
    assert difference(browser, light, dark)[0] > 0.5
    assert difference(browser, light, light) == (0, 1)
    assert difference(browser, light, REFERENCES / "plan-light-768.webp")[0] > _DIFFERING

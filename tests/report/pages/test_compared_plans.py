"""The page of plans side by side."""

import pytest
from tests.report.test_answer import compared

from meshwright.report.pages.compared_plans import comparison_html, short_names, table_of_plans

MORE = {
    "model": "tiny", "phase": "train", "chips": 8, "weights_dtype": "bf16", "mfu": 0.4, "joules": None,
    "bytes_per_chip": {"total": 10**9}, "bound_name": "compute", "price_per_hour": 8.0,
}  # fmt: skip


def plans(*names: str) -> list[dict]:
    return [MORE | compared(name, 1.0 + place, 10.0) for place, name in enumerate(names)]


def test_a_page_has_the_answer_bars_and_a_column_for_each_plan():
    shown = plans("runs/a.toml", "runs/b.toml")
    page = comparison_html(shown)
    assert page.count("a.toml</text>") == page.count("b.toml</text>") == 4  # rate and price, at two widths
    assert "USD per million tokens" in page and "Recommended" in page
    assert {name: cells for name, *cells in table_of_plans(shown)}["MFU"] == ["40.0%", "40.0%"]


def test_without_a_price_of_each_there_are_no_bars_of_prices():
    first, second = plans("a", "b")
    page = comparison_html([first, second | {"price": None, "price_per_hour": None}])
    assert "per million tokens</text>" not in page


@pytest.mark.parametrize(
    ("names", "short"), [(("x/a.toml", "y/b.toml"), ["a.toml", "b.toml"]), (("x/a", "y/a"), ["x/a", "y/a"])]
)
def test_folders_are_named_if_files_have_the_same_name(names: tuple[str, str], short: list[str]):
    assert short_names(plans(*names)) == short


def test_names_are_text():
    assert "<script>alert" not in comparison_html(plans("<script>alert(1)</script>", "b"))

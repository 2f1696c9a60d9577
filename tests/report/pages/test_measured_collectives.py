"""Charts of measured collectives: points and model, in a page and as text."""

import re

from meshwright.report.pages.measured_collectives import (
    collective_curves,
    collectives_html,
    measured_ops,
    terminal_plot,
)

RESULTS = [
    {"op": op, "axes": axes, "num_devices": 4, "bytes": size, "seconds": seconds, "predicted_seconds": 1e-3}
    for op in ("all_gather", "permute")
    for axes in (["X"], ["X", "Y"])
    for size, seconds in ((1024, 1e-4), (65536, 1e-2))
]
DOCUMENT = {"hardware": "cpu:8", "mesh": {"X": 4, "Y": 2}, "results": RESULTS}


def test_a_figure_has_points_and_a_model_for_each_choice_of_axes() -> None:
    curves = collective_curves(RESULTS, "all_gather")
    assert [curve.name for curve in curves] == ["X", "X, measured", "XY", "XY, measured"]
    assert [(point.x, point.y) for point in curves[1].points] == [(1024, 1e-4), (65536, 1e-2)]
    assert [point.y for point in curves[0].points] == [1e-3, 1e-3]


def test_the_page_holds_a_figure_for_each_collective_and_loads_nothing() -> None:
    html = collectives_html(DOCUMENT)
    found = re.findall(r'<figure class="panel [^"]*" id="figure-(\w+)">(.*?)</figure>', html, re.DOTALL)
    assert [op for op, _ in found] == measured_ops(DOCUMENT) == ["all_gather", "permute"]
    assert "X, 1.02 kB\n100 us, model 1 ms" in found[0][1]
    assert "<script src" not in html and "://" not in html


def test_the_plot_has_its_corners_where_the_extremes_are() -> None:
    title, top, *_, bottom, _, legend = terminal_plot(DOCUMENT, "all_gather").splitlines()
    assert title == "all_gather"
    assert top.startswith("     10 ms |")
    assert top.endswith("B")
    assert bottom.split("|")[1][0] == "B"
    assert legend.strip() == "1.02 kB to 65.5 kB, gathered; A X, B XY; · model"

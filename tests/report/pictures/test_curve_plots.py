"""The figures of `mw plot`: colours, room for names, and files."""

import re

import pytest

from meshwright.cli.main import main
from meshwright.hardware.catalog import load
from meshwright.models.presets import load_model
from meshwright.plan import curves
from meshwright.report.pictures.curve_plots import curves_figure


def test_a_curve_has_one_colour_in_all_panels() -> None:
    plot = curves.strategies_over_batch(load_model("llama-2-13b"), load("v5p:4x4x4"))
    figure = curves_figure(plot)
    colours: dict[str, set[str]] = {}
    for panel in figure.frames[figure.first].panels:
        for colour, name in re.findall(r'class="f-(\w+)[^"]*"[^>]*><title>([^,]+),', str(panel.body)):
            colours.setdefault(name, set()).add(colour)
    assert colours.keys() == {"compute", "FSDP", "TP", "FSDP and TP"}
    assert len(set().union(*colours.values())) == len(colours)


def test_names_of_curves_end_within_the_panel() -> None:
    [frame] = curves_figure(curves.look_ahead([0.5, 0.95], 0.1)).frames
    for panel in frame.panels:
        starts = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*>acceptance', str(panel.body))]
        assert len(starts) == 2 and max(starts) + 6.6 * len("acceptance 0.95") <= panel.width


@pytest.mark.parametrize(("name", "begin"), [("f.html", "<!doctype html>"), ("f.svg", "<svg")])
def test_a_plot_without_a_slider_is_a_page_or_a_picture(name, begin, tmp_path) -> None:
    assert main(["plot", "lookahead", "--acceptance", "0.5", "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text().lstrip().startswith(begin)


def test_a_plot_is_written_in_no_other_form(tmp_path, capsys) -> None:
    assert main(["plot", "lookahead", "--acceptance", "0.5", "-o", str(tmp_path / "f.png")]) == 2
    assert "ends in neither .svg nor .html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "hardware", "layout"),
    [
        ("llama-2-13b", "v5e:8", "tensor=8,"),
        ("llama-3-70b", "v5e:16", "tensor=8,kv_replicas=2,cache=sequence,"),
        ("gemma-3-1b", "h100:8", "data=2,kv_replicas=4,cache=sequence,"),
    ],
)
def test_a_generate_step_is_drawn_for_a_layout_that_splits_the_heads(model, hardware, layout, capsys) -> None:
    asked = [
        "plot",
        "decode",
        "--model",
        model,
        "--hardware",
        hardware,
        "--context",
        "4096",
        "--batches",
        "8",
    ]
    assert main(asked) == 0
    assert f"bf16 cache, {layout}remat=none." in capsys.readouterr().out


def test_a_layout_that_does_not_divide_is_not_drawn(capsys) -> None:
    where = ["--model", "llama-3-70b", "--hardware", "v5e:16", "--context", "4096", "--layout", "tensor=16"]
    assert main(["plot", "decode", *where]) == 2
    assert "8 KV heads (K) do not divide over tensor = 16" in capsys.readouterr().err

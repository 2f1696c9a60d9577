"""A plan's figures: complete, self-contained, and in every mark the planner's numbers."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
from tests.report.parsed_page import Page
from tests.report.sample_run import write_run

from meshwright.errors import DataError, HardwareError, OutputError, PlanError
from meshwright.files import write_whole
from meshwright.hardware import catalog
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan.study import scaling
from meshwright.plan.study.priced_plan import PricedPlan
from meshwright.plan.study.scaling import BEST
from meshwright.plan.study.split import split_step
from meshwright.plan_file import Plan, save_plan
from meshwright.report.draw.figure import Figure, Panel, write_figures
from meshwright.report.pages.run_page import build_report, read_plan, read_report
from meshwright.report.pictures.bars import layout_lines
from meshwright.report.pictures.plan_figures import plan_figures
from meshwright.units import format_bytes, format_seconds

SVG = "{http://www.w3.org/2000/svg}"


def save(folder, model="llama-3-8b", machine="v5e:4x4", layout="fsdp=8,tensor=2", sequences=64, seq_len=2048):
    plan = Plan(load_model(model), machine, Workload(sequences, seq_len), Layout.parse(layout))
    save_plan(plan, folder / "plan.toml")
    return folder / "plan.toml"


@pytest.fixture(scope="module", autouse=True)
def two_machines():
    """Sweeps over one neighbour in size and three batches: enough for a slider and for curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "MAX_SHAPES", 2)
        patch.setattr(scaling, "_SPAN", 2)
        yield


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("dense"))
    priced = read_plan(path)
    return path, priced, {figure.name: figure for figure in plan_figures(priced)}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A mixture of experts in stages, its experts spread; of its own machine alone."""
    layout = "pipe=4,data=2,tensor=2,expert=2,microbatches=8,schedule=1f1b,remat=full"
    path = save(tmp_path_factory.mktemp("experts"), "mixtral-8x7b", "h100:2x8", layout, 32, 4096)
    priced = read_plan(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "MAX_SHAPES", 1)
        return path, priced, {figure.name: figure for figure in plan_figures(priced)}


def titles(figure: Figure, frame: int | None = None) -> list[str]:
    """What the marks of a frame say when pointed at."""
    panels = figure.frames[figure.first if frame is None else frame].panels
    return re.findall(r"<title>(.*?)</title>", "".join(panel.body for panel in panels), re.DOTALL)


def words(figure: Figure) -> str:
    return "".join(panel.body for frame in figure.frames for panel in frame.panels)


@pytest.mark.slow
def test_a_plan_has_its_figures(dense, experts):
    _, _, figures = dense
    assert list(figures) == ["layouts", "step", "memory", "timeline", "strategies", "roofline"]
    assert list(experts[2]) == ["layouts", "step", "memory", "timeline", "pipeline", "strategies", "roofline"]


def test_the_bars_of_a_step_say_the_planner_s_seconds(dense):
    _, priced, figures = dense
    said = titles(figures["step"])
    for candidate in priced.top:
        split = split_step(candidate)
        assert f"compute: {format_seconds(split.compute_seconds)}" in said
        if split.hidden_seconds:
            assert f"hidden communication: {format_seconds(split.hidden_seconds)}" in said
        assert f">{format_seconds(candidate.step_seconds)}</text>" in words(figures["step"])


def test_the_bars_of_memory_say_the_planner_s_bytes(dense, experts):
    for _, priced, figures in (dense, experts):
        said = titles(figures["memory"])
        for candidate in priced.top:
            for cause in ("weights", "optimizer", "activations"):
                assert f"{cause}: {format_bytes(getattr(candidate.memory, cause))}" in said
            assert f">{format_bytes(candidate.memory.total)}</text>" in words(figures["memory"])
        usable = priced.hardware.chip.program_bytes
        assert f"usable {format_bytes(usable)}" in words(figures["memory"])


def test_the_bars_are_to_scale(dense):
    """The widths of a row's pieces are in the ratio of their seconds."""
    _, priced, figures = dense
    panel = figures["step"].frames[0].panels[0]
    found = re.findall(
        r'<rect x="[\d.]+" y="([\d.]+)" width="([\d.]+)" height="16.0" [^>]*><title>compute', panel.body
    )
    widths = [float(width) for _, width in found]
    seconds = [split_step(candidate).compute_seconds for candidate in priced.top]
    scale = widths[0] / seconds[0]
    assert widths == pytest.approx([scale * value for value in seconds], abs=0.01)


def test_the_marks_of_strategies_say_the_planner_s_figures(dense):
    _, priced, figures = dense
    figure = figures["strategies"]
    assert len(figure.frames) == len(priced.sweeps) > 1
    own = priced.sweeps[figure.first]
    assert own.hardware is priced.hardware
    said = "\n".join(titles(figure))
    for point in own.of("FSDP"):
        seconds = split_step(point.candidate).communication_seconds
        assert f"tokens: {format_seconds(seconds)}\n{layout_lines(point.candidate.layout)[0]}" in said
        assert f"tokens: {point.candidate.mfu:.1%}\n" in said


def test_every_frame_names_its_machine(dense):
    _, priced, figures = dense
    labels = [frame.label for frame in figures["strategies"].frames]
    assert labels == [f"{s.hardware.num_chips:,} chips, {s.hardware.spec}" for s in priced.sweeps]


def test_the_chosen_layout_is_named_among_all(dense):
    _, priced, figures = dense
    body = words(figures["layouts"])
    assert f"chosen: {format_seconds(priced.chosen.step_seconds)}" in body
    usual = {point.strategy for point in priced.usual} - {BEST}
    assert all(f"{name}: " in body for name in usual)


def test_the_roofline_names_every_operation_that_computes(dense):
    said = "\n".join(titles(dense[2]["roofline"]))
    for name in ("wq", "w_gate", "w_out", "attention", "unembed"):
        assert f"{name} (forward)" in said and f"{name} (backward)" in said


def test_the_pipeline_shows_the_plan_s_schedule_first_and_the_others(experts):
    figure = experts[2]["pipeline"]
    assert figure.frames[0].label.startswith("1f1b: 4 stages, 8 microbatches")
    assert {frame.label.split(":")[0] for frame in figure.frames} >= {"1f1b", "gpipe", "zb-h1", "interleaved"}
    assert figure.is_interactive and figure.file_name == "pipeline.html"


def test_each_figure_is_a_file_that_stands_alone(dense, experts, tmp_path):
    for number, (_, _, figures) in enumerate((dense, experts)):
        paths = write_figures(figures.values(), tmp_path / str(number))
        assert [path.name for path in paths] == [figure.file_name for figure in figures.values()]
        for path in paths:
            text = path.read_text()
            assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "NaN" not in text and ">nan" not in text and "inf" not in re.findall(r'="([^"]*)"', text)
            if path.suffix == ".svg":
                root = ElementTree.fromstring(text)
                assert root.tag == f"{SVG}svg" and root.find(f"{SVG}rect") is not None
            else:
                page = Page(text)
                assert page.open == [] and any(tag == "input" for tag, _ in page.tags)


def test_nothing_lies_outside_its_panel(dense, experts):
    """Marks and the anchors of words are inside; a word is inside by its estimated width."""
    for _, _, figures in (dense, experts):
        for figure in figures.values():
            for frame in figure.frames:
                for panel in frame.panels:
                    assert_inside(panel, figure.name)


def assert_inside(panel: Panel, name: str) -> None:
    root = ElementTree.fromstring(f"<svg>{panel.body}</svg>")
    turned = {
        id(text) for group in root.iter("g") if "rotate" in group.get("transform", "") for text in group
    }
    for text in root.iter("text"):
        if id(text) in turned:
            continue
        x, y, size = (float(text.get(key, "nan")) for key in ("x", "y", "font-size"))
        width = 0.52 * size * len(text.text or "")
        shift = {"start": 0, "middle": -width / 2, "end": -width}[text.get("text-anchor", "start")]
        assert x + shift >= -2 and x + shift + width <= panel.width + 2, (name, text.text)
        assert size * 0.5 <= y <= panel.height + 1, (name, text.text)
    for circle in root.iter("circle"):
        assert 0 <= float(circle.get("cx", "nan")) <= panel.width, name
        assert 0 <= float(circle.get("cy", "nan")) <= panel.height, name


def test_words_of_one_panel_do_not_lie_on_each_other(dense, experts):
    for _, _, figures in (dense, experts):
        for figure in figures.values():
            for frame in figure.frames:
                for panel in frame.panels:
                    boxes = list(text_boxes(panel))
                    for number, one in enumerate(boxes):
                        for other in boxes[number + 1 :]:
                            assert not overlap(one, other), (figure.name, one[-1], other[-1])


def text_boxes(panel: Panel):
    """(left, right, top, bottom, words) of upright words outside of blocks, a little smaller than drawn."""
    root = ElementTree.fromstring(f"<svg>{panel.body}</svg>")
    turned = {id(text) for group in root.iter("g") for text in group}
    for text in root.iter("text"):
        if id(text) in turned:
            continue
        x, y, size = (float(text.get(key, "nan")) for key in ("x", "y", "font-size"))
        width = 0.46 * size * len(text.text or "")
        left = x + {"start": 0, "middle": -width / 2, "end": -width}[text.get("text-anchor", "start")]
        yield left, left + width, y - 0.8 * size, y, text.text


def overlap(one, other) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def test_a_report_of_a_plan_shows_why_and_the_figures(dense):
    path, priced, _ = dense
    best = {"candidates": [priced.chosen.to_dict()], "explanation": "Why\n- Because `fsdp` fits."}
    html = build_report(path, lambda found: best)
    page = Page(html)
    assert page.open == [] and page.headings == ["The plan", "The figures", "The mesh", "The fine print"]
    assert "<h4>Why</h4><p>Because <code>fsdp</code> fits.</p>" in html
    assert html.count('<figure class="panel') >= 5 and "observablehq" not in html
    linked = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert [link for link in linked if not link.startswith("#")] == []


def test_a_plan_edited_by_hand_is_priced_as_it_stands(dense, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(dense[0].read_text().replace("tensor = 2", "tensor = 4").replace("fsdp = 8", "fsdp = 4"))
    priced = read_plan(path)
    assert priced.chosen.layout.tensor == 4
    assert any(candidate.layout == priced.plan.layout for candidate in priced.top)
    assert priced.as_chosen.best.layout == priced.plan.layout


def test_one_chip_and_a_model_that_does_not_fit(tmp_path):
    """Nothing is moved, nothing fits: the figures say so and do not fail."""
    path = save(tmp_path, "llama-3-8b", "v5e:1x1", "data=1", 1, 2048)
    figures = {figure.name: figure for figure in plan_figures(read_plan(path))}
    assert "No operation of this step communicates." in words(figures["roofline"])
    assert "chosen" in words(figures["layouts"]) and "does not fit" in words(figures["layouts"])


def test_a_host_has_one_machine_and_so_no_slider(tmp_path):
    path = save(tmp_path, "gpt2", "cpu:8", "data=8", 8, 128)
    figures = {figure.name: figure for figure in plan_figures(read_plan(path))}
    assert not figures["strategies"].is_interactive
    assert figures["strategies"].file_name == "strategies.svg"


def test_a_run_whose_machine_is_gone_keeps_its_report(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    save(run, machine="v5e:4x4")
    text = (run / "plan.toml").read_text().replace("v5e:4x4", "gone.toml")
    (run / "plan.toml").write_text(text)
    (run / "plan.json").write_text(json.dumps({"candidates": [], "assumptions": ["a"]}))
    report = read_report(run)
    assert report.figures == () and "gone.toml" in report.missing and "cannot be read" in report.missing
    (run / "plan.json").unlink()
    with pytest.raises(HardwareError, match=r"gone\.toml: cannot be read"):
        read_report(run)


def test_what_is_no_plan_is_refused_in_one_line(tmp_path):
    (tmp_path / "plan.toml").write_text("[[[")
    with pytest.raises(PlanError, match="does not parse") as error:
        read_report(tmp_path / "plan.toml")
    assert "\n" not in str(error.value)
    (tmp_path / "plan.toml").write_text('hardware = "v5e:4x4"\n')
    with pytest.raises(PlanError, match="lacks workload, layout, model"):
        read_report(tmp_path / "plan.toml")
    with pytest.raises(PlanError, match=r"nowhere: no such file or folder"):
        read_report(tmp_path / "nowhere")


def test_a_binary_file_is_no_plan(tmp_path):
    (tmp_path / "plan.toml").write_bytes(b"\xff\xfe\x00plan")
    with pytest.raises((PlanError, DataError)) as error:
        read_report(tmp_path / "plan.toml")
    assert "plan.toml" in str(error.value) and "\n" not in str(error.value)


def test_what_cannot_be_written_is_refused_in_one_line(dense, tmp_path):
    _, _, figures = dense
    run = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"report\.html: cannot be written") as error:
        write_whole(tmp_path / "file" / "report.html", build_report(run))
    assert "\n" not in str(error.value)
    with pytest.raises(OutputError, match="cannot be written"):
        write_whole(tmp_path, build_report(run))
    with pytest.raises(OutputError, match=r"layouts\.svg: cannot be written"):
        write_figures(figures.values(), tmp_path / "file")


def test_layouts_in_words():
    layout = Layout.of(pipe=4, data=2, tensor=2, microbatches=8, sequence_parallel=True, schedule="zb-h1")
    assert layout_lines(layout) == (
        "pipe 4 · data 2 · tensor 2",
        "sequence parallel, 8 microbatches, zb-h1",
    )
    assert layout_lines(Layout.of()) == ("one device", "")


def test_catalog_and_plan_agree(dense):
    """What the figures are about is the plan's machine, not the one it was planned on."""
    _, priced, _ = dense
    assert isinstance(priced, PricedPlan) and priced.hardware == catalog.load(priced.plan.hardware)

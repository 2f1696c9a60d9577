"""The Gantt chart of a pipeline: every pass is drawn where it runs, and the figures are the simulation's."""

import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.cost.pipeline import PassSeconds, PipelineTimeline, Times, simulate
from meshwright.layout.pipelines import SCHEDULES, pass_table
from meshwright.plan.study.pipelines import shown_microbatches
from meshwright.report.pictures.schedule_chart import pipeline_caption, pipeline_figure, pipeline_panel

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = Path(__file__).parents[3] / "docs" / "explanations" / "pipeline"
TITLES: dict[str, str] = dict(
    zip(SCHEDULES, ("GPipe", "Lanes", "1F1B", "Interleaved 1F1B", "ZB-H1", "ZB-V", "DualPipe"), strict=True)
)
BODY = PassSeconds(0.01, 0.01, 0.01)
BLOCK = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)")


def timeline(name: str, p: int, m: int, body: PassSeconds = BODY) -> PipelineTimeline:
    table = pass_table(name, p, m, 2 if name == "interleaved" else 1)
    return simulate(table, Times([body] * table.num_depths))


def blocks(found: PipelineTimeline) -> list[tuple[float, ...]]:
    """x, middle, width and height of every pass drawn."""
    page = ElementTree.fromstring(pipeline_panel(found).svg("a pipeline"))
    drawn = [path.attrib for path in page.iter("path") if "stroke" in path.attrib]
    paths = [(path["d"], float(path["stroke-width"])) for path in drawn]
    return [(*map(float, block), height) for path, height in paths for block in BLOCK.findall(path)]


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_is_drawn_where_it_runs(name: str):
    found = timeline(name, 4, 8)
    drawn = blocks(found)
    assert len(drawn) == len(found.events)
    left, right = min(x for x, _, _, _ in drawn), max(x + width for x, _, width, _ in drawn)
    pixels_a_second = (right - left) / found.makespan_seconds
    starts = sorted((x - left) / pixels_a_second for x, _, _, _ in drawn)
    assert starts == pytest.approx(sorted(event.start for event in found.events), abs=0.001)


def test_joined_passes_share_a_row():
    found = timeline("dualpipe", 4, 8)
    heights = sorted({height for _, _, _, height in blocks(found)})
    assert len(heights) == 2 and heights[0] < heights[1] / 2
    num_joined = sum(one.joined for row in found.table.rows for one in row)
    assert sum(height == heights[0] for _, _, _, height in blocks(found)) == 2 * num_joined


def test_the_words_are_the_simulation_s():
    found = timeline("1f1b", 4, 8)
    assert pipeline_caption(found) == (
        "4 stages, 8 microbatches: 330 ms, with a bubble of 27.3%. "
        "At most 4 microbatches in flight, first on stage 0 after 40 ms."
    )
    said = words(pipeline_figure(found, "1F1B"))
    assert said[0] == "1F1B"
    assert said.count("27.3%") == 4
    numbers = [word for word in said if word.isdigit()]
    assert len(numbers) == 2 * 4 * 8 + 4 + 1  # of passes, of microbatches in flight, and 0 s
    assert {"stage 0", "stage 3", "forward", "backward", "idle", "300 ms"} <= set(said)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("zb-v", {"forward, chunk 0 to 1", "gradient of the input", "gradient of the weights"}),
        ("dualpipe", {"forward, from stage 0 and from stage 3", "backward (narrow: only of the input)"}),
    ],
)
def test_the_legend_says_what_a_b_is(name: str, wanted: set[str]):
    assert wanted <= set(words(pipeline_figure(timeline(name, 4, 8), name)))


def test_two_chunks_and_two_copies_are_said():
    assert "At most 8 chunks of microbatches (2 per stage) in flight" in pipeline_caption(
        timeline("zb-v", 4, 8)
    )
    said = pipeline_caption(timeline("dualpipe", 4, 8))
    assert "At most 5 microbatches in flight" in said and said.endswith("; 2 copies of the weights.")


def test_numbers_go_where_there_is_no_room():
    said = words(pipeline_figure(timeline("zb-v", 8, 64), "ZB-V"))
    assert sum(word.isdigit() for word in said) == 8 + 1  # microbatches in flight, and 0 s


def test_a_long_step_shows_when_a_stage_is_busy():
    """Passes narrower than a pixel run together; the idle time stays."""
    found = timeline("gpipe", 2, 2000)
    assert blocks(found) == []
    svg = pipeline_figure(found, "GPipe")
    page = ElementTree.fromstring(svg)
    assert len(svg) < 10_000
    rows = [path.attrib["d"] for path in page.iter(f"{SVG}path") if path.attrib.get("class") == "f-compute"]
    # Stage 0 stops between its last F and its first B; stage 1 does not.
    assert [row.count("M") for row in rows] == [2, 1]
    assert "computing" in words(svg)


@pytest.mark.parametrize(
    "pipe", [2, 8, pytest.param(16, marks=pytest.mark.slow), pytest.param(32, marks=pytest.mark.slow), 64]
)
def test_all_schedules_of_many_microbatches_fit_a_page(pipe: int):
    """A report of 244 microbatches on 8 stages had 1.4 MB; a page may have 1."""
    shown = shown_microbatches(pipe, 1024)
    drawn = [pipeline_panel(timeline(name, pipe, shown)).svg(name) for name in SCHEDULES]
    assert sum(map(len, drawn)) < 600_000


def test_a_title_is_escaped():
    assert "<b>" not in pipeline_figure(timeline("gpipe", 2, 2), "<b>")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_pictures_of_the_document(name: str):
    """docs/explanations/pipeline.md shows what is drawn today; UPDATE_PICTURES=1 writes it."""
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    body = PassSeconds(*[0.01 / chunks] * 3)
    drawn = pipeline_figure(timeline(name, 4, 8, body), TITLES[name])
    picture = PICTURES / f"{name}.svg"
    if os.environ.get("UPDATE_PICTURES"):
        picture.write_text(drawn)
    assert picture.read_text() == drawn

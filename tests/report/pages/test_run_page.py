"""The page of a run: complete, self-contained, and never made of somebody else's markup."""

import json
import re

import pytest
from tests.report.parsed_page import Page
from tests.report.sample_run import audit_document, corpus_document, metrics_lines, plan_document, write_run

from meshwright.errors import DataError, PlanError
from meshwright.files import write_whole
from meshwright.report.pages.run_page import build_report
from meshwright.report.pictures.run_charts import loss_panel, points, step_time_panel
from meshwright.report.run_documents import read_run

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "demo")


def test_every_document_has_its_section(run):
    page = Page(build_report(run))
    expected = ["The plan", "The run", "The audit", "The model speaks", "The mesh", "The fine print"]
    assert page.headings == ["The answer", *expected]
    assert page.open == []


@pytest.mark.parametrize(
    ("missing", "heading"),
    [("plan.json", "The plan"), ("metrics.jsonl", "The run"), ("audit.json", "The audit")],
)
def test_a_missing_document_leaves_its_section_out(run, missing, heading):
    (run / missing).unlink()
    headings = Page(build_report(run)).headings
    assert heading not in headings
    assert "The fine print" in headings


def test_the_headlines(run):
    html = build_report(run)
    for text in (
        "demo on cpu:8",
        "fsdp 4 × tensor 2",
        "5.24M parameters",
        "planned 412 ms",
        "unigram entropy 6.718",
    ):
        assert text in html
    assert "9 match · 7 equivalent · 1 unplanned" in html


def test_nothing_is_loaded_from_elsewhere(run):
    page = Page(build_report(run))
    linked = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert [link for link in linked if not link.startswith("#")] == []
    assert not re.search(r"@import|url\(", build_report(run).split("</style>")[0])


def test_a_page_is_small_with_charts_and_without(run):
    html = build_report(run)
    assert len(html) < 300_000
    (run / "metrics.jsonl").unlink()
    assert len(build_report(run)) < 200_000


def test_charts_hold_their_levels_and_a_mark_for_each_value():
    body = loss_panel(metrics_lines(), corpus_document()["unigram_entropy"]).body
    assert all(f">{name}</text>" in body for name in ("training", "validation", "unigram entropy 6.72"))
    assert body.count("<title>step ") == 60 + 12
    body = step_time_panel(metrics_lines(), 0.412).body
    assert "planned 412 ms" in body and ">0</text>" in body  # from zero
    assert body.count("<title>step ") == 60


def test_a_loss_that_is_not_a_number_is_left_out():
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": None}]
    assert [(point.x, point.y) for point in points(lines, "loss", "{}")] == [(1, 2.0)]


def test_a_long_run_keeps_its_extremes():
    lines = [{"step": step, "loss": 5.0 - step % 7} for step in range(100_000)]
    lines[31_234]["loss"], lines[70_001]["loss"] = 99.0, -99.0
    kept = points(lines, "loss", "{}")
    assert len(kept) <= 400 and [point.x for point in kept] == sorted(point.x for point in kept)
    assert {(31_234, 99.0), (70_001, -99.0)} <= {(point.x, point.y) for point in kept}


def test_the_summary_comes_first_and_leads_to_every_section(run):
    html = build_report(run)
    page = Page(html)
    anchors = [attrs["href"] for tag, attrs in page.tags if tag == "a"]
    ids = {attrs["id"] for tag, attrs in page.tags if tag == "h2"}
    assert anchors and {anchor.removeprefix("#") for anchor in anchors} == ids
    labels = re.findall(r'<span class="label">([^<]*)</span><strong>', html)
    assert labels[:4] == ["Layout", "Step time", "MFU", "Memory per chip"]
    assert html.index('class="cards"') < html.index('<nav class="contents"') < html.index("<main")


def test_the_memory_card_says_what_is_free_or_lacking(run):
    plan = plan_document()
    plan["hardware"] |= {"usable_bytes": 200}
    for needed, words in ((150, "50 B (25%) free of 200 B"), (250, "50 B more than the 200 B there are")):
        plan["best"]["bytes_per_chip"] = {"total": needed}
        (run / "plan.json").write_text(json.dumps(plan))
        assert words in build_report(run)


def test_the_budget_is_a_card(run):
    plan = plan_document()
    plan["budget"] = {"tokens": 2e12, "days": 2.07, "chip_hours": 203e3, "price": 1e6, "currency": "USD"}
    (run / "plan.json").write_text(json.dumps(plan))
    html = build_report(run)
    assert "2.07 days" in html and "2T tokens, 203k chip-hours, 1M USD at the chip&#39;s price" in html


def poison(value):
    """The document with hostile text in place of, or added to, every string in it."""
    if isinstance(value, dict):
        return {key: poison(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_text_from_documents_stays_text(run):
    plain = Page(build_report(run)).tags
    for name in ("plan.json", "audit.json", "completion.json"):
        (run / name).write_text(json.dumps(poison(json.loads((run / name).read_text()))))
    (run / "plan.toml").write_text(f'model = "{HOSTILE}</pre>"')
    html = build_report(run)
    assert "alert(1)" in html
    hostile = Page(html).tags
    assert sum(tag == "script" for tag, _ in hostile) == sum(tag == "script" for tag, _ in plain)
    assert not [tag for tag, attrs in hostile if tag == "img" or "onerror" in attrs]


def test_keys_are_text_too(run):
    plan = plan_document()
    plan["environment"] = {HOSTILE: HOSTILE}
    plan["best"]["bytes_per_chip"] = {HOSTILE: 10}
    plan["candidates"][0]["breakdown"][0]["name"] = HOSTILE
    (run / "plan.json").write_text(json.dumps(plan))
    assert not [tag for tag, attrs in Page(build_report(run)).tags if tag == "img" or "onerror" in attrs]


def test_a_lone_plan_is_a_report(run):
    page = Page(build_report(run / "plan.toml"))
    assert page.headings == ["The plan", "The mesh", "The fine print"]


def test_an_audit_without_rows_lists_what_one_side_lacks(run):
    audit = {key: value for key, value in audit_document().items() if key != "rows"}
    (run / "audit.json").write_text(json.dumps(audit))
    assert "1 unplanned" in build_report(run)


def test_what_the_compiler_does_not_tell_is_unavailable(run):
    (run / "audit.json").write_text(
        json.dumps(audit_document() | {"flops": {"planned": 1e9, "compiled": None}})
    )
    assert "<em>compiled</em> unavailable" in build_report(run)


def test_what_runs_at_once_and_what_makes_the_peak_stand_below_the_memory(run):
    audit = audit_document()
    audit["emitted"] = [one | {"overlaps": ["layers/w_in"]} for one in audit["emitted"]]
    buffer = {"bytes": 6000, "tensor": "layers/w_gate", "instruction": "fusion.1", "shape": "bf16[3,1000]"}
    audit["memory"]["peak"] = {"bytes": 8000, "buffers": [buffer]}
    (run / "audit.json").write_text(json.dumps(audit))
    html = build_report(run)
    assert "bf16[3,1000]" in html and "8 kB of temporaries by the order of the schedule" in html
    assert "products meanwhile" in html and "layers/w_in" in html
    assert "products meanwhile" not in build_report(run / "plan.toml")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(PlanError) as error:
        build_report(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} holds neither plan.toml, plan.json nor metrics.jsonl; give a run folder or a plan"
    )


def test_a_broken_line_is_named(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30')
    with pytest.raises(
        DataError, match=r"metrics\.jsonl:61 is not JSON: Expecting ',' delimiter at column 12$"
    ):
        read_run(run)


def test_a_document_of_another_shape_is_named(run):
    (run / "audit.json").write_text("[]")
    with pytest.raises(DataError, match=r"audit\.json holds a JSON list, not an object$"):
        build_report(run)


def test_a_report_is_written_whole_or_not_at_all(run, tmp_path):
    output = tmp_path / "out" / "report.html"
    assert write_whole(output, build_report(run)) == output
    first = output.read_text()
    assert first.rstrip().endswith("</html>")
    (run / "plan.json").write_text("{")
    with pytest.raises(DataError):
        write_whole(output, build_report(run))
    assert output.read_text() == first
    assert [path.name for path in output.parent.iterdir()] == ["report.html"]


def test_small_operations_share_one_piece_of_the_bar(run):
    plan = plan_document()
    names = [f"operation {number}" for number in range(20)]
    best = plan["best"]
    best["breakdown"] = [
        {"name": n, "seconds": 1 / (i + 1), "share": 0.05, "bound": "hbm"} for i, n in enumerate(names)
    ]
    plan["candidates"] = [best]
    (run / "plan.json").write_text(json.dumps(plan))
    html = build_report(run)
    assert "other (13)" in html
    large = html.split('id="figure-step"')[1].split("</svg>")[0]
    assert large.count("<title>") == 8


def test_only_one_of_two_candidates_with_the_same_layout_is_chosen(run):
    plan = plan_document()
    plan["candidates"].insert(1, plan["best"] | {"step_seconds": 0.5})
    (run / "plan.json").write_text(json.dumps(plan))
    assert build_report(run).count('<tr class="chosen') == 1


def test_partial_sums_and_replicas_are_told_apart(run):
    plan = plan_document()
    plan["shardings"]["activations"] = {"y": "y[B_fsdp, T, D]{U_tensor}", "x": "x[B_fsdp, T, D]"}
    (run / "plan.json").write_text(json.dumps(plan))
    html = build_report(run)
    assert "4 blocks, partial sums over tensor · [8, 256, 256]" in html
    assert "4 blocks × 2 replicas · [8, 256, 256]" in html

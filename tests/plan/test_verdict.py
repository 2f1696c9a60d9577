"""The sentences of a plan's verdict, and the published run that is nearest to it."""

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.api.inputs import Conditions
from meshwright.errors import MeshwrightError
from meshwright.hardware import catalog
from meshwright.plan.evidence import evidence_of, published_runs
from meshwright.plan.verdict import DENSE_OVER, EXPERTS_OVER, NAMES, no_price, verdict_lines
from meshwright.plan_file import load_plan

benchmarks = pytest.importorskip("benchmarks.published_runs")


@pytest.fixture(scope="module")
def plans():
    return mw.plan("llama-3-70b", "h100:8x8", mw.Train("2Mi", "8k"), given="tensor<=4", launcher="megatron")


def test_a_verdict_has_a_sentence_for_each_question(plans):
    verdict = plans.document(None)["verdict"]
    assert list(verdict) == list(NAMES) and verdict["memory"] is None
    assert all(line.endswith(".") for line in verdict.values() if line)
    assert "if tensor<=4, with megatron." in verdict["asked"]
    assert verdict["best"].startswith(f"{plans.best.layout}: ")
    assert (
        "64 chips at 10.80 USD a chip-hour (Google Cloud, list price on demand, February 2025)"
        in verdict["price"]
    )
    assert " to " in verdict["range"] and "8 of 10 new sources" in verdict["range"]
    assert verdict["next"].startswith(f"{plans[1].layout}: ")
    assert [line.partition(":")[0] for line in verdict_lines(verdict)] == [
        name for key, name in NAMES.items() if key != "memory"
    ]


def test_what_was_asked_is_in_the_plan(plans, tmp_path):
    plans.save(tmp_path / "plan.toml")
    asked = {"given": "tensor<=4", "for": "megatron"}
    assert load_plan(tmp_path / "plan.toml").asked == asked == plans.document(None)["asked"]
    plain = mw.plan("tiny", "cpu:8", mw.Train(8192, 128))
    assert plain.document(None)["asked"] == {} and plain.document(None)["verdict"]["price"] is None


def test_a_published_run_is_its_own_evidence(plans):
    document = plans.document(None)["candidates"][0]["evidence"]
    assert document["id"].startswith("T") and document["chips"] == 64
    assert document["distance_doublings"] <= 6 and abs(document["error_without_source"]) < 0.5


def test_no_run_is_near_to_long_sequences_over_many_context_ranks():
    model = mw.model("llama-3-8b", max_seq_len=131072)
    plans = mw.plan(model, "v5p:4x4x4", mw.Train("4Mi", "128k"), given="context=16")
    evidence = evidence_of(model, plans.best.candidate, 131072)
    assert not evidence.is_near and str(evidence).startswith("No published run is near; the nearest, ")
    assert evidence.factors["context"] >= 4


@pytest.mark.parametrize(("headroom", "has_room"), [(0.0, False), (DENSE_OVER, True)])
def test_a_full_chip_is_warned_of(headroom, has_room):
    machine = Conditions(headroom=headroom).of(catalog.load("v5p:2x2x2"))
    plans = mw.plan("llama-3-8b", machine, mw.Train("128Ki", "8k"))
    sentence = plans.document(None)["verdict"]["memory"]
    if has_room:
        assert sentence is None
    else:
        assert sentence.startswith(
            "99.8% of a chip is planned, and compiled steps took up to 3% more; --headroom"
        )


def test_compiled_first_choices_stay_within_the_margin_of_the_warning():
    rows = json.loads(Path("benchmarks/results/first_choices.json").read_text())["rows"]
    for row in rows:
        over = EXPERTS_OVER if mw.model(row["case"].split()[0]).moe else DENSE_OVER
        assert row["bytes_ratio"] <= 1 + over, row["case"]


def test_memory_of_a_chip_is_bounded():
    plans = mw.plan("llama-3-70b", "h100:8x8", mw.Train("2Mi", "8k"), given="memory<=60GB,tensor<=2")
    assert plans.best.fits and plans.best.candidate.needed_bytes <= 60e9
    for given, words in (("memory>=6GB", "has an upper limit"), ("memory<=6", "is not a size; write 70GB")):
        with pytest.raises(MeshwrightError, match=words):
            mw.plan("llama-3-70b", "h100:8x8", mw.Train("2Mi", "8k"), given=given)


def test_a_batch_nearby_that_allows_a_plainer_layout_is_named():
    plans = mw.plan("llama-3-70b", "h200:32x8", mw.Train("10M", "8k"))
    assert any(
        notice.startswith(
            "10,485,760 tokens a step allow fsdp=256,microbatches=5,remat=matmuls, which is plainer: "
        )
        for notice in plans.search.notices
    )


def test_the_packaged_table_is_of_the_published_one():
    assert benchmarks.WRITTEN.read_text(encoding="utf-8") == benchmarks.text()
    assert len(published_runs()) > 400


def test_a_chip_without_a_published_price_says_so() -> None:
    assert no_price(catalog.chip("gaudi2")) == (
        "none is known for gaudi2: no cloud's list price was found in November 2026; --price 2.5 sets the "
        "price of a chip-hour."
    )
    assert no_price(catalog.chip("cpu")) is None


def test_every_chip_has_a_price_or_the_reason_why_not() -> None:
    chips = [catalog.chip(name) for name in catalog.names() if name != "cpu"]
    assert [
        chip.name for chip in chips if (chip.price_per_chip_hour is None) == (chip.no_price is None)
    ] == []

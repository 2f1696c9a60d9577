"""The first section of every report: the same names, and a sentence from what the document has."""

import pytest
from tests.report.sample_run import audit_document, plan_document

from meshwright.report.answer import (
    answer_of_audit,
    answer_of_comparison,
    answer_of_load,
    answer_of_plan,
    answer_of_post_training,
    answer_of_script,
)

FINDINGS = [
    {"change": "keep x split", "where": "a.py:3", "seconds": 0.4},
    {"change": "gather once", "where": "a.py:9", "seconds": 0.1},
]


def script(findings: list[dict], seconds: float | None) -> dict:
    notes = ["Priced on h100:8."]
    return {
        "warnings": findings,
        "seconds": seconds,
        "extra_seconds": seconds and 0.5 * seconds,
        "script": "a.py:step",
        "devices": 8,
        "hardware": "h100:8" if seconds else None,
        "notes": notes,
    }


def compared(name: str, price: float | None, rate: float, fits: bool = True) -> dict:
    return {
        "plan": name,
        "layout": "fsdp=8",
        "hardware": "h100:8",
        "step_seconds": 1.0,
        "tokens_per_second_per_chip": rate,
        "num_sequences": 1,
        "seq_len": 8 * rate,
        "price": price,
        "price_per_hour": price and 80.0,
        "currency": "USD",
        "fits": fits,
    }


def load(**more: object) -> dict:
    document = {
        "requests": 100,
        "model": "demo",
        "targets": {"ttft_seconds": 0.5, "tpot_seconds": None},
        "requests_per_second": 4.0,
        "goodput": 3.0,
        "errors": 0,
        "new_tokens_per_second": 250.0,
        "results": [{"ratio": 1.25}],
    }
    return document | more


def test_a_plan_answers_in_the_words_of_its_verdict():
    plan = plan_document() | {"verdict": {"asked": "A.", "best": "B.", "price": None, "next": "N."}}
    assert answer_of_plan(plan) == [("Asked", "A."), ("Recommended", "B."), ("Runner-up", "N.")]
    assert answer_of_plan({}) == [] and answer_of_audit({}) == []


@pytest.mark.parametrize(("verdict", "words"), [("match", "is the planned one"), ("differs", "differs")])
def test_an_audit_says_whether_the_step_is_the_planned_one(verdict: str, words: str):
    [(name, sentence)] = answer_of_audit(audit_document() | {"verdict": verdict})
    assert name == "Audit" and sentence.startswith(f"the compiled step {words}")


def test_a_script_is_told_what_to_change_first():
    named = dict(answer_of_script(script(FINDINGS, 2.0)))
    assert named["Recommended"] == "keep x split (a.py:3): 2 findings, the dearest first."
    assert named["Price"] == "1 s of 2 s communicated in a step (50%) is not needed."
    assert named["Runner-up"] == "gather once (a.py:9)." and named["How sure"] == "Priced on h100:8."
    clean = dict(answer_of_script(script([], None)))
    assert clean["Recommended"] == "No change: no mistake was found." and "Price" not in clean


@pytest.mark.parametrize(
    ("document", "sure"),
    [
        (load(), "Measured; a step takes 1.25 times the planned time."),
        (load(results=[{"ratio": None}]), "Measured; this server has no plan to compare with."),
        (
            load(simulated={"chips": 8, "hardware": "h100:1x8", "busy_share": 0.5}),
            "Simulated with planned step times; measure a server with mw bench serve --url.",
        ),
    ],
)
def test_a_load_test_says_what_held(document: dict, sure: str):
    named = dict(answer_of_load(document))
    assert named["Asked"] == "100 requests to demo, with first token within 500 ms."
    assert named["Recommended"].startswith(
        "Add replicas, or send fewer requests: 75% of 4.00 requests/s are answered in time, "
    )
    assert named["How sure"] == sure


def test_a_load_test_with_a_price_says_what_tokens_cost():
    price = {"per_hour": 86.4, "per_million_tokens": 2.5, "currency": "USD"}
    simulated = {"chips": 8, "hardware": "h100:1x8", "busy_share": 0.5}
    each = "2.5 USD per million generated tokens, 86.40 an hour; "
    assert dict(answer_of_load(load(price=price)))["Price"] == f"{each}on the chips of the plan."
    named = dict(answer_of_load(load(price=price, simulated=simulated)))
    assert named["Price"] == f"{each}8 chips of h100:1x8, busy 50% of the time."
    unpriced = load(price={"per_hour": None, "per_million_tokens": None, "currency": "USD"})
    assert "Price" not in dict(answer_of_load(unpriced))


def test_a_comparison_recommends_the_cheapest_that_fits():
    plans = [compared("a", 3.0, 10.0), compared("b", 2.0, 8.0), compared("c", 1.0, 9.0, fits=False)]
    named = dict(answer_of_comparison(plans))
    assert named["Recommended"].startswith("b: fsdp=8") and "2 USD per million tokens" in named["Price"]
    assert named["Runner-up"].startswith("a: ") and named["Runner-up"].endswith(
        "1.50 times the price for the same tokens."
    )
    assert "How sure" not in named
    for best, other, end in ((2.0, [9.0, 12.0], "do not overlap"), (2.0, [4.0, 12.0], "the order may turn")):
        ranges = [compared("b", best, 8.0), compared("a", 3.0, 10.0)]
        for plan, each in zip(ranges, ([7.0, 9.0], other), strict=True):
            plan["step_seconds"], plan["step_seconds_range"] = (
                (8.0, each) if plan["plan"] == "b" else (10.0, each)
            )
        assert end in dict(answer_of_comparison(ranges))["How sure"]
    unpriced = dict(answer_of_comparison([compared("a", None, 10.0), compared("b", 2.0, 8.0)]))
    assert unpriced["Recommended"].startswith("a: ") and "Price" not in unpriced
    assert dict(answer_of_comparison(plans[2:]))["Recommended"].startswith("None of them fits")


def test_a_plan_of_post_training_begins_with_its_form():
    sizes = {"rollouts": 2048, "tokens": 2048 * 3000, "prompt_tokens": 1000, "output_tokens": 2100}
    of_run = {"model": "m", "hardware": "h100:16", "longest_answer": 8192, "why": ["x", "y", "z"]}
    forms = [{"price": 7.5, "currency": "USD", "chips": 16}]
    answer = answer_of_post_training({**sizes, **of_run, "forms": forms})
    assert answer[0] == (
        "Asked",
        "the shortest step of m on h100:16 with 2,048 rollouts of 2,100 tokens, at most 8,192 (2,000 on "
        "average once cut).",
    )
    assert answer[1:3] == [("Recommended", "x."), ("Price", "7.50 USD a step, on 16 chips.")]
    assert answer[3][0] == "How sure" and answer[4:] == [("Runner-up", "y."), ("Also", "z.")]
    unpriced = answer_of_post_training({**sizes, **of_run, "forms": [{**forms[0], "price": None}]})
    assert "Price" not in dict(unpriced)

"""Limits on the money of a training run."""

import json
import re

import pytest

from meshwright.cli.main import main
from meshwright.errors import MeshwrightError, PlanError
from meshwright.hardware.catalog import load
from meshwright.hardware.prices import ChipPrices, parse_money
from meshwright.plan.spending import SpendingLimits, parse_whole_budget
from meshwright.units import parse_count

RUN = ["--model", "llama-3-8b", "--batch-tokens", "512Ki", "--seq-len", "4096"]


def test_the_largest_machine_that_the_price_pays():
    """At 2 an hour 500 pays 250 chips: 31 whole hosts of 8, and the sizes tried are 28 hosts and then 32."""
    spec = SpendingLimits(max_price_per_hour=500.0).largest_machine("h100", ChipPrices(price="2"))
    assert load(spec).num_chips == 224
    assert SpendingLimits(max_price_per_hour=1.0).largest_machine("h100:64", ChipPrices()) == "h100:64"
    with pytest.raises(PlanError, match=r"h100:1x1 costs 2.00 USD an hour"):
        SpendingLimits(max_price_per_hour=1.0).largest_machine("h100", ChipPrices(price="2"))


def test_a_run_over_its_budget_exits_1_and_names_the_tokens_that_the_money_pays(capsys):
    def run(budget: str, tokens: str) -> int:
        words = ["--hardware", "h100:8", "--price", "2", "--tokens", tokens, "--budget", budget]
        return main(["plan", "train", *RUN, *words, "--json"])

    assert run("$1k", "100B") == 1
    [(cost, paid)] = re.findall(r"costs ([\d,]+) USD, .*; it pays (\w+) tokens", capsys.readouterr().err)
    price = float(cost.replace(",", ""))
    assert parse_count(paid) == pytest.approx(100e9 * 1000 / price, rel=0.01)
    assert run(f"{price * 1.01:.0f}", "100B") == 0


def test_a_machine_over_its_price_exits_1_and_names_a_smaller_one(capsys):
    words = ["--hardware", "h100:64", "--price", "2", "--max-price-per-hour", "100/hour"]
    assert main(["plan", "train", *RUN, *words]) == 1
    assert "h100:64 costs 128.00 USD an hour" in (message := capsys.readouterr().err)
    assert "fits: --hardware h100:6x8" in message


def test_a_plan_over_a_limit_says_so_in_its_json_and_is_not_written(capsys, tmp_path):
    words = ["--hardware", "h100:8", "--price", "2", "--max-price-per-hour"]
    paths = [tmp_path / "dear.toml", tmp_path / "paid.toml"]
    for path, (limit, code) in zip(paths, (("10", 1), ("16", 0)), strict=True):
        assert main(["plan", "train", *RUN, *words, limit, "-o", str(path), "--json"]) == code
        printed = capsys.readouterr()
        over = json.loads(printed.out).get("over_limit", [])
        assert path.exists() == (not over) and bool(over) == bool(code)
        assert all(each in printed.err and "16.00 USD" in each for each in over)


def test_a_chip_without_a_price_is_refused_before_the_search(monkeypatch, capsys):
    monkeypatch.setattr("meshwright.cli.plan._ranked", None)  # the search
    assert main(["plan", "train", *RUN, "--hardware", "m4-max:1", "--tokens", "1B", "--budget", "50k"]) == 2
    assert "m4-max has no price, which --budget needs" in capsys.readouterr().err


def test_money_as_people_write_it():
    assert parse_money("1,500 USD") == 1500.0
    assert parse_money("2 million dollars/h") == 2e6
    for text in ("-5", "0", "much", "5 parsecs", "50 mil", "1,5,0"):
        with pytest.raises(MeshwrightError, match="not an amount of money"):
            parse_money(text)
    with pytest.raises(MeshwrightError, match=r"write 1\.5M$"):
        parse_money("1,5M")
    with pytest.raises(MeshwrightError, match=r"write --max-price-per-hour 50k$"):
        parse_whole_budget("50k per hour")
    assert main(["plan", "train", *RUN, "--hardware", "h100:8", "--budget", "50k"]) == 2


def test_a_chip_without_a_size_is_no_fault_of_a_line_with_a_price(capsys):
    asked = ["plan", "train", *RUN, "--max-price-per-hour", "1", "--hardware"]
    assert main([*asked, "h100,v5p"]) == 2
    assert capsys.readouterr().err == "mw: --max-price-per-hour takes one machine; name one --hardware\n"
    assert main([*asked, "h100"]) == 2
    assert capsys.readouterr().err.endswith("USD an hour; fits: --max-price-per-hour 10.80\n")
    assert main([*asked, "h101"]) == 2
    assert "hardware 'h101' is unknown" in capsys.readouterr().err

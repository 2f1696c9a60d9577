"""mw compare: plans of both kinds side by side, priced anew."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main

TRAIN = ["plan", "train", "--model", "llama-3-8b", "--hardware", "v5e:4x4", "--batch-tokens", "1Mi"]
SERVE = ["plan", "serve", "--model", "llama-3-8b", "--hardware", "v5e:2x2", "--layout", "tensor=4"]


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("plans")
    train, serve = str(folder / "train.toml"), str(folder / "serve.toml")
    layout = "fsdp=16,remat=full,microbatches=8"
    assert main([*TRAIN, "--seq-len", "4096", "--layout", layout, "-o", train]) == 0
    assert main([*SERVE, "--phase", "generate", "--context", "2k", "--batch", "16", "-o", serve]) == 0
    return [train, serve]


def test_plans_side_by_side_have_chips_prices_and_energy(plans, capsys):
    capsys.readouterr()
    assert main(["compare", *plans, "--price", "v5e=1.5", "--currency", "EUR", "--json"]) == 0
    train, serve = json.loads(capsys.readouterr().out)["plans"]
    planned = json.loads(Path(plans[1]).with_suffix(".json").read_text())
    assert serve["step_seconds"] == pytest.approx(planned["step_seconds"])
    for plan, chips in ((train, 16), (serve, 4)):
        assert plan["chips"] == chips and plan["price_per_hour"] == 1.5 * chips and plan["currency"] == "EUR"
        seconds = 1e6 / plan["tokens_per_second_per_chip"] / chips
        assert plan["price"] == pytest.approx(plan["price_per_hour"] / 3600 * seconds)
        assert plan["joules"] is None  # a v5e's power is not published
    assert (train["phase"], serve["phase"]) == ("train", "generate")


def test_the_table_has_a_column_a_plan(plans, capsys):
    capsys.readouterr()
    assert main(["compare", *plans]) == 0
    printed = capsys.readouterr().out
    for text in ("price of 1M tokens", "unavailable", "tensor=4", "v5e:2x2 (4 chips)"):
        assert text in printed


def test_what_is_no_plan_is_one_line(capsys, tmp_path):
    assert main(["compare", str(tmp_path / "absent.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err

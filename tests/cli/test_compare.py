"""mw compare: plans of both kinds side by side, priced anew."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import PRESETS
from meshwright.plan.plan_costs import plan_costs
from meshwright.plan.train import price, well_placed
from meshwright.plan_file import Plan

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
    for text in ("price per 1M tokens", "unavailable", "tensor=4", "v5e:2x2 (4 chips)"):
        assert text in printed


def test_what_is_no_plan_is_one_line(capsys, tmp_path):
    assert main(["compare", str(tmp_path / "absent.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["compare", "llama-3-8b"]) == 2
    assert "of a model, write llama-3-8b@HARDWARE" in capsys.readouterr().err


BATCH = ["--batch-tokens", "1Mi", "--seq-len", "4096"]


def test_a_model_on_a_machine_is_compared_without_a_file(capsys):
    specs = ["llama-3-8b@v5e:4x4@fsdp=16,remat=full,microbatches=8", "llama-3-8b@h100:1x4"]
    assert main(["compare", *specs, *BATCH, "--json"]) == 0
    given, searched = json.loads(capsys.readouterr().out)["plans"]
    assert given["plan"] == specs[0] and given["layout"] == "fsdp=16,microbatches=8,remat=full"
    assert main([*TRAIN[:4], "--hardware", "h100:1x4", *BATCH, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert searched["layout"] == best["layout"]
    assert searched["step_seconds"] == pytest.approx(best["step_seconds"])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "llama-3-8b@v5e:4x4",
            "llama-3-8b@v5e:4x4 needs a batch; add --batch-tokens 4M --seq-len 8k; type mw compare "
            "llama-3-8b@v5e:4x4 --batch-tokens 4M --seq-len 8k (--batch-tokens and --seq-len for example)",
        ),
        ("a@b@c@d", "'a@b@c@d' is not MODEL@HARDWARE[@LAYOUT]: it has 3 @"),
    ],
)
def test_what_is_no_spec_is_one_line(spec, said, capsys):
    assert main(["compare", spec]) == 2
    assert capsys.readouterr().err == f"mw: {said}\n"


def test_a_plan_for_several_machines_has_the_best_of_each(capsys):
    several = [
        *TRAIN[:4],
        "--hardware",
        "v5e:4x4",
        "--hardware",
        "v5e:4x8",
        *BATCH,
        "--given",
        "pipe=1,tensor=1",
    ]
    assert main([*several, "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)["plans"]
    assert (small["chips"], large["chips"]) == (16, 32)
    assert small["step_seconds"] > 1.8 * large["step_seconds"]
    assert main([*several, "-o", "plan.toml"]) == 2
    assert capsys.readouterr().err == "mw: -o takes one machine; name one --hardware\n"


def test_a_layout_is_compared_on_the_links_that_a_search_gives_it():
    config, machine, work = PRESETS["llama-3-8b"], load("v5e:4x4"), Workload(256, 4096)
    layout = Layout.parse("fsdp=4,tensor=4")
    innermost_first = price(config, machine, work, layout)
    placed = well_placed(innermost_first)
    assert placed.step_seconds < 0.95 * innermost_first.step_seconds
    found = plan_costs(Plan(config, machine.spec, work, layout), machine)
    assert found["step_seconds"] == placed.step_seconds
    assert found["placement"] == placed.to_dict()["placement"]

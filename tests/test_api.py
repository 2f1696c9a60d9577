"""The library: what `import meshwright as mw` offers, and that the command line says the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_no_jax_import import heavy_modules_after

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import HardwareError, LayoutError, ModelError, PlanError
from meshwright.layout import Layout
from meshwright.plan_file import load_plan

POD = ("llama-3-8b", "v5e:4x4", mw.Train("1Mi", "4k"))
AS_OPTIONS = ["--model", "llama-3-8b", "--hardware", "v5e:4x4", "--batch-tokens", "1Mi", "--seq-len", "4096"]
ONE = "fsdp=16,microbatches=8,remat=full"


@pytest.fixture(scope="module")
def plans() -> mw.api.Plans:
    return mw.plan(*POD, top=3)


def document(capsys, *options: str) -> dict:
    assert main(["plan", "train", *AS_OPTIONS, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_line_says_the_same(plans, capsys):
    said = document(capsys, "--top", "3")
    ours = plans.to_dict()
    assert ours.keys() == said.keys()
    volatile = {"search", "environment"}
    assert {k: v for k, v in ours.items() if k not in volatile} == {
        k: v for k, v in said.items() if k not in volatile
    }
    assert ours["search"]["considered"] == said["search"]["considered"]


def test_the_repr_of_plans_is_the_table_of_the_command(plans, capsys):
    assert main(["plan", "train", *AS_OPTIONS, "--top", "3"]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    heading, *table = repr(plans).splitlines()
    assert printed.startswith(heading) and "\n".join(table) in printed
    assert re.findall(r"^  (\d) [*= ] ", repr(plans), re.MULTILINE) == ["1", "2", "3"]


def test_plans_are_a_sequence_of_priced_layouts(plans):
    times = [one.step_seconds for one in plans if one.fits]
    assert len(plans) == len(list(plans)) and len(times) > 1
    assert plans[0].layout == plans.best.layout and plans[-1].layout == list(plans)[-1].layout
    with pytest.raises(IndexError):
        plans[len(plans)]


def test_a_price_is_that_of_the_command(capsys):
    one = mw.price(*POD, ONE)
    said = document(capsys, "--layout", ONE)["best"]
    assert said.pop("bytes_per_chip_interval") is None  # no published memory of TPUs
    low, high = said.pop("step_seconds_interval")
    assert low < one.step_seconds < high and said.pop("as_fast_within_interval")
    assert said.pop("evidence")["is_near"] is False
    assert one.to_dict() | {"tie": False} == said
    assert one.layout == Layout.parse(ONE)
    assert mw.price(*POD, one.layout).step_seconds == one.step_seconds
    assert len(repr(one)) < 200 and repr(one).startswith(f"PricedLayout({ONE}: ")


def test_an_explanation_is_prose(plans):
    said = str(plans.explain(tokens="1T", critical_batch="4M"))
    assert [title for title in ("The layout", "Why not another", "Budget") if title not in said] == []


def test_a_plan_is_saved_as_the_command_saves_it(tmp_path: Path):
    assert main(["plan", "train", *AS_OPTIONS, "--layout", ONE, "-o", str(tmp_path / "theirs.toml")]) == 0
    assert mw.price(*POD, ONE).save(tmp_path / "ours.toml") == tmp_path / "ours.toml"
    assert load_plan(tmp_path / "ours.toml") == load_plan(tmp_path / "theirs.toml")
    ours, theirs = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and ours["best"] == theirs["best"]


def test_what_does_not_fit_is_priced_and_not_saved(tmp_path: Path):
    one = mw.price("llama-3-70b", "v5e:4x4", mw.Train("64k", 4096), "fsdp=16")
    assert not one.fits
    with pytest.raises(PlanError, match=r"llama-3-70b on v5e:4x4: fsdp=16.*does not fit"):
        one.save(tmp_path / "plan.toml")
    assert list(tmp_path.iterdir()) == []


def test_models_with_other_fields():
    assert mw.model("llama-3-8b", num_layers=4).num_layers == 4
    assert mw.model(mw.model("tiny")) == mw.model("tiny")
    assert mw.model("mixtral-8x7b", name="one").moe == mw.model("mixtral-8x7b").moe
    with pytest.raises(ModelError, match="'num_layer' is unknown; did you mean num_layers"):
        mw.model("llama-3-8b", num_layer=4)


def test_mistakes_are_those_of_the_command_line():
    with pytest.raises(HardwareError, match="'v5q' is unknown; did you mean"):
        mw.hardware("v5q:4x4")
    with pytest.raises(LayoutError, match="has 8 devices and v5e:4x4 has 16 chips"):
        mw.price(*POD, "fsdp=8")
    with pytest.raises(PlanError, match="is longer than llama-3-8b's context of 8192"):
        mw.plan("llama-3-8b", "v5e:4x4", mw.Train("1M", "16k"))


def test_functions_with_the_name_of_a_package():
    """Importing a module of the package, before or after, leaves the function in place."""
    code = """
from meshwright.audit.checks import TransferLimit
import meshwright as mw
from meshwright.hardware import catalog
from meshwright.plan.train import search
assert catalog.load("v5e:4x4") == mw.hardware("v5e:4x4")
assert mw.plan.__module__ == mw.audit.__module__ == "meshwright.api"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'plans'"):
        mw.plans  # noqa: B018


def test_planning_loads_no_jax(tmp_path: Path):
    code = f"""
import meshwright as mw
plans = mw.plan("tiny", "v5e:4x4", mw.Train("64k", 64))
repr(plans), plans.explain(), mw.hardware("cpu:8"), mw.model("tiny")
plans.best.save({str(tmp_path / "plan.toml")!r})
"""
    assert heavy_modules_after(code) == []


def test_a_priced_layout_is_trained_and_audited(tmp_path: Path):
    """In a process of its own: the number of devices is fixed when JAX starts."""
    data = tmp_path / "corpus"
    data.mkdir()
    for number in range(20):
        (data / f"{number}.txt").write_text("".join(f"line {line} of {number}\n\n" for line in range(200)))
    code = f"""
import meshwright as mw
tiny = mw.model("tiny", vocab_size=512)
best = mw.price(tiny, "cpu:2", mw.Train(512, 32), "fsdp=2")
seen = []
tell = lambda *now: seen.append(now)
result = best.train({str(data)!r}, run={str(tmp_path / "run")!r}, steps=3, progress=tell)
assert result.finished and result.line["step"] == 3 and seen, result
print(best.audit(target="cpu", numerics=False)["verdict"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["match"]
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {
        "plan.toml",
        "plan.json",
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "checkpoints",
    }


def test_a_pipeline_without_microbatches_gets_their_fastest_number():
    plain, one, eight = (
        mw.price(*POD, f"pipe=4,data=4,remat=full{microbatches}")
        for microbatches in ("", ",microbatches=1", ",microbatches=8")
    )
    assert plain.layout.schedule.microbatches > 1
    assert plain.step_seconds <= eight.step_seconds < one.step_seconds

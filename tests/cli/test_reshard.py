"""mw reshard, by its table, its JSON and its run on virtual devices."""

import json

import pytest
from tests.train.processes import Runs, exact_lines

from meshwright.audit.compile.targets import is_installed
from meshwright.cli.main import main

TINY = ["--model", "tiny", "--hardware", "cpu:8"]


def test_the_moves_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["reshard", "fsdp=64", "data=8,tensor=8", "--model", "qwen3-32b", "--hardware", "h100:8x8"]) == 0
    )
    out = capsys.readouterr().out
    assert "fsdp before is fsdp0 x fsdp1; data after is fsdp0; tensor after is fsdp1" in out
    assert "w_out[L, F, D_{fsdp0,fsdp1}]" in out and "stays" in out


def test_moves_emit_what_is_derived(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", "fsdp=8", "data=2,tensor=4", *TINY, "--run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ran"] and not any(one["differs"] for one in document["ran"])
    moved = {one["parameter"] for one in document["moves"] if one["steps"]}
    assert {one["parameter"] for one in document["ran"]} == moved


def test_plans_name_the_model_and_the_machine(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.toml", tmp_path / "b.toml"]
    work = ["--batch-tokens", "512", "--seq-len", "64"]
    for path, layout in zip(paths, ("fsdp=8", "fsdp=2,tensor=4"), strict=True):
        assert main(["plan", "train", *TINY, *work, "--layout", layout, "-o", str(path)]) == 0
    capsys.readouterr()
    assert main(["reshard", *map(str, paths), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"], document["hardware"], document["dtype"]) == ("tiny", "cpu:8", "f32")


def test_a_plan_of_one_server_is_repeated(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `mw plan rl -o` writes them, in either order; other numbers of devices are refused."""
    trainer, server = str(tmp_path / "rl.toml"), str(tmp_path / "rl.generate.toml")
    work = ["--batch-tokens", "512", "--seq-len", "64", "--layout", "fsdp=8"]
    assert main(["plan", "train", *TINY, *work, "-o", trainer]) == 0
    step = ["--phase", "generate", "--batch", "4", "--context", "64", "--layout", "tensor=2"]
    one = ["--model", "tiny", "--hardware", "cpu:2"]
    assert main(["plan", "serve", *one, *step, "-o", server]) == 0
    for pair in ((trainer, server), (server, trainer)):
        capsys.readouterr()
        assert main(["reshard", *pair, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["hardware"] == "cpu:8" and "data=4,tensor=2,remat=none" in document.values()
    assert main(["reshard", trainer, "tensor=2"]) == 2
    assert "fits: equal numbers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "hardware"), [("cpu", "h100:8x8"), ("tpu", "v5p:4x4x4"), ("gpu", "h100:8x8")]
)
def test_the_compiled_move_sends_the_planned_bytes(
    target: str, hardware: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight replicas of tensor=8 from fsdp=64, as a generator of 32B takes a trainer's weights."""
    if target != "cpu" and not is_installed(target):
        pytest.skip(f"no compiler for {target}")
    arguments = ["--model", "qwen3-32b", "--hardware", hardware, "--audit", "--target", target, "--json"]
    assert main(["reshard", "fsdp=64", "data=8,tensor=8", *arguments]) == 0
    audited = json.loads(capsys.readouterr().out)["audit"]
    assert not audited["differs"]
    assert audited["emitted_bytes"] == pytest.approx(audited["planned_bytes"], rel=0.02)


@pytest.mark.slow
def test_a_moved_run_goes_on_bit_for_bit(tmp_path) -> None:
    """As the run itself does under the other layout."""
    runs = Runs(tmp_path, "cpu:4", "fsdp=4")
    other, run = tmp_path / "other.toml", tmp_path / "run"
    runs.write_plan(other, "cpu:4", "fsdp=2,tensor=2")
    runs.mw(*runs.begin(run, "--steps", "4"))
    out, _ = runs.mw("reshard", str(run), str(other), "--out", str(tmp_path / "moved"))
    assert "step 4 moved in" in out and f"mw train --run {tmp_path / 'moved'} --resume" in out
    runs.mw("train", "--run", str(tmp_path / "moved"), "--resume", "--steps", "8")
    runs.mw("train", str(other), "--run", str(run), "--resume", "--steps", "8")
    assert exact_lines(tmp_path / "moved") == exact_lines(run)
    _, err = runs.mw("reshard", str(run), str(other), "--out", str(tmp_path / "moved"), code=2)
    assert "holds files already" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fsdp=8", "tensor=4"], "two layouts without a plan need --model"),
        (["fsdp=8", "tensor=4", *TINY], "has 8 devices and"),
        (["fsdp=8", "nothing.toml"], "nothing.toml"),
        (["fsdp=8", "tp=8", *TINY], "write tensor=8"),
        (
            ["fsdp=8", "tensor=8", *TINY, "--out", "moved"],
            "and the layout to move to is not a plan",
        ),
        (["data=8", "data=4,tensor=2", *TINY, "--audit", "--target", "abc"], "--target 'abc'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1

"""Bad input, to the end: each case that a user met ends in one line and exit code 2, before any work."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import OutputError, PlanError
from meshwright.files import check_writable
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config_tables import MoE
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

SIZES = {
    "num_layers": 2, "d_model": 64, "d_ff": 128, "num_heads": 4, "num_kv_heads": 4, "d_head": 16,
    "vocab_size": 256, "max_seq_len": 512,
}  # fmt: skip
PLAN = [
    "plan",
    "train",
    "--model",
    "tiny",
    "--hardware",
    "h100:8",
    "--batch-tokens",
    "64Ki",
    "--seq-len",
    "64",
]
RL = ["plan", "rl", "--model", "tiny", "--hardware", "h100:8", "--prompts", "8"]
RL += ["--prompt-tokens", "64", "--output-tokens", "64"]
SHARD = ["shard", "A[I_X, J] . B[J_X, K]", "--mesh", "X=4", "--dims", "I=64,J=64,K=64"]


def model_toml(**changes: object) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in {**SIZES, **changes}.items())


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what people hand to the wrong command."""
    monkeypatch.chdir(tmp_path)
    nested = "[" * 20_000 + "]" * 20_000  # Python 3.13 takes 5,000
    contents = {
        "moe.toml": model_toml(moe="yes"),
        "huge.toml": model_toml(num_layers=99_999_999_999_999),
        "number.toml": model_toml(name=7),
        "nested.json": nested,
        "nested.toml": f"a = {nested}",
        "config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}),
        "chip.toml": 'name = "mine"\nkind = "gpu"\n[network]\ndomain_size = 8\n',
        "metrics.jsonl": "{}\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    return tmp_path


CASES = {
    "empty output": ([*PLAN, "-o", ""], "-o is empty"),
    "empty output, long": ([*PLAN, "--output="], "--output is empty"),
    "empty model": (["model", ""], "the argument after 'model' is empty"),
    "empty data": (["train", "plan.toml", "--data", ""], "--data is empty"),
    "empty checkpoint": (["generate", "--checkpoint", "", "hi"], "--checkpoint is empty"),
    "output is a folder": ([*PLAN, "-o", "folder"], "folder: cannot be written: it is a folder"),
    "output below a file": ([*PLAN, "-o", "moe.toml/x.toml"], "cannot be written: "),
    "drawing below a file": ([*SHARD, "--svg", "moe.toml/x.svg"], "cannot be written: "),
    "report below a file": (["report", "folder", "-o", "moe.toml/x.html"], "cannot be written: "),
    "audit below a file": (["audit", "no.toml", "-o", "moe.toml/x.json"], "cannot be written: "),
    "calibration below a file": (["calibrate", "-o", "moe.toml/x.toml"], "cannot be written: "),
    "charts below a file": (["bench", "collectives", "--html", "moe.toml/x"], "cannot be written: "),
    "load test below a file": (
        ["bench", "serve", "--plan", "no.toml", "-o", "moe.toml/x.json"],
        "cannot be written: ",
    ),
    "demo below a file": (["demo", "--run", "moe.toml/x"], "cannot be written: "),
    "plan under the name of its figures": ([*RL, "-o", "x.json"], "-o x.json: the plan is TOML"),
    "a table that is a word": (["model", "moe.toml"], "moe = 'yes' must be a table [moe]"),
    "a name that is a number": (["model", "number.toml"], "name = 7 is not a string"),
    "too many layers": (["model", "huge.toml"], "num_layers = 99999999999999 must be at most 10,000"),
    "nested JSON": (["model", "nested.json"], "nested.json: does not parse: lists or objects are nested"),
    "nested TOML": (["model", "nested.toml"], "nested.toml: does not parse: lists or tables are nested"),
    "nested hardware": (["hardware", "nested.toml"], "nested.toml: not TOML: lists or tables are nested"),
    "nested plan": (["audit", "nested.toml"], "nested.toml: does not parse: lists or tables are nested"),
    "nested report": (["report", "nested.json"], "nested.json is not JSON: lists or objects are nested"),
    "endless model": (["model", "/dev/zero"], "/dev/zero: cannot be read: it is not a regular file"),
    "endless table": (["validate", "/dev/zero"], "/dev/zero: cannot be read: it is not a regular file"),
    "endless program": (["audit", "--hlo", "/dev/zero"], "cannot be read: it is not a regular file"),
    "endless metrics": ([*PLAN, "--anchor", "/dev/zero"], "cannot be read: it is not a regular file"),
    "too many chips": (["hardware", "h100:99999999999"], "has 99,999,999,999 chips; plans reach 1,048,576"),
    "too large a mesh": ([*SHARD[:2], "--mesh", "X=99999999999", *SHARD[4:]], "plans reach 1,048,576"),
    "an axis twice": ([*PLAN, "--layout", "data=4,data=4"], "layout: data is given twice, as 4 and 4"),
    "layout and runnable": ([*PLAN, "--layout", "data=8", "--runnable"], "leave out --runnable"),
    "layout and any": ([*PLAN, "--layout", "data=8", "--any"], "leave out --any"),
    "layout and given": ([*PLAN, "--layout", "data=8", "--given", "tensor=1"], "leave out --given"),
    "plan and model": (
        ["audit", "p.toml", "--model", "tiny"],
        "p.toml already gives these; leave out --model",
    ),
    "template and chip": (["hardware", "v5p", "--template", "h100"], "leave out v5p"),
    "a batch past all": (
        [*PLAN[:7], "1e18", *PLAN[8:]],
        "workload: num_sequences = 15,625,000,000,000,000 is more than 4,294,967,296",
    ),
    "rate nan": (["train", "--learning-rate", "nan"], "nan is out of range; it must be a finite number"),
    "rate zero": (["train", "folder/p.toml", "--checkpoint-minutes", "inf"], "inf is out of range"),
    "temperature nan": (
        ["generate", "--checkpoint", "x", "hi", "--temperature", "nan"],
        "nan is out of range",
    ),
    "many candidates": ([*PLAN, "--top", "9" * 20], "it must be from 1 to 10000"),
    "a config as a plan": (
        ["report", "config.json"],
        "config.json is not a plan of mw plan train -o: it has neither best nor",
    ),
    "missing figures": (
        ["hardware", "chip.toml"],
        "chip.toml lacks flops_per_second, chips_per_host, hbm_bytes, host_bytes, hbm_bytes_per_second, "
        "host_link_bytes_per_second, network.nvlink_bytes_per_second, network.nvlink_hop_seconds, "
        "network.nic_bytes_per_second, network.nic_hop_seconds, network.collective_launch_seconds; "
        "mw hardware --template h100 prints a whole file",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_2(case: str, files: Path, capsys):
    arguments, message = CASES[case]
    before = sorted(files.rglob("*"))
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("mw: ") and message in printed.err, printed.err
    assert sorted(files.rglob("*")) == before, "something was left behind"


def test_at_most_five_names_are_suggested(capsys):
    assert main(["hardware", "zzz"]) == 2
    message = capsys.readouterr().err
    suggested, _, rest = message.partition("nearest: ")[2].partition(" (")
    assert len(suggested.split(", ")) == 5 and rest.endswith("known)\n")


def test_a_slice_that_no_one_sells_is_planned_with_a_warning(capsys):
    plan = ["plan", "train", "--model", "tiny", "--batch-tokens", "1001Ki", "--seq-len", "64", "--top", "1"]
    main([*plan, "--hardware", "v5p:7x11x13"])
    assert "v5p:7x11x13 is not a slice that clouds offer: sides are multiples of 4" in capsys.readouterr().err
    for offered in ("v5p:4x4x8", "v5p:2x2x1", "v5e:4x8", "h100:24"):
        main(["hardware", offered])
        assert "no slice" not in capsys.readouterr().err, offered


def test_a_template_is_a_file_to_begin_with(tmp_path: Path, capsys):
    assert main(["hardware", "--template", "h100-sxm"]) == 0
    mine = tmp_path / "mine.toml"
    mine.write_text(capsys.readouterr().out)
    assert main(["hardware", f"{mine}:8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_chips"] == 8
    # --smallest takes the file's chip, which needs no topology.
    assert main([*PLAN[:5], str(mine), *PLAN[6:], "--smallest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["smallest"]["num_chips"] >= 1


def test_a_path_is_tried_and_left_as_it_was(tmp_path: Path):
    check_writable(tmp_path / "new" / "folder" / "plan.toml")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    for path in (tmp_path, Path(), tmp_path / "file" / "plan.toml", tmp_path / ("x" * 300)):
        with pytest.raises(OutputError, match="cannot be written"):
            check_writable(path)


def test_text_that_is_no_unicode_is_no_traceback(tmp_path: Path):
    """A path of bytes that are no UTF-8 comes through argv, in a process of its own."""
    command = [sys.executable, "-m", "meshwright.cli.main", "model", b"\xff\xfe.toml"]
    done = subprocess.run(command, capture_output=True, env={**os.environ, "LC_ALL": "C.UTF-8"}, check=False)
    assert done.returncode == 2 and b"Traceback" not in done.stderr and done.stderr.count(b"\n") == 1


def test_a_plan_for_another_model_names_every_size_that_differs():
    from meshwright.cli.service import _check_model

    mine = load_model("tiny")
    plan = Plan(mine, "cpu:1", Workload(2, 64, "generate"), Layout.of())
    moe = MoE(4, 2, 128)
    with pytest.raises(PlanError) as raised:
        _check_model(plan, replace(mine, name="other", num_layers=9, moe=moe))
    said = str(raised.value)
    assert said.startswith("the plan is for tiny, and the checkpoint holds other: L = ")
    assert said.endswith("E = none and 4, M = none and 128, U = none and 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("plan train", "plan train needs --model, --hardware, --batch-tokens, --seq-len; such as mw"),
        ("plan train --model tiny", "mw plan train needs --hardware, --batch-tokens, --seq-len; such as"),
        ("plan train --global-batch 8", "is --batch-tokens, the sequences times --seq-len, here"),
        ("plan train --lora 8", "--lora is --set lora_rank=8 here"),
        ("audit --model tiny --hardware cpu:8 --batch-tokens 64 --seq-len 8 --layout tp=8", "write tensor=8"),
        ("audit --model tiny --hardware cpu:8 --batch-tokens 64 --seq-len 8 --layout ga=2", "microbatches=2"),
        ("audit --model tiny --hardware cpu:8 --batch-tokens 64 --seq-len 8 --layout remat=selective",
         "remat = selective is remat = attention here; write remat=attention"),
    ],
)  # fmt: skip
def test_the_fields_other_words_are_answered(arguments: str, message: str, capsys) -> None:
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_version_and_help_are_commands_too(capsys) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("meshwright ")
    assert main(["help", "plan", "train"]) == 0
    assert "--batch-tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["meta-llama/Meta-Llama-3-8B-Instruct", "NousResearch/Meta-Llama-3-8B"])
def test_a_model_of_the_hub_is_its_preset(name: str, capsys) -> None:
    assert main(["model", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "llama-3-8b"


def test_a_plain_price_is_that_of_every_chip(capsys) -> None:
    asked = "plan train --model tiny --hardware l4:1 --batch-tokens 512 --seq-len 64 --tokens 1M --price 2.5"
    assert main([*asked.split(), "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["budget"]
    assert run["price"] == pytest.approx(2.5 * run["chip_hours"])


@pytest.mark.parametrize(("hardware", "code", "form"), [("h100:1x8", 0, "--json"), ("h100:1x1", 1, "")])
def test_a_reader_that_ends_early_loses_no_file_and_no_exit_code(
    hardware: str, code: int, form: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    command = (
        f"{sys.executable} -m meshwright plan train --model llama-3-8b --hardware {hardware} "
        f"--batch-tokens 64Ki --seq-len 4096 --explain {form} -o {plan} | head -c 10"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert done.returncode == code and "Traceback" not in done.stderr
    assert plan.is_file() == (code == 0)

"""mw plan train: the contract's keys, the file it writes, and what it says to a bad question."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.layout import Layout
from meshwright.plan_file import load_plan

KEYS = {"best", "candidates", "assumptions", "search"}
CANDIDATE_KEYS = {
    *("layout", "mesh", "step_seconds", "mfu", "hfu", "tflops_per_chip", "tokens_per_second_per_chip"),
    *("bytes_per_chip", "fits", "bound", "breakdown"),
}
BYTES_KEYS = {"weights", "gradients", "optimizer", "activations", "buffers", "total"}
POD = ["--model", "llama-3-70b", "--hardware", "v5p:4x4x4", "--batch-tokens", "1M", "--seq-len", "4096"]
HERE = ["--model", "tiny", "--hardware", "cpu:8", "--batch-tokens", "1Ki", "--seq-len", "64"]


def _but(options: list[str], changed: list[str]) -> list[str]:
    """`options` without those that `changed` gives: none may be given twice."""
    given = {word.partition("=")[0] for word in changed}
    pairs = zip(options[::2], options[1::2], strict=True)
    return [word for option, value in pairs if option not in given for word in (option, value)]


def plan(*arguments: str) -> int:
    return main(["plan", "train", *arguments])


def document(capsys, *arguments: str) -> dict:
    assert plan(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_the_keys_of_the_contract(capsys):
    found = document(capsys, *POD)
    assert found.keys() >= KEYS
    assert found["search"].keys() == {"considered", "seconds"}
    assert found["best"] == found["candidates"][0]
    assert found["faster"] is None  # pipelines run, in lanes
    for candidate in found["candidates"]:
        assert candidate.keys() >= CANDIDATE_KEYS
        assert candidate["bytes_per_chip"].keys() >= BYTES_KEYS
        assert {item.keys() >= {"name", "seconds", "share", "bound"} for item in candidate["breakdown"]} == {
            True
        }
        assert str(Layout.parse(candidate["layout"])) == candidate["layout"]
    slower = [candidate["step_seconds"] for candidate in found["candidates"] if not candidate["tie"]]
    assert slower == sorted(slower)


def test_top_limits_the_list_and_not_the_search(capsys):
    small = [
        "--model",
        "llama-3.2-1b",
        "--hardware",
        "v5e:4x4",
        "--batch-tokens",
        "64Ki",
        "--seq-len",
        "2048",
    ]
    few, many = document(capsys, *small, "--top", "2"), document(capsys, *small, "--top", "5")
    assert (len(few["candidates"]), len(many["candidates"])) == (2, 5)
    assert few["search"]["considered"] == many["search"]["considered"]


def test_layout_prices_that_one(capsys):
    found = document(capsys, *POD, "--layout", "fsdp=32,tensor=2,remat=full")
    assert [c["layout"] for c in found["candidates"]] == ["fsdp=32,tensor=2,remat=full"]
    assert found["search"]["considered"] == 1 and found["assumptions"]


def test_a_cpu_computes_in_the_faster_type_it_lists(capsys, tmp_path: Path):
    assert main(["plan", "train", *HERE, "-o", str(tmp_path / "plan.toml")]) == 0
    layout = load_plan(tmp_path / "plan.toml").layout
    assert (layout.precision.weights_dtype, layout.precision.compute_dtype) == ("f32", "f32")


def test_output_is_a_plan_and_its_figures_beside_it(capsys, tmp_path: Path):
    assert plan(*HERE, "-o", str(tmp_path / "plan.toml")) == 0
    written, figures = load_plan(tmp_path / "plan.toml"), json.loads((tmp_path / "plan.json").read_text())
    assert str(written.layout) == figures["best"]["layout"]
    assert written.planned_step_seconds == figures["best"]["step_seconds"]
    assert figures["shardings"]["weights"]["wq"].startswith("wq[")
    assert figures["workload"] == {
        "batch_tokens": 1024,
        "seq_len": 64,
        "num_sequences": 16,
        "asked_batch_tokens": 1024,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.toml"]
    printed = capsys.readouterr()
    assert "tiny (" in printed.out and "Layouts by planned step time" in printed.out
    assert "wrote" in printed.err and "wrote" not in printed.out


ODD = ["--model", "tiny", "--hardware", "cpu:8", "--batch-tokens", "832", "--seq-len", "64"]


def test_a_batch_that_does_not_divide_is_named_first_and_priced_once(capsys, tmp_path: Path):
    """13 sequences over 8 ranks: the terminal, plan.json and plan.toml are of 16."""
    assert plan(*ODD, "--layout", "data=8", "-o", str(tmp_path / "plan.toml")) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(
        "Planned for 16 sequences of 64 tokens (1,024 tokens): the 13 asked for do not divide over "
        "data·fsdp·microbatches = 8\n"
    )
    assert "16 sequences of 64 tokens (1,024 tokens; 832 asked for)" in " ".join(printed.out.split())
    written, figures = load_plan(tmp_path / "plan.toml"), json.loads((tmp_path / "plan.json").read_text())
    assert written.workload.num_sequences == figures["workload"]["num_sequences"] == 16
    assert written.planned_step_seconds == figures["best"]["step_seconds"]
    assert figures["workload"]["asked_batch_tokens"] == 832
    assert len(figures["notices"]) == 1 and figures["notices"][0].startswith("Planned for 16")


def test_a_searched_batch_that_does_not_divide_is_named_too(capsys):
    changed = ["--batch-tokens", "1984"]
    found = document(capsys, *_but(ODD, changed), *changed)
    sequences = found["workload"]["num_sequences"]
    assert found["notices"][0].startswith(f"Planned for {sequences} sequences of 64 tokens")
    for candidate in found["candidates"]:
        layout = Layout.parse(candidate["layout"])
        assert sequences % (layout.num_batch_shards * layout.schedule.microbatches) == 0


def test_k_of_a_length_is_1024_and_of_tokens_1000(capsys):
    changed = ["--batch-tokens", "512k", "--seq-len", "8k"]
    layout = "tensor=8,fsdp=8,microbatches=2,remat=full"
    found = document(capsys, *_but(POD, changed), *changed, "--layout", layout)
    assert found["workload"]["seq_len"] == 8192 and found["workload"]["asked_batch_tokens"] == 512_000
    assert found["workload"]["num_sequences"] == 64  # 62.5, and 62 do not divide over 8 * 2


def test_what_does_not_fit_exits_1_says_by_how_much_and_writes_nothing(capsys, tmp_path: Path):
    huge = [
        "--model",
        "llama-3.1-405b",
        "--hardware",
        "v5e:4x4",
        "--batch-tokens",
        "64Ki",
        "--seq-len",
        "4096",
        "--json",
    ]
    assert plan(*huge, "-o", str(tmp_path / "plan.toml")) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["best"]["fits"] is False
    assert "nothing fits; the nearest is" in printed.err and "more than the 16.9 GB" in printed.err
    assert "take more chips (--smallest finds how many)" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_names_the_cheapest_change(capsys):
    """Replicas of 8B do not fit; with shared gradients they do, and --layout takes the change's words."""
    case = ["--model", "llama-3-8b", "--hardware", "h100:1x8", "--batch-tokens", "512Ki", "--seq-len", "4096"]
    assert plan(*case, "--layout", "data=8,microbatches=2") == 1
    error = capsys.readouterr().err
    assert "; with zero=2, microbatches=8 it fits: " in error and error.count("\n") == 1
    assert document(capsys, *case, "--layout", "data=8,zero=2,microbatches=8")["best"]["fits"]


def test_the_faster_layout_that_does_not_run_has_one_line(capsys):
    case = [
        "--model",
        "llama-3.1-405b",
        "--hardware",
        "h100:64x8",
        "--batch-tokens",
        "4Mi",
        "--seq-len",
        "8k",
    ]
    assert plan(*case, "--top", "3") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "but does not run yet (schedule=" in out and " on 64 hosts); --any ranks it" in out
    assert "= within 2% of the best: ties, the simplest first" in out and " 2 = " in out


BAD = [
    (
        ["--layout", "tensor=16,fsdp=4"],
        "8 KV heads (K) do not divide over tensor = 16; fits: tensor in {1, 2, 4, 8}",
    ),
    (
        ["--layout", "fsdp=32"],
        "fsdp=32 has 32 devices and v5p:4x4x4 has 64 chips; fits: data=2,fsdp=32 or fsdp=64",
    ),
    (["--layout", "data=64", "--batch-tokens", "128Ki"], "32 sequences (B) are fewer than"),
    (["--layout", "fsdp=64,microbatches=8"], "fits: microbatches up to 3, or --batch-tokens 2097152"),
    (["--layout", "pipe=64,interleave=2"], "80 layers (L) are fewer than the chunks"),
    (["--layout", "fsdp=64,expert=8"], "llama-3-70b has no experts (E) for expert = 8"),
    (["--layout", "context=64", "--seq-len", "4095"], "4095 positions (T) do not divide over 64"),
    (["--max-seconds", "3"], "--max-seconds bounds what --smallest looks for; add --smallest"),
    (["--days", "3", "--tokens", "1T"], "--days bounds what --smallest looks for; add --smallest"),
    (["--smallest", "--days", "3"], "--days needs the length of the run; add --tokens 1T"),
    (["--smallest", "--max-seconds", "nan"], "'--max-seconds': 'nan' is not a time"),
    (["--smallest", "--max-seconds", "0"], "--max-seconds 0.0 is not a time; write a number above 0"),
    (["--smallest", "--layout", "fsdp=64"], "--smallest searches layouts; leave out --layout"),
    (["--smallest", "--hardware=cpu:8"], "cpu:8 does not come in slices"),
    (["--tokens", "0"], "Invalid value for '--tokens': '0' is not a positive whole number"),
    (["--layout", "fsdp=64,tensr=1"], "'tensr' is not supported; did you mean tensor"),
    (["--layout", "fsdp"], "'fsdp' is not KEY=VALUE"),
    (["--hardware=v5q:4x4x4"], "hardware 'v5q' is unknown; did you mean v5p or v5e?"),
    (["--hardware=/nowhere.toml"], "/nowhere.toml: cannot be read: No such file or directory"),
    (
        ["--model", "llama-3-71b"],
        "model 'llama-3-71b' is neither a preset nor a path; did you mean llama-3",
    ),
    (["--batch-tokens", "100"], "--batch-tokens 100 is less than one sequence of 4096 tokens"),
    (
        ["--seq-len", "16Ki"],
        "longer than llama-3-70b's context of 8192; fits: --seq-len 8192",
    ),
    (["--weights-dtype", "int8"], "weights_dtype = 'int8'; fits: f32, bf16"),
    (["-o", "/nowhere/at/all/plan.json"], "name a .toml"),
    (["--top", "0"], "Invalid value for '--top'"),
    (
        ["--given", "tensr=8"],
        "write a word of a layout or memory: tensor=8, memory<=70GB; did you mean tensor",
    ),
    (
        ["--given", "tensor"],
        "--given tensor: not a condition; write FIELD, one of = != <= >= < >, and a value",
    ),
    (["--given", "schedule<zb-v"], "--given schedule<zb-v: values of schedule have no order; write = or !="),
    (["--given", "schedule!=zb-x"], "schedule = 'zb-x'; did you mean zb-"),
    (["--given", "matmul_dtype!=fp8"], "a search does not choose matmul_dtype; write matmul_dtype=VALUE"),
    (["--given", "weights_dtype=f32"], "a search does not choose it; write --weights-dtype f32"),
    (["--given", "tensor=3"], "--given tensor=3 leaves no layout: 64 chips do not divide over tensor = 3"),
    (["--layout", "pipe=64", "--runnable", "--seq-len", "x"], "'x' is not a count; write 4096, 8k (8192)"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=lambda value: value[1] if len(value) == 2 else "")
def test_bad_input_is_one_line_and_exits_2(changed: list[str], message: str, capsys):
    assert plan(*_but(POD, changed), *changed) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mw: ") and printed.err.count("\n") == 1
    assert message in printed.err


def test_a_model_file_without_its_keys(capsys, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    assert plan(*POD[2:], "--model", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert "config.json lacks num_hidden_layers" in error and error.count("\n") == 1


def test_a_folder_in_the_way_of_the_plan(capsys, tmp_path: Path):
    assert plan(*HERE, "-o", str(tmp_path)) == 2
    assert list(tmp_path.iterdir()) == []
    assert "it is a folder; name a file" in capsys.readouterr().err


ASKED = ["--layout", "fsdp=32,tensor=2,remat=full"]
EXPLANATION_KEYS = {
    *("explanation", "thresholds", "rejected", "batch_range", "budget", "critical_batch"),
}


def test_json_says_why(capsys):
    found = document(capsys, *POD, *ASKED, "--tokens", "15T", "--critical-batch", "4M")
    assert found.keys() >= EXPLANATION_KEYS | KEYS
    assert found["explanation"].startswith("The layout\n- The 64 chips form a mesh, fsdp 32 x tensor 2.")
    limits = {limit["name"]: limit for limit in found["thresholds"]}
    assert limits["data_parallel_tokens_per_chip"]["limit"] == pytest.approx(850)
    assert {"name", "layout", "reason", "text", "numbers"} <= found["rejected"][0].keys()
    budget, step = found["budget"], found["best"]["step_seconds"]
    assert budget["steps"] == -(-15 * 10**12 // (256 * 4096))
    assert budget["seconds"] == pytest.approx(budget["steps"] * step)
    assert budget["chip_hours"] == pytest.approx(64 * budget["seconds"] / 3600)
    assert found["critical_batch"]["times"] == pytest.approx(256 * 4096 / 4e6)
    assert found["batch_range"]["min_tokens"] <= 256 * 4096


def test_what_was_not_asked_for_is_null(capsys):
    found = document(capsys, *POD, *ASKED)
    assert found["budget"] is None and found["critical_batch"] is None
    assert "smallest" not in found


def test_explain_is_prose_that_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("meshwright.cli.console._PIPED_WIDTH", 80)
    assert plan(*POD, *ASKED, "--explain", "--tokens", "15T") == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if line in TITLES]
    assert titles == TITLES
    assert max(map(len, printed.splitlines())) <= 80
    assert "fsdp=32,tensor=2," in printed and "…" not in printed
    assert "Time of a step" not in printed  # the table that the prose replaces


TITLES = [
    *("The layout", "Where the time goes", "Memory", "Other layouts", "Rules of thumb", "Batch"),
    *("To go faster", "Budget", "Assumptions"),
]


def test_without_explain_only_what_was_asked_for_is_said(capsys):
    assert plan(*POD, *ASKED, "--tokens", "15T") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "Budget" in lines and "The layout" not in lines and "Batch" not in lines
    assert any(line.endswith("--explain has more of them, the reasons and the assumptions") for line in lines)


def test_the_answer_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setattr("meshwright.cli.console._PIPED_WIDTH", 100)
    for more in (ASKED, ["--given", "pipe=1,context=1,tensor<=2"]):
        assert plan(*POD, *more) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 100
        assert any(line.startswith("Best: ") for line in lines) and "Assumptions" not in lines


def test_smallest_plans_for_the_fewest_chips(capsys, tmp_path: Path):
    asked = ["--model", "llama-3-8b", "--hardware", "v5e", "--batch-tokens", "512Ki", "--seq-len", "4096"]
    assert plan(*asked, "--smallest", "--json", "-o", str(tmp_path / "plan.toml")) == 0
    found = json.loads(capsys.readouterr().out)
    smallest = found["smallest"]
    assert smallest["hardware"] == found["hardware"]["spec"] == load_plan(tmp_path / "plan.toml").hardware
    assert found["best"]["fits"] and smallest["num_chips"] == found["hardware"]["num_chips"]
    assert [tried["hardware"] for tried in smallest["tried"]][:2] == ["v5e:1x1", "v5e:1x2"]


def test_no_size_that_fits_exits_1_and_says_why(capsys):
    assert plan(*POD[:2], *POD[4:], "--smallest", "--hardware", "v5p:2x2x1", "--json") == 1
    printed = capsys.readouterr()
    smallest = json.loads(printed.out)["smallest"]
    assert smallest["hardware"] is None and len(smallest["tried"]) == 3
    assert all(tried["why_not"] for tried in smallest["tried"])
    assert "mw: llama-3-70b on up to v5p:2x2x1: weights and moments need 176 GB per chip" in printed.err


def test_the_compiler_is_asked_for_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """A compiler that says 1 TB of the best and 1 MB of the next."""
    from meshwright.audit import second_opinion
    from meshwright.audit.compile.compile import CompiledProgram

    answers = iter([10**12, 10**6, 10**6])
    monkeypatch.setattr(
        second_opinion,
        "compile_plan",
        lambda plan, target, progress, use_cache: CompiledProgram("", 1.0, {"total": next(answers)}),
    )
    command = ["plan", "train", "--model", "tiny", "--hardware", "cpu:8", "--batch-tokens", "1Ki"]
    assert main([*command, "--seq-len", "64", "--audit", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(one["compiled_bytes"], one["fits"]) for one in document["audit"]] == [
        (10**12, False),
        (10**6, True),
        (10**6, True),
    ]
    assert document["best"]["layout"] == document["audit"][1]["layout"]
    assert document["best"]["compiled_bytes_per_chip"] == 10**6
    answers = iter([10**12, 10**6, 10**6])
    assert main([*command, "--seq-len", "64", "--audit"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 TB per chip by XLA for CPU" in out and ": does not fit" in out


NODE = [
    "plan", "train", "--model", "llama-3-8b", "--hardware", "h100:1x8", "--batch-tokens", "64Ki",
    "--seq-len", "8192", "--json",
]  # fmt: skip


def test_headroom_leaves_memory_free(capsys) -> None:
    needed = []
    for headroom in ("0%", "40%"):
        assert main([*NODE, "--headroom", headroom]) == 0
        needed.append(sum(json.loads(capsys.readouterr().out)["best"]["bytes_per_chip"].values()) / 2)
    assert needed[1] <= 0.6 * 81.2e9 < needed[0]


def test_a_roofline_is_faster_than_what_is_reached(capsys) -> None:
    seconds = []
    for form in ([], ["--ideal"]):
        assert main([*NODE, "--layout", "fsdp=8,remat=full", *form]) in (0, 1)
        seconds.append(json.loads(capsys.readouterr().out)["best"]["step_seconds"])
    assert seconds[1] < 0.8 * seconds[0]


def test_machines_joined_by_commas_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "train", "--model", "gpt2", "--batch-tokens", "8k", "--seq-len", "1k", "--json"]
    assert main([*asked, "--hardware", "h100:1", "--hardware", "a100-80gb:1"]) == 0
    repeated = json.loads(capsys.readouterr().out)
    assert main([*asked, "--hardware", "h100:1,a100-80gb:1"]) == 0
    joined = json.loads(capsys.readouterr().out)
    assert [each["hardware"] for each in joined["plans"]] == ["h100:1", "a100-80gb:1"]
    assert joined["plans"] == repeated["plans"]

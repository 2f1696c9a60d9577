"""mw plan serve: the contract's keys, one phase alone, the plan that it writes, and bad questions."""

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.layout import Layout
from meshwright.plan_file import load_plan

POINT = {
    *("hardware", "chips", "layout", "batch", "ttft_seconds", "tpot_seconds", "tokens_per_second"),
    *("tokens_per_second_per_chip", "requests_per_second_per_chip", "bytes_per_chip"),
}
STEP = {"step_seconds", "tokens_per_second", "bytes_per_chip", "max_batch", "bound"}
MODEL = ["plan", "serve", "--model", "llama-3-8b"]
LENGTHS = ["--prompt-tokens", "2k", "--output-tokens", "128"]
ASKED = [*MODEL, "--hardware", "v5e:2x2,v5e:2x4", *LENGTHS]


def document(capsys, *arguments: str, code: int = 0) -> dict:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_has_the_keys_of_the_contract(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    found = document(capsys, *ASKED, "--weights-dtype", "int8", "--kv-dtype", "int8", "-o", str(path))
    assert found.keys() >= {"frontier", "best", "prefill_to_generate_ratio", "max_batch"}
    for point in (*found["frontier"], found["best"]):
        assert point.keys() >= POINT and point["batch"] <= point["max_batch"]
        assert point["tokens_per_second"] == pytest.approx(point["batch"] / point["tpot_seconds"])
        assert point["currency"]
    plan = load_plan(path)
    assert plan.workload.phase == "generate" and plan.layout.precision.weights_dtype == "int8"
    assert json.loads(path.with_suffix(".json").read_text())["best"] == found["best"]


def test_the_terminal_has_a_table_a_plot_and_words(capsys):
    assert main([*ASKED, "--explain"]) == 0
    printed = capsys.readouterr().out
    for text in ("tokens/s per chip: a v5e", "B_crit", "larger than the weights", "What int8 would give"):
        assert text in printed


def test_the_answer_fits_a_screen(capsys, monkeypatch):
    monkeypatch.setattr("meshwright.cli.console._PIPED_WIDTH", 100)
    assert main(ASKED) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert any(line.startswith("Best: ") for line in lines) and not any("B_crit" in line for line in lines)


@pytest.mark.parametrize(
    ("phase", "queries"), [(["generate", "--context", "2k"], 1), (["prefill", "--prompt-tokens", "2k"], 2048)]
)
def test_one_phase_is_one_point(capsys, phase: list[str], queries: int):
    where = ["--hardware", "v5e:2x2", "--batch", "4"]
    found = document(capsys, *MODEL, *where, "--phase", *phase)
    assert found.keys() >= STEP and found["fits"] and found["max_batch"] >= 4
    assert found["tokens_per_second"] == pytest.approx(4 * queries / found["step_seconds"])
    layout = found["layout"].partition(",remat")[0]
    ideal = document(capsys, *MODEL, *where, "--phase", *phase, "--ideal", "--layout", layout)
    assert ideal["step_seconds"] < found["step_seconds"]


def test_a_model_is_changed_on_the_fly(capsys):
    step = [*MODEL, "--hardware", "v5e:2x2", "--layout", "tensor=4", "--phase", "generate", "--context", "1k"]
    whole = document(capsys, *step)["bytes_per_chip"]
    more = document(capsys, *step, "--set", "num_kv_heads=32")["bytes_per_chip"]
    assert more["cache"] == 4 * whole["cache"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([*ASKED, "--tpot", "0.00001"], 1, "--tpot 10 us is met by no layout"),
        (
            ["plan", "serve", "--model", "llama-3-70b", *ASKED[4:]],
            1,
            "its weights in bf16 are",
        ),
        (
            [*MODEL, "--hardware", "v5e:2x2", "--prompt-tokens", "8k"],
            2,
            "add --prompt-tokens 8k --output-tokens 512",
        ),
        ([*ASKED, "--batch", "3"], 2, "--batch describes one step; add --phase generate"),
        ([*ASKED, "--phase", "generate", "--context", "9"], 2, "--phase prices one step; name one machine"),
        ([*MODEL, "--hardware", "v5e:2x2", "--phase", "generate"], 2, "add --context 8k"),
        (
            [*ASKED, "--phase", "generate", "--context", "1k", "--lengths", "sharegpt", "--paged"],
            2,
            "--phase prices one step and no requests; leave out --lengths, --paged",
        ),
        (
            [
                *MODEL,
                "--hardware",
                "v5e:2x2",
                "--phase",
                "prefill",
                "--prompt-tokens",
                "1k",
                "--context",
                "9",
            ],
            2,
            "--phase prefill is of whole prompts",
        ),
        ([*ASKED, "--tpot", "0"], 2, "tpot = 0.0; it must be a number above 0"),
        ([*ASKED, "--max-price-per-hour", "-1"], 2, "'-1' is not an amount of money; write 500, 50k or 1.5M"),
        ([*ASKED, "--kv-dtype", "int3"], 2, "layout: kv_dtype = 'int3'; fits: f32, bf16, fp8, int8, int4"),
        ([*ASKED, "--matmul-dtype", "int3"], 2, "layout: matmul_dtype = 'int3'; fits: f32"),
        ([*ASKED, "--price", "h100=2"], 2, "--price h100: no machine here has this chip; fits: v5e"),
        ([*ASKED, "--currency", "EUR"], 2, "--currency EUR: no price is known in it; add --price v5e=X"),
        ([*ASKED, "--set", "num_kv_heads"], 2, "--set 'num_kv_heads': write FIELD=VALUE"),
        ([*ASKED, "--price", "v5x=1"], 2, "hardware 'v5x' is unknown"),
        ([*ASKED, "--price", "v5e"], 2, "--price 'v5e' is not a price of a chip-hour"),
        ([*ASKED, "--weights-dtype", "int7"], 2, "layout: weights_dtype = 'int7'; fits: f32"),
        ([*ASKED, "--set", "heads=3"], 2, "--set heads: a model has no such field"),
        ([*ASKED, "--set", "num_kv_heads=3"], 2, "32 query heads (N) do not divide over 3 KV heads (K)"),
        ([*MODEL, "--hardware", "v5q", *LENGTHS], 2, "hardware 'v5q' is unknown"),
        ([*ASKED, "--layout", "tensor=3"], 2, "the axes must multiply to 4"),
    ],
)
def test_bad_questions_get_one_line(capsys, arguments: list[str], code: int, said: str):
    assert main(arguments) == code
    lines = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
    assert said in lines[-1] and len(lines) == 1


def test_where_nothing_meets_the_target_json_says_why_and_what_is_nearest(capsys):
    found = document(capsys, *ASKED, "--tpot", "0.00001", code=1)
    assert found["frontier"] == [] and found["best"] is None
    assert found["nearest"]["batch"] == 1 and "--tpot" in found["reason"]
    load = ["--engine", "vllm", "--rate", "1", "--tpot-p95", "0.00001"]
    of_load = document(capsys, *MODEL, "--hardware", "h100:1x1", *LENGTHS, *load, code=1)
    assert of_load.keys() == found.keys() and "for a single request" in of_load["reason"]


def test_a_large_machine_is_divided_into_servers(capsys):
    """One server of 64 chips for 2 requests/s would cost 64 times as much as the chip that suffices."""
    load = [*MODEL, "--hardware", "h100:64", *LENGTHS, "--engine", "vllm", "--rate", "2"]
    assert document(capsys, *load)["best"]["chips"] < 8


def test_a_rate_reads_the_targets_and_refuses_other_options(capsys):
    """Targets of every answer count for 95% of a load's; options that no simulation reads are named."""
    load = [*MODEL, "--hardware", "h100:1x1", *LENGTHS, "--engine", "vllm", "--rate", "1"]
    assert document(capsys, *load, "--ttft", "2s", "--tpot", "90ms")["ttft_p95_seconds"] == 2.0
    assert main([*load, "--chunk", "512"]) == 2
    assert "leave out --chunk" in capsys.readouterr().err


@pytest.mark.parametrize("load", [[], ["--rate", "1"]])
def test_an_engine_keeps_its_tables_wide(capsys, tmp_path, load: list[str]):
    path = tmp_path / "plan.toml"
    asked = [*MODEL, "--hardware", "h100:1x1", *LENGTHS, "--engine", "vllm", "--weights-dtype", "fp8"]
    document(capsys, *asked, *load, "-o", str(path))
    assert load_plan(path).layout.precision.tables_dtype == "bf16"


def test_prompts_are_split_by_position_where_a_target_needs_it(capsys, tmp_path):
    """By data ranks, each with all the weights; ways that share these do not run."""
    asked = [*MODEL, "--hardware", "v5e:4x4", "--layout", "data=2,tensor=8", "--prompt-tokens", "32k"]
    asked += ["--output-tokens", "512"]
    whole = document(capsys, *asked)
    ways = {way["layout"]: way["ttft_seconds"] for way in whole["other_prefills"]}
    by_ranks = ways["context=2,tensor=8,remat=none"]
    assert by_ranks < 0.9 * whole["best"]["ttft_seconds"]
    best = document(capsys, *asked, "--ttft", str(1.01 * by_ranks), "-o", str(tmp_path / "plan.toml"))["best"]
    assert (best["ttft_seconds"], best["why_not_run"]) == (by_ranks, None)
    assert load_plan(tmp_path / "plan.toml").layout.rules == Layout.of(context=2, tensor=8).rules
    target = ["--ttft", str(1.01 * min(ways.values()))]
    assert main([*asked, *target]) == 1
    assert "which mw serve does not run yet: --any ranks such layouts" in capsys.readouterr().err
    assert main([*asked, *target, "--any"]) == 0
    assert "mw serve does not run it yet: weights stored as context=" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["fsdp=4", "pipe=2,tensor=2", "context=4", "context=2,tensor=2"])
def test_a_layout_that_is_never_searched_is_priced_alone(capsys, layout: str):
    found = document(capsys, *MODEL, "--hardware", "h100:1x4", *LENGTHS, "--layout", layout)
    assert all(word in found["best"]["layout"] for word in layout.split(","))
    assert (found["best"]["why_not_run"] is None) == ("pipe" not in layout)


def test_drafts_lower_the_batch_from_which_matmuls_are_compute_bound(capsys):
    whole = document(capsys, *ASKED)
    drafted = document(capsys, *ASKED, "--drafts", "3", "--acceptance", "0.5")
    assert drafted["critical_batch"] == pytest.approx(whole["critical_batch"] / 4)


def test_groups_of_chips_have_a_batch_each(capsys):
    """B_crit of all: as many sequences for each of the data ranks, which multiply their own."""
    asked = [*MODEL, "--hardware", "h100:1x4", *LENGTHS, "--explain"]
    one = document(capsys, *asked, "--layout", "tensor=4")
    four = document(capsys, *asked, "--layout", "data=4")
    assert four["critical_batch"] == pytest.approx(4 * one["critical_batch"])
    assert main([*asked, "--layout", "data=4"]) == 0
    assert "x 4 groups of chips" in " ".join(capsys.readouterr().out.split())


def test_lengths_of_a_distribution_or_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture):
    asked = [*MODEL, "--hardware", "h100:1x1", "--json"]

    def best(*lengths: str) -> dict:
        assert main([*asked, *lengths]) == 0
        return json.loads(capsys.readouterr().out)

    alike = best("--prompt-tokens", "1k", "--output-tokens", "128")
    fixed = best("--lengths", "fixed", "--prompt-tokens", "1k", "--output-tokens", "128")
    for found in (alike, fixed):  # a distribution without spread is one length
        for one in (found["requests"], found, found["search"]):
            for key in ("longest", "token_context", "search", "seconds", "requests"):
                one.pop(key, None)
    assert fixed["frontier"] == alike["frontier"]
    trace = tmp_path / "requests.jsonl"
    rows = [(100, 10), (300, 90)]
    lines = [{"arrival_seconds": 0, "prompt_tokens": p, "output_tokens": o} for p, o in rows]
    trace.write_text("\n".join(map(json.dumps, lines)))
    requests = best("--trace", str(trace))["requests"]
    assert (requests["prompt_tokens"], requests["output_tokens"]) == (200, 50)
    assert (requests["longest"], requests["token_context"]) == (390, (10 * 105 + 90 * 345) // 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "sharegp"], "lengths 'sharegp' are unknown; did you mean sharegpt?"),
        (["--trace", "none.jsonl"], "trace none.jsonl: cannot be read as text: No such file or directory"),
        (["--trace", "none.jsonl", "--lengths", "alpaca"], "--trace has the lengths of its requests"),
        (["--prompt-tokens", "1k"], "the frontier needs the lengths of requests"),
    ],
)
def test_lengths_that_are_none(arguments: list[str], message: str, capsys: pytest.CaptureFixture):
    assert main([*MODEL, "--hardware", "h100:1x1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_lengths_some_are_assumed_and_said(capsys: pytest.CaptureFixture):
    line = [*MODEL, "--hardware", "h100:1x1", "--json"]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert "prompts and answers of 1,024 tokens are assumed" in err
    assert main([*line, "--prompt-tokens", "1024", "--output-tokens", "1024"]) == 0
    assert json.loads(out)["best"] == json.loads(capsys.readouterr().out)["best"]


def test_a_step_of_an_engine_has_wide_tables(capsys):
    """67.7 GiB of weights were measured for int8 beside bf16 embeddings (70.6 GB if they were int8 too)."""
    step = ["plan", "serve", "--model", "llama-3.1-70b", "--hardware", "h100:1x1"]
    step += ["--weights-dtype", "int8", "--phase", "generate", "--batch", "1", "--context", "2048"]
    ours = document(capsys, *step)
    engine = document(capsys, *step, "--engine", "vllm")
    weights = [one["bytes_per_chip"]["weights"] for one in (ours, engine)]
    assert weights[0] < 70.7e9 and abs(weights[1] / 2**30 - 67.7) < 0.1


def test_a_serving_plan_opens_with_its_verdict(capsys):
    asked = (*MODEL, "--hardware", "v5e:2x2,h100:1x2", "--prompt-tokens", "1k", "--output-tokens", "128")
    verdict = document(capsys, *asked, "--tpot", "30ms")["verdict"]
    assert verdict["asked"].endswith("answers of 128, with a time per token of at most 30 ms.")
    assert "a chip-hour (Google Cloud, list price on demand, February 2025)" in verdict["price"]
    assert " tokens/s, " in verdict["best"] and verdict["next"] != verdict["best"]
    assert main([*asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("Best: ") and any(line.startswith("Price: ") for line in lines[:5])


def test_a_plan_for_a_load_is_written(tmp_path, capsys) -> None:
    """-o writes the plan and its document; options without an effect on it are refused."""
    path = tmp_path / "s.toml"
    load = [*MODEL, "--hardware", "h100:1x1", "--rate", "2", "--prompt-tokens", "256", "--output-tokens", "8"]
    assert main([*load, "-o", str(path)]) == 0
    plan = load_plan(path)
    assert (plan.hardware, plan.workload.phase, plan.workload.seq_len) == ("h100:1x1", "generate", 265)
    assert json.loads(path.with_suffix(".json").read_text())["rate_per_second"] == 2
    assert main([*load, "--explain"]) == 2
    assert "leave out --explain" in capsys.readouterr().err


def test_a_server_needs_memory_for_its_programs(capsys) -> None:
    """On TPUs, whose compiled layers are some megabytes in every one of the programs."""
    found = document(capsys, *ASKED)
    server, best = found["server"], found["best"]
    counts = server["programs"]
    assert counts["samplers"] == 24 and counts["prompts"] == 8
    assert server["bytes"] == best["bytes_per_chip"]["total"] + server["program_bytes"]
    assert server["boots"]


def test_the_published_file_of_a_narrow_type_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """LLaMA 3.1 405B: the published fp8 file has attention in bf16, 60.9 GB a chip in place of 50.8."""
    words = ["plan", "serve", "--hardware", "h100:1x8", "--weights-dtype", "fp8", "--layout", "tensor=8"]
    step = ["--phase", "generate", "--batch", "1", "--context", "1024"]
    assert main([*words, *step, "--model", "llama-3.1-405b"]) == 0
    asked = capsys.readouterr()
    assert "--model llama-3.1-405b-fp8" in asked.err and "weights 50.8 GB" in asked.out
    assert main([*words, *step, "--model", "llama-3.1-405b-fp8"]) == 0
    published = capsys.readouterr()
    assert not published.err and "weights 60.9 GB" in published.out


@pytest.mark.parametrize("machine", ["2x4090", "RTX 4090 x2"])
def test_machines_are_read_as_shops_write_them(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "serve", "--model", "llama-3.2-1b", "--prompt-tokens", "512", "--output-tokens", "64"]
    assert main([*line, "--hardware", machine, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["hardware"] == "rtx4090:2"

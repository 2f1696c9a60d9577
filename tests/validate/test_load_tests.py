"""Published load tests: what rows mean, how they are simulated, and how their predictions are scored."""

import json
from dataclasses import fields, replace
from math import exp

import numpy as np
import pytest

from meshwright.cli.load_test_output import missed_bars, show_load_tests
from meshwright.cli.main import main
from meshwright.cost.serving_step import Passes
from meshwright.engines.serving_engine import ENGINES
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.presets import PRESETS
from meshwright.plan.serve.engine_steps import EngineSteps, EngineTable
from meshwright.plan.serve.with_engine import on_engine
from meshwright.validate.load_test_recipes import PoolRecipe, Recipe, one_pool_drafts, recipes_of
from meshwright.validate.load_test_row import FIGURES, LoadTestRow, WorkerDegrees
from meshwright.validate.load_test_scores import load_test_document
from meshwright.validate.load_test_settings import decode_slots
from meshwright.validate.load_tests import (
    LoadTestCase,
    load_test_case,
    load_test_cases,
    predict_load_test,
    predict_load_tests,
)
from meshwright.validate.published import UnreadRow, read_rows

CELLS = {
    "id": "S1",
    "source": "a run",
    "year": "2026",
    "engine": "vllm",
    "model": "llama-3.1-8b",
    "system": "h100",
    "hardware": "h100:1x1",
    "chips": "1",
    "weight_dtype": "bf16",
    "mode": "together",
    "concurrency": "8",
    "prompt_len": "1000",
    "output_len": "100",
    "ttft_seconds": "0.1",
    "tpot_seconds": "0.01",
}


def row(tmp_path, **cells: str) -> LoadTestRow | UnreadRow:
    names = [field.name for field in fields(LoadTestRow)]
    path = tmp_path / "rows.csv"
    values = CELLS | cells
    path.write_text(",".join(names) + "\n" + ",".join(values.get(name, "") for name in names) + "\n")
    [read] = read_rows(path)
    assert isinstance(read, LoadTestRow | UnreadRow)
    return read


def predicted(tmp_path, **cells: str) -> dict[str, float]:
    read = row(tmp_path, **cells)
    assert isinstance(read, LoadTestRow)
    prediction = predict_load_test(read)
    assert prediction.predicted, prediction.skipped
    return prediction.predicted


def test_a_row_that_cannot_be_read_has_its_line_and_reason(tmp_path):
    read = row(tmp_path, mode="elsewhere")
    assert isinstance(read, UnreadRow)
    assert "line 2 (S1): mode = 'elsewhere' is unknown; fits: together, apart" in read.reason
    [prediction] = predict_load_tests([read])
    assert prediction.skipped == read.reason
    assert load_test_document([prediction])["skipped"] == 1


def test_rows_have_mean_lengths_and_prompts_without_an_answer(tmp_path):
    """An answer of no token ends with the prompt, and its row has no time per token."""
    read = row(tmp_path, prompt_len="1000.4", output_len="99.6")
    assert isinstance(read, LoadTestRow) and (read.prompt_len, read.output_len) == (1000, 100)
    lone = [row(tmp_path, output_len=tokens, tpot_seconds="") for tokens in ("0", "1")]
    assert [each.figures.keys() for each in lone] == [{"ttft_seconds": 0, "e2e_seconds": 0}.keys()] * 2  # pyright: ignore
    none, first = predictions = [predict_load_test(each) for each in lone]  # pyright: ignore
    assert none.predicted == first.predicted and none.error("tpot_seconds") is None
    assert none.error("ttft_seconds") == none.error("e2e_seconds")
    document = load_test_document([*predictions, predict_load_test(row(tmp_path, tpot_seconds=""))])  # pyright: ignore
    assert [document["figures"][name]["num_rows"] for name in FIGURES] == [0, 3, 2]
    assert document["rows"][0]["errors"]["tpot_seconds"] is None
    show_load_tests(document, list_rows=True)
    assert missed_bars(load_test_document(predictions[:1]), None, None)[0].startswith("first token: median")


def test_an_expert_group_that_is_counted_twice_is_counted_once(tmp_path):
    """The same run is listed with n devices and with n times n."""
    read = row(tmp_path, tensor="64", data="1", expert_tensor="8", expert="8", chips="64")
    assert isinstance(read, LoadTestRow)
    assert read.pools() == [(1, WorkerDegrees(8, 1, 1, 8))]
    read = replace(read, tensor=4, data=4, expert_tensor=1, expert=16, chips=16)
    assert read.pools() == [(1, WorkerDegrees(4, 1, 1, 4))]
    read = replace(read, tensor=8, data=1, expert_tensor=8, expert=1, chips=8)
    assert read.pools() == [(1, WorkerDegrees(8, 1, 8, 1))]


def test_more_requests_at_once_wait_longer_for_each_token(tmp_path):
    few, many = (predicted(tmp_path, concurrency=number) for number in ("4", "64"))
    assert few["tpot_seconds"] < many["tpot_seconds"] and few["ttft_seconds"] < many["ttft_seconds"]
    assert few["e2e_seconds"] == pytest.approx(few["ttft_seconds"] + 99 * few["tpot_seconds"])


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_engines_answer_within_a_few_weights_reads(tmp_path, engine: str):
    """16 GB of weights at 3.35 TB/s take 4.8 ms a token; eight sequences add little."""
    figures = predicted(tmp_path, engine=engine)
    assert 0.0048 < figures["tpot_seconds"] < 0.012


def test_pools_apart_do_not_wait_for_prompts(tmp_path):
    """A decode step of eight sequences is shorter than the mean step of a pool with prompts."""
    pools = {"prefill_workers": "1", "prefill_tensor": "1", "decode_workers": "1", "decode_tensor": "1"}
    apart = predicted(tmp_path, mode="apart", chips="2", hardware="h100:1x2", prompt_len="8000", **pools)
    together = predicted(tmp_path, prompt_len="8000")
    assert apart["tpot_seconds"] < together["tpot_seconds"]


def test_ranks_that_do_not_divide_the_heads_share_redundant_experts(tmp_path):
    read = row(
        tmp_path,
        model="deepseek-v3",
        weight_dtype="fp8",
        hardware="gb200-nvl72:1x72",
        chips="72",
        tensor="72",
        expert_tensor="72",
    )
    assert isinstance(read, LoadTestRow)
    assert predict_load_test(read).layout == "data=72,expert=72,remat=none"


def test_memory_that_the_driver_reports_differs_from_the_data_sheet():
    """nvidia-smi on a B200 has 183,359 MiB, its data sheet 180 GB. TPUs have no such figure."""
    assert load("b200:1x4").chip.reported_bytes == pytest.approx(183_359 * 2**20, rel=1e-6)
    assert load("h100:1x8").chip.reported_bytes == pytest.approx(81_559 * 2**20, rel=1e-6)
    assert load("v5p:2x2x1").chip.reported_bytes == load("v5p:2x2x1").chip.hbm_bytes


def test_a_model_that_is_unknown_is_skipped_by_name(tmp_path):
    read = row(tmp_path, model="no-such-model")
    [prediction] = predict_load_tests([read])
    assert "line 2 (" in (prediction.skipped or "") and "no-such-model" in (prediction.skipped or "")


def test_ranges_hold_four_of_five_rows_of_pairs_left_out():
    """Each published pair of engine and model on a machine is covered by the others."""
    from meshwright.plan.spread import serving_rows, serving_spread

    inside = [
        1 / (1 + spread.within) <= exp(row.log_error) <= 1 + spread.within
        for row in serving_rows()
        if row.figure == "tpot_seconds"
        for spread in [
            serving_spread(row.figure, row.kind, row.software, row.chip, row.experts, without=row.source)
        ]
    ]
    assert 0.75 <= sum(inside) / len(inside) <= 0.90


def test_a_row_has_the_range_of_each_figure(tmp_path):
    read = row(tmp_path)
    assert isinstance(read, LoadTestRow)
    document = predict_load_test(read).to_dict()
    assert document["range"].keys() == document["predicted"].keys() == {  # pyright: ignore
        "tpot_seconds", "ttft_seconds", "e2e_seconds",
    }  # fmt: skip
    for name, (low, high) in document["range"].items():  # pyright: ignore
        assert low < document["predicted"][name] < high  # pyright: ignore


def test_servers_that_collect_tokens_send_the_first_one_later(tmp_path):
    """The answer ends as before: SGLang's scripts on Blackwell collect 30 tokens."""
    cells = {
        "model": "deepseek-v3",
        "weight_dtype": "fp8",
        "hardware": "b200:1x8",
        "chips": "8",
        "tensor": "8",
    }
    direct, collected = (predicted(tmp_path, engine=name, **cells) for name in ("vllm", "sglang"))
    assert collected["ttft_seconds"] > direct["ttft_seconds"] + 20 * collected["tpot_seconds"]


def test_pools_apart_without_workers_have_those_of_launch_scripts(tmp_path):
    """Few requests: four workers that split heads for one of prefill; many: sequences of each device."""
    cells = {
        "engine": "trtllm", "model": "deepseek-v3", "weight_dtype": "fp8", "hardware": "gb200-nvl72:1x16",
        "mode": "apart", "chips": "16", "prompt_len": "1024", "output_len": "1024", "prefill_tensor": "8",
        "prefill_expert": "8", "decode_tensor": "8", "decode_expert": "8",
    }  # fmt: skip
    few, many = (load_test_case(row(tmp_path, concurrency=number, **cells)) for number in ("8", "4096"))  # pyright: ignore
    assert few.workers == (1, 4) and str(few.servers[1].layout) == "expert=8,tensor=8,remat=none"
    assert many.workers[1] == 1 and str(many.servers[1].layout) == "data=8,expert=8,remat=none"
    assert few.servers[1].gain > 1


def test_requests_beyond_the_decode_slots_wait_for_their_first_token(tmp_path):
    """180 requests for 32 devices of 4 sequences: measured 2.2 s, of which prefill takes 0.3."""
    cells = {
        "engine": "trtllm", "model": "deepseek-v3", "weight_dtype": "nvfp4", "hardware": "gb200-nvl72:1x36",
        "mode": "apart", "chips": "36", "prompt_len": "1024", "output_len": "1024", "prefill_tensor": "4",
        "prefill_expert": "4", "decode_tensor": "32", "decode_expert": "32",
    }  # fmt: skip
    waiting, held = (predicted(tmp_path, concurrency=number, **cells) for number in ("180", "128"))
    assert held["ttft_seconds"] < 0.5 < 1.2 < waiting["ttft_seconds"] < 3.5
    sizes = {(666, 32): 512, (180, 32): 128, (3072, 8): 3072, (7, 8): 8, (1600, 16): 1536}
    read = row(tmp_path, concurrency="666", **cells)
    for (concurrency, groups), slots in sizes.items():
        assert decode_slots(read, concurrency, groups, splits=False) == slots  # pyright: ignore
    assert decode_slots(read, 666, 1, splits=True) == 666  # pyright: ignore


_APART = {
    "engine": "trtllm", "model": "deepseek-v3", "weight_dtype": "fp8", "hardware": "b200:2x8", "chips": "16",
    "mode": "apart", "prompt_len": "1024", "output_len": "1024", "prefill_tensor": "8", "decode_tensor": "8",
}  # fmt: skip


def test_a_row_with_pools_apart_has_the_settings_of_its_search(tmp_path):
    """InferenceX: 8 requests on 8 decode workers that split heads, with 3 draft tokens."""
    read = row(tmp_path, concurrency="8", **_APART)
    assert isinstance(read, LoadTestRow)
    recipe = Recipe(PoolRecipe(1, 8, True), PoolRecipe(8, 8, False), decode_batch=1, drafts=3)
    assert recipes_of(read, "deepseek-v3") == (recipe,) and recipe.slots == 8
    [case] = load_test_cases(read)
    assert (case.workers, case.slots, case.servers[0].data, case.servers[1].data) == ((1, 8), 8, 8, 1)
    assert case.servers[1].drafts == 3 and case.servers[1].gain == pytest.approx(2.61, abs=0.01)
    assert not recipes_of(replace(read, concurrency=9), "deepseek-v3")
    assert not recipes_of(replace(read, decode_workers=7), "deepseek-v3")
    # A table that counts the devices of both pools in each column.
    assert recipes_of(replace(read, prefill_tensor=72, decode_tensor=72), "deepseek-v3") == (recipe,)


def test_a_row_with_one_pool_drafts_tokens_if_all_searches_with_its_load_do(tmp_path):
    """InferenceX, dsr1-fp4-b200-trt-mtp: 16 to 64 requests on expert groups of 4 devices draft 3 tokens."""
    cells = {
        "engine": "trtllm", "model": "deepseek-v3", "weight_dtype": "nvfp4", "hardware": "b200:1x4",
        "chips": "4", "concurrency": "16", "prompt_len": "1024", "output_len": "1024", "tensor": "4",
        "expert": "4", "engine_version": "1.1.0rc2.post2",
    }  # fmt: skip
    read = row(tmp_path, **cells)
    assert isinstance(read, LoadTestRow)
    assert one_pool_drafts(read, "deepseek-v3") == 3
    [server] = load_test_case(read).servers
    assert server.drafts == 3 and server.gain == pytest.approx(2.61, abs=0.01)
    # 64 requests ran with and without drafts; whole experts on each device ran without; and other versions.
    for other in ({"concurrency": 64}, {"expert": 1, "concurrency": 32}, {"engine_version": None}):
        assert one_pool_drafts(replace(read, **other), "deepseek-v3") == 0
    # Devices with sequences of their own draft one token.
    own = replace(read, tensor=1, data=4, concurrency=128)
    assert one_pool_drafts(own, "deepseek-v3") == 1


def test_settings_that_a_row_leaves_open_are_averaged(tmp_path, monkeypatch):
    """32 requests ran with and without draft tokens: 11.0 and 5.2 ms a token measured."""
    read = row(tmp_path, concurrency="32", **_APART)
    assert isinstance(read, LoadTestRow)
    cases = load_test_cases(read)
    assert sorted(case.servers[1].drafts for case in cases) == [0, 3]

    def figures(case: LoadTestCase) -> dict[str, float]:
        return read.with_request(0.4, 0.005 if case.servers[1].drafts else 0.0125)

    monkeypatch.setattr(LoadTestCase, "figures", figures)
    predicted = predict_load_test(read).predicted
    assert predicted and predicted["tpot_seconds"] == pytest.approx((0.005 * 0.0125) ** 0.5)
    assert predicted == read.with_request(predicted["ttft_seconds"], predicted["tpot_seconds"])


def test_draft_tokens_are_verified_with_attention_of_their_own():
    """Each token of a step reads the whole cache of its sequence; absorbed latents are bound by FLOPs."""
    machine = on_engine(load("b200:1x8"), ENGINES["tensorrt-llm"])
    layout = Layout.of(data=8, expert=8, weights_dtype="fp8", kv_dtype="fp8")
    plain, drafting = (
        EngineTable(PRESETS["deepseek-v3"], layout, machine, 256, 8192, drafts) for drafts in (0, 3)
    )
    attention = [table.decode(256, 8192) - table.decode(256, 2) for table in (plain, drafting)]
    assert attention[1] == pytest.approx(4 * (1 + 3 / 61) * attention[0], rel=0.02)
    assert 1 < drafting.decode(1, 2) / plain.decode(1, 2) < 2


def test_drafts_save_the_same_time_in_steps_with_and_without_prompts():
    """A step that generates 2 tokens per sequence has half the price of a decode step; prompts have all."""
    machine = on_engine(load("b200:1x8"), ENGINES["tensorrt-llm"])
    layout = Layout.of(tensor=8, expert=8, weights_dtype="fp8", kv_dtype="fp8")
    table = EngineTable(PRESETS["deepseek-v3"], layout, machine, 8192, 8192, drafts=1)
    plain, drafting = (EngineSteps(table, 1, gain=gain) for gain in (1.0, 2.0))
    alone, beside = [(64, 4096.0, [], 0), (64, 4096.0, [(1024, 1024)], 0)]
    saved = [plain.seconds(*step) - drafting.seconds(*step) for step in (alone, beside)]
    assert saved[0] == pytest.approx(plain.seconds(*alone) / 2) and saved[1] == pytest.approx(saved[0])


def test_prompts_of_a_table_are_those_of_whole_passes():
    """Engines build the keys and values of latents for prompts: DeepSeek-V3 attends 3.4 times as fast."""
    machine = on_engine(load("gb200-nvl72:1x4"), ENGINES["tensorrt-llm"])
    layout = Layout.of(tensor=4, expert=4, weights_dtype="fp8", kv_dtype="fp8")
    table = EngineTable(PRESETS["deepseek-v3"], layout, machine, 9000, 8192)
    whole = Passes(PRESETS["deepseek-v3"], layout.at("prefill"), np.ones(1), 8192, 8192, machine)
    seconds = float(np.ravel(whole.seconds(machine))[0])
    assert table.prompts(8192, 8192 * 8192 / 2) == pytest.approx(seconds, rel=0.03)


def test_more_requests_than_max_are_those_of_the_engine(tmp_path):
    case = load_test_case(row(tmp_path, concurrency="max"))  # pyright: ignore
    assert 64 <= case.concurrency <= 1024


def test_experts_over_devices_that_repeat_heads_are_priced(tmp_path):
    """Two KV heads over four devices: experts are divided over the devices that split heads."""
    read = row(
        tmp_path, engine="sglang", model="qwen3.5-397b-a17b", weight_dtype="fp8", hardware="b200:1x4",
        chips="4", tensor="4", expert="4",
    )  # fmt: skip
    assert isinstance(read, LoadTestRow)
    assert predict_load_test(read).layout == "expert=2,tensor=2,kv_replicas=2,remat=none"


def test_the_ledger_has_load_tests_by_engine_and_pools(tmp_path, capsys):
    """A new source has today's errors; recorded lines without rows have those of the first look only."""
    row(tmp_path, source="ours")
    assert main(["validate", "--ledger", "--json", str(tmp_path / "rows.csv")]) == 0
    lines = json.loads(capsys.readouterr().out)["ledger"]
    found = {line["figure"]: line for line in lines if line["source"].startswith("ours, ")}
    assert {*found} == {"time per token", "time to first token", "request"}
    assert all(line["rows"] == 1 and line["today_median"] is not None for line in found.values())
    recorded = [
        line for line in lines if line["source"].endswith("(InferenceX and NVIDIA runs), vllm, one pool")
    ]
    assert [line["first_median"] for line in recorded] == [0.407, 0.263, 0.351]

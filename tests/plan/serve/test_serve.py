"""Serving planned: the chapter's tables, figures worked by hand, and what must hold of any frontier."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright as mw
from meshwright.cost.serving_step import Passes, inference_cost, pass_cost
from meshwright.engines.serving_engine import ENGINES
from meshwright.errors import PlanError
from meshwright.hardware.catalog import chip, load
from meshwright.hardware.prices import priced
from meshwright.hardware.roofs import compute_bound_batch
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.moves.attention import uses_ring
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MoE
from meshwright.models.count import count_params
from meshwright.models.presets import PRESETS, load_model
from meshwright.plan.serve.explain import explain_serving
from meshwright.plan.serve.layouts import serving_layouts
from meshwright.plan.serve.phase import price_phase
from meshwright.plan.serve.prefill import PromptPasses
from meshwright.plan.serve.requests import Requests, Targets
from meshwright.plan.serve.search import AS_GOOD, Infeasible, ServePlan, search_serving, serving_machines
from meshwright.plan.serve.serving_plan import plan_of_point
from meshwright.plan.serve.with_engine import on_engine, with_engine
from meshwright.plan_file import load_plan
from meshwright.units import format_seconds

# `meshwright.plan` is a function, too: the module is not an attribute of the package.
search = import_module("meshwright.plan.serve.search")
LLAMA, BF16 = PRESETS["llama-2-13b"], {"weights_dtype": "bf16"}
# The chapter's example: L64 D4096 F16384 N32 K8 H256 V32128, tied.
CHAPTER = ModelConfig("chapter", 64, 4096, 16384, 32, 8, 256, 32128, 131072, tied_embeddings=True)


def ideal(spec: str) -> Hardware:
    machine = load(spec)
    return replace(machine, chip=machine.chip.ideal())


def unpriced(machine: Hardware) -> Hardware:
    return replace(machine, chip=replace(machine.chip, price_per_chip_hour=None))


@pytest.mark.parametrize(
    ("batch", "milliseconds"), [(1, 4.98), (8, 12.13), (16, 20.30), (32, 36.65), (64, 69.33), (240, 249.09)]
)
def test_a_generate_step_reads_weights_and_caches_as_the_chapter_has_it(batch: int, milliseconds: float):
    """LLaMA-2-13B in bf16 on 8 v5e at 8,192 positions; the chapter divides by 8.2e11 bytes/s a chip.

    The chapter also counts the embedding's 0.33 GB, of which a step reads a row a sequence, and leaves out
    activations, which are up to 1% here.
    """
    cost, _ = inference_cost(LLAMA, Layout.of(tensor=8), ideal("v5e:2x4"), "generate", batch, 8192)
    read = sum(term.seconds for term in cost.terms if term.name.startswith(("matmul", "attention")))
    embedding = LLAMA.vocab_size * LLAMA.d_model * 2 / 8 / 8.1e11
    assert (read + embedding) * 8.1 / 8.2 == pytest.approx(milliseconds * 1e-3, rel=0.01)


def test_a_small_model_takes_what_its_weights_and_caches_take_to_read():
    """30B in int8 on a v5e 4x4 with caches of 819 MB: 2.5 ms at batch 4 and 21 ms at 256, or nearly."""
    config = replace(CHAPTER, num_layers=96, d_model=4096, num_kv_heads=16, num_heads=32, d_head=128)
    params_bytes, cache_bytes = 30e9, 819e6
    context = round(cache_bytes / (2 * 96 * 16 * 128))
    layout = Layout.of(tensor=16, weights_dtype="int8", kv_dtype="int8")
    for batch, seconds in ((4, 2.5e-3), (256, 21e-3)):
        cost, memory = inference_cost(config, layout, ideal("v5e:4x4"), "generate", batch, context)
        reads = sum(t.seconds for t in cost.terms if t.bound == "hbm" and "elementwise" not in t.name)
        scale = (params_bytes + batch * cache_bytes) / (16 * (memory.weights + memory.cache))
        # The attention's share that FLOPs bind is not read time; what is left grows as the bytes do.
        assert reads * scale <= 1.1 * seconds


def test_batches_at_128k_are_those_of_keys_and_values():
    """int8 keys and values are 2 L K H = 262,144 bytes a token: 7 sequences of 128k on 16 v5e, not 14.

    A kernel reads them in place. `mw serve` has none for int8 on TPUs, and copies those of a layer.
    """
    words, machine = {"weights_dtype": "int8", "kv_dtype": "int8"}, load("v5e:4x4")
    machine = replace(machine, chip=machine.chip.roofline())
    found = {
        str(layout.word("cache")): price_phase(
            CHAPTER, machine, Workload(2, 131_072, "generate"), [layout]
        ).max_batch
        for layout in serving_layouts(CHAPTER, load("v5e:4x4"), words, replicas=False)
        if layout.degree("kv_replicas") > 1 and layout.degree("tensor2") == 1
    }
    assert found == {"copies": 3, "batch": 6, "sequence": 7}  # copies hold half, a split batch is even


def test_critical_batches_are_the_chapters():
    v5e = chip("v5e")
    assert compute_bound_batch(v5e) == pytest.approx(240, rel=0.02)
    assert compute_bound_batch(v5e, "int8") == pytest.approx(120, rel=0.02)
    assert compute_bound_batch(v5e, "int8", "int8") == pytest.approx(240, rel=0.02)
    moe = replace(CHAPTER, moe=MoE(16, 2, 16384))
    found = search_serving(
        moe, [load("v5e:8x8")], Requests(1024, 128), precisions=[{"weights_dtype": "bf16"}]
    )
    assert explain_serving(found.best).critical_batch == pytest.approx(1920, rel=0.02)


def test_states_count_as_caches_in_the_explanation():
    """Falcon Mamba has no keys and values: 64 layers of 8,192 x (16 f32 + 3 bf16) a sequence."""
    config, layout = PRESETS["falcon-mamba-7b"], Layout.of(data=4)
    plan = search_serving(config, [load("v5p:2x2x1")], Requests(2048, 256), precisions=[BF16], layout=layout)
    explained = explain_serving(plan.best)
    states = 64 * 8192 * (16 * 4 + 3 * 2)
    assert explained.crossover_batch == -(-2 * count_params(config).total // states)
    words = " ".join(str(explained).split())
    assert "36.7 MB in bf16, 36.7 MB of it states, the same for any length; from" in words


def test_experts_are_read_as_far_as_tokens_choose_them():
    """One token reads 2 of Mixtral's 8 experts, 64 read all, each with a block of 64 rows.

    The loop over the blocks of one token copies their weights before it reads them: three times their bytes.
    """
    config, layout = PRESETS["mixtral-8x7b"], Layout.of(tensor=8)
    seconds = [
        sum(t.seconds for t in cost.terms if t.name.startswith("matmul"))
        for cost, _ in (pass_cost(config, layout.at("generate"), ideal("h100:8"), b, 1, 16) for b in (1, 64))
    ]
    experts = 3 * config.d_model * 14336 * 32 * 2 / 8 / 3.35e12
    rows = 8 * 64 * 3 * (config.d_model + 14336 / 8) * 32 * 2 / 3.35e12
    assert seconds[1] - seconds[0] == pytest.approx((8 - 3 * 2) * experts + rows, abs=0.02 * 8 * experts)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_a_kernel_of_all_experts_copies_no_weights(engine: str) -> None:
    """Four sequences of DeepSeek-V3 on eight H200s took 10.3 ms a token (SGLang 0.5.9, InferenceX)."""
    config, layout = PRESETS["deepseek-v3"], Layout.of(tensor=8).replace(weights_dtype="fp8")
    machine = on_engine(load("h200:1x8"), ENGINES[engine])
    cost, _ = inference_cost(config, layout, machine, "generate", 4, 1536)
    assert cost.seconds == pytest.approx(0.0103, rel=0.15)


def test_collectives_of_engines_reach_the_measured_share_of_links():
    """NVIDIA, TensorRT-LLM's tech blog 18: us to experts and back, by tokens of each of 8 GB200s."""
    layout = Layout.of(data=8, expert=8, weights_dtype="fp8", kv_dtype="fp8")
    machine = on_engine(load("gb200-nvl72:1x8"), ENGINES["tensorrt-llm"])
    for tokens, measured in ((1, 49.9), (32, 50.9), (128, 69.8), (512, 181.2), (2048, 634.4)):
        cost, _ = inference_cost(PRESETS["deepseek-v3"], layout, machine, "generate", 8 * tokens, 1536)
        sent = [one.seconds for one in cost.collectives if one.op == "all_to_all"]
        assert len(sent) == 2 and sum(sent) == pytest.approx(measured * 1e-6, rel=0.1)


def test_kernels_of_engines_multiply_no_padding():
    """A program of static shapes multiplies blocks of rows of each expert; an engine, the rows it has."""
    config, layout = PRESETS["deepseek-v3"], Layout.of(tensor=8).replace(weights_dtype="fp8")
    machine = on_engine(load("h200:1x8"), ENGINES["vllm"])
    static = replace(machine, software=replace(machine.software, static_rows=True))
    rows, blocks = (
        inference_cost(config, layout, hardware, "generate", 256, 1536)[0].seconds
        for hardware in (machine, static)
    )
    assert 1.02 * rows < blocks
    assert not with_engine(load("a100-80gb:1x1"), ENGINES["gpt-fast"]).software.static_rows


def test_passes_of_many_batches_are_those_of_each():
    batches = [2.0, 16.0, 96.0]
    for machine, words in (
        ("v5e:4x4", "tensor=8,kv_replicas=2,cache=batch,weights_dtype=int8"),
        ("h100:2x8", "tensor=8,kv_replicas=2,cache=sequence,kv_dtype=int8"),
    ):
        config, hardware = PRESETS["llama-3-70b"], load(machine)
        layout = Layout.parse(words).at("generate")
        many = Passes(config, layout, np.array(batches), 1, 4096, hardware)
        alone = [pass_cost(config, layout, hardware, int(batch), 1, 4096) for batch in batches]
        assert many.seconds(hardware).tolist() == pytest.approx([cost.seconds for cost, _ in alone])
        assert many.memory.total.tolist() == pytest.approx([memory.total for _, memory in alone])


def test_a_cache_beyond_its_heads_is_split_with_the_collectives_of_its_kind():
    config, hardware = PRESETS["llama-3-70b"], load("v5e:4x4")
    ops, caches = {}, {}
    for cache in ("copies", "batch", "sequence"):
        layout = Layout.of(tensor=8, kv_replicas=2, cache=cache).at("generate")
        cost, memory = pass_cost(config, layout, hardware, 16, 1, 4096)
        moved = [one for one in cost.collectives if one.tensor.endswith("attention")]
        ops[cache] = [(one.op, one.axes, one.count) for one in moved]
        caches[cache] = memory.cache
    assert ops == {
        "copies": [],
        "batch": [("all_to_all", ("kv_replicas",), 80)] * 2,
        "sequence": [("all_gather", ("kv_replicas",), 80), ("reduce_scatter", ("kv_replicas",), 80)],
    }
    assert caches["copies"] == 2 * caches["batch"] == 2 * caches["sequence"]


def test_narrow_types_are_read_as_they_lie():
    config, hardware = PRESETS["llama-3-8b"], ideal("v5e:2x4")
    cost, memory = {}, {}
    for dtype in ("bf16", "int8", "int4"):
        layout = Layout.of(tensor=8, weights_dtype=dtype, kv_dtype=dtype).at("generate")
        cost[dtype], memory[dtype] = pass_cost(config, layout, hardware, 8, 1, 4096)
    # Beside 128 elements of a head lies a scale of four bytes.
    scaled = {"bf16": 1, "int8": 128 / 132, "int4": 64 / 68}
    for wide, narrow in (("bf16", "int8"), ("int8", "int4")):
        assert scaled[wide] * memory[wide].cache == 2 * scaled[narrow] * memory[narrow].cache
        assert cost[wide].seconds > 1.3 * cost[narrow].seconds
    # A scale an output is little, one for 32 numbers of int4 a quarter; tables stay in int8.
    shares = [memory[dtype].weights / memory["bf16"].weights for dtype in ("int8", "int4")]
    assert shares == pytest.approx([1 / 2, (0.625 * 6.98 + 1.05) / (2 * 8.03)], rel=2e-3)


@pytest.fixture(scope="module")
def frontier() -> ServePlan:
    return search_serving(
        PRESETS["llama-3-8b"],
        [unpriced(machine) for machine in serving_machines(["v5e", "h100:1x8"])],
        Requests(1024, 256),
        Targets(tpot=0.02),
        precisions=[BF16, {"weights_dtype": "int8", "kv_dtype": "int8"}],
    )


def test_no_point_of_a_frontier_is_beaten_by_another(frontier: ServePlan):
    points = frontier.frontier
    assert len(points) > 5
    for one, other in pairwise(points):
        assert one.tpot_seconds < other.tpot_seconds
        assert one.tokens_per_second_per_chip < other.tokens_per_second_per_chip
    for kind in frontier.by_chip.values():
        for one in kind:
            better = [p for p in points if p.tpot_seconds <= one.tpot_seconds]
            assert max(p.tokens_per_second_per_chip for p in better) >= one.tokens_per_second_per_chip


def test_what_is_chosen_fits_and_meets_the_targets(frontier: ServePlan):
    best = frontier.best
    assert best.tpot_seconds <= 0.02 and best.batch <= best.max_batch
    assert best.memory.total <= best.hardware.chip.program_bytes
    assert best.tpot_seconds == pytest.approx(best.cost.seconds, rel=0.02)
    wanted = [p for p in frontier.frontier if p.tpot_seconds <= 0.02]
    assert best.tokens_per_second_per_chip == max(p.tokens_per_second_per_chip for p in wanted)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=20))
def test_a_token_of_requests_that_differ_sees_the_mean_over_steps(lengths: list[tuple[int, int]]):
    """By brute force: every generated token of every request, at the context that its request has halfway."""
    requests = Requests.of_lengths(lengths)
    seen = [prompt + max(1, output // 2) for prompt, output in lengths for _ in range(output)]
    assert requests.mean_context == round(sum(seen) / len(seen))
    assert requests.context == max(prompt + output for prompt, output in lengths)
    if len(set(lengths)) == 1:
        alike = Requests(*lengths[0])
        assert (requests.context, requests.mean_context) == (alike.context, alike.mean_context)


def test_without_a_target_two_percent_of_throughput_do_not_double_the_time_per_token():
    """A model bound by compute: throughput nears its limit, and the time per token grows with the batch."""
    machine, requests = load("cpu:1"), Requests(256, 128)
    f32 = {"weights_dtype": "f32", "compute_dtype": "f32", "kv_dtype": "f32"}
    found = search_serving(PRESETS["tiny"], [machine], requests, precisions=[f32])
    most = found.frontier[-1]
    assert most.batch > 4 * found.best.batch and most.tpot_seconds > 4 * found.best.tpot_seconds
    assert found.best.tokens_per_second >= most.tokens_per_second / (1 + AS_GOOD)
    within = search_serving(
        PRESETS["tiny"], [machine], requests, Targets(tpot=most.tpot_seconds), precisions=[f32]
    )
    assert within.best.batch == most.batch


def test_the_smallest_slice_of_each_type_is_the_fewest_chips_that_hold_the_weights(frontier: ServePlan):
    """8.03e9 parameters: 16.06 GB in bf16 just fit a v5e's 16.9 GB beside a cache."""
    small = {(one.chip, one.weights_dtype): one.chips for one in frontier.smallest}
    assert small == {("v5e", "bf16"): 1, ("v5e", "int8"): 1, ("h100", "bf16"): 8, ("h100", "int8"): 8}


def test_a_target_out_of_reach_names_itself_and_what_comes_nearest():
    config, machines, requests = PRESETS["llama-3-8b"], [load("v5e:2x2")], Requests(1024, 128)
    with pytest.raises(Infeasible, match=r"--tpot 10 us is met by no layout; the lowest is") as found:
        search_serving(config, machines, requests, Targets(tpot=1e-5), precisions=[BF16])
    assert found.value.nearest is not None and found.value.nearest.batch == 1
    with pytest.raises(Infeasible, match="--ttft 1 ms is met by no layout"):
        search_serving(config, machines, requests, Targets(ttft=1e-3), precisions=[BF16])
    both = (
        r"^--ttft 1 ms is met by no layout; the lowest is .*; --tpot 10 us is met by no layout; the lowest is"
    )
    with pytest.raises(Infeasible, match=both):
        search_serving(config, machines, requests, Targets(ttft=1e-3, tpot=1e-5), precisions=[BF16])
    with pytest.raises(Infeasible, match=r"its weights in bf16 are 141 GB and all chips have"):
        search_serving(PRESETS["llama-3-70b"], machines, requests, precisions=[BF16])
    with pytest.raises(Infeasible, match=r"--max-price-per-hour 1.00 USD .* the lowest is 4.80 USD;"):
        search_serving(config, machines, requests, Targets(price_per_hour=1.0), precisions=[BF16])
    unknown = [unpriced(machine) for machine in machines]
    with pytest.raises(PlanError, match="v5e has no price, which --max-price-per-hour needs"):
        search_serving(config, unknown, requests, Targets(price_per_hour=1.0), precisions=[BF16])


def test_prices_choose_the_cheapest_token_and_a_budget_bounds_the_chips():
    machines = [priced(m, {"v5e": 1.0}, "EUR") for m in serving_machines(["v5e"])]
    found = search_serving(
        PRESETS["llama-3-8b"], machines, Requests(1024, 256), Targets(price_per_hour=4.0), precisions=[BF16]
    )
    best = found.best
    assert best.price_per_hour is not None and best.price_per_hour <= 4.0
    assert best.to_dict()["currency"] == "EUR"
    prefill, generate = best.chip_seconds
    assert best.price_per_million_tokens == pytest.approx(1.0 / 3600 * (prefill + generate) / 256 * 1e6)
    assert best.prefill_to_generate_ratio == pytest.approx(prefill / generate)


def test_a_draft_head_adds_its_own_arrays_to_the_memory():
    """Its layer, its projection [2D, D] and norms; the table and the output projection are the model's."""
    config, machine = PRESETS["llama-3-8b"], [load("h100:1")]
    requests = {"prompt_tokens": 4096, "output_tokens": 256, "drafts": 2, "acceptance": 0.7}
    plain, headed = (
        search_serving(config, machine, Requests(**requests, draft_head=head), precisions=[BF16]).best
        for head in (False, True)
    )
    own = count_params(config.head).total - count_params(config).vocab
    assert headed.memory.weights - plain.memory.weights == pytest.approx(2 * own, rel=1e-3)


def test_a_prefix_and_drafts_save_what_they_do():
    config, machine = PRESETS["llama-3-8b"], [load("v5e:2x2")]
    plain = search_serving(config, machine, Requests(4096, 256), precisions=[BF16]).best
    hit = search_serving(config, machine, Requests(4096, 256, prefix_hit=0.75), precisions=[BF16]).best
    # A quarter of the tokens, which gather tables of pages, and their scores go through memory.
    assert 0.25 < hit.prefill_seconds / plain.prefill_seconds < 0.5
    drafts = search_serving(
        config, machine, Requests(4096, 256, drafts=4, acceptance=0.8), precisions=[BF16], layout=plain.layout
    )
    guessed = min(p.tpot_seconds for p in drafts.frontier)
    alone = min(
        p.tpot_seconds
        for p in search_serving(config, machine, Requests(4096, 256), precisions=[BF16]).frontier
    )
    assert guessed == pytest.approx(alone / 3.362, rel=0.2)  # five queries read the weights once


@pytest.mark.parametrize(("chips", "gathers"), [("v5e:2x2", False), ("h100:4", True)])
def test_chunks_read_the_weights_again_and_sum_to_their_passes(chips: str, gathers: bool):
    """After the first of a prompt, a chunk gathers blocks of pages up to its end, or has a kernel."""
    config, machine, layout = PRESETS["llama-3-8b"], load(chips), Layout.of(tensor=4)

    def of_passes(requests: Requests, ends: Mapping[int, int]) -> float:
        """The seconds of so many queries up to each of these positions."""
        at, longest = layout.at("prefill"), requests.context
        blocks = {end: min(longest, -(-end // 512) * 512) for end in ends}
        read = {end: blocks[end] if gathers and end > queries else end for end, queries in ends.items()}
        passes = [pass_cost(config, at, machine, 1, queries, read[end]) for end, queries in ends.items()]
        return sum(cost.seconds for cost, _ in passes)

    requests = Requests(8192, 128)
    whole, chunked = (
        float(PromptPasses(config, layout, requests, chunk, machine).seconds(machine)[0])
        for chunk in (None, 512)
    )
    assert chunked == pytest.approx(of_passes(requests, dict.fromkeys(range(512, 8193, 512), 512)))
    least, most = (2, 3) if gathers else (1, 2)
    assert least * whole < chunked < most * whole
    # What a prefix cache holds is not computed, but seen; the last chunk may be shorter.
    requests = Requests(8000, 128, prefix_hit=0.5)
    hit = PromptPasses(config, layout, requests, 1024, machine)
    ends = {5024: 1024, 6048: 1024, 7072: 1024, 8000: 928}
    assert float(hit.seconds(machine)[0]) == pytest.approx(of_passes(requests, ends))


@pytest.mark.parametrize(("chips", "has_kernel"), [("v5e:2x4", False), ("h100:8", True)])
def test_an_explanation_says_where_pages_are_gathered(chips: str, has_kernel: bool):
    """An int8 cache is 67,584 bytes a token, scales and all: moved twice more than by a kernel."""
    layout = Layout.of(tensor=8, kv_dtype="int8")
    point = search_serving(
        PRESETS["llama-3-8b"],
        [load(chips)],
        Requests(2048, 128),
        precisions=[{"weights_dtype": "bf16", "kv_dtype": "int8"}],
        layout=layout,
    ).best
    found = str(explain_serving(point))
    assert ("keys are in int8, queries in bf16" in found) is not has_kernel
    if not has_kernel:
        rate = point.hardware.chip.memory_bytes_per_second("bf16")
        more = 2 * point.batch * point.requests.mean_context * 67_584 / 8 / rate
        assert f"{format_seconds(more)} more a step" in found


def test_a_prompt_split_by_position_is_prefilled_sooner_than_by_heads_alone():
    """Beyond the bound of tensor parallelism its collectives take the time; no kernel attends in a ring.

    What keeps the weights where generation has them runs; what shares them over more devices does not.
    """
    config, machine, requests = PRESETS["llama-3-70b"], load("h100:4x8"), Requests(32_768, 128)
    plain = search_serving(
        config, [machine], requests, precisions=[BF16], layout=Layout.of(tensor=8, data=4)
    ).best
    ways = {
        way.layout.context: way
        for way in plain.other_prefills
        if way.layout.context > 1 and uses_ring(way.layout)
    }
    assert ways and all(way.layout.mesh.num_devices == 32 for way in ways.values())
    # Four replicas that each have a part of the prompt, instead of prompts of their own.
    assert plain.ttft_seconds / 4 < ways[4].ttft_seconds < plain.ttft_seconds
    target = Targets(ttft=1.1 * min(way.ttft_seconds for way in ways.values()))
    with pytest.raises(
        Infeasible, match=r"--ttft .* over context=\d+ it would be .* mw serve does not run yet"
    ):
        search_serving(config, [machine], requests, target, precisions=[BF16], layout=plain.layout)
    found = search_serving(
        config, [machine], requests, target, precisions=[BF16], layout=plain.layout, runnable=False
    ).best
    assert found.prefill_layout.context > 1 and found.ttft_seconds <= target.ttft
    assert found.tpot_seconds == pytest.approx(plain.tpot_seconds, rel=0.5) and found.layout == plain.layout
    assert found.why_not and "context" in found.why_not and found.served_layout is None
    runs = Targets(ttft=1.01 * ways[4].ttft_seconds)
    served = search_serving(config, [machine], requests, runs, precisions=[BF16], layout=plain.layout).best
    assert served.why_not is None and served.ttft_seconds <= runs.ttft
    both = plan_of_point(served).layout
    assert (both.context, both.tensor, both.data) == (4, 8, 1)
    alike = [
        pass_cost(config, one.at("generate"), machine, served.batch, 1, 32_832)
        for one in (both, plain.layout)
    ]
    assert alike[0][0].seconds == alike[1][0].seconds and alike[0][1] == alike[1][1]
    assert found.memory.total <= machine.chip.program_bytes
    way = "ring attention" if uses_ring(found.prefill_layout) else "keys and values all-gathered"
    assert f"split by position over context = {found.prefill_layout.context} ({way}" in str(
        explain_serving(found)
    )


def test_paged_caches_hold_more_requests():
    config, machine = PRESETS["llama-3-8b"], [load("v5e:2x2")]
    layout = Layout.of(tensor=4)
    found = [
        search_serving(
            config, machine, Requests(512, 4096, paged=paged), precisions=[BF16], layout=layout
        ).best
        for paged in (False, True)
    ]
    assert found[1].max_batch / found[0].max_batch == pytest.approx(4608 / 2560, rel=0.05)


def test_requests_that_are_none_are_refused():
    for words, said in (
        ({"prompt_tokens": 0}, "prompt_tokens = 0; it must be a positive integer"),
        ({"prefix_hit": 1.0}, "prefix_hit = 1.0; it must be at least 0 and below 1"),
        ({"acceptance": 0.5}, "acceptance = 0.5 needs drafts"),
    ):
        with pytest.raises(PlanError, match=said):
            Requests(**{"prompt_tokens": 8, "output_tokens": 8, **words})
    with pytest.raises(PlanError, match=r"tpot = -1; it must be a number above 0"):
        Targets(tpot=-1)
    assert Targets().ttft == inf


def test_the_library_plans_serving_and_saves_what_is_served(tmp_path):
    found = mw.plan("llama-3-8b", "v5e:2x2,v5e:1x2", mw.Serve("1k", 128, tpot=0.1), weights_dtype="bf16,int8")
    best = found.best
    assert len(found) == len(list(found)) > 1 and "Throughput per chip" in repr(found)
    assert best.fits and best.tpot_seconds <= 0.1 and 0 < best.mfu < 1
    assert "B_crit" in str(best.explain()) and found.to_dict()["best"] == best.to_dict()
    plan = load_plan(best.save(tmp_path / "plan.toml"))
    assert plan.workload == Workload(best.batch, 1152, "generate") and plan.layout == best.layout


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_machines_and_layouts_changes_nothing(seed: int, monkeypatch: pytest.MonkeyPatch):
    """The mixture of the book's questions: prices of one machine are not those of another."""
    config, order = load_model("docs/book/served-moe.toml"), random.Random(seed)
    machines = [load("v5e:2x4"), load("v5e:4x4"), load("v5e:4x8")]
    types = [{"weights_dtype": "int8", "kv_dtype": "int8"}]

    def answer(machines: Sequence[Hardware]) -> ServePlan:
        return search_serving(config, machines, Requests(4096, 512), precisions=types)

    def shuffled(*given: Any, **named: Any) -> list[Layout]:
        layouts = list(serving_layouts(*given, **named))
        return order.sample(layouts, len(layouts))

    first = answer(machines)
    monkeypatch.setattr(search, "serving_layouts", shuffled)
    again = answer(order.sample(machines, len(machines)))
    assert [one.hardware for one in first.smallest] == ["v5e:4x4"]
    assert first.smallest == again.smallest and str(first.best) == str(again.best)
    assert [*map(str, first.frontier)] == [*map(str, again.frontier)]

"""What one pass with a cache reads and keeps: the model's own count of its cache, sharded by the layout."""

from dataclasses import replace

import pytest
from tests.cost.recorded import BF16

from meshwright.cost.cached_ops import keys_read
from meshwright.cost.graph import Graph, Node
from meshwright.cost.memory import alive_in_inference
from meshwright.cost.passes import Dtypes, compute_seconds, work_seconds
from meshwright.cost.record import record_training
from meshwright.cost.record_inference import record_inference, record_pass
from meshwright.cost.recorder import PassShape
from meshwright.cost.serving_step import in_inference, inference_cost, inference_memory
from meshwright.engines.serving_engine import ENGINES
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout import Layout
from meshwright.layout.workload import InferencePhase
from meshwright.models.config import ModelConfig
from meshwright.models.count import kv_cache_bytes, kv_read_bytes, mixer_state_bytes
from meshwright.models.presets import PRESETS
from meshwright.plan.serve.with_engine import on_engine
from meshwright.validate.quantized_file import wide_weights

# Within a window of 128, over one of 4,096, and far beyond every window.
SEQ_LENS = (100, 8192, 131_072)


def _generate(config: ModelConfig, context: int, layout: Layout | None = None, sequences: int = 1) -> Graph:
    """A recorded generate step of `sequences` behind caches of `context` positions."""
    shape = PassShape(sequences, 1, context)
    return record_pass(config, layout or Layout.of(), shape)


def _read_bytes(graph: Graph) -> int:
    """Bytes of the caches that attention reads, on one device."""
    return sum(
        segment.count * value.bytes_per_device
        for segment in graph.segments
        for node in segment.nodes
        if node.kind == "attention"
        for value in node.inputs
        if "S" in value.array.dims
    )


def test_new_states_of_a_layer_are_an_array_until_they_are_written() -> None:
    """Of Codestral Mamba 128 heads of 64 x 128 in float32 a sequence, beside some 15 rows of activations."""
    graph = _generate(PRESETS["codestral-mamba-7b"], 4096, sequences=64)
    [layer] = [segment for segment in graph.segments if segment.source]
    new_states = 64 * 128 * 64 * 128 * 4
    assert new_states < alive_in_inference(layer) < 1.05 * new_states


def test_latents_are_copied_without_a_kernel() -> None:
    """Kimi Linear's on H100s: a layer's pages of 64 sequences. Other engines have a kernel."""
    layout, h100 = Layout.of(tensor=8), load("h100:1x8")

    def copied(name: str, machine: Hardware) -> int:
        config = replace(PRESETS[name], num_layers=4)
        graph = record_inference(config, machine, layout.at("generate"), PassShape(64, 1, 4096))
        return max(node.scratch for _, node in graph.nodes() if node.name == "attention")

    assert copied("kimi-linear-48b-a3b", h100) == 64 * 4096 * BF16 * (512 + 64)
    assert copied("kimi-linear-48b-a3b", on_engine(h100, ENGINES["vllm"])) == 0
    assert copied("llama-3-8b", h100) == 0


def test_a_window_is_multiplied_in_whole_pages_without_a_kernel() -> None:
    """DeepSeek-V4's window of 128, in pages of 128, may begin within a page: two are gathered.

    Of 64 query heads of 512, scores and values take 4 FLOPs each per column and key.
    """
    config, layout = PRESETS["deepseek-v4-flash"], Layout.of().at("generate")
    graph = record_inference(config, load("v5p:2x2x1"), layout, PassShape(8, 1, 4096))
    flops = {
        node.forward[0].flops
        for _, node in graph.nodes()
        if node.name == "attention" and node.forward and node.forward[0].flops
    }
    assert 4 * 8 * 64 * 512 * 2 * 128 in flops


def test_logits_are_whole_in_float32() -> None:
    config, layout = PRESETS["falcon-mamba-7b"], Layout.of(tensor=8)
    head = _generate(replace(config, num_layers=1), 16, layout, sequences=64).segments[-1]
    logits = 64 * config.vocab_size * 4
    assert logits < alive_in_inference(head) < 1.1 * logits


@pytest.mark.parametrize("name", PRESETS)
def test_caches_are_those_that_the_model_counts(name: str) -> None:
    config = PRESETS[name]
    for seq_len in SEQ_LENS:
        graph = _generate(config, seq_len)
        kept = kv_cache_bytes(config, seq_len) + mixer_state_bytes(config)
        assert inference_memory(graph, Layout.of()).cache == kept
        assert _read_bytes(graph) == kv_read_bytes(config, seq_len)


def test_heads_and_sequences_split_a_cache() -> None:
    config, layout = PRESETS["llama-3-70b"], Layout.of(data=2, tensor=8)
    graph = _generate(config, 4096, layout, sequences=16)
    assert inference_memory(graph, layout).cache == 16 * kv_cache_bytes(config, 4096) / (2 * 8)
    assert _read_bytes(graph) == 16 * kv_read_bytes(config, 4096) / (2 * 8)


def test_stored_weights_count_their_scales() -> None:
    """LLaMA-3-8B: of int4 a scale for 32 numbers in layers, and tables in int8, with one a row."""
    config = PRESETS["llama-3-8b"]
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    tables, norms = 2 * 128_256 * 4096, (2 * 32 + 1) * 4096

    def weights(dtype: str) -> int:
        layout = Layout.of(weights_dtype=dtype)
        return inference_memory(_generate(config, 128, layout), layout).weights

    assert weights("bf16") == 2 * (matrices + tables + norms)
    of_tables = tables + 4 * 2 * 128_256
    assert weights("int4") == matrices * (1 / 2 + 4 / 32) + of_tables + 2 * norms
    # A scale an output: of wo N H inputs, of w_out F, of the others D.
    outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert weights("int8") == matrices + 4 * outputs + of_tables + 2 * norms


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_products_in_the_type_of_the_weights_cast_each_activation_once(dtype: str) -> None:
    """LLaMA-3-8B: what q, k and v read, wo, the gates and w_out, in 2 bytes; written and read, 4 in all."""
    config, tokens = PRESETS["llama-3-8b"], 512

    def nodes(kind: str, matmul_dtype: str | None) -> list[Node]:
        layout = Layout.of(weights_dtype=dtype, matmul_dtype=matmul_dtype)
        graph = record_pass(config, layout.at("prefill"), PassShape(1, tokens, tokens))
        [layers] = [segment for segment in graph.segments if segment.count == 32]
        return [node for node in layers.nodes if node.kind == kind]

    casts = sum(work.hbm_bytes for node in nodes("cast", dtype) for work in node.forward)
    assert casts == 4 * tokens * (4096 + 4096 + 4096 + 14336)
    assert nodes("cast", None) == []
    for matmul_dtype, is_widened in ((dtype, False), (None, True)):
        products = nodes("matmul", matmul_dtype)
        assert [work.widened for node in products for work in node.forward] == [is_widened] * 7
    [w_out] = [node for node in nodes("matmul", dtype) if node.name == "w_out"]
    of_weight = 4096 * 14336 + 4 * 4096
    assert w_out.forward[0].hbm_bytes == of_weight + 2 * tokens * (14336 + 4096)


def test_latents_have_no_heads_and_are_whole_over_tensor() -> None:
    config, layout = PRESETS["deepseek-v3"], Layout.of(data=2, tensor=8)
    graph = _generate(config, 4096, layout, sequences=16)
    assert inference_memory(graph, layout).cache == 16 * kv_cache_bytes(config, 4096) / 2


def test_attention_over_latents_contracts_them_in_every_head() -> None:
    """2 S N (R + A) FLOPs for the scores and 2 S N R for the values: 128 heads, R = 512, A = 64."""
    graph = _generate(PRESETS["deepseek-v3"], 131_072)
    node = next(node for _, node in graph.nodes() if node.kind == "attention")
    assert sum(work.flops for work in node.forward) == pytest.approx(
        2 * 131_072 * 128 * (2 * 512 + 64), rel=1e-5
    )


def test_a_prompt_fills_the_cache_that_generation_reads() -> None:
    config, hardware = PRESETS["gemma-3-27b"], load("v5e:4x4")
    layout = Layout.of(tensor=16)
    (_, prefill), (_, generate) = (
        inference_cost(config, layout, hardware, phase, 4, 8192) for phase in ("prefill", "generate")
    )
    assert prefill.cache == generate.cache == 4 * kv_cache_bytes(config, 8192) / 16


def _attention(graph: Graph, kind: str = "attention") -> Node:
    return next(node for _, node in graph.nodes() if node.kind == kind)


def test_rows_of_prompts_on_cpus_meet_pages_one_after_another() -> None:
    """A row of 16 queries reads whole pages of 64 up to its own: of 1,024 positions 544 a query, on average.

    In memory are its scores and weights over two pages, 4 bytes each, and the sums of values in float32.
    """
    config = PRESETS["llama-3-8b"]
    shape, heads = PassShape(2, 1024, 1024), config.num_heads
    graph = record_inference(config, load("cpu:1"), Layout.of().at("prefill"), shape)
    [work] = _attention(graph).forward
    assert work.flops == 4 * 2 * 1024 * 544 * heads * config.d_head
    [scores] = _attention(graph, "softmax").outputs
    assert scores.bytes_per_device == 2 * 4 * heads * 16 * 128 + 4 * 2 * 1024 * heads * config.d_head
    # A quarter of them behind the rest: page 13 to 16, 4 rows each.
    chunk = record_inference(config, load("cpu:1"), Layout.of().at("prefill"), PassShape(2, 256, 1024))
    assert _attention(chunk).forward[0].flops == 4 * 2 * 256 * 64 * 14.5 * heads * config.d_head


def test_chunks_on_accelerators_gather_blocks_of_tables() -> None:
    """512 queries in 8 rows, each with 512 of 4,096 positions: keys and values of 8 heads in bf16.

    A score is float32, its weight bf16, and so are the sums of values, 16 heads of 128 a device.
    """
    config, layout = PRESETS["llama-3-8b"], Layout.of(tensor=2).at("prefill")
    graph = record_inference(config, load("h100:2"), layout, PassShape(1, 512, 4096))
    assert _attention(graph).forward[0].flops == 4 * 512 * 4096 * (32 / 2) * 128
    [scores] = _attention(graph, "softmax").outputs
    a_block = 512 * 512 * (32 / 2) * (4 + 2) + 8 * 2 * 2 * 512 * (8 / 2) * 128
    assert scores.bytes_per_device == a_block + 4 * 512 * (32 / 2) * 128
    early = keys_read(config, load("h100:2"), layout, 512, 1000, 32768)
    assert early == 1024 and keys_read(config, load("v5e:2x1"), layout, 512, 1000, 32768) == 1000


@pytest.mark.parametrize(
    ("name", "machine", "words"),
    [
        ("llama-3-8b", "h100:2", "tensor=2"),
        ("deepseek-v3", "h100:2", "tensor=2"),
        ("gemma-3-27b", "v5p:2x1x1", "tensor=2"),
        ("gpt-oss-20b", "h100:2", "tensor=2"),
        ("llama-3-8b", "h100:2", "context=2"),
    ],
)
def test_whole_prompts_attend_as_sequences_of_training(name: str, machine: str, words: str) -> None:
    """By the same kernel, or without one (sinks, split positions) by the same blocks."""
    config, hardware, shape = PRESETS[name], load(machine), PassShape(2, 4096, 4096)
    layout = Layout.parse(words)
    trained, prefilled = (
        record_training(config, hardware, layout, shape),
        record_inference(config, hardware, layout.at("prefill"), shape),
    )
    kinds = [{node.kind for _, node in graph.nodes()} for graph in (trained, prefilled)]
    assert ("softmax" in kinds[0]) == ("softmax" in kinds[1]) == (words == "context=2" or "oss" in name)
    for kind in ("attention", *kinds[0] & {"softmax"}):
        assert _attention(prefilled, kind).forward == _attention(trained, kind).forward


def test_inference_runs_forward_alone_and_updates_nothing() -> None:
    layout = Layout.of(data=2, fsdp=2, tensor=2, zero=1)
    cost, _ = inference_cost(PRESETS["llama-3-8b"], layout, load("h100:8"), "prefill", 4, 4096)
    assert {one.direction for one in cost.collectives} == {"forward"}
    assert {one.what for one in cost.collectives} == {"activations", "logits"}
    assert not any("optimizer" in term.name or "backward" in term.name for term in cost.terms)


def test_weights_are_read_while_partial_sums_are_waited_for() -> None:
    """Prefetch hides the shorter of the two: one token of a 70B on 16 chips at their ratings."""
    config, layout, machine = PRESETS["llama-3-70b"], Layout.of(tensor=8, kv_replicas=2), load("v5e:4x4")
    ideal = machine.chip.ideal()
    plain, ahead = (
        inference_cost(config, layout, replace(machine, chip=chip), "generate", 1, 16)[0]
        for chip in (ideal, replace(ideal, step=replace(ideal.step, prefetch=1.0)))
    )
    reads = sum(term.seconds for term in plain.terms if term.name == "matmul (forward)")
    waits = sum(term.seconds for term in plain.terms if term.name.startswith("activations"))
    assert 0.1 * reads < waits < reads
    assert ahead.seconds == pytest.approx(plain.seconds - waits, rel=1e-3)
    assert ahead.seconds == pytest.approx(sum(term.seconds for term in ahead.terms))
    assert min(term.seconds for term in ahead.terms) > 0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5-397b-a17b"])
def test_engines_sum_chosen_and_shared_experts_at_once(name: str, engine: str) -> None:
    """A device adds its terms of both before the all-reduce; the second model gates its shared expert."""
    machine = load("h100:1x8")

    def summed(machine: Hardware, phase: InferencePhase) -> set[str]:
        layout = Layout.of(tensor=8).at(phase)
        graph = record_inference(
            PRESETS[name], machine, layout, PassShape(8, 1, 64 if phase == "prefill" else 1, 64)
        )
        return {
            node.name
            for segment, node in graph.nodes()
            if segment.name == "layer" and any(t.op == "all_reduce" for t in node.forward_transfers)
        }

    for phase in ("prefill", "generate"):
        assert summed(machine, phase) - summed(on_engine(machine, ENGINES[engine]), phase) == {"shared_out"}


def test_weights_that_files_keep_wide_are_multiplied_wide() -> None:
    """NVIDIA's DeepSeek-R1 in NVFP4 keeps the projections of latents in bf16, and not that of the output."""
    model, machine = PRESETS["deepseek-v3"], on_engine(load("b200:1x8"), ENGINES["tensorrt-llm"])
    config = replace(model, unquantised=wide_weights(model, "fp4") or ())
    layout = Layout.of(data=8, expert=8, weights_dtype="fp4", matmul_dtype="fp4", experts_dtype="fp4")
    graph = record_inference(config, machine, layout.at("prefill"), PassShape(8, 1024, 1024))
    works = {node.name: node.forward[0] for _, node in graph.nodes() if node.kind == "matmul"}
    wide = {name for name, work in works.items() if work.wide}
    assert {"wq_down", "wq_up", "wkv_down", "wk_up", "wv_up", "router"} <= wide
    assert not wide & {"wo", "shared_in", "expert_in", "w_out"}
    chip, dtypes = machine.chip, Dtypes.of(layout)
    narrow = replace(works["wq_up"], wide=False)
    seconds = [compute_seconds(work, "matmul", dtypes, chip) for work in (works["wq_up"], narrow)]
    assert seconds[0] > 2 * seconds[1]


@pytest.mark.parametrize("matmul_dtype", [None, "fp4"])
def test_kernels_of_experts_in_4_bits_narrow_their_rows_once(matmul_dtype: str | None) -> None:
    """FlashInfer's kernel takes narrow rows, and narrows those between its products. Hopper has none."""
    config = PRESETS["minimax-m2.5"]
    layout = Layout.of(data=8, expert=8, matmul_dtype=matmul_dtype, experts_dtype="fp4").at("generate")
    seconds = {}
    for name in ("b200:1x8", "h200:1x8"):
        machine = on_engine(load(name), ENGINES["vllm"])
        graph = record_inference(config, machine, layout, PassShape(64, 1, 1024))
        casts = [
            node
            for _, node in graph.nodes()
            if node.kind == "cast" and any(work.routed for work in node.forward)
        ]
        assert [node.name for node in casts] == ["expert_gate_cast"]
        seconds[name] = work_seconds(
            casts[0].forward[0], "cast", Dtypes.of(layout), in_inference(machine).chip
        ).seconds
    assert seconds["b200:1x8"] > 0 == seconds["h200:1x8"]

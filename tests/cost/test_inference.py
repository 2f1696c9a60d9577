"""What one pass with a cache reads and keeps: the model's own count of its cache, sharded by the layout."""

from dataclasses import replace

import pytest

from meshwright.cost.graph import Graph
from meshwright.cost.inference import inference_cost, inference_memory, record_inference
from meshwright.cost.recorder import Shape
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.count import kv_cache_bytes, kv_read_bytes
from meshwright.models.presets import PRESETS

# Within a window of 128, over one of 4,096, and far beyond every window.
SEQ_LENS = (100, 8192, 131_072)


def _generate(config: ModelConfig, context: int, layout: Layout | None = None, sequences: int = 1) -> Graph:
    """A recorded generate step of `sequences` behind caches of `context` positions."""
    shape = Shape(sequences, 1, context)
    return record_inference(config, layout or Layout.of(), shape, flash_attention=True)


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


@pytest.mark.parametrize("name", PRESETS)
def test_caches_are_those_that_the_model_counts(name: str) -> None:
    config = PRESETS[name]
    for seq_len in SEQ_LENS:
        graph = _generate(config, seq_len)
        assert inference_memory(graph, Layout.of()).cache == kv_cache_bytes(config, seq_len)
        assert _read_bytes(graph) == kv_read_bytes(config, seq_len)


def test_heads_and_sequences_split_a_cache() -> None:
    config, layout = PRESETS["llama-3-70b"], Layout.of(data=2, tensor=8)
    graph = _generate(config, 4096, layout, sequences=16)
    assert inference_memory(graph, layout).cache == 16 * kv_cache_bytes(config, 4096) / (2 * 8)
    assert _read_bytes(graph) == 16 * kv_read_bytes(config, 4096) / (2 * 8)


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

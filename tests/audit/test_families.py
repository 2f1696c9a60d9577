"""What is planned for families besides LLaMA is what the compiler emits: collectives and FLOPs."""

from dataclasses import replace
from typing import Literal

import pytest
from tests.nn.small_models import (
    CHUNKED,
    COMPRESSED,
    CONVOLUTION,
    DELTA,
    GPT,
    LATENT,
    LIGHTNING,
    LINEAR_UNIT,
    LOCAL,
    MAMBA,
    MIXTURE,
    OSS,
    SELECTIVE,
    SHARED,
    SHARED_BY_FOUR,
    SPARSE,
    SPARSE_BLOCKS,
)

from meshwright.audit.plan_audit import audit_plan
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan_file import Plan

pytestmark = [pytest.mark.slow, pytest.mark.sampled(5)]

# Two periods of local and global layers. XLA unrolls a loop of one, and then its CSE saves the scores that
# the backward pass would compute again: 6% of the FLOPs of LOCAL's three layers.
TWO_PERIODS = replace(LOCAL, num_layers=4)


@pytest.mark.parametrize("config", [TWO_PERIODS, GPT], ids=lambda config: config.name)
@pytest.mark.parametrize(
    "text",
    [
        "data=2,fsdp=2,tensor=2",
        "fsdp=2,tensor=4,sequence_parallel=true",
        "data=2,fsdp=2,tensor=2,zero=1,microbatches=2,sequence_parallel=true",
        "fsdp=2,tensor=2,tensor2=2",
    ],
)
def test_biases_positions_windows_and_norms_of_heads(config: ModelConfig, text: str) -> None:
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 64), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match"
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (SHARED, "data=2,fsdp=2,tensor=2"),
        (SHARED, "context=2,fsdp=2,tensor=2,remat=full"),
        (SHARED, "pipe=2,data=2,tensor=2,microbatches=2,schedule=lanes"),
        (SHARED_BY_FOUR, "data=2,fsdp=2,tensor=2"),
        (SHARED_BY_FOUR, "data=2,context=4,remat=full"),
        (SHARED_BY_FOUR, "data=2,context=4,context_method=ulysses,remat=full"),
        # Each layer sends the keys that it reads, and meets what its window lets it see of them.
        (SHARED, "data=2,context=4,context_method=ring"),
        (SHARED_BY_FOUR, "data=2,context=4,context_method=ring,remat=full"),
        (LOCAL, "data=2,context=4,context_method=ring"),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else value,
)
def test_layers_that_share_keys_and_values(config: ModelConfig, text: str) -> None:
    """Their groups gather keys once in a forward pass, and each layer again where it computes again."""
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 64), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match"
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] == audit["flops"]["planned"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (LATENT, "data=2,fsdp=2,tensor=2,sequence_parallel=true"),
        (LATENT, "fsdp=2,tensor=4"),
        (SPARSE, "data=2,fsdp=2,tensor=2,sequence_parallel=true"),
        (SPARSE, "fsdp=2,tensor=2,context=2,sequence_parallel=true,remat=full"),
        (SPARSE, "context=4,fsdp=2,context_method=ring,remat=matmuls"),
        (SPARSE_BLOCKS, "data=2,fsdp=2,tensor=2,sequence_parallel=true"),
        (SPARSE_BLOCKS, "fsdp=2,tensor=2,context=2,sequence_parallel=true,remat=full"),
        # With room for an even share alone what is multiplied and sent is what is planned.
        (MIXTURE, "fsdp=4,expert=4,tensor=2,sequence_parallel=true,remat=full,capacity=1"),
        (MIXTURE, "fsdp=4,expert=4,tensor=2,sequence_parallel=true,remat=full,grouped=true"),
        (MIXTURE, "data=2,fsdp=4,expert=2,grouped=true"),
        # Rows travel; XLA:CPU sends all that a round has room for, which the audit names.
        (MIXTURE, "fsdp=8"),
        (MIXTURE, "fsdp=8,expert=4"),
        (MIXTURE, "fsdp=4,expert=2,tensor=2"),
        (MIXTURE, "fsdp=4,expert=4,tensor=2,sequence_parallel=true"),
        (OSS, "data=4,tensor=2,sequence_parallel=true,expert=2,capacity=1"),
        (CHUNKED, "data=4,tensor=2,sequence_parallel=true,expert=2,capacity=1"),
        (CHUNKED, "data=2,fsdp=4,expert=2,grouped=true"),
        (CHUNKED, "fsdp=4,expert=2,tensor=2"),
        # A token crosses once to a node, whose devices have experts of their own, or columns of the same.
        (MIXTURE, "data=8,expert=8,expert_nodes=4,dispatch=once"),
        (OSS, "data=2,fsdp=2,expert=4,expert_nodes=2,tensor=2,microbatches=2,dispatch=once"),
        (
            MIXTURE,
            "fsdp=4,expert=2,expert_nodes=2,tensor=2,sequence_parallel=true,remat=matmuls,dispatch=once",
        ),
        (MIXTURE, "fsdp=4,expert=4,expert_nodes=2,tensor=2,dispatch=once,capacity=1"),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else value,
)
def test_latents_and_experts(config: ModelConfig, text: str) -> None:
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 64), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match"
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        ("train", "data=4,fsdp=2,capacity=1"),
        ("train", "data=2,fsdp=2,kv_replicas=2,expert=2,capacity=1"),
        ("train", "fsdp=2,kv_replicas=4,sequence_parallel=true,capacity=1"),
        ("generate", "data=8"),
        ("prefill", "data=8"),
    ],
)
def test_compressed_keys_and_streams(phase: Literal["train", "prefill", "generate"], text: str) -> None:
    """Keys that are values too are gathered once, and their cotangents summed once."""
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    config = replace(COMPRESSED, max_seq_len=80)  # whole pages of 20 positions
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 80, phase), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match"
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("config", [LATENT, SPARSE, SPARSE_BLOCKS], ids=lambda config: config.name)
@pytest.mark.parametrize("phase", ["prefill", "generate"])
def test_latents_over_pages(config: ModelConfig, phase: Literal["prefill", "generate"]) -> None:
    """Queries absorb wk_up and spell out no keys; an indexer scores all positions, and few are read."""
    layout = Layout.parse("data=4,tensor=2").replace(weights_dtype="f32", compute_dtype="f32")
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 64, phase), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match"
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("config", "text", "seq_len"),
    [
        # Four chunks a piece: XLA unrolls a loop of one, and merges the solutions of both of its scans.
        (replace(DELTA, num_layers=2), "context=2,fsdp=4", 1024),
        (replace(MAMBA, num_layers=2), "context=2,tensor=2,fsdp=2,remat=full", 256),
        (SELECTIVE, "context=2,tensor=2,fsdp=2,remat=full", 256),
        (LINEAR_UNIT, "context=2,tensor=2,fsdp=2,remat=full", 256),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else value,
)
def test_states_of_pieces(config: ModelConfig, text: str, seq_len: int) -> None:
    """States are gathered and scattered, ends of pieces permuted."""
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    plan = Plan(replace(config, max_seq_len=seq_len), "cpu:8", Workload(16, seq_len), layout)
    audit = audit_plan(plan, "cpu", use_cache=False)
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "config", [DELTA, CONVOLUTION, SPARSE, SPARSE_BLOCKS], ids=lambda config: config.name
)
def test_states_after_split_prompts(config: ModelConfig) -> None:
    """States of pieces, the last inputs of convolutions and keys of an indexer are sent to all devices."""
    layout = Layout.parse("context=2,data=2,tensor=2").replace(weights_dtype="f32", compute_dtype="f32")
    plan = Plan(replace(config, max_seq_len=512), "cpu:8", Workload(8, 512, "prefill"), layout)
    audit = audit_plan(plan, "cpu", use_cache=False)
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("config", [DELTA, MAMBA], ids=lambda config: config.name)
def test_states_of_whole_sequences(config: ModelConfig) -> None:
    """Products that solve the delta rule's systems, and of the only group of Mamba-2's heads, are counted."""
    layout = Layout.parse("fsdp=4,tensor=2").replace(weights_dtype="f32", compute_dtype="f32")
    plan = Plan(replace(config, max_seq_len=512), "cpu:8", Workload(8, 512), layout)
    audit = audit_plan(plan, "cpu", use_cache=False)
    assert (audit["unplanned"], audit["missing"]) == ([], [])
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize(
    ("text", "seq_len"),
    [
        # A norm over split heads saves its sums.
        ("fsdp=4,tensor=2", 256),
        # Four chunks a piece: XLA unrolls a loop of one, and merges products that are computed again.
        ("context=2,tensor=2,fsdp=2,remat=full", 1024),
    ],
)
def test_lightning_attention(text: str, seq_len: int) -> None:
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    config = replace(LIGHTNING, max_seq_len=seq_len)
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, seq_len), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match"
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.01)


def test_a_piece_shorter_than_a_chunk_is_a_chunk() -> None:
    """Eight pieces of 32 positions: products within a chunk are of 32 keys, not of 64."""
    layout = Layout.parse("context=4,fsdp=2").replace(weights_dtype="f32", compute_dtype="f32")
    config = replace(LIGHTNING, max_seq_len=256)
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 256), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match"
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.01)

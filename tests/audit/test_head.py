"""A head by chunks of tokens is what is planned for CPU: products, collectives once a step, memory."""

from dataclasses import replace

import pytest

from meshwright.audit.plan_audit import audit_plan
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

# Of a vocabulary so large that logits are most of the memory.
TINY = replace(load_model("tiny"), vocab_size=8192)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (replace(TINY, tied_embeddings=True), "data=2"),
        pytest.param(TINY, "fsdp=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param(TINY, "data=2,zero=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param(replace(TINY, lora_rank=4), "data=2", marks=pytest.mark.slow),
    ],
    ids=["tied", "gathered", "scattered", "frozen"],
)
def test_a_head_by_chunks_is_as_planned(config: ModelConfig, text: str) -> None:
    layout = Layout.parse(text, weights_dtype="f32", compute_dtype="f32")
    audit = audit_plan(Plan(config, "cpu:2", Workload(32, 128), layout), "cpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=1e-3)
    buffers = audit["memory"]["peak"]["buffers"]
    assert buffers[0]["shape"] == "f32[512,8192]", "the largest buffer is the logits of a chunk"

"""Layouts that a search returns for eight CPU devices are compiled as they are planned: a sample."""

from dataclasses import replace

import pytest
from tests.nn.test_layouts import GPT, LOCAL, MIXTURE, TIED, TINY

from meshwright.audit.audit import audit_plan
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan_file import Plan

SLOW = pytest.mark.slow
DEEP_LOCAL = replace(LOCAL, num_layers=4)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        # XLA:CPU sums the squares of large gradients by windows first.
        (TINY, "data=4,fsdp=2,microbatches=2"),
        # Queries, and keys and values, have other ways back to one input that is gathered once.
        pytest.param(TINY, "tensor=4,kv_replicas=2,sequence_parallel=true", marks=SLOW),
        pytest.param(TINY, "data=8,zero=2,microbatches=2", marks=SLOW),
        # A tied table, gathered once for three ticks and once for two microbatches of the head.
        pytest.param(TIED, "pipe=2,fsdp=4,microbatches=2,schedule=lanes", marks=SLOW),
        # Batched products without names of JAX, whose gradients add up.
        (TIED, "pipe=2,data=4,zero=1,microbatches=4,schedule=lanes"),
        # Rows of the table, scattered over the positions before they are summed over the stages.
        pytest.param(
            TIED, "pipe=2,fsdp=2,tensor=2,sequence_parallel=true,microbatches=2,schedule=lanes", marks=SLOW
        ),
        # Products that all lack a name of JAX, recomputed.
        pytest.param(TINY, "pipe=2,fsdp=4,microbatches=2,schedule=lanes,remat=full", marks=SLOW),
        # Learned positions, split as the embedding's tokens and whole for attention.
        pytest.param(
            GPT, "pipe=2,data=2,tensor=2,sequence_parallel=true,microbatches=2,schedule=lanes", marks=SLOW
        ),
        # Both gradients of a tied table, added before they are scattered.
        pytest.param(DEEP_LOCAL, "pipe=2,data=4,zero=2,microbatches=2,schedule=lanes", marks=SLOW),
        # A dense layer whose weights are kept over microbatches, before two with experts whose are not.
        pytest.param(MIXTURE, "data=4,fsdp=2,expert=4,microbatches=2", marks=SLOW),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else value,
)
def test_it_is_compiled_as_it_is_planned(config: ModelConfig, text: str) -> None:
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 64), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match", audit["findings"]

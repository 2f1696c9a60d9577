"""Layouts that a search returns for eight CPU devices are compiled as they are planned: a sample.

Nightly another sample is drawn of each model; what it finds different is mended, and kept below.
"""

from dataclasses import replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from tests.nn.small_models import GPT, LATENT, LOCAL, MIXTURE, OSS, TIED, TINY
from tests.train.test_spmd_1f1b import MIXTURE as ALIKE

from meshwright.audit.plan_audit import audit_plan
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.runnable import why_not
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan.space import SEARCHED_REMATS, Space
from meshwright.plan_file import Plan

pytestmark = pytest.mark.sampled(4)

DEEP_LOCAL = replace(LOCAL, num_layers=4)
IN_FLOAT32 = {"weights_dtype": "f32", "compute_dtype": "f32"}


def searched(config: ModelConfig, work: Workload) -> list[Layout]:
    """The layouts that a search prices for eight CPU devices, without recomputation."""
    space = Space(config, load("cpu:8"), work, Layout.of(**IN_FLOAT32))
    found = {str(one.layout): one.layout for one in space.choices(space.meshes(running=True))}
    return [one for one in found.values() if why_not(config, one) is None]


def assert_as_planned(config: ModelConfig, layout: Layout) -> None:
    audit = audit_plan(Plan(config, "cpu:8", Workload(16, 64), layout), "cpu", use_cache=False)
    assert audit["verdict"] == "match", audit["findings"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        # XLA:CPU sums the squares of large gradients by windows first.
        (TINY, "data=4,fsdp=2,microbatches=2"),
        # Queries, and keys and values, have other ways back to one input that is gathered once.
        (TINY, "tensor=4,kv_replicas=2,sequence_parallel=true"),
        (TINY, "data=8,zero=2,microbatches=2"),
        # A tied table, gathered once for three ticks and once for two microbatches of the head.
        (TIED, "pipe=2,fsdp=4,microbatches=2,schedule=lanes"),
        # Batched products without names of JAX, whose gradients add up.
        (TIED, "pipe=2,data=4,zero=1,microbatches=4,schedule=lanes"),
        # Rows of the table, scattered over the positions before they are summed over the stages.
        (TIED, "pipe=2,fsdp=2,tensor=2,sequence_parallel=true,microbatches=2,schedule=lanes"),
        # Products that all lack a name of JAX, recomputed.
        (TINY, "pipe=2,fsdp=4,microbatches=2,schedule=lanes,remat=full"),
        # Learned positions, split as the embedding's tokens and whole for attention.
        (GPT, "pipe=2,data=2,tensor=2,sequence_parallel=true,microbatches=2,schedule=lanes"),
        # Both gradients of a tied table, added before they are scattered.
        (DEEP_LOCAL, "pipe=2,data=4,zero=2,microbatches=2,schedule=lanes"),
        # Gradients that a loop over a stage's layers stacks; sinks, whose gradient is gathered over tensor.
        (
            ALIKE,
            "pipe=2,expert=4,tensor=4,sequence_parallel=true,microbatches=2,schedule=lanes,remat=matmuls",
        ),
        # Biases that are updated by their shards, and gathered again.
        (OSS, "data=8,zero=1"),
        # Attention with one key head a device and one sequence, whose products have no batch.
        (TINY, "fsdp=2,tensor=4,sequence_parallel=true,microbatches=8,remat=matmuls"),
        # Kinds of layers that are chosen by numbers which lie on stages.
        (DEEP_LOCAL, "pipe=4,data=2,microbatches=4,schedule=lanes"),
        # Gradients of weights that are summed once, beside those of the input that they share.
        (TINY, "tensor=4,kv_replicas=2,sequence_parallel=true,microbatches=4,remat=attention"),
        # A bias of experts that is stored by its columns: gathered, and gathered again.
        (OSS, "data=2,fsdp=4,expert=2,microbatches=2,grouped=true"),
        (OSS, "fsdp=8,expert=4,microbatches=2,remat=full"),
        # Keys of latents that are spelt out, recomputed.
        (LATENT, "tensor=8,microbatches=8,remat=full"),
        # A dense layer whose weights are kept over microbatches, before two with experts whose are not.
        (MIXTURE, "data=4,fsdp=2,expert=4,microbatches=2"),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else value,
)
@pytest.mark.slow
def test_it_is_compiled_as_it_is_planned(config: ModelConfig, text: str) -> None:
    assert_as_planned(config, Layout.parse(text).replace(**IN_FLOAT32))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [TINY, TIED, GPT, DEEP_LOCAL, LATENT, MIXTURE, OSS, replace(ALIKE, name="alike")],
    ids=lambda config: config.name,
)
# A compile of 5 to 20 s an example, so that one that fails is not made smaller.
@settings(max_examples=4, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_any_is_compiled_as_it_is_planned(config: ModelConfig, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(searched(config, Workload(16, 64))))
    layout = layout.replace(remat=data.draw(st.sampled_from(SEARCHED_REMATS)))
    assume(why_not(config, layout) is None)
    assert_as_planned(config, layout)

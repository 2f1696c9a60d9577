"""Kernels of attention in the stages of a pipeline, traced as for TPUs on the devices at hand."""

from dataclasses import replace
from importlib import import_module

import jax
import pytest

from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.platforms import PLATFORMS
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

CONFIG = replace(load_model("tiny"), d_head=64, max_seq_len=512)


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gathered_keys_reach_the_tpus_kernel_in_a_stage(tensor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best layout of LLaMA-3-8B on 64 v5e has stages and `context`; JAX refused to trace it."""
    text = f"pipe=2,context=2,tensor={tensor},data={2 // tensor},microbatches=4,schedule=lanes"
    monkeypatch.setattr(import_module("meshwright.nn.attention.flash"), "platform", lambda: PLATFORMS["tpu"])
    layout = Layout.parse(text).replace(weights_dtype="bf16", compute_dtype="bf16")
    optimizer = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=0, total_steps=10)
    step = CompiledStep(CONFIG, layout, Workload(8, 512), optimizer, chip_flops_per_second=1e11)
    with jax.set_mesh(step.mesh):
        traced = step.jitted.trace(step.abstract_state(), step.abstract_tokens())
    assert "splash_mha" in str(traced.jaxpr)

"""A tiny twin's numbers beside the formulas': what is made small, what agrees, and what does not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.audit.wrong_arithmetic import DENSE, GENERATION, ON_GPUS, TRAINING, flagged, report

from meshwright.audit.numerics import cached_numerics, check_numerics, tiny_model, tiny_plan
from meshwright.audit.numerics.comparison import numerics_report
from meshwright.audit.numerics.twin import in_narrow_types, kernel_plan
from meshwright.errors import AuditError
from meshwright.layout import Layout, grouped
from meshwright.layout.grouped import Blocks
from meshwright.layout.workload import Workload
from meshwright.models.count import count_params
from meshwright.models.families import load_family
from meshwright.models.layer_kinds import Window
from meshwright.models.presets import PRESETS, load_model
from meshwright.nn.experts import dropless
from meshwright.plan_file import Plan

pytestmark = pytest.mark.sampled(3)


def _plan(model: str, layout: str) -> Plan:
    return Plan(load_model(model), "v5p:16x16x16", Workload(1024, 4096), Layout.parse(layout))


def test_a_tiny_model_keeps_its_family() -> None:
    gemma = load_model("gemma-2-9b")
    small = tiny_model(gemma)
    kept = (
        "norm",
        "norm_offset",
        "post_norms",
        "attention_softcap",
        "logit_softcap",
        "tied_embeddings",
        "activation",
    )
    assert [getattr(small, name) for name in kept] == [getattr(gemma, name) for name in kept]
    assert small.windows == (Window(5), None, Window(5))
    assert (small.num_heads // small.num_kv_heads, small.num_layers) == (2, 3)
    multi_query = tiny_model(load_model("llama-3-70b"))
    assert (multi_query.num_heads, multi_query.num_kv_heads, multi_query.sliding_window) == (8, 4, None)


# A family without a written form is planned only.
WRITTEN = [name for name, config in PRESETS.items() if load_family(str(config.family)).is_written]


@pytest.mark.parametrize("name", WRITTEN)
def test_every_preset_has_a_tiny_model(name: str) -> None:
    config = load_model(name)
    small = tiny_model(config)
    assert small.d_model == 32 and count_params(small).total < 500_000
    kinds, tiny_kinds = (
        {(layer.kind.stack, layer.kind.window is None, layer.kind.turned) for layer in one.layers}
        for one in (config, small)
    )
    assert tiny_kinds == kinds
    for phase in ("train", "generate"):
        length = min(1024, config.max_seq_len)
        of_kernel = kernel_plan(Plan(config, "v5p:2x2x2", Workload(16, length, phase), Layout.of()))
        assert of_kernel is None or count_params(of_kernel.model).total < 1_000_000


def test_tiny_experts_and_latents_keep_their_kind() -> None:
    config = load_model("deepseek-v3")
    small = tiny_model(config)
    assert small.moe and small.mla and config.moe
    kept = "score", "choice_bias", "normalized", "scaling", "num_shared_experts"
    assert [getattr(small.moe, name) for name in kept] == [getattr(config.moe, name) for name in kept]
    assert (small.moe.num_experts, small.moe.num_groups, small.moe.groups_per_token) == (8, 4, 2)
    assert (small.moe.num_dense_layers, small.num_layers) == (1, 3)
    assert (small.mla.q_rank, small.mla.kv_rank, small.d_head, small.num_kv_heads) == (12, 16, 8, 4)


def test_a_tiny_plan_of_experts_has_two_of_each_axis() -> None:
    small = tiny_plan(_plan("mixtral-8x7b", "fsdp=32,expert=8,expert_nodes=4,dispatch=once"))
    assert small.layout.mesh.num_devices == 4
    assert str(small.layout).startswith("fsdp=4,expert_nodes=2,expert=4,dispatch=once")
    assert str(tiny_plan(_plan("mixtral-8x7b", "fsdp=32,expert=8")).layout).startswith("fsdp=4,expert=4")
    assert str(tiny_plan(_plan("mixtral-8x7b", "fsdp=32,expert=2")).layout).startswith("fsdp=4,expert=2")


def test_a_tiny_ring_has_a_direction() -> None:
    small = tiny_plan(_plan("gemma-2-9b", "data=2,fsdp=8,context=4,tensor=2"))
    assert str(small.layout).startswith("data=2,fsdp=2,context=4,tensor=2")


def test_a_tiny_plan_keeps_the_layouts_options() -> None:
    small = tiny_plan(
        _plan("llama-3-70b", "fsdp=128,tensor=4,microbatches=8,sequence_parallel=true,remat=full")
    )
    degrees = Layout.of(fsdp=2, tensor=4, microbatches=2, sequence_parallel=True, remat="full")
    assert small.layout == degrees.replace(weights_dtype="f32", compute_dtype="f32")
    assert small.workload == Workload(8, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3-70b", "fsdp=1024,tensor=4,sequence_parallel=true,remat=full"),
        ("gemma-2-9b", "data=2,fsdp=8,context=4,tensor=2"),
        ("llama-3-70b", "fsdp=64,microbatches=4"),
        ("deepseek-v3", "fsdp=64,expert=32,remat=full"),
        ("kimi-k2", "data=2,fsdp=8,tensor=4"),
        ("deepseek-v3.2", "fsdp=8,tensor=4,context=2,sequence_parallel=true"),
        ("glm-5.2", "fsdp=8,tensor=4,context=2,sequence_parallel=true"),
        ("minimax-m3", "fsdp=8,tensor=4,context=2,sequence_parallel=true"),
        ("mixtral-8x7b", "fsdp=32,expert=8,expert_nodes=4,dispatch=once"),
        ("gpt-oss-20b", "fsdp=8,expert=8,tensor=2,sequence_parallel=true"),
        ("llama-4-scout", "fsdp=8,context=4,expert=8"),
        ("phi-3.5-mini", "fsdp=8,tensor=2"),
    ],
)
def test_what_nn_runs_agrees_with_one_device(model: str, layout: str) -> None:
    found = check_numerics(_plan(model, layout))
    assert found["agrees"] and found["loss"]["difference"] < 1e-6
    assert found["loss"]["one_device"] > 4  # ln 64 = 4.16
    tensors = {row["tensor"] for row in found["gradients"]}
    assert tensors >= {"embed", "final_norm"} and any("layers/" in name for name in tensors)
    assert 0 < found["worst"]["difference"] < 1e-5


@pytest.mark.parametrize(
    ("text", "small", "num_layers"),
    [
        ("pipe=8,fsdp=64,microbatches=16,schedule=1f1b", "pipe=4,fsdp=2,microbatches=2,schedule=1f1b", 2),
        # Two microbatches for each stage at least, and a layer for each of their chunks but two.
        ("pipe=4,microbatches=16,schedule=dualpipe", "pipe=4,microbatches=8,schedule=dualpipe", 2),
        (
            "pipe=4,microbatches=16,schedule=interleaved,interleave=4",
            "pipe=4,microbatches=4,schedule=interleaved,interleave=2",
            6,
        ),
    ],
)
def test_a_tiny_pipeline_has_four_stages(text: str, small: str, num_layers: int) -> None:
    found = tiny_plan(_plan("llama-3-70b", text))
    assert found.layout == Layout.parse(small).replace(weights_dtype="f32", compute_dtype="f32")
    assert found.model.num_layers == num_layers
    # Of three layers, as a window and all have least, no two stages of lanes have half.
    odd = replace(load_model("llama-3-70b"), num_layers=80, global_every=2, sliding_window=128)
    lanes = Plan(
        odd, "v5p:16x16x16", Workload(1024, 4096), Layout.parse("pipe=4,microbatches=8,schedule=lanes")
    )
    assert tiny_plan(lanes).model.num_layers == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "pipe=4,fsdp=64,microbatches=8,schedule=zb-h1",
        "pipe=8,tensor=4,microbatches=16,schedule=lanes",
        "pipe=4,fsdp=2,microbatches=8,schedule=dualpipe",
    ],
)
def test_pipelines_agree_with_the_formulas(layout: str) -> None:
    found = check_numerics(_plan("llama-3-8b", layout))
    assert found["agrees"] and found["layout"].startswith("pipe=4")
    assert {row["tensor"] for row in found["gradients"]} >= {"embed", "layers/wq", "unembed"}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "muon", "adafactor"])
def test_optimizers_agree_with_the_formulas(optimizer: str) -> None:
    found = report(DENSE, f"fsdp=2,microbatches=2,optimizer={optimizer}", "train")
    assert found["agrees"] and len(found["updates"]) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3-8b", "data=2,tensor=4"),
        ("gemma-2-9b", "tensor=8"),
        ("deepseek-v3", "data=2,tensor=4"),
        ("deepseek-v3.2", "data=2,tensor=4"),
        ("glm-5.2", "data=2,tensor=4"),
        ("minimax-m3", "data=2,tensor=4"),
        ("llama-3-8b", "tensor=4,weights_dtype=int8,kv_dtype=int8"),
    ],
)
def test_generation_agrees_with_the_formulas(model: str, layout: str) -> None:
    plan = Plan(load_model(model), "v5p:2x2x2", Workload(16, 2048, "generate"), Layout.parse(layout))
    found = check_numerics(plan)
    assert found["agrees"] and [row["request"] for row in found["requests"]][-1] == "prompt of 30"
    narrow = in_narrow_types(plan, tiny_plan(plan))
    names = [check["what"] for check in found["checks"]]
    assert ("tokens in narrow types" in names) == (narrow is not None)
    assert "rotations of far positions" in names
    assert len(names) == (4 if narrow else 3) + (2 if kernel_plan(plan) else 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor=8", "data=4,expert=4", "tensor=4,weights_dtype=int8"])
def test_generation_by_one_product_of_all_experts_agrees_with_the_formulas(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, whose loops over blocks copy the weights."""
    seen: list[Blocks] = []

    def blocks_of(*arguments: Any, **options: Any) -> Blocks:
        seen.append(grouped.blocks_of(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(dropless, "blocks_of", blocks_of)
    hardware = f"h100:1x{Layout.parse(layout).mesh.num_devices}"
    plan = Plan(load_model("mixtral-8x7b"), hardware, Workload(16, 2048, "generate"), Layout.parse(layout))
    assert check_numerics(plan)["agrees"]
    assert {1, 0} == {int(blocks.least) for blocks in seen}, "chunks of prompts have blocks, steps have none"


def test_a_plan_whose_kernel_can_be_interpreted_has_a_twin_of_it() -> None:
    ring = kernel_plan(_plan("gemma-2-9b", "fsdp=8,context=4"))
    assert ring and str(ring.layout).startswith("context=2")
    assert (ring.workload.seq_len, ring.model.windows[:2]) == (512, (Window(100), None))
    assert kernel_plan(_plan("gemma-2-9b", "fsdp=8,context=4,context_method=ring")) is None
    served = Plan(load_model("llama-3-8b"), "h100:8", Workload(16, 2048, "generate"), Layout.of(tensor=8))
    assert kernel_plan(served) is not None
    # cuDNN's kernel does not run on CPUs: its call is checked, with XLA's implementation behind it.
    dense = replace(served, workload=Workload(16, 2048), layout=Layout.of(fsdp=8))
    assert kernel_plan(dense) is not None
    assert kernel_plan(replace(dense, model=load_model("gpt-oss-20b"))) is None  # sinks


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_wrong_arithmetic_of_training_is_flagged(name: str) -> None:
    model, layout, patches = TRAINING[name]
    assert flagged(report(model, layout, "train", patches()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_GPUS)
def test_wrong_calls_of_cudnn_are_flagged(name: str) -> None:
    model, layout, patches = ON_GPUS[name]
    assert flagged(report(model, layout, "train", patches(), "h100:8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATION)
def test_wrong_arithmetic_of_generation_is_flagged(name: str) -> None:
    model, layout, patches = GENERATION[name]
    assert flagged(report(model, layout, "generate", patches()))


def test_a_model_without_a_twin_says_why() -> None:
    plan = Plan(DENSE, "v5p:2x2x2", Workload(16, 64), Layout.parse("fsdp=8,kv_dtype=int8"))
    found = cached_numerics(plan, use_cache=False)
    assert found["agrees"] is None and "kv_dtype=int8" in found["why"]


def test_a_layout_that_cannot_run_says_why() -> None:
    with pytest.raises(AuditError, match=r"the tiny model does not run: .*kv_dtype=int8"):
        check_numerics(_plan("llama-3-70b", "fsdp=64,kv_dtype=int8"))


def test_a_missing_sum_is_found() -> None:
    alone = {"wq": np.array([1.0, 2.0]), "wk": np.array([3.0, -4.0])}
    found = numerics_report(4.0, {**alone, "wk": np.array([1.5, -2.0])}, 4.0, alone)
    assert not found["agrees"]
    assert found["worst"] == {"tensor": "wk", "difference": 0.5}
    assert numerics_report(4.0, alone, 4.0, alone)["agrees"]
    assert not numerics_report(4.1, alone, 4.0, alone)["agrees"]


def test_what_is_not_finite_is_none_and_differs() -> None:
    alone = {"wq": np.array([1.0])}
    found = numerics_report(float("nan"), {"wq": np.array([np.inf])}, 4.0, alone)
    assert (found["agrees"], found["loss"]["difference"], found["worst"]["difference"]) == (False, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "qwen3-next-80b-a3b"])
def test_zero_gradients_and_small_keys_are_no_false_alarms(model: str) -> None:
    """The bias of keys has no gradient, and the delta rule enlarges roundings."""
    assert flagged(report(load_model(model), "fsdp=2", "train")) == []


def test_a_gradient_that_is_only_rounding_is_measured_by_the_others() -> None:
    alone = {"wq": np.array([1.0]), "wk_bias": np.array([1e-12])}
    assert numerics_report(4.0, {"wq": np.array([1.0]), "wk_bias": np.array([-3e-12])}, 4.0, alone)["agrees"]

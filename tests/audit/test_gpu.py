"""The GPU's own compiler, without a GPU: what it makes of whole planned steps.

Needs the [cuda12] extra; without it the CPU's compiler stands in (test_compare.py).
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.audit.small_models import deepseek_v4

from meshwright.audit.compile.compile import compile_plan
from meshwright.audit.compile.targets import choose_target, is_installed
from meshwright.audit.facts.matmuls import products
from meshwright.audit.hlo.op_names import scope_of
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.plan_audit import audit_plan
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

pytestmark = pytest.mark.skipif(
    not is_installed("gpu"), reason='no CUDA plugin; pip install "meshwright[cuda12]" runs the audits for GPU'
)


@pytest.mark.parametrize(
    ("model", "hardware", "layout"),
    [
        ("tiny", "h100:8", Layout.of(fsdp=4, tensor=2, remat="full")),
        ("tiny", "a100-80gb:2x4", Layout.of(data=2, fsdp=2, tensor=2)),
        ("tiny", "b200:8", Layout.of(data=2, tensor=4, sequence_parallel=True)),
        ("demo", "h200:2x8", Layout.of(data=2, fsdp=8, microbatches=2)),
        ("tiny", "h100:8", Layout.of(pipe=2, fsdp=2, tensor=2, microbatches=4, schedule="zb-h1")),
        ("tiny", "h100:8", Layout.of(pipe=2, fsdp=4, microbatches=4, schedule="dualpipe")),
    ],
)
def test_the_compiled_step_is_the_planned_one(model: str, hardware: str, layout: Layout) -> None:
    audit = audit_plan(Plan(load_model(model), hardware, Workload(32, 128), layout), "gpu", use_cache=False)
    assert (audit["target"], audit["not_understood"], audit["findings"]) == ("gpu", [], [])
    assert audit["verdict"] == "match"
    assert audit["memory"]["compiled"] > 0
    # A causal mask leaves (T + 1) / 2 keys a query, which a plan counts as T / 2.
    assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=0.01)


@pytest.mark.parametrize("words", [{}, {"expert_nodes": 2, "dispatch": "once"}], ids=["each", "once"])
def test_products_of_experts_are_those_of_their_pass(words: dict[str, object]) -> None:
    """XLA makes one body of the loops of two weights, forward and recomputed, with the names of one."""
    config = replace(load_model("mixtral-8x7b"), num_layers=2)
    layout = Layout.of(fsdp=16, expert=8, remat="full", **words)
    audit = audit_plan(Plan(config, "h100:2x8", Workload(32, 4096), layout), "gpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama-3.2-1b", Layout.of(fsdp=4, context=2)),  # blocks of gathered keys
        ("deepseek-v2-lite", Layout.of(fsdp=8, remat="full")),  # values narrower than keys
        ("gemma-3-1b", Layout.of(fsdp=8, remat="full")),  # heads of 256, in layers with windows and without
    ],
)
def test_attention_is_the_planned_one(model: str, layout: Layout) -> None:
    config = load_model(model)
    config = replace(config, num_layers=config.global_every or 2)
    audit = audit_plan(Plan(config, "h100:1x8", Workload(16, 4096), layout), "gpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])


def test_gradients_of_layers_with_entries_are_the_planned_ones() -> None:
    """One sum over devices of many small gradients: each part has its own weight's name."""
    layout = Layout.parse("fsdp=4,expert=4", weights_dtype="bf16", compute_dtype="bf16")
    audit = audit_plan(Plan(deepseek_v4(), "h100:1x4", Workload(4, 2048), layout), "gpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=0.01)
    assert audit["memory"]["compiled"] == pytest.approx(audit["memory"]["planned"], rel=0.1)


def test_a_prompt_s_keys_and_values_do_not_wait_for_the_end_of_the_step() -> None:
    """Else the temporaries hold a second cache, and the memory is a quarter more than planned."""
    plan = Plan(load_model("llama-3-8b"), "h100:1x8", Workload(4, 4096, "prefill"), Layout.of(tensor=8))
    audit = audit_plan(plan, "gpu")
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    assert audit["memory"]["compiled"] == pytest.approx(audit["memory"]["planned"], rel=0.15)
    assert audit["step_seconds"]["scheduled"] == pytest.approx(audit["step_seconds"]["planned"], rel=0.15)


@pytest.mark.parametrize("dtype", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_rows_are_multiplied_in_the_type_of_the_weights(dtype: str) -> None:
    """By kernels of XLA's that read both operands so, which a program that widens them is told from."""
    config = replace(load_model("llama-3-8b"), num_layers=1)
    layout = Layout.of(tensor=8, weights_dtype=dtype, matmul_dtype=dtype)
    plan = Plan(config, "h100:1x8", Workload(64, 4096, "generate"), layout)
    audit = audit_plan(plan, "gpu", use_cache=False)
    assert (audit["verdict"], audit["findings"]) == ("match", [])
    assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=1e-4)
    wide = replace(plan, layout=layout.replace(matmul_dtype=None))
    target = choose_target(plan.hardware, layout, "gpu")
    for one, is_narrow in ((plan, True), (wide, False)):
        program = parse_hlo(compile_plan(one, target, lambda _: None).hlo)
        found = [product for product in products(program) if "attention" not in scope_of(product.op_name)]
        assert len(found) >= 5
        assert all((product.bits(program, widened=False) == 8) is is_narrow for product in found)


@pytest.mark.parametrize("dtype", ["fp4", "mxfp8"])
def test_blocks_are_multiplied_where_there_are_units(dtype: str) -> None:
    """By cuDNN on a B200; an H100's program widens them, and its audit says so."""
    config = replace(load_model("llama-3.2-1b"), num_layers=1, vocab_size=8192)
    layout, workload = Layout.of(fsdp=4, tensor=2, matmul_dtype=dtype), Workload(16, 1024)
    for hardware, found in (("b200:1x8", []), ("h100:1x8", ["dtype"])):
        audit = audit_plan(Plan(config, hardware, workload, layout), "gpu", use_cache=False)
        assert [one["kind"] for one in audit["findings"] if one["kind"] != "memory"] == found
        assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=0.01)


def test_collectives_of_weights_run_beside_products() -> None:
    """As plans hide them: by what `nn/start/compiler_options.py` asks for."""
    layout = Layout.of(fsdp=8, remat="full", compute_dtype="bf16", weights_dtype="bf16")
    audit = audit_plan(Plan(load_model("llama-3-8b"), "h100:8", Workload(8, 4096), layout), "gpu")
    weights = ("wq", "wo", "w_gate", "w_in", "w_out")
    hidden = {
        (one["tensor"], one["direction"], one["op"]): bool(one["overlaps"])
        for one in audit["emitted"]
        if one["tensor"] in weights and one["direction"] != "update"
    }
    assert len(hidden) == 3 * len(weights)
    assert all(beside for (_, direction, _), beside in hidden.items() if direction == "forward"), hidden
    assert sum(hidden.values()) > 2 / 3 * len(hidden), hidden


PINNED = """
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from meshwright.testing import assert_collectives

mesh = AbstractMesh((8,), ("model",), axis_types=(AxisType.Auto,))
w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("model", None)))
x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "model")))
assert_collectives(jax.jit(lambda x, w: x @ w), x, w, hardware="h100:8", expected={"AllReduce_model": 1})
print(float(jnp.ones(3).sum()))
"""


def test_a_test_without_a_gpu_pins_a_program_for_gpus_and_computes_thereafter() -> None:
    """In an environment that says nothing of platforms, as a user's has."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "XLA"))}
    command = [sys.executable, "-c", PINNED]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "3.0\n"), ran.stderr


@pytest.mark.parametrize("kv_dtype", ["bf16", pytest.param("fp8", marks=pytest.mark.slow)])
def test_generation_reads_its_pages_by_a_kernel(kv_dtype: str) -> None:
    """No tables of pages lie in memory: gathered, those of one of two layers would be half of the cache."""
    config = replace(load_model("llama-3-8b"), num_layers=2)
    layout = Layout.of(tensor=8, kv_dtype=kv_dtype)
    plan = Plan(config, "h100:8", Workload(64, 4096, "generate"), layout)
    audit = audit_plan(plan, "gpu", use_cache=False)
    assert (audit["verdict"], audit["findings"], audit["not_understood"]) == ("match", [], [])
    cache = audit["memory"]["planned_by_cause"]["cache"]
    assert audit["memory"]["compiled_by_cause"]["temporaries"] < cache / 2
    assert audit["step_seconds"]["scheduled"] < audit["step_seconds"]["planned"]


@pytest.mark.parametrize(
    ("model", "num_layers", "layout"),
    [
        ("mixtral-8x7b", 2, "data=4,tensor=2"),  # blocks of eight rows, more than tokens choose
        ("deepseek-v2-lite", 3, "data=2,tensor=4"),  # shared and routed experts are summed together
        ("deepseek-v2-lite", 3, "data=8,expert=8"),  # counts are sent before the rows
        ("gpt-oss-20b", 2, "data=2,tensor=4"),  # a layer with a window and sinks, which has no kernel
    ],
)
def test_generation_by_experts_is_the_planned_one(model: str, num_layers: int, layout: str) -> None:
    """Plans count the whole blocks of rows that experts multiply."""
    config = replace(load_model(model), num_layers=num_layers)
    plan = Plan(config, "h100:8", Workload(64, 4096, "generate"), Layout.parse(layout))
    audit = audit_plan(plan, "gpu", use_cache=False)
    assert (audit["verdict"], audit["findings"], audit["not_understood"]) == ("match", [], [])
    assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=0.01)

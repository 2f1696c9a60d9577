"""The TPU's own compiler, without a TPU: what it makes of a gradient, and of a whole planned step.

Needs the [tpu] extra; without it the CPU's compiler stands in (test_compare.py).
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tests.audit.small_models import deepseek_v4

from meshwright.audit.compile.cache import libtpu_lock
from meshwright.audit.compile.targets import choose_target, is_installed
from meshwright.audit.plan_audit import audit_plan
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

pytestmark = pytest.mark.skipif(
    not is_installed("tpu"), reason='no libtpu; pip install "meshwright[tpu]" runs the audits for TPU'
)

# dw[F_tensor, D_fsdp] of one matmul, on 256 chips: reduced by the plain reshard, and as nn does it.
GRADIENT = """
import json, sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P, reshard
from meshwright.audit.facts.communication import collectives
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.compile.targets import choose_target, target_mesh
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.nn.start.device_mesh import partition_spec
from meshwright.nn.products.scatter import reduce_scatter

layout = Layout.of(fsdp=64, tensor=4)
mesh = target_mesh(choose_target("v5p:8x8x4", layout, "tpu"), layout)
step, = contraction_of(layout, "w_out", "BTF,FD->BTD").rhs_reshard.backward
partial = partition_spec(step.operand)

def gradient(reduce):
    def run(h, dy):
        dw = jnp.einsum("BTF,BTD->FD", h, dy, out_sharding=partial, preferred_element_type=jnp.bfloat16)
        return reduce(dw)
    return run

def shape(size, spec):
    return jax.ShapeDtypeStruct((64, 512, size), "bfloat16", sharding=NamedSharding(mesh, spec))

forms = {
    "naive": lambda dw: reshard(dw, partition_spec(step.result)),
    "split": lambda dw: reduce_scatter(dw, step),
}
found = {}
with jax.set_mesh(mesh):
    for name, reduce in forms.items():
        inputs = shape(28672, P("fsdp", None, "tensor")), shape(8192, P("fsdp", None, None))
        traced = jax.jit(gradient(reduce)).trace(*inputs)
        program = parse_hlo(traced.lower(lowering_platforms=("tpu",)).compile().as_text())
        sums = [one for one in collectives(program) if not one.follows_sum]
        found[name] = [(one.op, one.gathered_bytes) for one in sums]
print(json.dumps(found))
"""


def test_a_gradient_stays_a_reduce_scatter_where_its_dimension_is_split() -> None:
    environment = {
        **os.environ,
        **choose_target("v5p:8x8x4", Layout.of(fsdp=64, tensor=4), "tpu").environment,
    }
    with libtpu_lock(lambda: None):
        ran = subprocess.run(
            [sys.executable, "-c", GRADIENT], env=environment, capture_output=True, text=True, check=False
        )
    assert ran.returncode == 0, ran.stderr
    size = 28672 // 4 * 8192 * 2
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "naive": [["all_reduce", size]],
        "split": [["reduce_scatter", size]],
    }


@pytest.mark.parametrize(
    ("model", "hardware", "layout", "workload"),
    [
        ("llama-3.2-1b", "v5e:4x4", "data=2,tensor=8,sequence_parallel=true", Workload(16, 2048)),
        ("llama-3.2-1b", "v5p:2x2x4", "fsdp=4,context=4", Workload(16, 2048)),
        (
            "llama-3.2-1b",
            "v5p:2x2x4",
            "fsdp=4,pipe=4,microbatches=8,schedule=lanes",
            Workload(64, 2048),
        ),
        (
            "llama-3-70b",
            "v5p:16x16x16",
            "fsdp=1024,tensor=4,sequence_parallel=true,remat=full",
            Workload(1024, 4096),
        ),
    ],
)
def test_the_compiled_step_is_the_planned_one(
    model: str, hardware: str, layout: str, workload: Workload
) -> None:
    """Of usual sizes: a TPU pads small arrays to its tiles, and its kernels compute whole blocks."""
    bf16 = Layout.parse(layout, weights_dtype="bf16", compute_dtype="bf16")
    audit = audit_plan(Plan(load_model(model), hardware, workload, bf16), "tpu", use_cache=False)
    assert (audit["target"], audit["not_understood"], audit["findings"]) == ("tpu", [], [])
    assert audit["verdict"] == "match"
    assert audit["memory"]["compiled"] > 0


@pytest.mark.parametrize(
    ("model", "context"), [("llama-3-8b", 4096), pytest.param("gemma-2-27b", 8192, marks=pytest.mark.slow)]
)
def test_generation_reads_its_pages_by_a_kernel(model: str, context: int) -> None:
    """No tables of pages lie in memory: gathered, those of one of two layers would be half of the cache."""
    config = replace(load_model(model), num_layers=2)
    plan = Plan(config, "v5e:2x4", Workload(64, context, "generate"), Layout.of(tensor=8))
    audit = audit_plan(plan, "tpu", use_cache=False)
    assert (audit["verdict"], audit["findings"], audit["not_understood"]) == ("match", [], [])
    cache = audit["memory"]["planned_by_cause"]["cache"]
    temporaries = audit["memory"]["compiled_by_cause"]["temporaries"]
    assert temporaries < cache / 2
    assert audit["step_seconds"]["scheduled"] < 2 * audit["step_seconds"]["planned"]


@pytest.mark.parametrize(
    ("scale", "hardware", "workload"),
    [
        (2, "v5e:2x2", Workload(32, 4096, "generate")),
        pytest.param(1, "v5p:2x2x1", Workload(4, 2048), marks=pytest.mark.slow),
    ],
)
def test_layers_of_windows_and_entries_are_as_planned(scale: int, hardware: str, workload: Workload) -> None:
    """Also in a generate step, which is unrolled, the weights of one layer are gathered at a time."""
    layout = Layout.parse("fsdp=4,expert=4", weights_dtype="bf16", compute_dtype="bf16")
    audit = audit_plan(Plan(deepseek_v4(scale), hardware, workload, layout), "tpu", use_cache=False)
    assert (audit["verdict"], audit["findings"], audit["not_understood"]) == ("match", [], [])
    assert audit["flops"]["compiled"] == pytest.approx(audit["flops"]["planned"], rel=0.01)
    assert audit["memory"]["compiled"] == pytest.approx(audit["memory"]["planned"], rel=0.15)


def test_gathers_of_weights_run_beside_products() -> None:
    """As plans hide them: by what `nn/start/compiler_options.py` asks for, without which none does on v5p."""
    layout = Layout.of(data=2, fsdp=4, remat="full", compute_dtype="bf16", weights_dtype="bf16")
    plan = Plan(load_model("llama-3.2-1b"), "v5p:2x2x2", Workload(8, 2048), layout)
    weights = ("wq", "wo", "w_gate", "w_in", "w_out")
    hidden = [
        bool(one["overlaps"])
        for one in audit_plan(plan, "tpu")["emitted"]
        if one["tensor"] in weights and one["op"] == "all_gather"
    ]
    assert sum(hidden) > len(hidden) / 2


@pytest.mark.slow
def test_rows_of_experts_travel_as_planned() -> None:
    """Mixtral's first two layers: rows go over `expert`, then `tensor`, as many as an even load has."""
    config = replace(load_model("mixtral-8x7b"), num_layers=2)
    layout = Layout.parse("fsdp=4,expert=4,tensor=2,sequence_parallel=true")
    audit = audit_plan(Plan(config, "v5p:2x2x2", Workload(8, 4096), layout), "tpu")
    assert (audit["unplanned"], audit["missing"], audit["not_understood"]) == ([], [], [])
    tensors = ("dispatch", "combine", "to_expert_gate+expert_in", "expert_out")
    of_experts = [row for row in audit["rows"] if row["tensor"] in tensors]
    assert {row["direction"] for row in of_experts} >= {"forward", "backward"}
    # The counts of rows are gathered by a sum of zero-padded shards, which is negligible.
    assert {row["status"] for row in of_experts} <= {"match", "equivalent", "negligible"}
    assert audit["flops"]["compiled"] / audit["flops"]["planned"] == pytest.approx(1, abs=0.01)


def test_a_loop_over_split_examples_is_named_if_it_gathers_them_in_each_turn() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    import meshwright

    mesh = AbstractMesh((8,), ("data",))

    def total(w: Any, x: Any) -> Any:
        def add(g: Any, row: Any) -> Any:
            return g + jax.grad(lambda w: jnp.mean(jnp.tanh(row @ w) ** 2))(w), None

        return w - 0.1 * jax.lax.scan(add, jnp.zeros_like(w), x)[0]

    w = jax.ShapeDtypeStruct((512, 512), "float32", sharding=NamedSharding(mesh, PartitionSpec()))
    x = jax.ShapeDtypeStruct((64, 128, 512), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    audit = meshwright.audit(jax.jit(total, donate_argnums=0), w, x, hardware="v5p:2x2x2")
    assert {one["kind"] for one in audit["warnings"]} == {"batch_gathered"}

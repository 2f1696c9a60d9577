"""The partitioner's own warnings, mapped to tensors, and a program that makes it warn."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright
from meshwright.audit import plan_audit as audit_module
from meshwright.audit.compile import compile as compile_module
from meshwright.audit.compile.compile import captured_stderr, warning_lines
from meshwright.audit.plan_audit import audit_plan
from meshwright.audit.remarks.compiler_log import compiler_warnings
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

P = PartitionSpec
STAMP = "W1121 15:21:36.638540   11393"
BEFORE, AFTER = "{devices=[2,1,1,4]<=[8] last_tile_dim_replicate}", "{devices=[1,1,4,2]<=[2,4]T(1,0)}"
LOG = f"""\
I1121 15:21:36.595311   11393 spmd_partitioner.cc:10] partitioning
{STAMP} spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go \
from sharding {BEFORE} to {AFTER} efficiently for HLO operation %copy.0 = bf16[4,64,16]{{2,1,0}} \
copy(%cos.0), sharding={BEFORE}, metadata={{op_name="jit(f)/jvp(mlp)/h/sharding_constraint" \
stack_frame_id=4}}. As the last resort, SPMD will replicate the tensor and then partition it.
{STAMP} hlo_rematerialization.cc:3005] Can't reduce memory use below 1.00GiB
{STAMP} cpu_client.cc:1] something about the host
{STAMP} tpu_spmd_partitioner.cc:459] Collective matmul V1 is enabled. Please consider migrating to V2
not a line of XLA's
"""


def test_a_replicated_tensor_is_named_with_its_whole_size() -> None:
    replicated, other = compiler_warnings(warning_lines(LOG))
    assert (replicated.kind, replicated.tensor, replicated.instruction) == (
        "involuntary_replication",
        "h",
        "copy.0",
    )
    assert replicated.bytes == 2 * 4 * 64 * 16 * 2
    assert replicated.where == "jit(f)/jvp(mlp)/h/sharding_constraint"
    change = f"from {BEFORE} to {AFTER}"
    assert replicated.what == f"the compiler replicates `h` (16,384 B) on every device to reshard it {change}"
    assert (other.kind, other.bytes) == ("other", None)
    assert other.what.startswith("hlo_rematerialization: Can't reduce memory use below 1.00GiB")


def test_a_line_in_other_words_is_not_dropped() -> None:
    line = (
        "W1121 15:21:36.638540 11393 spmd_partitioner.cc:9] Involuntary full rematerialization of something"
    )
    (one,) = compiler_warnings(warning_lines(f"{line}\n{line}"))
    assert (one.kind, one.tensor, one.bytes) == ("involuntary_replication", "", None)


def test_lists_of_devices_are_cut() -> None:
    pairs = ",".join(f"{{{i},{i + 8}}}" for i in range(64))
    line = f"emitter: cannot be made async: %p.1 = bf16[8] permute(%x), source_target_pairs={{{pairs}}}, end"
    (one,) = compiler_warnings([line])
    assert one.what.endswith("permute(%x), source_target_pairs={...}, end")


def test_what_is_captured_is_passed_on(capfd: pytest.CaptureFixture) -> None:
    with captured_stderr() as said:
        os.write(2, b"from C++\n")
        assert said() == "from C++\n"
    assert capfd.readouterr().err == "from C++\n"


def test_a_program_that_makes_the_compiler_replicate_differs() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def run(x: jax.Array) -> jax.Array:
        with jax.named_scope("hidden"):
            h = with_sharding_constraint(jnp.cos(x), P("data", None, None))
        return with_sharding_constraint(jnp.sin(h), P(None, None, "tensor"))

    x = jax.ShapeDtypeStruct((8, 64, 16), "float32", sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        found = meshwright.audit(run, x)
    (one,) = found["compiler_warnings"]
    assert (one["kind"], one["tensor"], one["bytes"]) == (
        "involuntary_replication",
        "hidden",
        8 * 64 * 16 * 4,
    )
    assert found["verdict"] == "differs"


@pytest.mark.slow
def test_a_plan_brings_the_log_of_its_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the program was compiled before."""
    plan = Plan(load_model("tiny"), "cpu:2", Workload(2, 16), Layout.of(data=2))
    assert audit_plan(plan, "cpu")["compiler_warnings"] == []
    monkeypatch.setattr(audit_module, "fetch", lambda key: None)  # the program is stored, and the audit not
    monkeypatch.setattr(compile_module, "warning_lines", lambda log: warning_lines(LOG))
    found = audit_plan(plan, "cpu")
    assert (found["cached"], found["verdict"]) == (True, "differs")
    assert [one["tensor"] for one in found["compiler_warnings"]] == ["h", ""]

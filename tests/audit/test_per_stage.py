"""Pipelines whose stages run programs of their own: each stage is compiled as it is planned.

The GPU's and the TPU's compilers are asked in test_gpu.py and the audit matrix.
"""

from dataclasses import replace
from functools import cache

import pytest
from tests.audit.test_searched import IN_FLOAT32, assert_as_planned
from tests.nn.small_models import MIXTURE, TIED, TINY

from meshwright.audit.compile.compile import CompiledProgram, compile_plan
from meshwright.audit.compile.target import Target
from meshwright.audit.facts.matmuls import dot_flops
from meshwright.audit.hlo.link import StageCall, linked
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.plan_audit import judged
from meshwright.errors import AuditError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.plan_file import Plan

pytestmark = pytest.mark.sampled(4)

SLOW = pytest.mark.slow
DEEP = replace(TINY, num_layers=4)
CPU = Target("cpu")


def _plan(text: str, config: ModelConfig = DEEP) -> Plan:
    return Plan(config, "cpu:8", Workload(16, 64), Layout.parse(text, **IN_FLOAT32))


@cache
def _compiled() -> CompiledProgram:
    return compile_plan(_plan("pipe=2,data=2,tensor=2,microbatches=4,schedule=zb-h1"), CPU, use_cache=False)


def test_each_stage_is_compiled_as_it_is_planned() -> None:
    plan = _plan("pipe=2,data=2,tensor=2,microbatches=4,schedule=zb-h1")
    found = judged(plan, CPU, _compiled())
    assert (found["verdict"], found["findings"], found["not_understood"]) == ("match", [], [])
    assert [one["stage"] for one in found["stages"]] == [0, 1]
    # Four microbatches of 4 sequences, of which a device has 2, of 64 positions in float32.
    block = 2 * 64 * DEEP.d_model * 4
    sent = [row for row in found["rows"] if row["tensor"] == "activations between stages"]
    told = [(row["stage"], row["direction"], row["emitted"]["sent"]) for row in sent]
    assert told == [(0, "forward", 4 * block), (1, "backward", 4 * block)]
    assert all(one["flops"]["compiled"] == pytest.approx(one["flops"]["planned"]) for one in found["stages"])
    assert found["memory"]["compiled"] == max(one["memory"]["compiled"] for one in found["stages"])


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("pipe=2,data=2,tensor=2,microbatches=4,schedule=zb-h1,remat=full", "product"),
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=zb-h1", "collective"),
        # Its copies of the weights are sent to nobody.
        ("pipe=2,data=2,tensor=2,microbatches=4,schedule=dualpipe", "collective"),
    ],
)
def test_programs_of_another_plan_differ(text: str, kind: str) -> None:
    found = judged(_plan(text), CPU, _compiled())
    assert found["verdict"] == "differs"
    assert {0, 1} == {one["stage"] for one in found["findings"] if one["kind"] == kind}


@SLOW
@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("pipe=2,data=4,zero=2,microbatches=4,schedule=1f1b,remat=matmuls", DEEP),
        ("pipe=2,fsdp=4,microbatches=4,schedule=gpipe,remat=full", DEEP),
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=interleaved,interleave=2", DEEP),
        # Chunks without layers, of four on two stages: nothing of the batch is sent to a stage of such alone.
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=zb-v,remat=full", TINY),
        # Two chunks of one stage whose programs are alike.
        ("pipe=4,data=2,microbatches=4,schedule=zb-v", replace(TINY, num_layers=8)),
        ("pipe=2,fsdp=4,microbatches=4,schedule=dualpipe", DEEP),
        # A table that is read on both ends, and summed on both.
        ("pipe=2,data=4,zero=1,microbatches=4,schedule=zb-h1", TIED),
        ("pipe=4,data=2,zero=1,microbatches=8,schedule=dualpipe", DEEP),
        ("pipe=2,fsdp=4,microbatches=4,schedule=zb-v", replace(TIED, num_layers=4)),
        ("pipe=4,data=2,zero=1,microbatches=8,schedule=dualpipe", replace(TIED, num_layers=4)),
        ("pipe=4,data=2,zero=2,microbatches=8,schedule=dualpipe", replace(TIED, num_layers=4)),
        ("pipe=2,data=2,context=2,microbatches=2,schedule=zb-h1", DEEP),
        ("pipe=2,data=2,tensor=2,microbatches=4,schedule=zb-h1,optimizer=muon", DEEP),
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=zb-h1,optimizer=adafactor", DEEP),
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=1f1b,offload_optimizer=true", DEEP),
        # Of frozen weights there are no gradients: none of both ends, which `adapters` have not.
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,schedule=zb-h1", replace(DEEP, lora_rank=4)),
        ("pipe=2,data=2,tensor=2,microbatches=4,schedule=lanes", replace(DEEP, lora_rank=4)),
        # Rows of experts in rounds, of which all stages' devices agree on the number.
        ("pipe=2,fsdp=2,expert=2,tensor=2,microbatches=2,schedule=zb-h1", MIXTURE),
        # A bias that only chooses experts: its gradient is zero, and no device sends it.
        ("pipe=2,data=4,zero=2,expert=2,microbatches=2,schedule=1f1b", MIXTURE),
    ],
)
def test_other_schedules_and_axes(text: str, config: ModelConfig) -> None:
    assert_as_planned(config, Layout.parse(text, **IN_FLOAT32))


_PROGRAM = """HloModule run, is_scheduled=true

ENTRY %main (a: f32[2,2], b: f32[2,2]) -> f32[2,2] {
  %a = f32[2,2]{1,0} parameter(0), metadata={op_name="x"}
  %b = f32[2,2]{1,0} parameter(1), metadata={op_name="w"}
  ROOT %dot = f32[2,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_program_counts_as_often_as_its_own_stage_calls_it() -> None:
    """2 x 2 x 2 multiply-adds: three times on stage 0, five times on stage 1, which is given what 0 made."""
    calls = (
        StageCall("call.0", 0, 0, 3, {"x": "rows", "w": "params['w']"}),
        StageCall("call.1", 0, 1, 5, {"x": "call.0#0", "w": "params['w']"}),
    )
    programs = [parse_hlo(_PROGRAM)]
    stages = [linked(programs, calls, ("call.1#0",), stage) for stage in (0, 1)]
    assert list(map(dot_flops, stages)) == [3 * 16, 5 * 16]
    # Both stages have a weight of that name.
    assert sorted(one.op_name for one in stages[0].main.parameters) == ["params['w']", "params['w']", "rows"]
    with pytest.raises(AuditError, match="parameter a has no name that JAX gave it"):
        linked(programs, (StageCall("call.0", 0, 0, 1, {"w": "w"}),), (), 0)

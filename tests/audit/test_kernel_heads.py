"""KV heads that attention kernels read, on GPUs and TPUs."""

from dataclasses import replace

import pytest

from meshwright.audit.compare.kernel_heads import head_findings
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import parse_hlo
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.plan_file import Plan

CUDNN = """HloModule test

ENTRY %main () -> f32[] {{
  %q = bf16[2,128,4,64] parameter(0)
  %k = bf16[2,128,{heads},64] parameter(1)
  ROOT %out = bf16[2,4,128,64] custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax"
}}
"""
SPLASH = """HloModule test

ENTRY %main () -> f32[] {{
  %next = s8[1,1,1] parameter(0)
  %visited = s8[1,1,1] parameter(1)
  %q = bf16[2,4,128,64] parameter(2)
  %k = bf16[2,{heads},128,64] parameter(3)
  ROOT %out = bf16[2,4,128,64] custom-call(%next, %visited, %q, %k, %k), \
custom_call_target="tpu_custom_call", metadata={{op_name="jit(step)/attention/splash_mha_fwd/pallas_call"}}
}}
"""


@pytest.mark.parametrize("text", [CUDNN, SPLASH])
def test_kv_heads_repeated_before_a_kernel_are_found(text: str) -> None:
    """Each of two devices has four of eight query heads and two of four KV heads."""
    model = replace(load_model("tiny"), num_heads=8, num_kv_heads=4, d_head=64)
    plan = Plan(model, "h100:2", Workload(2, 128), Layout.parse("tensor=2"))
    planned, repeated = (
        head_findings(parse_hlo(text.format(heads=heads)), plan, Prices(plan.layout.mesh, None, None, None))
        for heads in (2, 4)
    )
    assert planned == []
    [finding] = repeated
    assert "reads 4 KV heads for 4 query heads, 2 planned" in finding.what
    assert finding.bytes == 2 * 2 * (2 * 128 * 64 * 2)

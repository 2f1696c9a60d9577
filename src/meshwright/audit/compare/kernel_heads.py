"""Findings on the KV heads that attention kernels read.

The FLOPs of a kernel depend on its query heads only. If KV heads are repeated before the kernel, one for each
query head, the FLOPs are as planned: only the shapes of the operands show it.
"""

from meshwright.audit.facts.instruction_work import kernel_heads
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import TracedValue, known_runs, places
from meshwright.audit.remarks import Remark
from meshwright.layout.moves.attention import attention_layout
from meshwright.plan_file import Plan


def head_findings(program: Program, plan: Plan, prices: Prices) -> list[Remark]:
    """One finding if kernels read more KV heads for each query head than planned."""
    model, layout = plan.model, attention_layout(plan.layout.at(plan.workload.phase))
    over_queries = layout.activation("q", "BTNH").axes_of("N")
    if model.mla or layout.activation("k", "BTKH").axes_of("K") != over_queries:
        return []  # each query head has its own keys, or devices split query and KV heads differently
    group, num_bytes, first = model.num_heads // model.num_kv_heads, 0, None
    for place in places(program):
        for instruction in place.computation.instructions.values():
            heads = kernel_heads(TracedValue(instruction, place))
            if heads is None or heads.queries >= group * heads.keys:
                continue
            num_extra = heads.keys - heads.queries // group
            num_bytes += round(num_extra * heads.bytes_per_head * known_runs(program, place))
            first = first or (instruction.op_name, heads)
    if first is None:
        return []
    name, heads = first
    return [
        Remark(
            "product",
            "attention",
            f"attention: the kernel reads {heads.keys} KV heads for {heads.queries} query heads, "
            f"{heads.queries // group} planned: KV heads are repeated before the kernel",
            name,
            "pass the KV heads unrepeated: the kernel reads one KV head for several query heads",
            num_bytes,
            prices.read_seconds(num_bytes),
        )
    ]

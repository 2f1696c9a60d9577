"""Findings on the heads of keys and values that attention kernels read.

A kernel has the FLOPs of its queries' heads, whatever the number of KV heads. If these are repeated before
it, for as many as queries have, only its operands show it.
"""

from meshwright.audit.facts.instruction_work import kernel_heads
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import TracedValue, known_runs, places
from meshwright.audit.remarks import Remark
from meshwright.layout.moves.attention import attention_layout
from meshwright.plan_file import Plan


def head_findings(program: Program, plan: Plan, prices: Prices) -> list[Remark]:
    """One finding if kernels read more KV heads for each head of queries than planned."""
    model, layout = plan.model, attention_layout(plan.layout.at(plan.workload.phase))
    over_queries = layout.activation("q", "BTNH").axes_of("N")
    if model.mla or layout.activation("k", "BTKH").axes_of("K") != over_queries:
        return []  # each head of queries has its own keys, or devices share heads
    group, num_bytes, worst = model.num_heads // model.num_kv_heads, 0, None
    for place in places(program):
        for instruction in place.computation.instructions.values():
            heads = kernel_heads(TracedValue(instruction, place))
            if heads is None or heads.queries >= group * heads.keys:
                continue
            more = heads.keys - heads.queries // group
            num_bytes += round(more * heads.extra_bytes * known_runs(program, place))
            worst = worst or (instruction.op_name, heads)
    if worst is None:
        return []
    name, heads = worst
    return [
        Remark(
            "product",
            "attention",
            f"attention: its kernel reads {heads.keys} heads of keys and values for {heads.queries} of "
            f"queries, {heads.queries // group} planned: they are repeated before it",
            name,
            "give the kernel the keys and values as they are projected: it reads one for several queries",
            num_bytes,
            prices.read_seconds(num_bytes),
        )
    ]

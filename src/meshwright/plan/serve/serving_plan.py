"""The plan of a way to serve, as it is written, served and audited."""

from dataclasses import replace

from meshwright.layout.layout_checks import num_replicas
from meshwright.layout.page_sizes import chunk_of, divided_block
from meshwright.layout.workload import Workload
from meshwright.plan.serve.phase import PhasePoint
from meshwright.plan.serve.point import Point
from meshwright.plan_file import Plan


def plan_of_point(point: Point) -> Plan:
    """Its generate step, with room for whole requests, by the layout of both phases where there is one.

    Raises LayoutError where something that was planned with padding does not divide.
    """
    context = point.requests.context
    config = replace(point.config, max_seq_len=max(context, point.config.max_seq_len))
    planned = {
        "step_seconds": point.cost.seconds,
        "ttft_seconds": point.ttft_seconds,
        "bytes_per_chip": point.memory.total,
    }
    workload = Workload(point.batch, context, "generate")
    layout = point.served_layout or point.layout
    return Plan(config, point.hardware.spec, workload, layout, planned)


def prefill_of(plan: Plan) -> Plan:
    """The prefill step of a server's plan: a chunk of one prompt on each replica, as in `mw serve`.

    If devices divide a prompt, the step is a whole prompt that fills the context.
    """
    layout, context = plan.layout.at("prefill"), plan.workload.seq_len
    num_tokens = min(chunk_of(layout, context), context)
    if layout.rules.prompt_axes:
        num_tokens -= num_tokens % divided_block(1, layout.num_prompt_shards)
    return replace(plan, workload=Workload(num_replicas(layout, plan.model), num_tokens, "prefill"))


def plan_of_phase(point: PhasePoint) -> Plan:
    """Its one step."""
    planned = {"step_seconds": point.step_seconds, "bytes_per_chip": point.memory.total}
    config = replace(point.config, max_seq_len=max(point.workload.seq_len, point.config.max_seq_len))
    return Plan(config, point.hardware.spec, point.workload, point.layout, planned)

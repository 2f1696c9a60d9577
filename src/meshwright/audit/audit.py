"""The audit of a plan: its step compiled, its collectives, FLOPs and memory beside the planned ones."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.audit.beside_plan import at_phase_rates, beside_plan
from meshwright.audit.compare.findings import too_large
from meshwright.audit.compile.compile import CompiledProgram, compile_plan
from meshwright.audit.compile.planned_program import planned_step
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.facts.seconds import step_prices
from meshwright.audit.facts.timeline import program_timeline
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.numerics import check_numerics
from meshwright.audit.per_stage import stages_beside_plan
from meshwright.audit.remarks.compiler_log import compiler_warnings, replicates
from meshwright.errors import OutOfMemoryError, PlanError
from meshwright.hardware.catalog import load
from meshwright.layout.paged import page_of
from meshwright.models.count import widest_window
from meshwright.plan.serve.serving_plan import prefill_of
from meshwright.plan_file import Plan
from meshwright.platforms import PLATFORMS


def audit_plan(
    plan: Plan,
    target: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    use_cache: bool = True,
    numerics: bool = False,
) -> dict:
    """The audit of the step of `plan`, of whatever phase: the keys of `mw audit`.

    numerics: also run the layout with a tiny model beside one device (see `numerics.check_numerics`).
    target: "cpu", "tpu" or "gpu", whose compiler to ask; by default that of the plan's hardware where it is
    installed, else the CPU's. Raises AuditError where the step does not compile. Sequences that are served
    fill whole pages on both sides: progress is told where they are longer so than planned.
    """
    chosen, plan = choose_target(plan.hardware, plan.layout, target), _in_whole_pages(plan, progress)
    try:
        compiled = compile_plan(plan, chosen, progress, use_cache=use_cache)
    except OutOfMemoryError as error:
        return refused(plan, chosen, error)
    checked = _numerics(plan, progress) if numerics else None
    return judged(plan, chosen, compiled, checked)


def _in_whole_pages(plan: Plan, progress: Callable[[str], None]) -> Plan:
    """The plan with sequences as long as the pages that a server gives them, within the model's context."""
    workload = plan.workload
    if workload.phase == "train":
        return plan
    page = page_of(workload.seq_len, widest_window(plan.model))
    whole = -(-workload.seq_len // page) * page
    if whole == workload.seq_len or whole > plan.model.max_seq_len:
        return plan
    progress(f"audited with {whole:,} positions a sequence, whole pages of {page}, for {workload.seq_len:,}")
    return replace(plan, workload=replace(workload, seq_len=whole))


def audit_phases(
    plan: Plan,
    target: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    use_cache: bool = True,
    numerics: bool = False,
) -> dict:
    """The audit of a plan in every phase that it has: that of `audit_plan`, and of a server's plan two.

    The document of a server's plan is that of its generate step, with that of a prefill step under `prefill`;
    its verdict is `match` where both are. The arguments are those of `audit_plan`.
    """
    document = audit_plan(plan, target, progress, use_cache=use_cache, numerics=numerics)
    if not plan.is_of_server:
        return document
    prefill = audit_plan(prefill_of(plan), target, progress, use_cache=use_cache)
    verdict = "match" if document["verdict"] == prefill["verdict"] == "match" else "differs"
    return document | {"verdict": verdict, "prefill": prefill}


def judged(plan: Plan, target: Target, compiled: CompiledProgram, checked: dict | None = None) -> dict:
    """The audit of a compiled step. verdict: `match` if every collective is planned or equivalent, products
    and memory are as planned, everything was understood, and the compiler replicated nothing of its own.

    checked: the numerics' report, if they were asked for.
    """
    if compiled.stages:
        found = stages_beside_plan(plan, target, compiled.hlo, compiled.stages)
    else:
        planned = planned_step(plan, load(plan.hardware), compared_on=PLATFORMS[target.name])
        program = parse_hlo(compiled.hlo)
        found = beside_plan(plan, target, planned, program, plan.layout.mesh, compiled.memory_bytes)
    said = compiler_warnings(compiled.compiler_log)
    bad = bool(found["findings"] or found["not_understood"]) or replicates(said)
    bad |= checked is not None and not checked["agrees"]
    return {
        "verdict": "differs" if bad else "match",
        "target": target.name,
        "compiler": target.title,
        "layout": str(plan.layout),
        "compile_seconds": compiled.compile_seconds,
        "cached": compiled.cached,
        **({"numerics": checked} if checked else {}),
        "compiler_warnings": [one.of_compiler() for one in said],
        **found,
    }


def scheduled_seconds(plan: Plan, target: Target, compiled: CompiledProgram) -> float | None:
    """Seconds of a step by its compiled schedule; None if they are unknown.

    They are unknown on virtual devices, on chips of another kind, and if a loop dispatches several programs.
    """
    hardware = load(plan.hardware)
    is_own = target.is_of(hardware.chip) and not hardware.chip.platform.virtual
    if compiled.stages or not is_own:
        return None
    program, mesh, machine = parse_hlo(compiled.hlo), plan.layout.mesh, at_phase_rates(plan, hardware)
    found = [on_mesh(one, mesh, widened=False) for one in collectives(program)]
    line = program_timeline(program, machine.chip, step_prices(machine, mesh), found)
    return line and line.seconds


def refused(plan: Plan, target: Target, error: OutOfMemoryError) -> dict:
    """The audit of a step for which a chip has no room: what the compiler wants, beside the plan's memory."""
    hardware = load(plan.hardware)
    planned = planned_step(plan, hardware)
    capacity = hardware.chip.program_bytes
    what = too_large(error.num_bytes, capacity, str(error))
    largest = [
        {"bytes": size, "tensor": "", "instruction": "", "shape": "", "what": said}
        for size, said in error.buffers
    ]
    return {
        "verdict": "differs",
        "target": target.name,
        "compiler": target.title,
        "layout": str(plan.layout),
        "compile_seconds": None,
        "cached": False,
        "findings": [what.of_plan()],
        "compiler_warnings": [],
        "planned": [p.to_dict() for p in planned.collectives],
        "emitted": [],
        "unplanned": [],
        "missing": [],
        "rows": [],
        "not_understood": [],
        "bytes": {"planned": sum(p.step_bytes for p in planned.collectives), "compiled": None},
        "sent": {"planned": None, "compiled": None},
        "step_seconds": {"planned": planned.seconds, "scheduled": None},
        "flops": {"planned": planned.flops, "compiled": None},
        "memory": {
            "planned": planned.memory_total,
            "compiled": error.num_bytes,
            "planned_by_cause": dict(planned.memory),
            "compiled_by_cause": None,
            "peak": {"bytes": error.num_bytes, "buffers": largest} if largest else None,
        },
    }


def _numerics(plan: Plan, progress: Callable[[str], None]) -> dict:
    if plan.workload.phase != "train":
        raise PlanError(f"--numerics compares training steps; this plan has phase {plan.workload.phase!r}")
    progress(f"running a tiny model under {plan.layout} and on one device")
    return check_numerics(plan)

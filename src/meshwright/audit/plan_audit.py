"""The audit of a plan: collectives, FLOPs and memory of its compiled step and of the plan."""

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from meshwright.audit.against_plan import against_plan, at_phase_rates
from meshwright.audit.compare.findings import too_large
from meshwright.audit.compile.cache import content_key, fetch, source_key, store
from meshwright.audit.compile.compile import STAGES_APART, CompiledProgram, compile_plan
from meshwright.audit.compile.planned_program import planned_step
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import choose_target
from meshwright.audit.facts.buffers import chip_memory, constant_bytes
from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.compiled_schedule import program_timeline
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.facts.seconds import step_prices
from meshwright.audit.grade import graded, worst
from meshwright.audit.hlo.read import parse_hlo
from meshwright.audit.numerics import cached_numerics
from meshwright.audit.per_stage import stages_against_plan
from meshwright.audit.remarks.compiler_log import compiler_warnings, replicates
from meshwright.audit.server_start import server_memory
from meshwright.errors import OutOfMemoryError
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout.page_sizes import page_of
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
    """The audit of one step of `plan`, in any phase: the keys of `mw audit`.

    numerics: also compare a tiny twin's arithmetic with the formulas (see `numerics.check_numerics`).
    target: "cpu", "tpu" or "gpu", the compiler; by default the plan's hardware's if it is installed,
    otherwise the CPU's. Raises AuditError if the step does not compile. Served sequences fill whole pages on
    both sides; `progress` reports it if they are longer than planned.
    """
    chosen, plan = choose_target(plan.hardware, plan.layout, target), _in_whole_pages(plan, progress)
    key = source_key(
        {"audit": content_key(plan, chosen), "planned": dict(plan.planned), "numerics": numerics}
    )
    if use_cache and (stored := fetch(key)):
        progress(f"read the audit of {plan.layout} that was made before")
        return json.loads((stored / _DOCUMENT).read_text()) | {"cached": True}
    document = _audited(plan, chosen, progress, use_cache=use_cache, numerics=numerics)
    if use_cache:
        store(key, {_DOCUMENT: json.dumps(document)})
    return document


_DOCUMENT = "audit.json"


def _audited(
    plan: Plan, chosen: Target, progress: Callable[[str], None], *, use_cache: bool, numerics: bool
) -> dict:
    with ThreadPoolExecutor(1) as both:  # each waits for a process
        checked = both.submit(cached_numerics, plan, use_cache=use_cache) if numerics else None
        try:
            compiled = compile_plan(plan, chosen, progress, use_cache=use_cache)
        except OutOfMemoryError as error:
            return refused(plan, chosen, error)
        if checked and not checked.done():
            progress("running a tiny twin of the plan, to compare its numbers with the formulas'")
        return judged(plan, chosen, compiled, checked.result() if checked else None)


def _in_whole_pages(plan: Plan, progress: Callable[[str], None]) -> Plan:
    """The plan with sequences padded to a server's whole pages, within the model's context."""
    workload = plan.workload
    if workload.phase == "train":
        return plan
    page = page_of(plan.model, workload.seq_len)
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
    """The audit of a plan in each of its phases: two for a server's plan.

    Arguments as for `audit_plan`. A server's plan has the document of its generate step, with a prefill
    step's under `prefill` and `server_memory` under `server`; its verdict is `match` if both match.
    """
    document = audit_plan(plan, target, progress, use_cache=use_cache, numerics=numerics)
    if not plan.is_of_server:
        return document
    prefill = audit_plan(prefill_of(plan), target, progress, use_cache=use_cache)
    verdict = "match" if document["verdict"] == prefill["verdict"] == "match" else "differs"
    grade = worst((document["grade"], prefill["grade"]))
    server = server_memory(plan, document, prefill)
    return document | {"verdict": verdict, "grade": grade, "prefill": prefill, "server": server}


def judged(plan: Plan, target: Target, compiled: CompiledProgram, checked: dict | None = None) -> dict:
    """The audit of a compiled step.

    verdict: `match` if every collective is planned or equivalent, products and memory are as planned, all
    instructions were understood, the compiler replicated nothing involuntarily, and the twin's numbers
    agree with the formulas. checked: the numerics' report, if requested.
    """
    if compiled.stages:
        document = stages_against_plan(plan, target, compiled.hlo, compiled.stages)
        programs = [constant_bytes(parse_hlo(text)) for text in compiled.hlo.split(STAGES_APART)]
        by_stage = Counter[int]()
        for call in compiled.stages.calls:
            by_stage[call.stage] += programs[call.program]
        constants = max(by_stage.values())
    else:
        planned = planned_step(plan, load(plan.hardware), compared_on=PLATFORMS[target.name])
        program = parse_hlo(compiled.hlo)
        memory = chip_memory(compiled.memory_bytes, program)
        document = against_plan(plan, target, planned, program, plan.layout.mesh, memory)
        constants = constant_bytes(program)
    warnings = compiler_warnings(compiled.compiler_log)
    bad = bool(document["findings"] or document["not_understood"]) or replicates(warnings)
    bad |= checked is not None and checked["agrees"] is False
    return graded({
        "verdict": "differs" if bad else "match",
        "target": target.name,
        "compiler": target.title,
        "versions": dict(target.versions),
        "layout": str(plan.layout),
        "compile_seconds": compiled.compile_seconds,
        "cached": compiled.cached,
        "program": {"bytes": compiled.program_bytes, "constants": constants},
        **({"numerics": checked} if checked else {}),
        "compiler_warnings": [one.of_compiler() for one in warnings],
        **document,
    })  # fmt: skip


def scheduled_seconds(
    plan: Plan, target: Target, compiled: CompiledProgram, hardware: Hardware | None = None
) -> float | None:
    """Seconds of a step by its compiled schedule; None if they are unknown.

    They are unknown on virtual devices, on chips of another kind, and if a loop dispatches several programs.
    hardware: prices the schedule, by default the plan's own; another may have another network.
    """
    hardware = hardware or load(plan.hardware)
    is_own = target.is_of(hardware.chip) and not hardware.chip.platform.virtual
    if compiled.stages or not is_own:
        return None
    program, mesh, machine = parse_hlo(compiled.hlo), plan.layout.mesh, at_phase_rates(plan, hardware)
    emitted = [on_mesh(one, mesh, widened=False) for one in collectives(program)]
    line = program_timeline(program, machine.chip, step_prices(machine, mesh), emitted)
    return line and line.seconds


def refused(plan: Plan, target: Target, error: OutOfMemoryError) -> dict:
    """The audit of a step that exceeds a chip's memory: the compiler's figures and the plan's."""
    hardware = load(plan.hardware)
    planned = planned_step(plan, hardware)
    capacity = hardware.chip.program_bytes
    what = too_large(error.num_bytes, capacity, str(error))
    largest = [
        {"bytes": size, "tensor": "", "instruction": "", "shape": "", "what": text}
        for size, text in error.buffers
    ]
    return graded({
        "verdict": "differs",
        "target": target.name,
        "compiler": target.title,
        "versions": dict(target.versions),
        "layout": str(plan.layout),
        "compile_seconds": None,
        "cached": False,
        "program": {"bytes": None, "constants": None},
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
    })  # fmt: skip

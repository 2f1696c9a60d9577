"""The audit of a plan: its step compiled, its collectives, FLOPs and memory beside the planned ones."""

from collections.abc import Callable, Sequence

from meshwright.audit.compare.findings import (
    activation_findings,
    compare_memory,
    exposure_findings,
    findings,
    kept_findings,
    missing_findings,
    norm_findings,
    product_findings,
    result_findings,
    saved_findings,
    state_findings,
    sum_findings,
    too_large,
    unplanned_findings,
    update_findings,
    weight_findings,
    wide_findings,
)
from meshwright.audit.compare.line_up import Row, line_up, weighed
from meshwright.audit.compare.products import compare_products, wider_products
from meshwright.audit.compare.rules import Side
from meshwright.audit.compile.compile import CompiledProgram, compile_plan
from meshwright.audit.compile.programs import PlannedStep, planned_step
from meshwright.audit.compile.targets import Target, choose_target
from meshwright.audit.facts.buffers import buffer_peak, input_bytes
from meshwright.audit.facts.collectives import collectives, is_differentiated
from meshwright.audit.facts.elementwise import (
    scoped_arithmetic,
    state_passes,
    transcendentals,
    update_arithmetic,
)
from meshwright.audit.facts.emitted import Emitted, on_mesh
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.prices import Prices, step_prices
from meshwright.audit.facts.products import dot_flops, products
from meshwright.audit.facts.schedule import ProgramSchedule, StepTimeline, overlaps, program_timeline
from meshwright.audit.hlo.parse import Program, parse_hlo
from meshwright.audit.numerics import check_numerics
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.compiler import compiler_warnings, replicates
from meshwright.cost.inference import in_inference
from meshwright.cost.priced import PricedCollective
from meshwright.errors import OutOfMemoryError, PlanError
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.layout.fit import check_one_program
from meshwright.models.parameters import parameters
from meshwright.plan_file import Plan


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
    installed, else the CPU's. Raises AuditError where the step does not compile, LayoutError where it is
    several programs.
    """
    check_one_program(plan.layout, "an audit compares")
    chosen = choose_target(plan.hardware, plan.layout, target)
    try:
        compiled = compile_plan(plan, chosen, progress, use_cache=use_cache)
    except OutOfMemoryError as error:
        return refused(plan, chosen, error)
    checked = _numerics(plan, progress) if numerics else None
    return judged(plan, chosen, compiled, checked)


def judged(plan: Plan, target: Target, compiled: CompiledProgram, checked: dict | None = None) -> dict:
    """The audit of a compiled step. verdict: `match` if every collective is planned or equivalent, products
    and memory are as planned, everything was understood, and the compiler replicated nothing of its own.

    checked: the numerics' report, if they were asked for.
    """
    hardware, on_cpu = load(plan.hardware), target.name == "cpu"
    planned, machine = planned_step(plan, hardware, by_cpu=on_cpu), _at_rates(plan, hardware)
    program = parse_hlo(compiled.hlo)
    emitted = [on_mesh(one, plan.layout.mesh, widened=on_cpu) for one in collectives(program)]
    beside = overlaps(ProgramSchedule(program), emitted, can_overlap=not on_cpu)
    prices = step_prices(machine, plan.layout.mesh)
    side = Side(
        has_reduce_scatter=target.has_reduce_scatter,
        num_microbatches=plan.layout.microbatches,
        num_passes=plan.layout.num_passes,
        num_loops=_NUM_LOOPS if plan.layout.stages_alike else 1,
        gradients_dtype=plan.layout.gradients_dtype or plan.layout.compute_dtype,
        split_weights=planned.split_weights,
    )
    rows = weighed(line_up(planned.collectives, emitted, side), prices, planned.seconds)
    differences = _differences(planned, program, rows, prices, on_cpu=on_cpu)
    if compiled.memory_bytes:
        capacity = hardware.chip.program_bytes if target.name == hardware.chip.kind != "cpu" else None
        apart = input_bytes(program), _logits_bytes(plan)
        differences += compare_memory(planned, compiled.memory_bytes, *apart, capacity, on_cpu=on_cpu)
    if on_cpu:
        differences += saved_findings(planned, program)
        differences += missing_findings(program, planned.elementwise)
    line = (
        program_timeline(program, machine.chip, prices, emitted) if target.name == machine.chip.kind else None
    )
    differences += exposure_findings(rows, line, planned.seconds)
    if plan.workload.phase == "train" and not plan.model.lora_rank:
        differences += kept_findings(program) + weight_findings(program, parameters(plan.model))
    if planned.update:
        differences += update_findings(planned.update, update_arithmetic(program, planned.operations), prices)
        differences += norm_findings(program) + sum_findings(program)
    trains = is_differentiated(program)
    functions = transcendentals(program, differentiated=trains)
    differences += activation_findings(functions, planned.operations, plan.model.activation)
    if plan.workload.phase != "train":
        differences += result_findings(program, planned.operations)
    differences += unplanned_findings(
        scoped_arithmetic(program, differentiated=trains), planned.operations, prices, on_cpu=on_cpu
    )
    differences += state_findings(state_passes(program, differentiated=trains), planned, prices)
    gaps = not_understood(program)
    said = compiler_warnings(compiled.compiler_log)
    bad = bool(differences or gaps) or replicates(said) or (checked is not None and not checked["agrees"])
    memory, largest = compiled.memory_bytes, buffer_peak(program)
    return {
        "verdict": "differs" if bad else "match",
        "target": target.name,
        "compiler": target.compiler,
        "layout": str(plan.layout),
        "compile_seconds": compiled.compile_seconds,
        "cached": compiled.cached,
        "findings": [one.of_plan() for one in differences],
        **({"numerics": checked} if checked else {}),
        "compiler_warnings": [one.of_compiler() for one in said],
        "planned": [p.to_dict() for row in rows for p in row.planned],
        "emitted": [
            e.to_dict(row.tensor)
            | {"overlaps": beside[id(e)], "exposed_seconds": line and line.exposed[id(e)]}
            for row in rows
            for e in row.emitted
        ],
        "unplanned": [
            e.to_dict(row.tensor) for row in rows if row.status == "unplanned" for e in row.emitted
        ],
        "missing": [p.to_dict() for row in rows if row.status == "missing" for p in row.planned],
        "rows": [_row_dict(row, prices, line) for row in rows],
        "not_understood": gaps,
        "bytes": {
            "planned": sum(p.step_bytes for p in planned.collectives),
            # An all-reduce counts once; so do its parts, scattered and gathered.
            "compiled": sum(
                e.gathered_per_step for e in emitted if e.op != "all_gather" or not e.collective.follows_sum
            ),
        },
        "sent": {
            "planned": round(sum(map(prices.planned_sent, planned.collectives))),
            "compiled": sum(map(prices.sent, emitted)),
        },
        "step_seconds": {"planned": planned.seconds, "scheduled": line and line.seconds},
        "flops": {"planned": planned.flops, "compiled": dot_flops(program)},
        "memory": {
            "planned": planned.memory_total,
            "compiled": memory and memory["total"],
            "planned_by_cause": dict(planned.memory),
            "compiled_by_cause": memory,
            "peak": largest and largest.to_dict(),
        },
    }


def scheduled_seconds(plan: Plan, target: Target, compiled: CompiledProgram) -> float | None:
    """Seconds of a step by its compiled schedule; None where nothing tells them (XLA:CPU)."""
    hardware = load(plan.hardware)
    if target.name == "cpu" or target.name != hardware.chip.kind:
        return None
    program, mesh, machine = parse_hlo(compiled.hlo), plan.layout.mesh, _at_rates(plan, hardware)
    found = [on_mesh(one, mesh, widened=False) for one in collectives(program)]
    line = program_timeline(program, machine.chip, step_prices(machine, mesh), found)
    return line and line.seconds


def _at_rates(plan: Plan, hardware: Hardware) -> Hardware:
    """The hardware with what its chips reach in steps of the plan's phase, as the plan is priced."""
    return hardware if plan.workload.phase == "train" else in_inference(hardware)


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
        "compiler": target.compiler,
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


# Of a pipeline of lanes: its first tick, those until the last stage begins, and those that have both passes.
_NUM_LOOPS = 3


def _logits_bytes(plan: Plan) -> int:
    """Bytes of an inference step's result on one device: float32, whole over the vocabulary."""
    if plan.workload.phase == "train":
        return 0
    shards = plan.layout.at(plan.workload.phase).num_batch_shards
    return 4 * plan.workload.num_sequences * plan.model.vocab_size // shards


def _differences(
    planned: PlannedStep, program: Program, rows: Sequence[Row], prices: Prices, *, on_cpu: bool
) -> list[Remark]:
    """The findings on collectives, products and their types, the costliest first."""
    computed, trains = list(products(program)), is_differentiated(program)
    wide = wider_products(computed, program, planned.matmul_dtype, widened=on_cpu, differentiated=trains)
    different = compare_products(planned.products, computed, differentiated=trains)
    found = [
        *findings(rows, prices),
        *product_findings(different, prices, planned.matmul_dtype),
        *wide_findings(wide, planned.matmul_dtype, planned.flops, prices),
    ]
    return sorted(found, key=lambda one: (-abs(one.seconds or 0.0), -(one.bytes or 0)))


def _numerics(plan: Plan, progress: Callable[[str], None]) -> dict:
    if plan.workload.phase != "train":
        raise PlanError(f"--numerics compares training steps; this plan has phase {plan.workload.phase!r}")
    progress(f"running a tiny model under {plan.layout} and on one device")
    return check_numerics(plan)


def _row_dict(row: Row, prices: Prices, line: StepTimeline | None) -> dict:
    """Both sides of a row, each with its seconds a step, in all and exposed; None where unavailable."""
    planned, emitted = _planned_summary(row.planned), _emitted_summary(row.emitted)
    seconds = [prices.seconds(e) for e in row.emitted]
    if planned:
        planned["seconds"] = sum(p.step_seconds for p in row.planned)
        planned["exposed_seconds"] = sum(p.exposed_seconds for p in row.planned)
        planned["sent"] = round(sum(map(prices.planned_sent, row.planned)))
    if emitted:
        emitted["exposed_seconds"] = line and sum(line.exposed[id(e)] for e in row.emitted)
        emitted["sent"] = sum(map(prices.sent, row.emitted))
        emitted["seconds"] = None if None in seconds else sum(s for s in seconds if s is not None)
    return {
        "tensor": row.tensor,
        "direction": row.direction,
        "planned": planned,
        "emitted": emitted,
        "status": row.status,
        "note": row.note,
    }


def _planned_summary(planned: Sequence[PricedCollective]) -> dict | None:
    return _summary([(p.op, p.axes, p.gathered_bytes, p.count) for p in planned])


def _emitted_summary(emitted: Sequence[Emitted]) -> dict | None:
    return _summary([(e.op, e.axes, e.gathered_bytes, e.runs) for e in emitted])


def _summary(parts: Sequence[tuple[str, tuple[str, ...], int, float]]) -> dict | None:
    """Operations joined by +; bytes and count of a step in all."""
    if not parts:
        return None
    names = dict.fromkeys(op for op, *_ in parts)
    axes = dict.fromkeys(axis for _, over, *_ in parts for axis in over)
    return {
        "op": " + ".join(names),
        "axes": list(axes),
        "bytes": round(sum(size * count for *_, size, count in parts)),
        "count": sum(count for *_, count in parts),
    }

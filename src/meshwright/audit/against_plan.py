"""Comparison of a compiled program with a planned step: collectives, FLOPs and memory."""

from collections.abc import Mapping, Sequence

from meshwright.audit.compare.added import join_added, join_equal
from meshwright.audit.compare.arithmetic import (
    condition_findings,
    host_findings,
    rounding_findings,
    type_findings,
)
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
    unplanned_findings,
    update_findings,
    weight_findings,
    wide_findings,
)
from meshwright.audit.compare.flops import compare_products, wider_products
from meshwright.audit.compare.kernel_heads import head_findings
from meshwright.audit.compare.line_up import TensorRow, line_up, weighed
from meshwright.audit.compare.rewrites import Side
from meshwright.audit.compile.planned_program import PlannedStep
from meshwright.audit.compile.target import Target
from meshwright.audit.facts.buffers import buffer_peak, integer_input_bytes
from meshwright.audit.facts.communication import collectives, is_differentiated
from meshwright.audit.facts.compiled_schedule import ProgramSchedule, StepTimeline, overlaps, program_timeline
from meshwright.audit.facts.emitted import Emitted, on_mesh
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.matmuls import dot_flops, products, summed_products
from meshwright.audit.facts.narrow_arithmetic import (
    host_transfers,
    narrow_results,
    narrowest_elements,
    rounded_statistics,
)
from meshwright.audit.facts.outside_products import (
    scoped_arithmetic,
    state_passes,
    transcendentals,
    update_arithmetic,
)
from meshwright.audit.facts.seconds import Prices, step_prices
from meshwright.audit.hlo.op_names import scope_of
from meshwright.audit.hlo.read import Program
from meshwright.audit.remarks import Remark
from meshwright.cost.priced import PricedCollective
from meshwright.cost.serving_step import in_inference
from meshwright.dtypes import dtype_bytes
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.models.parameters import parameters
from meshwright.notation.mesh import Mesh
from meshwright.plan_file import Plan


def against_plan(
    plan: Plan,
    target: Target,
    planned: PlannedStep,
    program: Program,
    mesh: Mesh,
    memory: Mapping[str, int] | None,
) -> dict:
    """The findings on a program, and the keys of `mw audit` with both sides.

    mesh: of the program's devices. memory: of one of them, by cause.
    """
    hardware, compiler = load(plan.hardware), target.compiler
    machine = at_phase_rates(plan, hardware)
    emitted = [on_mesh(one, mesh, widened=compiler.widens) for one in collectives(program)]
    overlapped = overlaps(ProgramSchedule(program), emitted, can_overlap=compiler.asynchronous)
    prices = step_prices(machine, plan.layout.mesh)
    side = Side(
        has_reduce_scatter=compiler.reduce_scatter,
        num_microbatches=plan.layout.schedule.microbatches,
        num_passes=plan.layout.schedule.num_passes(plan.layout.pipe),
        num_loops=_NUM_LOOPS if plan.layout.spmd_stages else 1,
        gradients_dtype=plan.layout.precision.gradients_dtype or plan.layout.precision.compute_dtype,
        split_weights=planned.split_weights,
    )
    lined_up = join_added(line_up(planned.collectives, emitted, side), program)
    lined_up = join_equal(lined_up, parallel=plan.model.text.parallel)
    rows = weighed(lined_up, prices, planned.seconds)
    differences = _differences(planned, program, rows, prices, widened=compiler.widens)
    largest = buffer_peak(program)
    if memory:
        has_own = target.is_of(hardware.chip) and not hardware.chip.platform.host_memory
        capacity = hardware.chip.program_bytes if has_own else None
        apart = integer_input_bytes(program), _logits_bytes(plan)
        differences += compare_memory(planned, memory, *apart, capacity, compiler.total_tolerance, largest)
    if compiler.as_traced:
        differences += saved_findings(planned, program)
        differences += missing_findings(program, planned.elementwise)
    line = program_timeline(program, machine.chip, prices, emitted) if target.is_of(machine.chip) else None
    differences += exposure_findings(rows, line, planned.seconds)
    differences += _program_findings(plan, planned, program, prices, compiler.unplanned_share)
    return {
        "findings": [one.of_plan() for one in differences],
        "planned": [p.to_dict() for row in rows for p in row.planned],
        "emitted": [
            e.to_dict(row.tensor)
            | {"overlaps": overlapped[id(e)], "exposed_seconds": line and line.exposed[id(e)]}
            for row in rows
            for e in row.emitted
        ],
        "unplanned": [
            e.to_dict(row.tensor) for row in rows if row.status == "unplanned" for e in row.emitted
        ],
        "missing": [p.to_dict() for row in rows if row.status == "missing" for p in row.planned],
        "rows": [_row_dict(row, prices, line) for row in rows],
        "not_understood": not_understood(program),
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
            "compiled_by_cause": memory and dict(memory),
            "peak": largest and largest.to_dict(),
        },
    }


def at_phase_rates(plan: Plan, hardware: Hardware) -> Hardware:
    """The hardware with its chips' rates in the plan's phase, as for the plan's price."""
    return hardware if plan.workload.phase == "train" else in_inference(hardware)


# Loops of SPMD 1F1B: the first tick, ticks until the last stage begins, and ticks with both passes.
_NUM_LOOPS = 3


def _logits_bytes(plan: Plan) -> int:
    """Bytes of an inference step's result on one device: float32, whole over the vocabulary."""
    if plan.workload.phase == "train":
        return 0
    shards = plan.layout.at(plan.workload.phase).num_batch_shards
    return 4 * plan.workload.num_sequences * plan.model.vocab_size // shards


def _differences(
    planned: PlannedStep, program: Program, rows: Sequence[TensorRow], prices: Prices, *, widened: bool
) -> list[Remark]:
    """The findings on collectives, products and their types, the costliest first."""
    computed, trains = list(products(program)), is_differentiated(program)
    dtypes = planned.matmul_dtype, planned.attention_dtype
    not_wide = (one for one in computed if planned.wide.isdisjoint(scope_of(one.op_name)))
    wide = wider_products(not_wide, program, *dtypes, widened=widened, differentiated=trains)
    # Only in generation may XLA compute products with a state as elementwise work and sums.
    summed = set() if trains else planned.wide & summed_products(program)
    different = compare_products(
        planned.products,
        computed,
        differentiated=trains,
        edge=planned.attention_edge,
        summed=summed,
        same_input=planned.same_input,
    )
    remarks = [
        *findings(rows, prices),
        *product_findings(different, prices, planned.matmul_dtype),
        *wide_findings(wide, planned.matmul_dtype, planned.flops, prices),
    ]
    return sorted(remarks, key=lambda remark: (-abs(remark.seconds or 0.0), -(remark.bytes or 0)))


def _program_findings(
    plan: Plan, planned: PlannedStep, program: Program, prices: Prices, unplanned_share: float
) -> list[Remark]:
    """The findings on kept values, the update, elementwise work, number types and transfers to the host."""
    trains, precision = is_differentiated(program), plan.layout.precision
    remarks: list[Remark] = []
    if plan.workload.phase == "train" and all(one.trained for one in parameters(plan.model).values()):
        remarks += kept_findings(program) + weight_findings(program, parameters(plan.model))
    if planned.update:
        remarks += update_findings(planned.update, update_arithmetic(program, planned.operations), prices)
        remarks += norm_findings(program) + sum_findings(program)
    functions = transcendentals(program, differentiated=trains)
    remarks += activation_findings(functions, planned.operations, plan.model.activation)
    if plan.workload.phase != "train":
        remarks += result_findings(program, planned.operations)
    arithmetic = scoped_arithmetic(program, differentiated=trains)
    remarks += unplanned_findings(arithmetic, planned.operations, prices, unplanned_share)
    narrow = narrow_results(program, differentiated=trains)
    statistics = rounded_statistics(program, differentiated=trains)
    adds_wide = dtype_bytes(precision.accumulated_dtype) > _NARROW_BYTES
    rounded = _rounded_elements(plan, planned)
    remarks += type_findings(narrow, statistics, planned, rounded, adds_wide=adds_wide)
    remarks += rounding_findings(narrowest_elements(program), plan.layout)
    remarks += host_findings(host_transfers(program), plan.layout)
    remarks += condition_findings(program) if planned.update else []
    remarks += head_findings(program, plan, prices)
    return remarks + state_findings(state_passes(program, differentiated=trains), planned, prices)


def _rounded_elements(plan: Plan, planned: PlannedStep) -> int:
    """Elements of one device's state that an update may round to 16 bits: weights, and narrow moments."""
    precision = plan.layout.precision
    size = dtype_bytes(precision.weights_dtype)
    weights = planned.memory.get("weights", 0) // size if size <= _NARROW_BYTES else 0
    moments = planned.memory.get("optimizer", 0) // dtype_bytes(precision.optimizer_dtype)
    is_narrow = dtype_bytes(precision.optimizer_dtype) <= _NARROW_BYTES
    return round(weights + (moments if is_narrow else 0))


_NARROW_BYTES = 2


def _row_dict(row: TensorRow, prices: Prices, line: StepTimeline | None) -> dict:
    """Both sides of a row, with all and exposed seconds a step; None if unavailable."""
    planned, emitted = _planned_summary(row.planned), _emitted_summary(row.emitted)
    if planned:
        planned["seconds"] = sum(p.step_seconds for p in row.planned)
        planned["exposed_seconds"] = sum(p.exposed_seconds for p in row.planned)
        planned["sent"] = round(sum(map(prices.planned_sent, row.planned)))
    if emitted:
        emitted["exposed_seconds"] = line and sum(line.exposed[id(e)] for e in row.emitted)
        emitted["sent"] = sum(map(prices.sent, row.emitted))
        emitted["seconds"] = prices.total_seconds(row.emitted)
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
    """Operations joined by +, with the bytes and runs of a step."""
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

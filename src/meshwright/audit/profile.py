"""Measured and planned seconds of each operation in traced steps."""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.audit.facts.communication import is_differentiated
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.hlo.op_names import phase_of, scope_of, split_op_name
from meshwright.audit.hlo.read import Computation, Instruction, Program, parse_hlo
from meshwright.cost.graph import Node, recomputed_nodes
from meshwright.cost.passes import Dtypes, work_seconds
from meshwright.errors import AuditError
from meshwright.files import read_text
from meshwright.hardware import catalog
from meshwright.layout.rules import STAGES
from meshwright.plan.train import price
from meshwright.plan_file import Plan
from meshwright.train.profiling import HLO

# Instructions that run others; only the others' time counts.
_CONTAINERS = frozenset({"while", "call", "conditional", "async-start", "async-done"})
_PASS = {"forward": "forward", "remat": "recompute", "backward": "backward", "update": "update"}
# Operations of the plan that are in the scope of another in the program.
_WITHIN = {"softmax": "attention"}
_BETWEEN_STAGES = (STAGES,)
OTHER, OPTIMIZER = "other", "optimizer"

_Key = tuple[str, str, str]  # (name, pass, "compute" or "collective")


@dataclass(frozen=True)
class OperationTime:
    """One operation in one pass of a step: seconds on the mean device, measured and planned.

    name: the weight or operation of the forward pass; "other" for instructions without such a name.
    planned_seconds: None if the plan has no operation of that name.
    """

    name: str
    direction: str
    kind: str
    measured_seconds: float
    planned_seconds: float | None

    @property
    def difference(self) -> float:
        return self.measured_seconds - (self.planned_seconds or 0.0)


def operation_times(folder: Path, plan: Plan) -> list[OperationTime]:
    """The operations of the traced steps, sorted by measured minus planned seconds.

    folder: as `train.profiling` writes it. Raises AuditError if the trace has no operation of the step.
    """
    planned = planned_seconds(plan)
    programs = [parse_hlo(read_text(file, AuditError)) for file in sorted(folder.glob(HLO))]
    measured = _measured(folder, programs, {name for name, _, _ in planned}, plan.layout.mesh.num_devices)
    if not measured:
        names = ", ".join(program.name for program in programs) or "any program"
        raise AuditError(f"profile {folder}: the trace has no operation of {names}")
    rows = [OperationTime(*key, measured.get(key, 0.0), planned.get(key)) for key in {**measured, **planned}]
    return sorted(rows, key=lambda row: -row.difference)


def planned_seconds(plan: Plan) -> dict[_Key, float]:
    """Seconds of a step by operation, pass and kind, on the mean chip.

    Collectives count whether they are hidden or not.
    """
    hardware, layout = catalog.load(plan.hardware), plan.layout
    candidate = price(plan.model, hardware, plan.workload, layout)
    cost, graph = candidate.cost, candidate.graph
    planned: dict[_Key, float] = defaultdict(float)
    chip, dtypes = hardware.chip, Dtypes.of(layout)
    for segment in graph.segments:
        runs = segment.count * layout.schedule.microbatches / layout.pipe * chip.step.slowdown
        for direction in graph.directions:
            nodes = segment.nodes
            if direction == "recompute":
                nodes = recomputed_nodes(segment, layout.schedule.remat)
            for node in nodes:
                seconds = sum(
                    work_seconds(work, node.kind, dtypes, chip).seconds for work in _work(node, direction)
                )
                if seconds:
                    planned[_WITHIN.get(node.name, node.name), direction, "compute"] += seconds * runs
    for priced in cost.collectives:
        if layout.stage_programs and priced.axes == _BETWEEN_STAGES:
            continue  # outside of all programs, so the trace has no operation for it
        planned[_WITHIN.get(priced.tensor, priced.tensor), priced.direction, "collective"] += (
            priced.step_seconds
        )
    for term in cost.terms:
        if term.name == OPTIMIZER:
            planned[OPTIMIZER, "update", "compute"] += term.seconds
    return dict(planned)


def _work(node: Node, direction: str) -> tuple[Any, ...]:
    return (*node.backward, *node.weight_gradient) if direction == "backward" else node.forward


def _measured(
    folder: Path, programs: Sequence[Program], names: set[str], num_devices: int
) -> dict[_Key, float]:
    """Seconds of a step by operation, as a mean over devices and traced steps.

    A step runs each program of a pipeline at least once, so the number of steps is the number of runs
    of the rarest program.
    """
    instructions = {
        (program.name, name): (program, instruction)
        for program in programs
        for computation in program.computations.values()
        for name, instruction in computation.instructions.items()
    }
    differentiated = any(map(is_differentiated, programs))
    measured: dict[_Key, float] = defaultdict(float)
    runs: dict[object, set[object]] = defaultdict(set)
    for stats, seconds in _events(folder):
        known = instructions.get((str(stats.get("hlo_module")), str(stats.get("hlo_op"))))
        if known is None:
            continue
        program, instruction = known
        runs[program.name].add(stats.get("run_id"))
        if instruction.opcode in _CONTAINERS:
            continue
        op_name = _op_name(program, instruction)
        direction = _PASS[phase_of(op_name, differentiated)] if op_name else OTHER
        kind = "collective" if op_of(instruction) else "compute"
        measured[_name(op_name, names, direction), direction, kind] += seconds
    num_steps = min(map(len, runs.values()), default=1)
    return {key: seconds / (num_steps * num_devices) for key, seconds in measured.items()}


def _events(folder: Path) -> Iterator[tuple[Mapping[str, object], float]]:
    """(stats, seconds) of every event of the newest trace."""
    from jax.profiler import ProfileData

    for file in sorted(folder.rglob("*.xplane.pb")):
        for plane in ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                yield from _events_on(line)


def _events_on(line: Any) -> list[tuple[Mapping[str, object], float]]:
    """The operations of one line of a trace, with their seconds.

    From Python 3.13 on, jaxlib's type of an event's stats warns when it is first created, since it names no
    module. If warnings are errors, jaxlib's C++ ends the process, and only jaxlib can change that.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        events = ((dict(event.stats), event.duration_ns * 1e-9) for event in line.events)
        return [(stats, seconds) for stats, seconds in events if "hlo_op" in stats]


def _op_name(program: Program, instruction: Instruction) -> str:
    """JAX's name of an instruction; for a fusion without one, the name of its root."""
    if instruction.op_name or instruction.opcode != "fusion":
        return split_op_name(instruction.op_name)[0] if instruction.op_name else ""
    fused: Computation | None = program.computations.get(instruction.attributes.get("calls", "").lstrip("%"))
    return split_op_name(fused.result.op_name)[0] if fused and fused.result.op_name else ""


def _name(op_name: str, names: set[str], direction: str) -> str:
    """The innermost scope that is an operation of the plan."""
    scopes = [_WITHIN.get(scope, scope) for scope in scope_of(op_name)] if op_name else []
    known = [scope for scope in scopes if scope in names]
    if known:
        return known[-1]
    return OPTIMIZER if direction == "update" else OTHER

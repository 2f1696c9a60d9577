"""The audit of any compiled program: its collectives with their time, FLOPs, and the usual accidents.

No plan is compared. The verdict is `match` if every instruction was understood and no accident was
found, else `differs`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshwright.audit.compile.log import compiler_warnings, replicates
from meshwright.audit.facts.branches import is_counted, smaller_branches
from meshwright.audit.facts.buffers import peak
from meshwright.audit.facts.collectives import located
from meshwright.audit.facts.emitted import on_mesh
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.groups import inferred_mesh
from meshwright.audit.facts.overlap import ProductSchedule, overlaps
from meshwright.audit.facts.prices import Prices, step_prices
from meshwright.audit.facts.products import dot_flops
from meshwright.audit.facts.sent import Sent
from meshwright.audit.facts.timeline import timeline
from meshwright.audit.hlo.parse import Program, check_complete, parse_hlo
from meshwright.audit.remarks.accidents import accidents, at_the_root
from meshwright.audit.remarks.repeated import repeated_products
from meshwright.audit.remarks.replicas import replicated_state
from meshwright.errors import AuditError
from meshwright.files import read_text
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_mesh


@dataclass(frozen=True)
class Reading:
    """A program and its collectives on a mesh: the one given, or nameless axes that the groups span."""

    program: Program
    sent: tuple[Sent, ...]
    prices: Prices


def audit_file(path: Path, hardware: str | None = None, mesh: str | None = None) -> dict:
    """The audit of an optimised HLO module's text. Raises AuditError in one line for any other file."""
    text = read_text(path, AuditError)
    if text.lstrip().startswith(("module @", "#loc")):
        raise AuditError(f"{path}: this is MLIR, not compiled HLO; give the text of Compiled.as_text()")
    axes = parse_mesh(mesh) if mesh else None
    try:
        program = parse_hlo(text)
        check_complete(program)
        return audit_program(program, hardware, axes)
    except (AuditError, LookupError, ValueError) as error:
        what = str(error) if isinstance(error, AuditError) else f"HLO that cannot be read ({error!r})"
        raise AuditError(f"{path}: {what}") from error


def audit_program(
    program: Program,
    hardware: str | None = None,
    mesh: Mesh | None = None,
    compiler_log: Iterable[str] | None = None,
) -> dict:
    """emitted[], warnings[], not_understood[], step_seconds, bytes, flops and the verdict of a program.

    hardware: prices the collectives; a chip alone (`v5p`) stands for as many as the program has devices.
    mesh: names their axes, device ids row-major. compiler_log: its warnings; None where there is none, and
    then they are None, unavailable. Raises AuditError where either has other devices.
    """
    machine = machine_of(hardware, program.num_devices) if hardware else None
    reading = read(program, machine, mesh)
    gaps = not_understood(program)
    prices = reading.prices
    largest, schedule = peak(program), ProductSchedule(program)
    beside = overlaps(schedule, [(one.value, one.emitted) for one in reading.sent])
    line = None
    if machine and machine.chip.kind == program.compiler:
        found = [(one.value, one.emitted) for one in reading.sent]
        line = timeline(program, machine.chip, step_prices(machine, prices.mesh), found)
    warnings = at_the_root(
        [
            *accidents(schedule, reading.sent, prices),
            *replicated_state(program, prices),
            *repeated_products(program, prices),
        ]
    )
    warnings.sort(key=lambda one: (-(one.seconds or 0.0), -one.bytes))
    said = None if compiler_log is None else compiler_warnings(compiler_log)
    smaller = smaller_branches(program)
    counted = [one for one in reading.sent if is_counted(one.value.place, smaller)]
    return {
        "verdict": "differs" if gaps or warnings or replicates(said or ()) else "match",
        "program": program.name,
        "devices": program.num_devices,
        "hardware": machine.spec if machine else None,
        "mesh": dict(mesh.sizes) if mesh else None,
        "emitted": [
            _to_dict(one, reading.prices, named=mesh is not None)
            | {
                "conditional": one.collective.conditional,
                "overlaps": beside[id(one.emitted)],
                "exposed_seconds": line and line.exposed[id(one.emitted)],
            }
            for one in reading.sent
        ],
        "warnings": [one.to_dict() for one in warnings],
        "compiler_warnings": None if said is None else [one.to_dict() for one in said],
        "not_understood": gaps,
        "branches": list(dict.fromkeys(smaller.values())),
        "step_seconds": {"planned": None, "scheduled": line and line.seconds},
        "bytes": {"planned": None, "compiled": sum(one.emitted.bytes_per_step for one in counted)},
        "flops": {"planned": None, "compiled": dot_flops(program)},
        "memory": {"planned": None, "compiled": None, "peak": largest and largest.to_dict()},
        "seconds": _total(reading.prices.seconds(one.emitted) for one in counted),
    }


def read(program: Program, machine: Hardware | None = None, mesh: Mesh | None = None) -> Reading:
    """The collectives of a program on `mesh`, or on one inferred from their groups."""
    if mesh and mesh.num_devices != program.num_devices:
        sizes = ",".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
        raise AuditError(
            f"the mesh {sizes} has {mesh.num_devices} devices and the program {program.num_devices}; "
            f"the axes must multiply to {program.num_devices}"
        )
    found = list(located(program))
    axes = mesh or inferred_mesh([c.groups for _, c in found], program.num_devices)
    widened = program.compiler == "cpu"
    sent = tuple(Sent(value, on_mesh(collective, axes, widened=widened)) for value, collective in found)
    return Reading(
        program, sent, Prices(axes, machine and machine.place(axes), machine and machine.chip, mesh)
    )


def machine_of(spec: str, num_devices: int) -> Hardware:
    """The hardware of a program of so many devices; a chip alone stands for as many."""
    machine = load(spec if ":" in spec or spec.endswith(".toml") else f"{spec}:{num_devices}")
    if machine.num_chips != num_devices:
        raise AuditError(
            f"{spec} has {machine.num_chips} chips and the program {num_devices} devices; "
            f"fits: {machine.chip.name}:{num_devices}"
        )
    return machine


def _to_dict(one: Sent, prices: Prices, *, named: bool) -> dict:
    """The keys of `emitted[]` in `mw audit`, and: dtype, group_size, seconds a step (None: unavailable)."""
    emitted = one.emitted
    found = emitted.to_dict(one.tensor)
    return found | {
        "axes": found["axes"] if named else [],
        "group_size": emitted.collective.groups.size,
        "seconds": prices.seconds(emitted),
        "note": emitted.note if named else "",
    }


def _total(seconds: Iterable[float | None]) -> float | None:
    known = list(seconds)
    return None if None in known else sum(one for one in known if one is not None)

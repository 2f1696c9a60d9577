"""The audit of any program, compiled or to be compiled: its collectives, FLOPs, time and the usual accidents.

`audit_file` takes the text of a compiled program; `audit` takes a function, which it compiles where its
arguments are, or ahead of time for chips. No plan is compared. The verdict is `match` if every instruction
was understood and no accident was found, else `differs`.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.audit.compile.compile import captured_stderr, program_text, warning_lines
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import own_target, target_devices
from meshwright.audit.facts.buffers import buffer_peak
from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.emitted import Emitted, on_mesh
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.groups import inferred_mesh
from meshwright.audit.facts.products import dot_flops, is_counted_branch, smaller_branches
from meshwright.audit.facts.seconds import Prices, step_prices
from meshwright.audit.facts.timeline import ProgramSchedule, overlaps, program_timeline
from meshwright.audit.hlo.read import Program, check_complete, parse_hlo
from meshwright.audit.remarks.accidents import accidents, at_the_root
from meshwright.audit.remarks.compiler_log import compiler_warnings, replicates
from meshwright.audit.remarks.replication import repeated_products, replicated_state
from meshwright.errors import AuditError
from meshwright.files import read_text
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_mesh
from meshwright.platforms import PLATFORMS

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Reading:
    """A program and its collectives on a mesh: the one given, or nameless axes that the groups span."""

    program: Program
    sent: tuple[Emitted, ...]
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
    reading = read_program(program, machine, mesh)
    gaps = not_understood(program)
    prices = reading.prices
    largest, schedule = buffer_peak(program), ProgramSchedule(program)
    beside = overlaps(schedule, reading.sent)
    line = None
    if machine and machine.chip.platform == program.platform:
        line = program_timeline(program, machine.chip, step_prices(machine, prices.mesh), reading.sent)
    warnings = at_the_root(
        [
            *accidents(schedule, reading.sent, prices),
            *replicated_state(program, prices),
            *repeated_products(program, prices),
        ]
    )
    warnings.sort(key=lambda one: (-(one.seconds or 0.0), -(one.bytes or 0)))
    said = None if compiler_log is None else compiler_warnings(compiler_log)
    smaller = smaller_branches(program)
    counted = [one for one in reading.sent if is_counted_branch(one.value.place, smaller)]
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
                "overlaps": beside[id(one)],
                "exposed_seconds": line and line.exposed[id(one)],
            }
            for one in reading.sent
        ],
        "warnings": [one.of_program() for one in warnings],
        "compiler_warnings": None if said is None else [one.of_compiler() for one in said],
        "not_understood": gaps,
        "branches": list(dict.fromkeys(smaller.values())),
        "step_seconds": {"planned": None, "scheduled": line and line.seconds},
        "bytes": {"planned": None, "compiled": sum(one.bytes_per_step for one in counted)},
        "flops": {"planned": None, "compiled": dot_flops(program)},
        "memory": {"planned": None, "compiled": None, "peak": largest and largest.to_dict()},
        "seconds": _total(reading.prices.seconds(one) for one in counted),
    }


def read_program(program: Program, machine: Hardware | None = None, mesh: Mesh | None = None) -> Reading:
    """The collectives of a program on `mesh`, or on one inferred from their groups."""
    if mesh and mesh.num_devices != program.num_devices:
        sizes = ",".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
        raise AuditError(
            f"the mesh {sizes} has {mesh.num_devices} devices and the program {program.num_devices}; "
            f"the axes must multiply to {program.num_devices}"
        )
    found = collectives(program)
    axes = mesh or inferred_mesh([one.groups for one in found], program.num_devices)
    widened = program.platform.compiler.widens
    sent = tuple(on_mesh(one, axes, widened=widened) for one in found)
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


def _to_dict(one: Emitted, prices: Prices, *, named: bool) -> dict:
    """The keys of `emitted[]` in `mw audit`, and: dtype, group_size, seconds a step (None: unavailable)."""
    found = one.to_dict(one.tensor)
    return found | {
        "axes": found["axes"] if named else [],
        "group_size": one.collective.groups.size,
        "seconds": prices.seconds(one),
        "note": one.note if named else "",
    }


def _total(seconds: Iterable[float | None]) -> float | None:
    known = list(seconds)
    return None if None in known else sum(one for one in known if one is not None)


def audit(
    jitted: Callable[..., Any],
    *args: Any,
    hardware: str | None = None,
    ahead_of_time: bool = False,
    **kwargs: Any,
) -> dict:
    """The audit of `jitted(*args, **kwargs)`, which is compiled and not run.

    args: arrays, or jax.ShapeDtypeStruct with a sharding; their mesh names the axes.
    hardware: prices the collectives; `v5p:4x4x4`, or a chip alone for as many devices as the mesh has.
    ahead_of_time: compile for that hardware, of which no chip need be attached (see `compiled_ahead`).
    The document has the keys of `mw audit --hlo --json`: `verdict`, `emitted[]`, `warnings[]`,
    `compiler_warnings[]`, `not_understood[]`, `bytes`, `flops`. Raises AuditError with the
    compiler's message where it refuses.
    """
    if ahead_of_time and hardware is None:
        raise AuditError("ahead_of_time=True needs hardware=, such as v5p:4x4x4")
    with captured_stderr() as said:
        if ahead_of_time and hardware:
            program, mesh = compiled_ahead(jitted, hardware, *args, **kwargs)
        else:
            program, mesh = compiled_program(jitted, *args, **kwargs)
        log = warning_lines(said())
    return audit_program(program, hardware, mesh, log)


def compiled_program(jitted: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Program, Mesh | None]:
    """The optimised program, and the mesh of the first argument that has one, else that of jax.set_mesh."""
    found = _mesh_of((args, kwargs))
    program = _compiled(jitted, lambda jitted: jitted.lower(*args, **kwargs).compile())
    return program, Mesh(dict(found.shape)) if found else None


def compiled_ahead(
    jitted: Callable[..., Any], hardware: str, *args: Any, **kwargs: Any
) -> tuple[Program, Mesh]:
    """The program as the compiler of `hardware` makes it, and its mesh.

    The mesh is that of the arguments, or of jax.set_mesh, on the hardware's chips; arguments keep their
    PartitionSpecs, and those without one are whole on every chip. A function that names the devices of
    another mesh is refused: constrain by PartitionSpec, under jax.set_mesh. Raises AuditError where there is
    no mesh, or the compiler refuses, DeviceError where it is not installed.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    found = _mesh_of((args, kwargs))
    if found is None:
        raise AuditError(f"no argument has a mesh, which compiling for {hardware} needs; call jax.set_mesh")
    target = own_target(machine_of(hardware, found.size))
    mesh = _on_chips(found, target)

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    args, kwargs = jax.tree.map(placed, (args, kwargs))

    def compile_for(jitted: Any) -> Any:
        with jax.set_mesh(mesh):
            lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=(target.compiler.lowering,))
            return lowered.compile(compiler_options=dict(target.compiler.options) or None)

    return _compiled(jitted, compile_for), Mesh(dict(found.shape))


def _compiled(jitted: Callable[..., Any], compile_it: Callable[[Any], Any]) -> Program:
    import jax

    if not hasattr(jitted, "lower"):
        jitted = jax.jit(jitted)
    try:
        text = program_text(compile_it(jitted))
    except Exception as error:
        name = getattr(jitted, "__name__", "the function")
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise AuditError(f"{name} does not compile: {lines[0]}") from error
    assert text, "XLA keeps the text of what it compiles"
    return parse_hlo(text)


def _on_chips(mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh", target: Target) -> "jax.sharding.Mesh":
    """The mesh on a target's chips, its axes along the dimensions of their torus."""
    import jax
    import numpy as np

    from meshwright.nn.start.device_mesh import device_grid

    # The compiler is loaded into this process: others, each with its own, are no harm where no chip is held.
    for name, value in {**target.environment, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        if name != "JAX_PLATFORMS":
            os.environ.setdefault(name, value)
    devices, sizes = target_devices(target), tuple(mesh.shape.values())
    grid = (
        device_grid(devices, sizes)
        if PLATFORMS[target.name].torus_mesh
        else np.asarray(devices).reshape(sizes)
    )
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def _mesh_of(arguments: Any) -> "jax.sharding.Mesh | jax.sharding.AbstractMesh | None":
    import jax

    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    named = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding) and s.mesh.size > 1]
    ambient = jax.sharding.get_abstract_mesh()
    return named[0] if named else None if ambient.empty else ambient

"""The audit of any program: its collectives, FLOPs, time and common mistakes.

`audit_file` takes the text of a compiled program. `audit` takes a function, and compiles it for its
arguments' devices or ahead of time for chips. There is no plan to compare with. The verdict is `match` if
every instruction was understood and no mistake was found, otherwise `differs`.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.audit.alternatives import (
    CHEAPER,
    Alternative,
    Cost,
    arguments,
    cheaper_shardings,
    constraints,
    cost_of_sent,
    with_arguments,
)
from meshwright.audit.compare.arithmetic import host_calls
from meshwright.audit.compile.compile import callback_words, captured_stderr, program_text, warning_lines
from meshwright.audit.compile.target import Target
from meshwright.audit.compile.targets import own_target, target_devices
from meshwright.audit.facts.buffers import buffer_peak
from meshwright.audit.facts.communication import collectives
from meshwright.audit.facts.compiled_schedule import ProgramSchedule, overlaps, program_timeline
from meshwright.audit.facts.emitted import Emitted, on_mesh
from meshwright.audit.facts.gaps import not_understood
from meshwright.audit.facts.groups import inferred_mesh
from meshwright.audit.facts.matmuls import (
    dot_flops,
    is_counted_branch,
    multiplied_inputs,
    smaller_branches,
)
from meshwright.audit.facts.narrow_arithmetic import host_transfers
from meshwright.audit.facts.seconds import Prices, step_prices
from meshwright.audit.hlo.read import Program, check_complete, check_partitioned, parse_hlo
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.accidents import accidents, at_the_root, joined_alike
from meshwright.audit.remarks.activations import UNCONSTRAINED
from meshwright.audit.remarks.arithmetic import double_products, one_hot_products, tiny_sums
from meshwright.audit.remarks.beyond_memory import beyond_memory
from meshwright.audit.remarks.by_index import FOR_A_PART
from meshwright.audit.remarks.compiler_log import compiler_warnings, replicates
from meshwright.audit.remarks.donation import copied_caches, undonated_note
from meshwright.audit.remarks.dropped import dropped_products
from meshwright.audit.remarks.given_whole import given_whole
from meshwright.audit.remarks.loops import repeated_in_loops
from meshwright.audit.remarks.promoted import promoted_products
from meshwright.audit.remarks.replication import (
    REPEATED,
    drawn_whole,
    equal_values,
    gathered_operands,
    repeated_calls,
    repeated_on,
    repeated_products,
    replicated_state,
    state_of,
    summed_after_gather,
    with_repeated_work,
)
from meshwright.audit.remarks.too_early import summed_too_early
from meshwright.audit.remarks.tradeoffs import (
    repeated_gathers_note,
    repeated_sums_note,
    whole_weights_note,
)
from meshwright.audit.remarks.unneeded_rows import masked_products, sliced_products
from meshwright.errors import AuditError
from meshwright.files import read_text
from meshwright.hardware.catalog import load
from meshwright.hardware.topology import Hardware
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_mesh
from meshwright.platforms import PLATFORMS
from meshwright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class Reading:
    """A program and its collectives on a mesh: the given one, or inferred axes without names."""

    program: Program
    sent: tuple[Emitted, ...]
    prices: Prices


class ProgramAudit(dict):
    """The audit of a program; its repr is a summary of at most ten lines."""

    def __repr__(self) -> str:
        warnings, sent = self["warnings"], self["bytes"]["compiled"]
        seconds = _text(self["seconds"])
        lines = [
            f"{self['verdict']}: {len(warnings)} findings; {len(self['emitted'])} collectives of "
            f"{format_bytes(sent)} on {self['devices']} devices, {seconds} a step"
        ]
        for warning in warnings[:_MOST_FINDINGS]:
            lines.append(f"- {warning['kind']} ({_text(warning['seconds'])}): {warning['what']}")
        if len(warnings) > _MOST_FINDINGS:
            lines.append(f"- and {len(warnings) - _MOST_FINDINGS} more, in ['warnings']")
        lines += [f"- not understood: {line}" for line in self["not_understood"][:1]]
        lines += [f"- {line}" for line in self["notes"][:2]]
        return "\n".join(
            line if len(line) <= _MOST_LETTERS else f"{line[:_MOST_LETTERS]}..." for line in lines
        )


_MOST_FINDINGS, _MOST_LETTERS = 5, 160


def _text(seconds: float | None) -> str:
    return "time unknown" if seconds is None else format_seconds(seconds)


def audit_file(path: Path, hardware: str | None = None, mesh: str | None = None) -> dict:
    """The audit of an optimised HLO module's text.

    Raises AuditError, with a message of one line, for other files.
    """
    text = read_text(path, AuditError)
    modules = re.findall(r"^HloModule\s+([^\s,]+)", text, re.M)
    if not modules and re.search(r"^\s*(module\b|#loc|func\.func\b)|\b(stablehlo|mhlo|sdy)\.\w+", text, re.M):
        raise AuditError(f"{path}: this is MLIR, not compiled HLO; give the text of Compiled.as_text()")
    if len(modules) > 1:
        names = ", ".join(modules[:3])
        raise AuditError(f"{path}: {len(modules)} modules ({names}); fits: one, in a file of its own")
    axes = parse_mesh(mesh) if mesh else None
    try:
        program = parse_hlo(text)
        check_complete(program)
        check_partitioned(program)
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

    hardware: prices the collectives; only a chip (`v5p`) means one chip per device of the program. mesh:
    names their axes, device ids row-major. compiler_log: its warnings; None if unavailable, and then
    compiler_warnings is None. `versions` is None, since a program's text does not name its compiler. Raises
    AuditError if hardware or mesh have another number of devices.
    """
    machine = machine_of(hardware, program.num_devices) if hardware else None
    # The first says how sure the prices are, which the page shows at its top.
    notes = _of_platforms(program, machine) if machine else []
    reading = read_program(program, machine, mesh)
    gaps = not_understood(program)
    prices = reading.prices
    multiplied = multiplied_inputs(program)
    state = state_of(program, multiplied)
    notes += [
        note
        for note in (
            undonated_note(program),
            whole_weights_note(program, prices, multiplied),
            repeated_sums_note(reading.sent, prices),
            repeated_gathers_note(program, reading.sent, prices),
        )
        if note
    ]
    largest, schedule = buffer_peak(program), ProgramSchedule(program)
    overlapping = overlaps(schedule, reading.sent)
    line = None
    if machine and machine.chip.platform == program.platform:
        line = program_timeline(program, machine.chip, step_prices(machine, prices.mesh), reading.sent)
    faults = accidents(schedule, reading.sent, prices, multiplied)
    for_a_part = [one for one in faults if one.kind == FOR_A_PART]
    faults += summed_after_gather(program, prices, _without_remarks(reading.sent, for_a_part))
    gathers = gathered_operands(faults, reading.sent)
    repeated = repeated_on(program, prices.mesh)
    faults = with_repeated_work(joined_alike(faults), repeated, program, prices, reading.sent)
    warnings = at_the_root(
        [
            *faults,
            *replicated_state(program, prices, state, largest.num_bytes if largest else 0),
            *(
                repeated_products(repeated, program, prices, gathers, reading.sent)
                or _repeated_on_parts(reading, machine, gathers)
            ),
            *repeated_calls(program, prices, reading.sent),
            *dropped_products(program, prices),
            *masked_products(program, prices),
            *sliced_products(program, prices),
            *repeated_in_loops(program, prices),
            *copied_caches(program, prices),
            *given_whole(program, prices, {one.name for one in state}),
            *summed_too_early(program, prices, _without_remarks(reading.sent, faults)),
            *drawn_whole(program, prices),
            *equal_values(program, prices, reading.sent),
            *promoted_products(program, prices, reading.sent),
            *double_products(program, prices, reading.sent),
            *one_hot_products(program, prices),
            *tiny_sums(program, prices, reading.sent),
            *host_calls(host_transfers(program)),
            *beyond_memory(program, largest, machine and machine.chip),
        ]
    )
    warnings, small = _without_small_work(warnings, cost_of_sent(program, reading.sent, prices))
    notes += small
    log_warnings = None if compiler_log is None else compiler_warnings(compiler_log)
    smaller = smaller_branches(program)
    counted = [one for one in reading.sent if is_counted_branch(one.value.place, smaller)]
    return ProgramAudit({
        "verdict": "differs" if gaps or warnings or replicates(log_warnings or ()) else "match",
        "program": program.name,
        "devices": program.num_devices,
        "hardware": machine.spec if machine else None,
        "mesh": dict(mesh.sizes) if mesh else None,
        "emitted": [
            _to_dict(emitted, reading.prices, named=mesh is not None)
            | {
                "where": emitted.source,
                "conditional": emitted.collective.conditional,
                "overlaps": overlapping[id(emitted)],
                "exposed_seconds": line and line.exposed[id(emitted)],
            }
            for emitted in reading.sent
        ],
        "warnings": _costliest_first(one.of_program() for one in warnings),
        "compiler_warnings": None if log_warnings is None else [one.of_compiler() for one in log_warnings],
        "not_understood": gaps,
        "branches": list(dict.fromkeys(smaller.values())),
        "step_seconds": {"planned": None, "scheduled": line and line.seconds},
        "bytes": {"planned": None, "compiled": sum(one.bytes_per_step for one in counted)},
        "flops": {"planned": None, "compiled": dot_flops(program)},
        "memory": {"planned": None, "compiled": None, "peak": largest and largest.to_dict()},
        "seconds": reading.prices.total_seconds(counted),
        "notes": notes,
        "versions": None,
    })  # fmt: skip


def _without_small_work(remarks: Sequence[Remark], step: Cost | None) -> tuple[list[Remark], list[str]]:
    """The findings without repeated products of little time, and a note on each of these.

    A step of generation takes the time to read its weights and caches: what devices repeat adds little. step:
    None without hardware; then all are kept.
    """
    if step is None:
        return list(remarks), []
    kept, notes = list[Remark](), list[str]()
    for remark in remarks:
        seconds = remark.seconds or step.work
        if remark.kind == REPEATED and seconds < _SHARE_OF_WORK * step.work:
            notes.append(f"{remark.what}: {format_seconds(seconds)} of {format_seconds(step.work)} of work")
        else:
            kept.append(remark)
    return kept, notes


# Repeated products are a finding from this share of the time of a step's work.
_SHARE_OF_WORK = 0.01


def _costliest_first(warnings: Iterable[dict]) -> list[dict]:
    """Warnings by their seconds, then by their bytes.

    A rule's warning names the cause, so it comes before a sharding that the search found and that saves
    little more. A warning that only names an array that is resharded comes after a sharding that saves as
    much.
    """
    ordered = sorted(warnings, key=lambda one: (-(one["seconds"] or 0.0), -(one["bytes"] or 0)))
    rules = [one for one in ordered if one["kind"] != CHEAPER]
    for searched in (one for one in ordered if one["kind"] == CHEAPER):
        later = (at for at, one in enumerate(rules) if _comes_after(one, searched))
        rules.insert(next(later, len(rules)), searched)
    return rules


def _comes_after(rule: dict, searched: dict) -> bool:
    """Whether the warning of a rule comes after the warning of a sharding that the search found."""
    least = 1.0 if rule["kind"] in _RESHARDED else _NAMES_THE_CAUSE
    return (rule["seconds"] or 0.0) <= least * (searched["seconds"] or 0.0) * _NEARLY


_RESHARDED = ("activation_resharded", "input_resharded", "weight_resharded")
# The share of the searched sharding's seconds above which a warning that names the cause comes first.
_NAMES_THE_CAUSE = 0.8
# Seconds of the same collective differ by rounding.
_NEARLY = 1 + 1e-6


def _without_remarks(sent: Iterable[Emitted], remarks: Iterable[Remark]) -> list[Emitted]:
    """The collectives that no remark is about."""
    instructions = {one.instruction for one in remarks}
    return [one for one in sent if one.collective.name not in instructions]


def _of_platforms(program: Program, machine: Hardware) -> list[str]:
    """A note if a program for CPUs is priced on other chips. Raises AuditError for other pairs."""
    compiled, priced = program.platform, machine.chip.platform
    if compiled == priced:
        return []
    if not compiled.virtual:
        raise AuditError(
            f"the program is compiled for {compiled.plural}, and {machine.chip.name} is none; "
            f"fits: hardware of {compiled.plural}"
        )
    return [
        f"compiled for {compiled.plural}, priced on {machine.chip.name}: its own compiler joins and overlaps "
        f"collectives otherwise; compile for it with --target {machine.chip.kind}, or ahead_of_time=True in "
        "Python"
    ]


def _repeated_on_parts(
    reading: Reading, machine: Hardware | None, gathers: Iterable[Emitted]
) -> list[Remark]:
    """Products repeated over parts of a named axis, on the mesh that the groups of collectives make."""
    if reading.prices.named is None:
        return []
    of_parts = read_program(reading.program, machine)
    parts = of_parts.prices
    named, inferred = (sum(size > 1 for size in each.mesh.sizes.values()) for each in (reading.prices, parts))
    reported = {id(one.value.instruction) for one in gathers}
    same = [one for one in of_parts.sent if id(one.value.instruction) in reported]
    if inferred <= named:
        return []
    return repeated_products(repeated_on(reading.program, parts.mesh), reading.program, parts, same)


def read_program(program: Program, machine: Hardware | None = None, mesh: Mesh | None = None) -> Reading:
    """The collectives of a program on `mesh`, or on a mesh inferred from their groups."""
    if mesh and mesh.num_devices != program.num_devices:
        sizes = ",".join(f"{axis}={size}" for axis, size in mesh.sizes.items())
        raise AuditError(
            f"the mesh {sizes} has {mesh.num_devices} devices and the program {program.num_devices}; "
            f"the axes must multiply to {program.num_devices}"
        )
    emitted = collectives(program)
    axes = mesh or inferred_mesh([one.groups for one in emitted], program.num_devices)
    widened = program.platform.compiler.widens
    sent = tuple(on_mesh(one, axes, widened=widened) for one in emitted)
    return Reading(
        program, sent, Prices(axes, machine and machine.place(axes), machine and machine.chip, mesh)
    )


def machine_of(spec: str, num_devices: int) -> Hardware:
    """The hardware of a program of `num_devices`.

    A spec with only a chip means that number of chips.
    """
    machine = load(spec if ":" in spec or spec.endswith(".toml") else f"{spec}:{num_devices}")
    if machine.num_chips != num_devices:
        raise AuditError(
            f"{spec} has {machine.num_chips} chips and the program {num_devices} devices; "
            f"fits: {machine.chip.name}:{num_devices}"
        )
    return machine


def _to_dict(emitted: Emitted, prices: Prices, *, named: bool) -> dict:
    """The keys of `emitted[]` in `mw audit`, and group_size, seconds and note.

    seconds: a step; None if unavailable.
    """
    keys = emitted.to_dict(emitted.tensor)
    return keys | {
        "axes": keys["axes"] if named else [],
        "group_size": emitted.collective.groups.size,
        "seconds": prices.seconds(emitted),
        "note": emitted.note if named else "",
    }


def audit(
    jitted: Callable[..., Any],
    *args: object,
    hardware: str | None = None,
    ahead_of_time: bool = False,
    **kwargs: object,
) -> dict:
    """The audit of `jitted(*args, **kwargs)`, which is compiled and not run.

    args: arrays, or jax.ShapeDtypeStruct with a sharding; their mesh names the axes. hardware: prices the
    collectives: `v5p:4x4x4`, or only a chip for the mesh's number of devices. ahead_of_time: compile for that
    hardware without any of its chips (see `compiled_ahead`). The document has the keys of `mw audit --hlo
    --json`: `verdict`, `emitted[]`, `warnings[]`, `compiler_warnings[]`, `not_understood[]`, `bytes`,
    `flops`, and `versions` of jax, jaxlib and the compiler. Raises AuditError with the compiler's message if
    it refuses.
    """
    # An abstract mesh has no devices to compile for.
    ahead_of_time |= has_abstract_mesh((args, kwargs))
    return audit_compiled(jitted, args, kwargs, hardware, ahead_of_time=ahead_of_time)


def audit_compiled(
    jitted: Callable[..., Any],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    hardware: str | None,
    *,
    ahead_of_time: bool,
    search_seconds: float = 0.0,
) -> dict:
    """`audit` by the chosen compiler: an abstract mesh may also be compiled for this process's devices.

    search_seconds: time to compile the step with other shardings (`cheaper_shardings`); 0 for no search.
    """
    if ahead_of_time and hardware is None:
        raise AuditError("compiling ahead of time needs hardware=, such as v5p:4x4x4")
    if not hasattr(jitted, "trace") and (ahead_of_time or _has_types((args, kwargs))):
        jitted, args, kwargs = _of_arrays(jitted, args, kwargs)

    def compiled(changed: Alternative | None = None) -> tuple[Program, Mesh | None]:
        given, named = with_arguments(jitted, args, kwargs, changed) if changed else (args, kwargs)
        if ahead_of_time and hardware:
            return compiled_ahead(jitted, hardware, *given, **named)
        return compiled_program(jitted, *given, is_quick=changed is not None, **named)

    with captured_stderr() as captured, constraints() if search_seconds else nullcontext() as seen:
        program, mesh = compiled()
        log = warning_lines(captured())
    document = audit_program(program, hardware, mesh, log)
    document["versions"] = dict(Target(program.platform.name).versions)
    if seen is not None and hardware and mesh:
        places = list(seen)
        # While activations lack constraints, other shardings of the arguments change little.
        if not _lacks_constraints(document):
            places += arguments(jitted, args, kwargs)

        def is_wrong(program: Program) -> bool:
            return _lacks_constraints(audit_program(program, hardware, mesh))

        machine = machine_of(hardware, program.num_devices)
        with captured_stderr():
            cheaper = cheaper_shardings(compiled, places, program, mesh, machine, search_seconds, is_wrong)
        _add_warnings(document, cheaper)
    return document


def _lacks_constraints(document: Mapping[str, Any]) -> bool:
    """Whether an audit asks for constraints on activations."""
    return any(one["kind"] == UNCONSTRAINED for one in document["warnings"])


def _add_warnings(document: dict, remarks: list[Remark]) -> None:
    added = (one.of_program() for one in remarks)
    document["warnings"] = _costliest_first([*document["warnings"], *added])
    if remarks:
        document["verdict"] = "differs"


def _has_types(arguments: object) -> bool:
    """Whether a jax.ShapeDtypeStruct is among the arguments."""
    import jax

    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arguments))


def _of_arrays(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Callable[..., Any], tuple[object, ...], Mapping[str, object]]:
    """A jitted function of the arrays among the arguments, in a dict by name, and its arguments.

    Other arguments become constants, and results that are no arrays are dropped. For functions that jax.jit
    did not return, such as equinox.filter_jit's, which treat a ShapeDtypeStruct as a static value.
    """
    import jax

    leaves, tree = jax.tree_util.tree_flatten_with_path((args, dict(kwargs)))
    named = {_name_of(path): leaf for path, leaf in leaves}
    arrays = {name: leaf for name, leaf in named.items() if hasattr(leaf, "shape") and hasattr(leaf, "dtype")}

    def of_arrays(given: dict[str, Any]) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, (named | given).values())
        return [leaf for leaf in jax.tree.leaves(function(*args, **kwargs)) if hasattr(leaf, "dtype")]

    of_arrays.__name__ = getattr(function, "__name__", of_arrays.__name__)
    return jax.jit(of_arrays), (arrays,), {}


def _name_of(path: tuple[Any, ...]) -> str:
    """An argument's name: its position or keyword, then the path of a leaf within it."""
    import jax

    return jax.tree_util.keystr(path[1:], simple=True, separator=".")


def has_abstract_mesh(arguments: object) -> bool:
    """Whether an argument is sharded over a mesh without devices."""
    import jax

    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    meshes = (one.mesh for one in shardings if isinstance(one, jax.sharding.NamedSharding))
    return any(isinstance(mesh, jax.sharding.AbstractMesh) and not mesh.empty for mesh in meshes)


# For a program that is only read: XLA for CPU makes the same optimised program, and slower machine code of it
# in half the time.
_QUICK = {"xla_backend_optimization_level": 0}


def compiled_program(
    jitted: Callable[..., Any], *args: object, is_quick: bool = False, **kwargs: object
) -> tuple[Program, Mesh | None]:
    """The optimised program and its mesh.

    The mesh is the first one of an argument, otherwise jax.set_mesh's. If an argument's is
    abstract, the program is compiled for this process's devices. Raises AuditError if there are too few.
    is_quick: compile in less time, to a program that would run slower.
    """
    import jax

    options = {"compiler_options": _QUICK} if is_quick else {}
    mesh = _mesh_of((args, kwargs))
    if mesh is None or not has_abstract_mesh((args, kwargs)):
        program = _compiled(jitted, lambda jitted: jitted.lower(*args, **kwargs).compile(**options))
        return program, Mesh(dict(mesh.shape)) if mesh else None
    devices = jax.devices()
    if len(devices) < mesh.size:
        raise AuditError(
            f"the mesh has {mesh.size} devices and this process {len(devices)}; give --hardware with "
            f"{mesh.size} chips, or set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
        )
    on_devices = _with_devices(mesh, devices[: mesh.size])
    placed = _placed((args, kwargs), on_devices)
    program = _compiled(
        jitted,
        _under(mesh, on_devices, lambda jitted: jitted.lower(*placed[0], **placed[1]).compile(**options)),
    )
    return program, Mesh(dict(mesh.shape))


def compiled_ahead(
    jitted: Callable[..., Any], hardware: str, *args: Any, **kwargs: Any
) -> tuple[Program, Mesh]:
    """The program from the compiler of `hardware`, and its mesh.

    The mesh is the arguments', or jax.set_mesh's, on the hardware's chips. Arguments keep their
    PartitionSpecs; arguments without one are whole on every chip. A function that names the devices of
    another mesh is refused: constrain by PartitionSpec, under jax.set_mesh. Raises AuditError without a mesh
    or if the compiler refuses, DeviceError if it is not installed.
    """
    given = _mesh_of((args, kwargs))
    if given is None:
        raise AuditError(f"no argument has a mesh, which compiling for {hardware} needs; call jax.set_mesh")
    target = own_target(machine_of(hardware, given.size))
    mesh = _on_chips(given, target)
    args, kwargs = _placed((args, kwargs), mesh)

    def compile_it(jitted: Any) -> Any:
        lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=(target.compiler.lowering,))
        return lowered.compile(compiler_options=dict(target.compiler.options) or None)

    return _compiled(jitted, _under(given, mesh, compile_it)), Mesh(dict(given.shape))


def _under(
    given: "jax.sharding.Mesh | jax.sharding.AbstractMesh",
    mesh: "jax.sharding.Mesh",
    compile_it: Callable[[Any], Any],
) -> Callable[[Any], Any]:
    """`compile_it` under `mesh`; under `given` if a shard_map in the program names that abstract mesh."""
    import jax

    def compiled(context: AbstractContextManager[Any], jitted: Any) -> Any:
        with context:
            return compile_it(jitted)

    def under(jitted: Any) -> Any:
        try:
            return compiled(jax.set_mesh(mesh), jitted)
        except ValueError as error:
            # A shard_map that names the abstract mesh refuses one with devices.
            if _OTHER_MESH not in str(error) or not isinstance(given, jax.sharding.AbstractMesh):
                raise
            return compiled(jax.sharding.use_abstract_mesh(given), jitted)

    return under


def _placed(arguments: Any, mesh: "jax.sharding.Mesh") -> Any:
    """The types of arguments with their PartitionSpecs on another mesh."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, arguments)


# In JAX's error of a shard_map whose mesh is not the context's.
_OTHER_MESH = "should match the mesh passed to shard_map"


def _compiled(jitted: Callable[..., Any], compile_it: Callable[[Any], Any]) -> Program:
    import jax

    if not hasattr(jitted, "lower"):
        jitted = jax.jit(jitted)
    try:
        compiled = compile_it(jitted)
        text = program_text(getattr(compiled, "compiled", compiled))  # Equinox wraps JAX's Compiled
    except Exception as error:
        name = getattr(jitted, "__name__", "the function")
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "ncompatible devices" in str(error):
            raise AuditError(
                f"{name} does not compile: a sharding in it names the devices of another mesh; write "
                "with_sharding_constraint(x, PartitionSpec(...)), under jax.set_mesh, in place of "
                "NamedSharding(mesh, PartitionSpec(...))"
            ) from error
        if _OTHER_MESH in str(error):
            raise AuditError(
                f"{name} does not compile: a shard_map in it names the devices of another mesh; leave out "
                "its mesh=, so that it takes the one of jax.set_mesh"
            ) from error
        raise AuditError(f"{name} does not compile: {callback_words(str(error)) or lines[0]}") from error
    assert text, "XLA keeps the text of a compiled program"
    return parse_hlo(text)


def _on_chips(mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh", target: Target) -> "jax.sharding.Mesh":
    """The mesh on a target's chips, with its axes along the dimensions of their torus."""
    from meshwright.nn.start.device_mesh import device_grid

    # The compiler is loaded into this process; without a chip, other processes may load theirs too.
    for name, value in {**target.environment, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        if name != "JAX_PLATFORMS":
            os.environ.setdefault(name, value)
    devices = target_devices(target)
    if PLATFORMS[target.name].torus_mesh:
        devices = list(device_grid(devices, tuple(mesh.shape.values())).ravel())
    return _with_devices(mesh, devices)


def _with_devices(
    mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh", devices: Sequence[Any]
) -> "jax.sharding.Mesh":
    """A mesh of the same axes made of other devices, row-major."""
    import jax
    import numpy as np

    grid = np.asarray(devices).reshape(tuple(mesh.shape.values()))
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def _mesh_of(arguments: object) -> "jax.sharding.Mesh | jax.sharding.AbstractMesh | None":
    import jax

    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    named = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding) and s.mesh.size > 1]
    ambient = jax.sharding.get_abstract_mesh()
    return named[0] if named else None if ambient.empty else ambient

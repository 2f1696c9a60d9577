"""The audit of a function of the user's own: compiled where its arguments are, or ahead of time for chips."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshwright.audit.compile.log import captured_stderr, warning_lines
from meshwright.audit.compile.printed import program_text
from meshwright.audit.compile.targets import Target, own_target, target_devices
from meshwright.audit.foreign import audit_program, machine_of
from meshwright.audit.hlo.parse import Program, parse_hlo
from meshwright.errors import AuditError
from meshwright.notation.mesh import Mesh

if TYPE_CHECKING:
    import jax


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
    # Without a GPU no kernel can be timed, so none is chosen by its time.
    options = {"xla_gpu_autotune_level": 0} if target.name == "gpu" else None

    def compile_for(jitted: Any) -> Any:
        with jax.set_mesh(mesh):
            lowered = jitted.trace(*args, **kwargs).lower(lowering_platforms=(target.platform,))
            return lowered.compile(compiler_options=options)

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

    from meshwright.nn.mesh import device_grid

    # The compiler is loaded into this process: others, each with its own, are no harm where no chip is held.
    for name, value in {**target.environment, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}.items():
        if name != "JAX_PLATFORMS":
            os.environ.setdefault(name, value)
    devices, sizes = target_devices(target), tuple(mesh.shape.values())
    grid = device_grid(devices, sizes) if target.name == "tpu" else np.asarray(devices).reshape(sizes)
    return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def _mesh_of(arguments: Any) -> "jax.sharding.Mesh | jax.sharding.AbstractMesh | None":
    import jax

    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    named = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding) and s.mesh.size > 1]
    ambient = jax.sharding.get_abstract_mesh()
    return named[0] if named else None if ambient.empty else ambient

"""The audit of a function of the user's own: compiled where it stands, on the devices of its arguments."""

from collections.abc import Callable
from typing import Any

from meshwright.audit.compile.log import captured_stderr, warning_lines
from meshwright.audit.compile.printed import program_text
from meshwright.audit.foreign import audit_program
from meshwright.audit.hlo.parse import Program, parse_hlo
from meshwright.errors import AuditError
from meshwright.notation.mesh import Mesh


def audit(jitted: Callable[..., Any], *args: Any, hardware: str | None = None, **kwargs: Any) -> dict:
    """The audit of `jitted(*args, **kwargs)`, which is compiled and not run.

    args: arrays, or jax.ShapeDtypeStruct with a sharding; their mesh names the axes.
    hardware: prices the collectives; `v5p:4x4x4`, or a chip alone for as many devices as the mesh has.
    The document has the keys of `mw audit --hlo --json`: `verdict`, `emitted[]`, `warnings[]`,
    `compiler_warnings[]`, `not_understood[]`, `bytes`, `flops`. Raises AuditError with the
    compiler's message where it refuses.
    """
    with captured_stderr() as said:
        program, mesh = compiled_program(jitted, *args, **kwargs)
        log = warning_lines(said())
    return audit_program(program, hardware, mesh, log)


def compiled_program(jitted: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Program, Mesh | None]:
    """The optimised program, and the mesh of the first argument that has one, else that of jax.set_mesh."""
    import jax

    if not hasattr(jitted, "lower"):
        jitted = jax.jit(jitted)
    try:
        text = program_text(jitted.lower(*args, **kwargs).compile())  # pyright: ignore[reportFunctionMemberAccess]
    except Exception as error:
        name = getattr(jitted, "__name__", "the function")
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise AuditError(f"{name} does not compile: {lines[0]}") from error
    assert text, "XLA keeps the text of what it compiles"
    return parse_hlo(text), _mesh_of((args, kwargs))


def _mesh_of(arguments: Any) -> Mesh | None:
    import jax

    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    named = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding) and s.mesh.size > 1]
    ambient = jax.sharding.get_abstract_mesh()
    found = named[0] if named else None if ambient.empty else ambient
    return Mesh(dict(found.shape)) if found else None

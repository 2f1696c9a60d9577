"""What compiling a plan's step tells of it: bytes on a chip, and seconds of the compiled schedule."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from meshwright.audit.compile.compile import compile_plan
from meshwright.audit.compile.targets import Target
from meshwright.errors import MeshwrightError, OutOfMemoryError
from meshwright.plan_file import Plan


@dataclass(frozen=True)
class Figures:
    """compiled_bytes, scheduled_seconds: None where unavailable; reason: why there are no bytes, or "".

    program: a hash of the compiled text, "" where nothing was compiled. is_final: whether to compile again
    would say the same; False of a compile that took too long.
    """

    compiled_bytes: int | None
    scheduled_seconds: float | None
    reason: str = ""
    program: str = ""
    is_final: bool = True


def figures(
    plan: Plan, target: Target, progress: Callable[[str], None], *, use_cache: bool = True
) -> Figures:
    """The figures of `plan`, compiled by `target`. A refusal is a result: its message is the reason."""
    from meshwright.audit.audit import scheduled_seconds  # reading programs is not needed to plan

    try:
        compiled = compile_plan(plan, target, progress, use_cache=use_cache)
        program = hashlib.sha256(compiled.hlo.encode()).hexdigest()
        scheduled = scheduled_seconds(plan, target, compiled)
    except OutOfMemoryError as error:
        return Figures(error.num_bytes, None, str(error))
    except MeshwrightError as error:
        return Figures(None, None, str(error), is_final=False)
    memory = compiled.memory_bytes
    reason = "" if memory else f"{target.compiler} gives no figure"
    return Figures(memory["total"] if memory else None, scheduled, reason, program)

"""Steps that need more memory than a chip has, and the buffers that fill it."""

from meshwright.audit.facts.buffers import Held, Peak, input_bytes
from meshwright.audit.facts.communication import is_differentiated, uncast_dtype
from meshwright.audit.hlo.read import Instruction, Program
from meshwright.audit.hlo.trace import (
    MOVES,
    SLICES,
    CallPath,
    TracedValue,
    loop_body,
    places,
    readers,
    resolve,
)
from meshwright.audit.remarks import Remark
from meshwright.dtypes import NUMBER_TYPES, dtype_bytes, of_hlo
from meshwright.hardware.chip import Chip
from meshwright.units import format_bytes

# Buffers with a larger share of the temporaries decide the remedy.
_LARGE = 0.1
# Buffers that a warning names.
_SHOWN = 3


def beyond_memory(program: Program, peak: Peak | None, chip: Chip | None) -> list[Remark]:
    """A warning if the inputs and the temporaries at their peak are more than a chip's usable memory.

    A compiler that widens 16-bit numbers, as XLA for CPU does, makes larger buffers than the chip's own
    compiler would; these count in the narrower type.
    """
    if peak is None or chip is None or not peak.held:
        return []
    inputs = input_bytes(program)
    if inputs + peak.num_bytes <= chip.program_bytes:  # at most: narrower types only take less
        return []
    values = {
        instruction.name: TracedValue(instruction, place)
        for place in places(program)
        for instruction in place.computation.instructions.values()
    }
    sizes = [(held, _bytes_unwidened(program, held, values.get(held.instruction))) for held in peak.held]
    temporaries = sum(size for _, size in sizes)
    needed = inputs + temporaries
    if needed <= chip.program_bytes:
        return []
    large = [held for held, size in sizes if size > _LARGE * temporaries]
    stacked = [held for held in large if _is_stacked(program, values.get(held.instruction))]
    shown = (stacked or large or [held for held, _ in sizes])[:_SHOWN]
    first = values.get(shown[0].instruction)
    names = ", ".join(f"`{one.tensor or one.instruction}` {one.shape}" for one in shown)
    keeps = "kept for the backward pass by a loop" if stacked else "at the peak"
    return [
        Remark(
            "beyond_memory",
            shown[0].tensor or shown[0].instruction,
            f"a device needs {format_bytes(needed)}, {format_bytes(temporaries)} of them for temporaries, "
            f"and {chip.name} has {format_bytes(chip.program_bytes)} for a program; the largest {keeps}: "
            f"{names}",
            first.instruction.where if first else "",
            _KEPT if stacked else _IN_PARTS if is_differentiated(program) else _IN_PARTS_ONCE,
            needed - chip.program_bytes,
            instruction=shown[0].instruction,
        )
    ]


_KEPT = (
    "compute them again in the backward pass: jax.checkpoint around the body of the loop (the layer), or "
    "around the part that makes them, such as attention's scores"
)
_IN_PARTS = (
    "compute with a part of the rows at a time (jax.lax.scan or jax.lax.map over chunks of the batch, of "
    "positions or of examples) that adds up the results, and jax.checkpoint around its body, so that only "
    "one chunk of these arrays exists; or split them over more devices"
)
_IN_PARTS_ONCE = (
    "compute with a part of the rows at a time (jax.lax.scan or jax.lax.map over chunks), so that only one "
    "chunk of these arrays exists; or split them over more devices"
)


def _bytes_unwidened(program: Program, held: Held, value: TracedValue | None) -> int:
    """Bytes of a buffer in the type that the step gives it, if the compiler widened it."""
    if value is None or not program.platform.compiler.widens or not held.shape.startswith("f32"):
        return held.num_bytes
    narrow = of_hlo(uncast_dtype(program, value, value.instruction.op_name))
    if narrow not in NUMBER_TYPES:
        return held.num_bytes
    return round(held.num_bytes * dtype_bytes(narrow) / dtype_bytes("f32"))


def _is_stacked(program: Program, value: TracedValue | None) -> bool:
    """Whether a loop writes a part of a buffer in each turn."""
    if value is None:
        return False
    return any(
        user.instruction.opcode == "while" and _writes_a_slice(program, user.instruction, user.path)
        for user, _ in readers(program, value)
    )


def _writes_a_slice(program: Program, loop: Instruction, path: tuple[int, ...]) -> bool:
    """Whether each turn of a loop writes a slice of element `path` of its tuple."""
    body = loop_body(program, loop)
    written = resolve(program, TracedValue(body.result, CallPath(body), path), MOVES - SLICES)
    return written.instruction.opcode == "dynamic-update-slice"

"""State that a step returns in new memory, next to the state that it was given: weights, moments, caches."""

from collections.abc import Sequence

from meshwright.audit.facts.communication import is_differentiated
from meshwright.audit.facts.emitted import ELEMENTWISE, NEGLIGIBLE_BYTES
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program, arrays
from meshwright.audit.hlo.trace import (
    MOVES,
    SLICES,
    WRITES,
    CallPath,
    TracedValue,
    entered_as,
    loop_body,
    resolve,
    sources,
)
from meshwright.audit.remarks import Remark
from meshwright.units import format_bytes

# The most operations to trace from a result to its input; Adam's update has some forty of them.
_MOST_STEPS = 200
_THROUGH = ELEMENTWISE | {"sqrt", "abs", "select-n", "compare", "fusion", "call"}


def undonated_note(program: Program) -> str:
    """A sentence on new weights and moments next to the old; "" if a step donates these, or returns none."""
    if not is_differentiated(program):
        return ""
    results = arrays(program.main.result.shape)
    old = [buffer for path, shape in results if (buffer := _updated(program, path, shape))]
    undonated = _undonated(program, old)
    num_bytes = sum(one.shapes[0].num_bytes for one in undonated)
    if num_bytes <= NEGLIGIBLE_BYTES:
        return ""
    return (
        f"{_subject(undonated)} updated in new memory, {format_bytes(num_bytes)} on each device next to the "
        f"old state; donate the state: {_DONATE}"
    )


_DONATE = "jax.jit(step, donate_argnums=...)"


def copied_caches(program: Program, prices: Prices) -> list[Remark]:
    """A warning for inputs that are returned with a part overwritten, such as caches, and not donated.

    A step of inference copies such an input, which reads and writes all of it.
    """
    if is_differentiated(program):
        return []
    result = TracedValue(program.main.result, CallPath(program.main))
    old = list[Instruction]()
    for path, shape in arrays(program.main.result.shape):
        stored = _written(program, TracedValue(result.instruction, result.place, path))
        if stored and stored.shapes[0].dims == shape.dims:
            old.append(stored)
    undonated = _undonated(program, old)
    num_bytes = sum(one.shapes[0].num_bytes for one in undonated)
    if num_bytes <= NEGLIGIBLE_BYTES:
        return []
    names = ", ".join(dict.fromkeys(one.label.partition("[")[0].partition(".")[0] for one in undonated))
    return [
        Remark(
            "cache_copied",
            max(undonated, key=lambda one: one.shapes[0].num_bytes).label,
            f"{_subject(undonated)} written in part and returned, and the step copies all "
            f"{format_bytes(num_bytes)} of each device for that",
            "",
            f"donate it, so that it is written in place: {_DONATE}, with the positions of {names} among the "
            "arguments",
            num_bytes,
            prices.read_seconds(2 * num_bytes),
        )
    ]


def _undonated(program: Program, old: Sequence[Instruction]) -> list[Instruction]:
    """The inputs, each once, without the inputs that the program donates."""
    donated = {program.main.parameters[number].name for number in program.donated}
    by_name = {one.name: one for one in old}
    return [one for name, one in by_name.items() if name not in donated]


def _written(program: Program, left: TracedValue) -> Instruction | None:
    """The input that a result is, with a part of it written; None if it is no such input.

    A loop over layers may write each layer's part into a new stack, whose layers are those of the input.
    """
    written = False
    for _ in range(_MOST_STEPS):
        value = entered_as(program, left)
        instruction = value.instruction
        if instruction.opcode in WRITES:
            left, written = value.operand(0), True
        elif written and value.is_input:
            return instruction
        elif not written and instruction.opcode == "while" and value.path:
            computation = loop_body(program, instruction)
            body = value.place.enter(instruction, computation)
            stack = _stacked(program, TracedValue(computation.result, body, value.path))
            if stack is None:
                return None
            left = stack
        else:
            return None
    return None


def _stacked(program: Program, value: TracedValue) -> TracedValue | None:
    """The part that a turn of a loop writes into the stack that it returns; None if it writes none."""
    write = resolve(program, value, MOVES - SLICES)
    return write.operand(1) if write.instruction.opcode == "dynamic-update-slice" else None


def _subject(old: Sequence[Instruction]) -> str:
    """The subject and verb of a sentence on inputs: the largest, and the number of others."""
    largest = max(old, key=lambda one: one.shapes[0].num_bytes)
    return f"`{largest.label}`" + (f" and {len(old) - 1} more are" if len(old) > 1 else " is")


def _updated(program: Program, path: tuple[int, ...], shape: ArrayShape) -> Instruction | None:
    """The input of the same shape that a result is an elementwise function of; None without one."""
    left, seen = [TracedValue(program.main.result, CallPath(program.main), path)], 0
    while left and seen < _MOST_STEPS and shape.dims:
        seen += 1
        value = resolve(program, left.pop(0), MOVES)
        instruction = value.instruction
        if value.is_input:
            if instruction.shapes[0].dims == shape.dims:
                return instruction
        elif instruction.opcode in _THROUGH or (instruction.opcode == "tuple" and value.path):
            left += sources(program, value)
    return None

"""State that a step returns in new memory, next to the state that it was given: weights, moments, caches."""

from collections.abc import Sequence

from meshwright.audit.facts.communication import is_differentiated
from meshwright.audit.facts.emitted import ELEMENTWISE, NEGLIGIBLE_BYTES
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
from meshwright.units import format_bytes

# The most operations to trace from a result to its input; Adam's update has some forty of them.
_MOST_STEPS = 200
_THROUGH = ELEMENTWISE | {"sqrt", "abs", "select-n", "compare", "fusion", "call"}


def undonated_note(program: Program) -> str:
    """A sentence on new state next to the old; "" if a step donates its state, or returns none.

    In inference, state is an input that is returned with a part overwritten, such as a cache.
    """
    if not is_differentiated(program):
        return _of_caches(program)
    results = arrays(program.main.result.shape)
    old = [buffer for path, shape in results if (buffer := _updated(program, path, shape))]
    return _note(
        _undonated(program, old),
        "updated in new memory, {size} on each device next to the old state; donate the state: {how}",
    )


def _of_caches(program: Program) -> str:
    """A sentence on inputs that are returned after a part of them was written; "" without any."""
    result = TracedValue(program.main.result, CallPath(program.main))
    old = list[Instruction]()
    for path, shape in arrays(program.main.result.shape):
        stored = _written(program, TracedValue(result.instruction, result.place, path))
        if stored and stored.shapes[0].dims == shape.dims:
            old.append(stored)
    return _note(
        _undonated(program, old),
        "written in part and returned, and the step copies all {size} of each device for that; "
        "donate it: {how}",
    )


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


def _note(old: Sequence[Instruction], sentence: str) -> str:
    """The sentence on these inputs, with their size and the call that donates; "" if they are negligible."""
    num_bytes = sum(one.shapes[0].num_bytes for one in old)
    if num_bytes <= NEGLIGIBLE_BYTES:
        return ""
    largest = max(old, key=lambda one: one.shapes[0].num_bytes)
    which = f" and {len(old) - 1} more are" if len(old) > 1 else " is"
    rest = sentence.format(size=format_bytes(num_bytes), how="jax.jit(step, donate_argnums=...)")
    return f"`{largest.label}`{which} {rest}"


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

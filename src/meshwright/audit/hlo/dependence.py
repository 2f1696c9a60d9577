"""What a value of a compiled program is computed from, through calls and loops."""

from collections import deque
from collections.abc import Iterator

from meshwright.audit.hlo.parse import Program
from meshwright.audit.hlo.trace import CallPath, TracedValue, called_by, history, is_carried_unchanged


def sources(program: Program, value: TracedValue) -> list[TracedValue]:
    """What a value is computed from directly; none for a constant and for an input of the program."""
    instruction, path = value.instruction, value.path
    if instruction.opcode == "parameter":
        return _passed(program, value) if value.place.frames else []
    if instruction.opcode == "get-tuple-element":
        return [value.operand(0, (int(instruction.attributes["index"]), *path))]
    if instruction.opcode == "tuple" and path:
        return [value.operand(path[0], path[1:])]
    if instruction.opcode == "while" and path:
        return [value.operand(0, path), _result_of(program, value)]
    called = called_by(program, instruction)
    if called and instruction.opcode not in ("while", "conditional"):
        return [_result_of(program, value)]
    return [value.operand(index) for index in range(len(instruction.operands))]


def ancestors(program: Program, value: TracedValue) -> Iterator[TracedValue]:
    """`value` and all that it is computed from, nearest first, each once."""
    seen, left = {_key(value)}, deque([value])
    while left:
        one = left.popleft()
        yield one
        fresh = [source for source in sources(program, one) if _key(source) not in seen]
        seen |= {_key(source) for source in fresh}
        left += fresh


def same_each_turn(program: Program, value: TracedValue, depth: int) -> bool:
    """Whether a value inside the loop of frame `depth` is the same in each of its turns."""
    seen, left = {_key(value)}, [value]
    while left:
        one = left.pop()
        if len(one.place.frames) <= depth:
            continue
        if one.instruction.opcode == "parameter" and len(one.place.frames) == depth + 1:
            loop = one.place.frames[-1].caller
            if not one.path or not is_carried_unchanged(program, loop, one.path):
                return False
            continue
        fresh = [source for source in sources(program, one) if _key(source) not in seen]
        seen |= {_key(source) for source in fresh}
        left += fresh
    return True


def entered_as(program: Program, value: TracedValue) -> TracedValue:
    """Where a value began: back through moves, and out of loops that update it to what they are given."""
    while True:
        *_, value = history(program, value)
        in_loop = value.place.frames and value.place.frames[-1].caller.opcode == "while"
        if value.instruction.opcode != "parameter" or not in_loop or not value.path:
            return value
        value = TracedValue(value.place.frames[-1].caller, value.place.parent).operand(0, value.path)


def _passed(program: Program, value: TracedValue) -> list[TracedValue]:
    """What the caller passes for a parameter, and for a loop's also what its body makes of it."""
    caller, path = value.place.frames[-1].caller, value.path
    outside = TracedValue(caller, value.place.parent)
    if caller.opcode == "while":
        return [outside.operand(0, path), TracedValue(value.place.computation.result, value.place, path)]
    if caller.opcode == "conditional":
        return [outside.operand(1 + called_by(program, caller).index(value.place.computation), path)]
    return [outside.operand(int(value.instruction.literal), path)]


def _result_of(program: Program, value: TracedValue) -> TracedValue:
    """The result inside the computation that a call, fusion or loop runs."""
    called = called_by(program, value.instruction)
    body = value.instruction.attributes.get("body", "").lstrip("%")
    computation = program.computations[body] if body else called[0]
    place = value.place.enter(value.instruction, computation)
    return TracedValue(computation.result, place, value.path)


def _key(value: TracedValue) -> tuple[object, ...]:
    return value.instruction.name, chain_of(value.place), value.path


def chain_of(place: CallPath) -> tuple[str, ...]:
    """What tells a place from others: its computation and the calls that lead there."""
    return (place.computation.name, *(frame.caller.name for frame in place.frames))

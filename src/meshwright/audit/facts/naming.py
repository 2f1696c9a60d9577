"""JAX's names for instructions that the compiler left without one.

A compiler leaves collectives without a name if it sums several tensors at once, sums them in steps (within a
slice, then across) or moves a sum into a loop's next turn. The operands of such sums and the readers of
their results have names.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from meshwright.audit.facts.instruction_work import multiplies
from meshwright.audit.facts.opcodes import crossing_op, op_of, sent
from meshwright.audit.hlo.op_names import GRADIENTS, keys_of, primitive_of, renamed, scope_of
from meshwright.audit.hlo.read import Computation, Instruction, Program
from meshwright.audit.hlo.trace import (
    MOVES,
    CallPath,
    TracedValue,
    called_by,
    history,
    loop_body,
    readers,
    resolve,
)

# Opcodes that change only the place and type of numbers.
MOVED = MOVES | {"pad"}
# Opcodes that pass on unrelated values together.
_OF_MANY = {"constant", "parameter", "tuple", "get-tuple-element", "while", "conditional", "call"}
# Limit of steps back, for sums of sums and loops within loops: no name was more steps away.
_MOST_STEPS = 8
# JAX's path from a loop to its body.
_IN_BODY = "/while/body/"


def origin_name(program: Program, value: TracedValue) -> str:
    """JAX's name of the computation of a value; "" if there is none.

    A sum without a name takes the name of its operand. A value that a loop adds up or passes from turn to
    turn takes the name of its computation in a turn, also if the loop was unrolled.
    """
    return _name(program, value, _MOST_STEPS)


def _name(program: Program, value: TracedValue, steps: int) -> str:
    origin = list(history(program, value, MOVED))
    # A sum of several tensors has the name of one of them; summed_operand() gives each its operand.
    named = [v.instruction for v in origin if v.instruction.op_name and not (v.path and summed_operand(v))]
    # XLA for GPU multiplies by several weights at once, and the slices of the product have their names.
    cut = [i for i in named if i.opcode == "slice" and primitive_of(i.op_name) == "dot_general"]
    name = (cut[:1] or named[-1:] or [value.instruction])[0].op_name
    name, end = _within(scope_of(name), name, named), origin[-1]
    if not steps:
        return name
    adds_up = end.instruction.opcode == "add" and not scope_of(name)
    if adds_up or (end.path and _is_of_loop(end)):
        # A loop has several results, so the name of the instruction that takes one out may be more specific.
        taken = [i.op_name for i in named] if end.instruction.opcode == "while" else []
        return _longest([name, *taken, *_names_of_turn(program, end, steps - 1)])
    if not name and end.instruction.opcode == "concatenate":
        # Slices of a padded reduce-scatter, some from a neighbour: of one tensor if they have one name.
        parts = {_name(program, each, steps - 1) for each in end.operands()}
        return parts.pop() if len(parts) == 1 else ""
    before = summed_operand(end)
    return _longest([name, _name(program, before, steps - 1)]) if before else name


def _within(scope: tuple[str, ...], name: str, moved: Sequence[Instruction]) -> str:
    """The longest of `name` and the names of moves in its scope or a scope within it.

    A cast of a gradient has such a name.
    """
    inner = (one.op_name for one in moved if scope_of(one.op_name)[: len(scope)] == scope)
    return _longest([name, *inner]) if scope else name


def _is_of_loop(end: TracedValue) -> bool:
    """Whether a value is a loop's result, or comes from its previous turn."""
    in_body = end.place.frames and end.place.frames[-1].caller.opcode == "while"
    return end.instruction.opcode == "while" or (end.instruction.opcode == "parameter" and bool(in_body))


def _names_of_turn(program: Program, value: TracedValue, steps: int) -> Iterator[str]:
    """Names of a value's computation in a loop's turn: terms of sums, slices of stacks."""
    opcode = value.instruction.opcode
    if opcode == "while" and value.path:
        body = loop_body(program, value.instruction)
        made = [TracedValue(body.result, value.place.enter(value.instruction, body), value.path)]
    elif opcode == "parameter" and value.path and _is_of_loop(value):
        made = [TracedValue(value.place.computation.result, value.place, value.path)]
    elif opcode in ("add", "dynamic-update-slice"):
        made = [value.operand(1), *([value.operand(0)] if opcode == "add" else [])]
    else:
        made = []
    for each in made if steps else ():
        yield _within_loop(_name(program, each, steps - 1), each.place)
        end = resolve(program, each, MOVED)
        yield from _names_of_turn(program, end, steps - 1)


def _longest(names: Iterable[str]) -> str:
    return max(names, key=lambda name: len(scope_of(name)))


def summed_operand(end: TracedValue) -> TracedValue | None:
    """The operand of the collective whose result is `end`; None if it is no collective's.

    Across slices, the operand of its send.
    """
    start = end.operand(0, end.path) if end.instruction.opcode.endswith("-done") else end
    instruction = start.instruction
    if instruction.opcode == "recv" and crossing_op(instruction):
        return TracedValue(sent(start.place.computation, instruction), start.place).operand(0)
    if op_of(instruction) is None:
        return None
    return start.operand(start.path[0] if start.path and len(instruction.operands) > 1 else 0)


def reader_name(program: Program, result: TracedValue) -> str:
    """JAX's name of the first reader of a collective's result with a name in a scope.

    Moves count as readers. "" if no reader has one.
    """
    if result.instruction.opcode.endswith("-start"):
        done = next(iter(result.place.computation.users[result.instruction.name]), result.instruction)
        result = TracedValue(done, result.place, result.path)
    moved = result.place.computation.users[result.instruction.name] if not result.path else ()
    names = [user.op_name for user in moved] + [u.instruction.op_name for u, _ in readers(program, result)]
    return next(filter(scope_of, names), "")


def own_name(product: TracedValue) -> str:
    """JAX's name of a product, or of its fusion, with the name of the loop that runs it.

    XLA for GPU makes one body for loops with the same body, with the names of one of them: for example for
    the loops over rows of an expert's two first weights, forward and recomputed. Each loop keeps its own
    name.
    """
    instruction, place = _named(product)
    return _within_loop(instruction.op_name, place)


def _within_loop(op_name: str, place: CallPath) -> str:
    """`op_name` with the name of the loop around `place`, if it has another loop's."""
    while place.frames and place.frames[-1].caller.opcode != "while":
        place = place.parent
    if not place.frames:
        return op_name
    loop = _within_loop(place.frames[-1].caller.op_name, place.parent)
    other, _, inside = op_name.rpartition(_IN_BODY)
    if not other or not loop.endswith("/while") or op_name.startswith(f"{loop}/body/"):
        return op_name
    return f"{loop}/body/{inside}"


def _named(product: TracedValue) -> tuple[Instruction, CallPath]:
    instruction, place = product.instruction, product.place
    while not instruction.op_name and place.frames and place.frames[-1].caller.opcode == "fusion":
        instruction, place = place.frames[-1].caller, place.parent
    return instruction, place


def name_nearby(
    program: Program, product: TracedValue, taken: Collection[str], batched: Collection[str]
) -> str:
    """JAX's name of the named instruction nearest to a product without a name.

    "" if none has a name. taken: names of other products, which moves of their results also have. batched:
    einsums of batched products, which do not name a product without a batch.

    XLA for CPU calls a library for batched products in fusions without names. An addition to a gradient has
    the name of the weight. Moves of operands and readers of results keep the name of the einsum, or otherwise
    of its scope; for a product with a weight, the weight's name replaces that scope. The search continues
    from instructions that have no name either.
    """
    instruction, place = _named(product)
    if added := _adding_name(program, place, instruction):
        return added
    weight = next(filter(None, (_weight_of(program, product.operand(i)) for i in (0, 1))), "")
    seen, nearest = {instruction.name}, [instruction]
    for _ in range(_MOST_STEPS):
        neighbours = [one for near in nearest for one in _neighbours(place.computation, near)]
        fresh = {one.name: one for one in neighbours if one.name not in seen}
        seen |= fresh.keys()
        related = [one for one in fresh.values() if one.opcode not in _OF_MANY]
        nearest = [one for one in related if not _is_product(program, one, place.computation)]
        names = [one.op_name for one in nearest if scope_of(one.op_name) and one.op_name not in taken]
        names = [name for name in names if _may_name(einsum_of(name), product.instruction, batched)]
        if names:
            name = next((name for name in names if any("->" in scope for scope in scope_of(name))), names[0])
            return renamed(name, weight) if weight else name
    return ""


def einsum_of(name: str) -> str:
    """The einsum in a name of JAX; "" if it has none.

    >>> einsum_of("jit(f)/attention/BKGTS,BSKH->BTKGH/dot_general")
    'BKGTS,BSKH->BTKGH'
    """
    return next((part for part in name.split("/") if "->" in part), "")


def is_batched(product: Instruction) -> bool:
    """Whether a product has a batch: many products, each with its own operands."""
    return "lhs_batch_dims" in product.attributes


def _may_name(einsum: str, product: Instruction, batched: Collection[str]) -> bool:
    """Whether a product may be of an einsum.

    A batch of size one does not appear in the program.
    """
    if not is_batched(product):
        return einsum not in batched
    return not einsum or bool(set.intersection(*map(set, re.split(",|->", einsum))))


def _adding_name(program: Program, place: CallPath, product: Instruction) -> str:
    """The name of the addition of a product to other microbatches' gradients.

    "" if another instruction reads the product first. Readers with fewer elements are no such addition: they
    add a value derived from the product, such as a norm's gradient. A loop over layers writes each layer's
    gradient into a stack, which is added after the loop.
    """
    left, seen = [(place, product)], set[str]()
    elements = product.shapes[0].num_elements
    while left:
        place, instruction = left.pop()
        seen.add(instruction.name)
        for reader in place.computation.users[instruction.name]:
            if name := _adding_within(program, place, reader, instruction):
                return name
            if f"/{GRADIENTS}/" in reader.op_name and reader.shapes[0].num_elements >= elements:
                return reader.op_name
            passes = reader.opcode in MOVED or (not reader.op_name and reader.opcode not in _OF_MANY)
            if (passes or _writes_a_stack(reader)) and reader.name not in seen:
                left.append((place, reader))
            if _writes_a_stack(instruction) and reader is place.computation.result:
                left += _after_loop(place, reader.operands.index(instruction.name))
    return ""


def _writes_a_stack(instruction: Instruction) -> bool:
    return primitive_of(instruction.op_name) == "dynamic_update_slice"


def _after_loop(place: CallPath, index: int) -> Iterator[tuple[CallPath, Instruction]]:
    """The instructions that take element `index` out of the result of a loop.

    place: the loop's body; nothing if it is no loop's.
    """
    if place.frames and (loop := place.frames[-1].caller).opcode == "while":
        for user in place.parent.computation.users[loop.name]:
            if user.opcode == "get-tuple-element" and int(user.attributes["index"]) == index:
                yield place.parent, user


def _adding_within(program: Program, place: CallPath, fusion: Instruction, operand: Instruction) -> str:
    """The name of an addition to gradients inside a fusion that reads `operand`.

    A fusion itself has only the name of its root.
    """
    for inner in called_by(program, fusion) if fusion.opcode == "fusion" else ():
        numbers = {str(number) for number, name in enumerate(fusion.operands) if name == operand.name}
        taken = [one for one in inner.parameters if one.literal in numbers]
        inside = place.enter(fusion, inner)
        if added := next(filter(None, (_adding_name(program, inside, one) for one in taken)), ""):
            return added
    return ""


def _weight_of(program: Program, value: TracedValue) -> str:
    """The name of the weight that a value is or was gathered from; otherwise ""."""
    for _ in range(_MOST_STEPS):
        value = resolve(program, value, MOVED)
        if (before := summed_operand(value)) is None:
            break
        value = before
    instruction = value.instruction
    keys = keys_of(instruction.op_name) if value.is_input and "params[" in instruction.op_name else []
    return keys[-1] if keys else ""


def _neighbours(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """The readers and the operands of an instruction."""
    yield from computation.users[instruction.name]
    yield from (computation.instructions[name] for name in instruction.operands)


def _is_product(program: Program, instruction: Instruction, computation: Computation) -> bool:
    called = called_by(program, instruction) if instruction.opcode == "fusion" else ()
    inner = ((one, one_of) for one_of in called for one in one_of.instructions.values())
    return multiplies(instruction, computation) or any(multiplies(*pair) for pair in inner)


def laid_end_to_end(program: Program, value: TracedValue, *, by_compiler: bool = False) -> list[TracedValue]:
    """The tensors in a flat array that is summed in one go; none for a single tensor.

    XLA for GPU concatenates them. XLA for TPU takes the maximum of each padded with -inf:

        %all = maximum(pad(%a, -inf), padding=0_8), pad(%b, -inf), padding=8_0))

    `value` may be that array, a slice of it, or a sum's result. by_compiler: only arrays that the compiler
    made, without a name of JAX.
    """
    made = resolve(program, value, MOVED)
    while not made.instruction.op_name and (before := summed_operand(made)):
        made = resolve(program, before, MOVED)
    if by_compiler and made.instruction.op_name:
        return []
    if made.instruction.opcode == "concatenate":
        pieces = made.operands()
    elif made.instruction.opcode == "maximum":
        pieces = list(_padded(program, made))
    else:
        return []
    length = sum(piece.instruction.shapes[0].num_elements for piece in pieces)
    return pieces if length == made.instruction.shapes[0].num_elements else []


def _padded(program: Program, value: TracedValue) -> Iterator[TracedValue]:
    """The arrays padded with -inf whose maximum a value is."""
    made = resolve(program, value, MOVES)
    if made.instruction.opcode == "maximum":
        yield from _padded(program, made.operand(0))
        yield from _padded(program, made.operand(1))
    elif made.instruction.opcode == "pad":
        filler = resolve(program, made.operand(1), MOVES)
        if filler.instruction.literal == "-inf":
            yield made.operand(0)

"""JAX's name of what the compiler left without one: from what is sent, and from what reads the result.

A compiler that sums several tensors at once, sums them in steps (within a slice, then across) or moves a
sum into the next turn of a loop names none of these; what they sum has the names.
"""

import re
from collections.abc import Collection, Iterable, Iterator

from meshwright.audit.facts.opcodes import crossing_op, op_of, sent
from meshwright.audit.facts.work import multiplies
from meshwright.audit.hlo.op_names import GRADIENTS, keys_of, primitive_of, renamed, scope_of
from meshwright.audit.hlo.read import Computation, Instruction, Program
from meshwright.audit.hlo.trace import MOVES, CallPath, TracedValue, called_by, history, readers, resolve

# What leaves numbers as they are, but for their place and type.
MOVED = MOVES | {"pad"}
# What holds or hands on values that have nothing to do with each other.
_OF_MANY = {"constant", "parameter", "tuple", "get-tuple-element", "while", "conditional", "call"}
# Sums of sums, turns of loops within loops: more steps back than this lead nowhere.
_MOST_STEPS = 8
# What JAX writes between the name of a loop and what is in it.
_IN_BODY = "/while/body/"


def origin_name(program: Program, value: TracedValue) -> str:
    """JAX's name of what computed a value, "" where nothing has one.

    Of a sum without a name, that of what it sums; of what a loop adds up or hands on from turn to turn,
    that of what each turn makes, also where the loop was unrolled.
    """
    return _name(program, value, _MOST_STEPS)


def _name(program: Program, value: TracedValue, steps: int) -> str:
    origin = list(history(program, value, MOVED))
    # A sum of several tensors has the name of one; summed_operand() leads to those of all.
    named = [
        v.instruction for v in origin if v.instruction.op_name and not (v.path and summed_operand(program, v))
    ]
    # XLA for GPU multiplies by several weights at once, and the slices of the product have their names.
    cut = [i for i in named if i.opcode == "slice" and primitive_of(i.op_name) == "dot_general"]
    name = (cut[:1] or named[-1:] or [value.instruction])[0].op_name
    end = origin[-1]
    if not steps:
        return name
    adds_up = end.instruction.opcode == "add" and not scope_of(name)
    if adds_up or (end.path and _is_of_loop(end)):
        # What takes a result out of a loop may say more of it than the loop, which makes several.
        taken = [i.op_name for i in named] if end.instruction.opcode == "while" else []
        return _longest([name, *taken, *_names_of_turn(program, end, steps - 1)])
    if not name and end.instruction.opcode == "concatenate":
        # Slices of a padded reduce-scatter, some from a neighbour: of one tensor if they have one name.
        parts = {_name(program, end.operand(i), steps - 1) for i in range(len(end.instruction.operands))}
        return parts.pop() if len(parts) == 1 else ""
    before = summed_operand(program, end)
    return _longest([name, _name(program, before, steps - 1)]) if before else name


def _is_of_loop(end: TracedValue) -> bool:
    """Whether a value is what a loop makes, or has made in the turn before."""
    in_body = end.place.frames and end.place.frames[-1].caller.opcode == "while"
    return end.instruction.opcode == "while" or (end.instruction.opcode == "parameter" and bool(in_body))


def _names_of_turn(program: Program, value: TracedValue, steps: int) -> Iterator[str]:
    """Names of what a loop's turn makes of a value: of the terms of sums, of what is written into stacks."""
    opcode = value.instruction.opcode
    if opcode == "while" and value.path:
        body = program.computations[value.instruction.attributes["body"].lstrip("%")]
        made = [TracedValue(body.result, value.place.enter(value.instruction, body), value.path)]
    elif opcode == "parameter" and value.path and _is_of_loop(value):
        made = [TracedValue(value.place.computation.result, value.place, value.path)]
    elif opcode in ("add", "dynamic-update-slice"):
        made = [value.operand(1), *([value.operand(0)] if opcode == "add" else [])]
    else:
        made = []
    for one in made if steps else ():
        yield _name(program, one, steps - 1)
        *_, end = history(program, one, MOVED)
        yield from _names_of_turn(program, end, steps - 1)


def _longest(names: Iterable[str]) -> str:
    return max(names, key=lambda name: len(scope_of(name)))


def summed_operand(program: Program, end: TracedValue) -> TracedValue | None:
    """The operand of a collective, or across slices of its send, that a value is the result of."""
    start = end.operand(0, end.path) if end.instruction.opcode.endswith("-done") else end
    instruction = start.instruction
    if instruction.opcode == "recv" and crossing_op(instruction):
        return TracedValue(sent(start.place.computation, instruction), start.place).operand(0)
    if op_of(instruction) is None:
        return None
    return start.operand(start.path[0] if start.path and len(instruction.operands) > 1 else 0)


def reader_name(program: Program, result: TracedValue) -> str:
    """JAX's name of the first that reads a collective's result, moves included, if it has one in a scope."""
    if result.instruction.opcode.endswith("-start"):
        done = next(iter(result.place.computation.users[result.instruction.name]), result.instruction)
        result = TracedValue(done, result.place, result.path)
    moved = result.place.computation.users[result.instruction.name] if not result.path else ()
    names = [user.op_name for user in moved] + [u.instruction.op_name for u, _ in readers(program, result)]
    return next(filter(scope_of, names), "")


def own_name(product: TracedValue) -> str:
    """JAX's name of a product, or of the fusion that it is in, under that of the loop that runs it.

    XLA for GPU makes one body of loops whose bodies are alike, with the names of one of them: of the loops
    over rows of an expert's two first weights, forward and recomputed. Each loop keeps its own.
    """
    instruction, place = _named(product)
    return _within_loop(instruction.op_name, place)


def _within_loop(op_name: str, place: CallPath) -> str:
    """`op_name` under the name of the loop around `place`, where it has that of another loop."""
    while place.frames and place.frames[-1].caller.opcode != "while":
        place = place.parent
    if not place.frames:
        return op_name
    loop = _within_loop(place.frames[-1].caller.op_name, place.parent)
    own, _, inside = op_name.rpartition(_IN_BODY)
    if not own or not loop.endswith("/while") or op_name.startswith(f"{loop}/body/"):
        return op_name
    return f"{loop}/body/{inside}"


def _named(product: TracedValue) -> tuple[Instruction, CallPath]:
    instruction, place = product.instruction, product.place
    while not instruction.op_name and place.frames and place.frames[-1].caller.opcode == "fusion":
        instruction, place = place.frames[-1].caller, place.parent
    return instruction, place


def name_beside(
    program: Program, product: TracedValue, taken: Collection[str], batched: Collection[str]
) -> str:
    """JAX's name of what is nearest to a product without one, "" where nothing has any.

    XLA for CPU hands batched products to a library in fusions without names. What adds up a gradient has the
    name of its weight. What laid out their operands, or reads their results, keeps that of the einsum, or
    else of the scope that it is in; of a product with a weight, the weight's name takes that scope's place.
    Of what has no name either, what is beside that. taken: the names of other products, which what lays out
    their results has. batched: the einsums of products with a batch, which are no names of one without.
    """
    instruction, place = _named(product)
    if added := _adding_name(program, place, instruction):
        return added
    weight = next(filter(None, (_weight_of(program, product.operand(i)) for i in (0, 1))), "")
    found, nearest = {instruction.name}, [instruction]
    for _ in range(_MOST_STEPS):
        beside = [one for near in nearest for one in _beside(place.computation, near)]
        fresh = {one.name: one for one in beside if one.name not in found}
        found |= fresh.keys()
        own = [one for one in fresh.values() if one.opcode not in _OF_MANY]
        nearest = [one for one in own if not _is_product(program, one, place.computation)]
        names = [one.op_name for one in nearest if scope_of(one.op_name) and one.op_name not in taken]
        names = [name for name in names if _may_name(einsum_of(name), product.instruction, batched)]
        if names:
            name = next((name for name in names if any("->" in scope for scope in scope_of(name))), names[0])
            return renamed(name, weight) if weight else name
    return ""


def einsum_of(name: str) -> str:
    """The einsum in a name of JAX, "" where it has none.

    >>> einsum_of("jit(f)/attention/BKGTS,BSKH->BTKGH/dot_general")
    'BKGTS,BSKH->BTKGH'
    """
    return next((part for part in name.split("/") if "->" in part), "")


def is_batched(product: Instruction) -> bool:
    """Whether a product is one of many of its kind, of which each has its own operands."""
    return "lhs_batch_dims" in product.attributes


def _may_name(einsum: str, product: Instruction, batched: Collection[str]) -> bool:
    """Whether a product may be of an einsum; a batch of one is none in the program."""
    if not is_batched(product):
        return einsum not in batched
    return not einsum or bool(set.intersection(*map(set, re.split(",|->", einsum))))


def _adding_name(program: Program, place: CallPath, product: Instruction) -> str:
    """The name of what adds a product to the gradients of other microbatches, where that reads it first.

    What has fewer elements is no such sum, but of what was made of the product: a norm's gradient. A loop
    over layers writes each layer's gradient into a stack, which is added to others after it.
    """
    left, seen = [(place, product)], set[str]()
    elements = product.shapes[0].num_elements
    while left:
        place, one = left.pop()
        seen.add(one.name)
        for reader in place.computation.users[one.name]:
            if found := _adding_within(program, place, reader, one):
                return found
            if f"/{GRADIENTS}/" in reader.op_name and reader.shapes[0].num_elements >= elements:
                return reader.op_name
            passes = reader.opcode in MOVED or (not reader.op_name and reader.opcode not in _OF_MANY)
            if (passes or _writes_a_stack(reader)) and reader.name not in seen:
                left.append((place, reader))
            if _writes_a_stack(one) and reader is place.computation.result:
                left += _after_loop(place, reader.operands.index(one.name))
    return ""


def _writes_a_stack(one: Instruction) -> bool:
    return primitive_of(one.op_name) == "dynamic_update_slice"


def _after_loop(place: CallPath, index: int) -> Iterator[tuple[CallPath, Instruction]]:
    """What takes an element of the result of the loop whose body is at `place`, if it is one's."""
    if place.frames and (loop := place.frames[-1].caller).opcode == "while":
        for user in place.parent.computation.users[loop.name]:
            if user.opcode == "get-tuple-element" and int(user.attributes["index"]) == index:
                yield place.parent, user


def _adding_within(program: Program, place: CallPath, fusion: Instruction, operand: Instruction) -> str:
    """The name of what adds an operand of a fusion to gradients there: a fusion has the name of its root."""
    for inner in called_by(program, fusion) if fusion.opcode == "fusion" else ():
        numbers = {str(number) for number, name in enumerate(fusion.operands) if name == operand.name}
        taken = [one for one in inner.parameters if one.literal in numbers]
        inside = place.enter(fusion, inner)
        if found := next(filter(None, (_adding_name(program, inside, one) for one in taken)), ""):
            return found
    return ""


def _weight_of(program: Program, value: TracedValue) -> str:
    """The name of the weight that a value is, or was gathered from; "" of others."""
    for _ in range(_MOST_STEPS):
        value = resolve(program, value, MOVED)
        if (before := summed_operand(program, value)) is None:
            break
        value = before
    instruction = value.instruction
    is_input = instruction.opcode == "parameter" and not value.place.frames
    keys = keys_of(instruction.op_name) if is_input and "params[" in instruction.op_name else []
    return keys[-1] if keys else ""


def _beside(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    """What reads an instruction, and what it reads."""
    yield from computation.users[instruction.name]
    yield from (computation.instructions[name] for name in instruction.operands)


def _is_product(program: Program, instruction: Instruction, computation: Computation) -> bool:
    called = called_by(program, instruction) if instruction.opcode == "fusion" else ()
    inner = ((one, one_of) for one_of in called for one in one_of.instructions.values())
    return multiplies(instruction, computation) or any(multiplies(*pair) for pair in inner)


def laid_end_to_end(program: Program, value: TracedValue, *, by_compiler: bool = False) -> list[TracedValue]:
    """The tensors of which a flat array was made to sum them in one go; none where it is one tensor.

    XLA for GPU concatenates them. XLA for TPU takes the maximum of each padded with -inf:

        %all = maximum(pad(%a, -inf), padding=0_8), pad(%b, -inf), padding=8_0))

    `value` may be that array, a slice of it, or what a sum made of it. by_compiler: only what the compiler
    laid so, without a name of JAX.
    """
    *_, made = history(program, value, MOVED)
    while not made.instruction.op_name and (before := summed_operand(program, made)):
        *_, made = history(program, before, MOVED)
    if by_compiler and made.instruction.op_name:
        return []
    if made.instruction.opcode == "concatenate":
        pieces = [made.operand(i) for i in range(len(made.instruction.operands))]
    elif made.instruction.opcode == "maximum":
        pieces = list(_padded(program, made))
    else:
        return []
    length = sum(piece.instruction.shapes[0].num_elements for piece in pieces)
    return pieces if length == made.instruction.shapes[0].num_elements else []


def _padded(program: Program, value: TracedValue) -> Iterator[TracedValue]:
    """What was padded with -inf of which a value is the maximum."""
    *_, made = history(program, value)
    if made.instruction.opcode == "maximum":
        yield from _padded(program, made.operand(0))
        yield from _padded(program, made.operand(1))
    elif made.instruction.opcode == "pad":
        *_, filler = history(program, made.operand(1))
        if filler.instruction.literal == "-inf":
            yield made.operand(0)

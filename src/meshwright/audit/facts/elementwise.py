"""What a program computes outside of products: in the update, in its passes, and with weights and caches.

A plan names the operations of its passes, and has the optimizer's of the update. More is another program, and
mostly another pass over memory. An instruction counts wherever it stands, so that fusions change no count.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction

from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.work import multiplies
from meshwright.audit.hlo.op_names import is_of, phase_of, primitive_of, scope_of, split_op_name
from meshwright.audit.hlo.read import Computation, Instruction, Program, arrays
from meshwright.audit.hlo.trace import (
    MOVES,
    CallPath,
    TracedValue,
    history,
    known_runs,
    places,
    resolve,
    sources,
    value_key,
)

# Opcodes that compute numbers from numbers one by one.
_ARITHMETIC_OPCODES = """
abs add and atan2 cbrt ceil clamp compare cosine divide erf exponential exponential-minus-one floor is-finite
log log-plus-one logistic maximum minimum multiply negate not or power remainder round-nearest-afz
round-nearest-even rsqrt select sign sine sqrt subtract tan tanh xor
"""
_ARITHMETIC = frozenset(_ARITHMETIC_OPCODES.split())
_SORTS = frozenset({"sort", "topk"})
# JAX's functions of a number that are no arithmetic.
_FUNCTIONS = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erfc", "sin", "cos"}
)
# Opcodes that write the same numbers elsewhere, unless they are fused with the product that reads them.
_WRITES = frozenset({"concatenate", "copy", "pad", "reverse"})


@dataclass(frozen=True)
class UpdateArithmetic:
    """What one device computes in the update of a training step.

    computed: elements that elementwise operations make of gradients and state. reduced: elements that are
    summed, or reduced otherwise, as for a norm.
    """

    computed: float
    reduced: float


def update_arithmetic(program: Program, operations: Collection[str] = ()) -> UpdateArithmetic:
    """The elementwise operations and reductions of the update, outside of loops: those add up gradients.

    Elementwise operations count on arrays that have as many elements as an input of the program. Of what JAX
    does not differentiate, such as angles of positions, that of the passes is named after `operations`.
    """
    sizes = {shape.num_elements for one in program.main.parameters for shape in one.shapes if shape.dims}
    computed = reduced = Fraction(0)
    for place in places(program):
        if place.loops:
            continue
        runs = known_runs(program, place)
        for one in place.computation.instructions.values():
            if phase_of(one.op_name, differentiated=True) != "update" or is_of(one.op_name, operations):
                continue
            if one.opcode == "reduce":
                reduced += runs * _reduced_elements(program, TracedValue(one, place))
            elif one.opcode in _ARITHMETIC and one.shapes[0].num_elements in sizes:
                computed += runs * one.shapes[0].num_elements
    return UpdateArithmetic(round(computed), round(reduced))


def _reduced_elements(program: Program, reduce: TracedValue) -> int:
    """Elements that a reduction takes; XLA:CPU first reduces windows of 32, by an instruction of its own."""
    source = resolve(program, reduce.operand(0))
    if source.instruction.opcode == "reduce-window":
        source = source.operand(0)
    return source.instruction.shapes[0].num_elements


def nameless_sums(program: Program) -> int:
    """Sums of two arrays of floating-point numbers that have no name of JAX."""
    instructions = (one for each in program.computations.values() for one in each.instructions.values())
    return sum(
        one.opcode == "add"
        and not one.op_name
        and bool(one.shapes[0].dims)
        and _is_float(one.shapes[0].dtype)
        for one in instructions
    )


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("f", "bf"))


@dataclass(frozen=True)
class ScopedArithmetic:
    """Elements that one elementwise operation, reduction or sort of a pass makes in a step.

    op_name: JAX's. is_float: of floating-point numbers, as no counters of loops are.
    """

    op_name: str
    elements: int
    sorts: bool = False
    is_float: bool = True


def scoped_arithmetic(program: Program, *, differentiated: bool) -> Iterator[ScopedArithmetic]:
    """The elementwise operations, reductions and sorts of both passes that have JAX's names.

    The others are the compiler's own: indices, and constants that it works out anew. Neither counts what a
    scatter adds to single elements, which XLA:CPU does in a loop: its name is JAX's without the program.
    """
    for place in places(program):
        runs = known_runs(program, place)
        for one in place.computation.instructions.values():
            sorts = one.opcode in _SORTS
            is_counted = one.opcode in _ARITHMETIC or one.opcode == "reduce" or sorts
            is_named = one.op_name.startswith("jit(")
            if is_counted and is_named and phase_of(one.op_name, differentiated) != "update":
                made = one.shapes[0]
                computed = round(runs * made.num_elements)
                yield ScopedArithmetic(one.op_name, computed, sorts, _is_float(made.dtype))


def transcendentals(program: Program, *, differentiated: bool) -> dict[str, set[str]]:
    """The functions that the forward pass takes of numbers, as JAX names them, by scope."""
    found: dict[str, set[str]] = defaultdict(set)
    for place in places(program):
        for one in place.computation.instructions.values():
            for name in split_op_name(one.op_name):
                primitive = primitive_of(name)
                if primitive in _FUNCTIONS and phase_of(name, differentiated) == "forward":
                    for scope in scope_of(name):
                        found[scope].add(primitive)
    return found


def made_by(program: Program) -> Iterator[Instruction]:
    """What computes the results of an inference step that are no caches: past moves, and past collectives."""
    given = {(shape.dtype, shape.dims) for one in program.main.parameters for shape in one.shapes}
    for path, shape in arrays(program.main.result.shape):
        if (shape.dtype, shape.dims) in given:
            continue
        value = resolve(program, TracedValue(program.main.result, CallPath(program.main), path), MOVES)
        while op_of(value.instruction) or value.instruction.opcode.endswith("-done"):
            value = resolve(program, value.operand(0), MOVES)
        yield value.instruction


def weights_depend_on_a_norm(program: Program) -> bool:
    """Whether the update computes the arrays that a step returns from a number summed over whole arrays."""
    result, seen = program.main.result, set()
    arrays_of = [path for path, shape in arrays(result.shape) if shape.dims]
    left = [TracedValue(result, CallPath(program.main), path) for path in arrays_of]
    while left:
        value = left.pop()
        one, key = value.instruction, value_key(value)
        if key in seen or (one.op_name and phase_of(one.op_name, differentiated=True) != "update"):
            continue
        seen.add(key)
        if one.opcode == "reduce" and not one.shapes[0].dims:
            return True
        left += sources(program, value)
    return False


def multiplied_results(program: Program) -> int:
    """How many of the arrays that a step returns were multiplied or divided at last, wherever they are sent.

    Optimizers add to all that they keep: weights, moments, and what is a mean of both.
    """
    result = program.main.result
    returned = (
        TracedValue(result, CallPath(program.main), path) for path, one in arrays(result.shape) if one.dims
    )
    made = (resolve(program, value, _SENT).instruction for value in returned)
    return sum(one.opcode in ("multiply", "divide") for one in made)


_SENT = MOVES | {"all-gather", "all-gather-start", "all-gather-done"}


@dataclass(frozen=True)
class StatePass:
    """An instruction that computes with an input of the program before any product, or writes it elsewhere.

    num_bytes: that it reads in a step, and that it writes where it computes nothing.
    """

    state: Instruction
    by: Instruction
    num_bytes: int


def state_passes(program: Program, *, differentiated: bool) -> Iterator[StatePass]:
    """What is done with weights and caches outside of products and of the update.

    Of caches, which an inference step gives back in their shape, also what writes them elsewhere; weights are
    laid out by compilers as products want them. Slices that are taken and rows that are written are neither.
    """
    given_back = {(shape.dtype, shape.dims) for shape in program.main.result.shapes}
    for place in places(program):
        for one in place.computation.instructions.values():
            computes = one.opcode in _ARITHMETIC or one.opcode == "reduce"
            writes = one.opcode in _WRITES and _is_in_memory(one) and not _is_fused_with_product(place)
            if not (computes or writes) or phase_of(one.op_name, differentiated) == "update":
                continue
            if _multiplies_rows(one, place.computation):
                continue
            value = TracedValue(one, place)
            operands = [value.operand(index) for index in range(len(one.operands))]
            state = next((found for each in operands if (found := _input(program, each))), None)
            if state is None:
                continue
            runs = known_runs(program, place)
            if computes:
                yield StatePass(state, one, round(runs * operands[0].instruction.shapes[0].num_bytes))
            elif not differentiated and (state.shapes[0].dtype, state.shapes[0].dims) in given_back:
                yield StatePass(state, one, round(runs * 2 * one.shapes[0].num_bytes))


def _is_in_memory(one: Instruction) -> bool:
    """Whether it writes to the device's memory, and not to the faster one of a TPU."""
    return all(shape.memory_space == 0 for shape in one.shapes)


def _is_fused_with_product(place: CallPath) -> bool:
    while place.frames and place.frames[-1].caller.opcode == "fusion":
        if any(multiplies(one, place.computation) for one in place.computation.instructions.values()):
            return True
        place = place.parent
    return False


def _multiplies_rows(one: Instruction, computation: Computation) -> bool:
    """Whether it is a product of a single row, which XLA for TPU writes as one of numbers that are summed."""
    users = list(computation.users.get(one.name, ()))
    is_summed = bool(users) and all(user.opcode == "reduce" for user in users)
    return one.opcode == "multiply" and len(set(one.operands)) > 1 and is_summed


def _input(program: Program, value: TracedValue) -> Instruction | None:
    """The floating-point input of the program that a value is, or a slice of; None of others."""
    *_, last = history(program, value, MOVES)
    is_input = last.instruction.opcode == "parameter" and not last.place.frames
    is_float = is_input and _is_float(last.instruction.shapes[0].dtype)
    return last.instruction if is_float else None

"""Arithmetic outside of products: in the update, in the passes, with weights and caches.

A plan names the operations of its passes and has the optimizer's operations in the update. Further ones are
another program, and usually another pass over memory. Instructions within fusions count too, so that fusing
changes no count.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction

from meshwright.audit.facts.instruction_work import multiplies
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.hlo.op_names import is_of, phase_of, primitive_of, scope_of, split_op_name
from meshwright.audit.hlo.read import Computation, Instruction, Program, arrays
from meshwright.audit.hlo.trace import (
    MOVES,
    CallPath,
    TracedValue,
    known_runs,
    places,
    resolve,
    sources,
    value_key,
)

# Opcodes of elementwise arithmetic.
_NAMES = """
abs add and atan2 cbrt ceil clamp compare cosine divide erf exponential exponential-minus-one floor is-finite
log log-plus-one logistic maximum minimum multiply negate not or power remainder round-nearest-afz
round-nearest-even rsqrt select sign sine sqrt subtract tan tanh xor
"""
ARITHMETIC_OPCODES = frozenset(_NAMES.split())
_SORTS = frozenset({"sort", "topk"})
# JAX's transcendental functions.
_FUNCTIONS = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erfc", "sin", "cos"}
)
# Opcodes that copy numbers in memory, unless they are fused with the product that reads them.
_WRITES = frozenset({"concatenate", "copy", "pad", "reverse"})


@dataclass(frozen=True)
class UpdateArithmetic:
    """Arithmetic of one device in the update of a training step.

    computed: elements of results of elementwise operations on gradients and state. reduced: elements that
    reductions read, for example for a norm.
    """

    computed: float
    reduced: float


def update_arithmetic(program: Program, operations: Collection[str] = ()) -> UpdateArithmetic:
    """The elementwise operations and reductions of the update, outside of loops.

    Loops add up gradients. Elementwise operations count on arrays with the number of elements of an input of
    the program. operations: scopes of the passes that do not count; without a gradient, such as angles of
    positions, they look like the update.
    """
    sizes = {shape.num_elements for one in program.main.parameters for shape in one.shapes if shape.dims}
    computed = reduced = Fraction(0)
    for place in places(program):
        if place.loops:
            continue
        runs = known_runs(program, place)
        for each in place.computation.instructions.values():
            if phase_of(each.op_name, differentiated=True) != "update" or is_of(each.op_name, operations):
                continue
            if each.opcode == "reduce":
                reduced += runs * _reduced_elements(program, TracedValue(each, place))
            elif each.opcode in ARITHMETIC_OPCODES and each.shapes[0].num_elements in sizes:
                computed += runs * each.shapes[0].num_elements
    return UpdateArithmetic(round(computed), round(reduced))


def _reduced_elements(program: Program, reduce: TracedValue) -> int:
    """Elements that a reduction reads.

    XLA:CPU first reduces windows of 32, in a separate instruction.
    """
    source = resolve(program, reduce.operand(0))
    if source.instruction.opcode == "reduce-window":
        source = source.operand(0)
    return source.instruction.shapes[0].num_elements


def nameless_sums(program: Program) -> int:
    """Number of sums of two floating-point arrays without a JAX name."""
    instructions = (each for c in program.computations.values() for each in c.instructions.values())
    return sum(
        each.opcode == "add"
        and not each.op_name
        and bool(each.shapes[0].dims)
        and _is_float(each.shapes[0].dtype)
        for each in instructions
    )


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("f", "bf"))


@dataclass(frozen=True)
class ScopedArithmetic:
    """Elements of the results of one elementwise operation, reduction or sort in a step.

    op_name: JAX's. is_float: floating-point numbers, unlike counters of loops.
    """

    op_name: str
    elements: int
    sorts: bool = False
    is_float: bool = True


def scoped_arithmetic(program: Program, *, differentiated: bool) -> Iterator[ScopedArithmetic]:
    """The elementwise operations, reductions and sorts of both passes with JAX's names.

    Instructions without a name are the compiler's: indices, and constants that it computes again. Additions
    of a scatter to single elements do not count: XLA:CPU runs them in a loop, whose name omits the program.
    """
    for place in places(program):
        runs = known_runs(program, place)
        for each in place.computation.instructions.values():
            sorts = each.opcode in _SORTS
            is_counted = each.opcode in ARITHMETIC_OPCODES or each.opcode == "reduce" or sorts
            is_named = each.op_name.startswith("jit(")
            if is_counted and is_named and phase_of(each.op_name, differentiated) != "update":
                made = each.shapes[0]
                computed = round(runs * made.num_elements)
                yield ScopedArithmetic(each.op_name, computed, sorts, _is_float(made.dtype))


def transcendentals(program: Program, *, differentiated: bool) -> dict[str, set[str]]:
    """The transcendental functions of the forward pass, by JAX's names, for each scope."""
    functions: dict[str, set[str]] = defaultdict(set)
    instructions = (each for place in places(program) for each in place.computation.instructions.values())
    for name in (name for each in instructions for name in split_op_name(each.op_name)):
        primitive = primitive_of(name)
        if primitive in _FUNCTIONS and phase_of(name, differentiated) == "forward":
            for scope in scope_of(name):
                functions[scope].add(primitive)
    return functions


def made_by(program: Program) -> Iterator[Instruction]:
    """The instructions that compute the results of an inference step, without caches.

    Moves and collectives after the computation are skipped.
    """
    given = {(shape.dtype, shape.dims) for one in program.main.parameters for shape in one.shapes}
    for path, shape in arrays(program.main.result.shape):
        if (shape.dtype, shape.dims) in given:
            continue
        value = resolve(program, TracedValue(program.main.result, CallPath(program.main), path), MOVES)
        while op_of(value.instruction) or value.instruction.opcode.endswith("-done"):
            value = resolve(program, value.operand(0), MOVES)
        yield value.instruction


def weights_depend_on_a_norm(program: Program) -> bool:
    """Whether the update's results depend on a sum over whole arrays."""
    result, seen = program.main.result, set()
    arrays_of = [path for path, shape in arrays(result.shape) if shape.dims]
    left = [TracedValue(result, CallPath(program.main), path) for path in arrays_of]
    while left:
        value = left.pop()
        instruction, key = value.instruction, value_key(value)
        # A sum that XLA combined with another pass's has the names of both.
        names = split_op_name(instruction.op_name) if instruction.op_name else []
        phases = {phase_of(name, differentiated=True) for name in names}
        if key in seen or (phases and "update" not in phases):
            continue
        seen.add(key)
        if instruction.opcode == "reduce" and not instruction.shapes[0].dims:
            return True
        left += sources(program, value)
    return False


def multiplied_results(program: Program) -> int:
    """Number of a step's results whose last operation is a multiplication or division.

    Moves and gathers after it are skipped. Optimizers end with an addition for all of their state: weights,
    moments, and averages.
    """
    result = program.main.result
    returned = (
        TracedValue(result, CallPath(program.main), path)
        for path, shape in arrays(result.shape)
        if shape.dims
    )
    made = (resolve(program, value, _SENT).instruction for value in returned)
    return sum(one.opcode in ("multiply", "divide") for one in made)


_SENT = MOVES | {"all-gather", "all-gather-start", "all-gather-done"}


@dataclass(frozen=True)
class StatePass:
    """An instruction that computes with a program's input before any product, or copies it.

    state: the input. by: the instruction. num_bytes: read in a step; for a copy, read and written.
    """

    state: Instruction
    by: Instruction
    num_bytes: int


def state_passes(program: Program, *, differentiated: bool) -> Iterator[StatePass]:
    """Arithmetic with weights and caches outside of products and of the update.

    Copies of caches count too; an inference step returns a cache in the shape of its input. Copies of weights
    do not count, because compilers order them as products need them. Slices and updates of rows do not
    count either.
    """
    given_back = {(shape.dtype, shape.dims) for shape in program.main.result.shapes}
    for place in places(program):
        for instruction in place.computation.instructions.values():
            opcode = instruction.opcode
            computes = opcode in ARITHMETIC_OPCODES or opcode == "reduce"
            writes = opcode in _WRITES and _is_in_memory(instruction) and not _is_fused_with_product(place)
            if not (computes or writes) or phase_of(instruction.op_name, differentiated) == "update":
                continue
            if _multiplies_rows(instruction, place.computation):
                continue
            value = TracedValue(instruction, place)
            operands = value.operands()
            state = next((stored for each in operands if (stored := _input(program, each))), None)
            if state is None:
                continue
            runs = known_runs(program, place)
            if computes:
                yield StatePass(state, instruction, round(runs * operands[0].instruction.shapes[0].num_bytes))
            elif not differentiated and (state.shapes[0].dtype, state.shapes[0].dims) in given_back:
                yield StatePass(state, instruction, round(runs * 2 * instruction.shapes[0].num_bytes))


def _is_in_memory(instruction: Instruction) -> bool:
    """Whether it writes to the device's main memory; a TPU also has a faster one."""
    return all(shape.memory_space == 0 for shape in instruction.shapes)


def _is_fused_with_product(place: CallPath) -> bool:
    while place.frames and place.frames[-1].caller.opcode == "fusion":
        if any(multiplies(one, place.computation) for one in place.computation.instructions.values()):
            return True
        place = place.parent
    return False


def _multiplies_rows(instruction: Instruction, computation: Computation) -> bool:
    """Whether it is part of a product of a single row.

    XLA for TPU writes that as an elementwise product whose results are summed.
    """
    users = list(computation.users.get(instruction.name, ()))
    is_summed = bool(users) and all(user.opcode == "reduce" for user in users)
    return instruction.opcode == "multiply" and len(set(instruction.operands)) > 1 and is_summed


def _input(program: Program, value: TracedValue) -> Instruction | None:
    """The floating-point input of the program that a value is or slices; otherwise None."""
    last = resolve(program, value, MOVES)
    is_float = last.is_input and _is_float(last.instruction.shapes[0].dtype)
    return last.instruction if is_float else None

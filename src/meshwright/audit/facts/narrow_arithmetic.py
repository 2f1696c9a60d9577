"""Arithmetic in 16 bits or fewer, by its scopes, and a program's calls and transfers to its host."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.audit.facts.instruction_work import COPIERS, host_copy
from meshwright.audit.facts.opcodes import crossing_op
from meshwright.audit.facts.outside_products import ARITHMETIC_OPCODES
from meshwright.audit.hlo.op_names import PassName, phase_of, scope_of
from meshwright.audit.hlo.read import Instruction, Program, dtype_bits
from meshwright.audit.hlo.trace import TracedValue, known_runs, places, sources, value_key

_CALLBACK = "callback"

# Bits of the narrowest types that a plan has by default.
NARROW = 16


@dataclass(frozen=True)
class NarrowResult:
    """Elements that an operation rounds to at most 16 bits in a step. opcode: of XLA, or `convert`."""

    op_name: str
    opcode: str
    direction: PassName
    elements: int


def narrow_results(program: Program, *, differentiated: bool) -> Iterator[NarrowResult]:
    """The elementwise operations, reductions and casts whose results are floating-point of at most 16 bits.

    Also within fusions. A compiler that lacks 16-bit arithmetic computes in 32 bits and casts each result.
    """
    for place in places(program):
        runs = known_runs(program, place)
        for each in place.computation.instructions.values():
            if each.op_name and _rounds(each, program) and _is_narrow(each):
                direction = phase_of(each.op_name, differentiated)
                elements = round(runs * each.shapes[0].num_elements)
                yield NarrowResult(each.op_name, each.opcode, direction, elements)


def rounded_statistics(program: Program, *, differentiated: bool) -> dict[str, int]:
    """Elements that are rounded to 16 bits before a norm's root or a rotation's cosine, by scope.

    Only the forward pass counts. The elements are mean squares of norms and angles of rotary positions; 16
    bits keep two or three of their digits.
    """
    rounded: dict[str, int] = {}
    for place in places(program):
        for each in place.computation.instructions.values():
            scope = _scope_of_function(each)
            if scope is None or phase_of(each.op_name, differentiated) != "forward":
                continue
            left, seen = [TracedValue(each, place)], set()
            while left:
                value = left.pop()
                instruction, key = value.instruction, value_key(value)
                if key in seen or (instruction.op_name and scope not in scope_of(instruction.op_name)):
                    continue
                seen.add(key)
                # Compilers name the cast of a norm's input after the norm, too.
                elements = instruction.shapes[0].num_elements
                is_statistic = elements <= each.shapes[0].num_elements
                if is_statistic and _is_narrow(instruction) and _computes(instruction):
                    rounded[scope] = max(rounded.get(scope, 0), elements)
                left += sources(program, value)
    return rounded


def _scope_of_function(instruction: Instruction) -> str | None:
    """The scope of a norm's root, or of a rotation's cosine or sine; None for other instructions."""
    scopes = scope_of(instruction.op_name)
    if instruction.opcode in ("rsqrt", "sqrt"):
        return next((scope for scope in reversed(scopes) if scope.endswith(_NORM)), None)
    return scopes[-1] if scopes and instruction.opcode in ("cosine", "sine") else None


_NORM = "norm"


def narrowest_elements(program: Program) -> tuple[int, str]:
    """Elements cast to floating-point types of fewer than 16 bits in a step, and the largest cast's name."""
    total, largest, name = 0, 0, ""
    for place in places(program):
        runs = known_runs(program, place)
        for each in place.computation.instructions.values():
            if each.opcode != "convert":  # a callback has no result, so no shapes[0]
                continue
            made = each.shapes[0]
            if not made.dtype.startswith("f") or dtype_bits(made.dtype) >= NARROW:
                continue
            elements = round(runs * made.num_elements)
            total += elements
            if elements > largest:
                largest, name = elements, each.label
    return total, name


# Operations whose results are exactly the same in wider types.
_EXACT = frozenset({"maximum", "minimum", "select", "clamp", "negate", "abs", "sign", "compare"})


def _rounds(instruction: Instruction, program: Program) -> bool:
    """Whether an operation may round: the largest of 16-bit numbers is exact."""
    if instruction.opcode == "reduce":
        called = program.computations.get(instruction.attributes.get("to_apply", "").lstrip("%"))
        return called is None or called.result.opcode not in _EXACT
    return _computes(instruction) and instruction.opcode not in _EXACT


def _computes(instruction: Instruction) -> bool:
    return instruction.opcode in ARITHMETIC_OPCODES or instruction.opcode in ("reduce", "convert")


def _is_narrow(instruction: Instruction) -> bool:
    made = instruction.shapes[0]
    return made.dtype.startswith(("f", "bf")) and dtype_bits(made.dtype) <= NARROW


@dataclass(frozen=True)
class HostTransfer:
    """A call of the host, or an array that goes by the host's memory. num_bytes: a step."""

    instruction: Instruction
    what: str
    num_bytes: int
    is_call: bool = True


def host_transfers(program: Program) -> Iterator[HostTransfer]:
    """The callbacks, feeds and transfers of a program to the memory of its host."""
    for place in places(program):
        runs = known_runs(program, place)
        # A fusion, or an asynchronous call, counts as one copy.
        is_called_copy = bool(place.frames) and place.frames[-1].caller.opcode in COPIERS
        for each in place.computation.instructions.values():
            target = each.attributes.get("custom_call_target", "").strip('"')
            size = sum(shape.num_bytes for shape in each.shapes)
            is_feed = each.opcode in ("infeed", "outfeed")
            is_sent = each.opcode == "send" and each.attributes.get("is_host_transfer") == "true"
            if _CALLBACK in target:
                yield HostTransfer(each, f"calls Python on the host ({target})", round(runs * size))
            elif is_feed or (is_sent and crossing_op(each) is None):
                yield HostTransfer(each, f"sends to the host ({each.opcode})", round(runs * size))
            elif not is_called_copy and (copy := host_copy(program, TracedValue(each, place))):
                what = "is copied to the host's memory or from it"
                yield HostTransfer(each, what, round(runs * copy.num_bytes), is_call=False)

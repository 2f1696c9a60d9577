"""Matmuls that multiply 16-bit arrays by 32-bit ones: an earlier operation has promoted one operand.

JAX promotes 16-bit numbers if they meet a NumPy scalar or an array of 32 bits, not if they meet a Python
number. XLA for CPU computes in 32 bits anyway, but rounds each result that the program has in 16.
"""

from collections.abc import Iterable, Iterator

from meshwright.audit.facts.communication import is_differentiated
from meshwright.audit.facts.emitted import ELEMENTWISE, Emitted, is_product
from meshwright.audit.facts.matmuls import Product, innermost_name, products
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.op_names import phase_of, primitive_of
from meshwright.audit.hlo.read import Program, dtype_bits
from meshwright.audit.hlo.trace import (
    MOVES,
    MOVES_OR_REPEATS,
    TracedValue,
    history,
    resolve,
    sources,
    value_key,
)
from meshwright.audit.remarks import Remark
from meshwright.dtypes import of_hlo
from meshwright.units import and_more, format_number_of

# Promoted matmuls are reported if they have a larger share of the program's FLOPs: routers may be promoted.
_SHARE = 0.05
_NARROW, _WIDE = 16, 32
# Limit of the values that a backward search visits.
_MOST_STEPS = 200


def promoted_products(program: Program, prices: Prices, sent: Iterable[Emitted]) -> list[Remark]:
    """A warning of the forward pass's matmuls of a 16-bit array and a computed 32-bit one.

    The backward pass of a matmul with a 32-bit result has such matmuls by right. Results that are sent count,
    too, with the half of their bytes.
    """
    differentiated, total = is_differentiated(program), 0.0
    promoted: list[tuple[Product, TracedValue, TracedValue]] = []
    for product in products(program):
        total += product.flops
        if phase_of(product.value.instruction.op_name, differentiated) != "forward":
            continue
        promoted += [(product, *pair) for pair in _promoted(program, product.value)]
    flops = sum(product.flops for product, _, _ in promoted)
    if flops <= _SHARE * total:
        return []
    largest, narrow, wide = max(promoted, key=lambda one: one[0].flops)
    instruction = largest.value.instruction
    name = innermost_name(instruction)
    others = and_more(len(promoted) - 1)
    kept, given = _narrow_type(program, narrow), of_hlo(wide.instruction.shapes[0].dtype)
    origin = next((promoter for _, _, each in promoted if (promoter := _promoter(program, each))), None)
    by, change = _of_origin(program, origin, kept)
    made = {id(product.value.instruction) for product, _, _ in promoted}
    on_the_way = {name for _, _, each in promoted for name in _sent_wide(program, each)}
    moved = [
        emitted
        for emitted in sent
        if emitted.value.instruction.name in on_the_way
        or id(resolve(program, emitted.operand(), MOVES).instruction) in made
    ]
    if moved:
        others += f" and {format_number_of(len(moved), 'collective')} of their operands or results"
    num_bytes = sum(prices.sent(one) for one in moved) * (_WIDE - _NARROW) // _WIDE
    seconds = [prices.product_seconds(flops, dtype) for dtype in (given, kept)]
    sent_seconds = prices.total_seconds(moved)
    saved = None
    if None not in (*seconds, sent_seconds):
        saved = (seconds[0] or 0.0) - (seconds[1] or 0.0) + (sent_seconds or 0.0) * (1 - _NARROW / _WIDE)
    place = instruction if origin is None else origin.instruction
    return [
        Remark(
            "promoted",
            name,
            f"the matmul `{name}`{others}: {kept} numbers are multiplied by {given} ones, in {given}{by}",
            place.where,
            change,
            num_bytes,
            saved,
            instruction=instruction.name,
        )
    ]


def _of_origin(program: Program, origin: TracedValue | None, kept: str) -> tuple[str, str]:
    """What promoted an operand, and the remedy."""
    cast = f"cast the activations back before the matmul (.astype({kept}))"
    if origin is None:
        return "", cast
    name = primitive_of(origin.instruction.op_name) or origin.instruction.opcode
    by = f", since {name} has promoted an operand"
    operands = origin.operands()
    ends = [resolve(program, each, MOVES_OR_REPEATS) for each in operands]
    if not any(one.instruction.opcode == "constant" for one in ends):
        return by, f"cast the 32-bit operand of that {name} to {kept}, or its result back (.astype({kept}))"
    return f"{by}: its constant has {_WIDE} bits", (
        "write the constant as a Python number (H ** -0.5, math.sqrt(H)), or cast it to the array's type: a "
        f"NumPy scalar, as np.sqrt returns, and an array promote to {_WIDE} bits. Otherwise {cast}"
    )


def _promoted(program: Program, product: TracedValue) -> Iterator[tuple[TracedValue, TracedValue]]:
    """(16-bit operand, computed 32-bit operand) of a matmul, if it has such.

    The first is an input of the program, since XLA for CPU widens what loops carry without a name.
    """
    if len(product.instruction.operands) < 2:
        return
    pair = [product.operand(at) for at in (0, 1)]
    for narrow, wide in (pair, pair[::-1]):
        origin = resolve(program, wide, MOVES)
        is_input = origin.instruction.opcode in ("parameter", "constant")
        *forms, stored = history(program, narrow, MOVES)
        is_weight = stored.is_input
        if not is_weight or any(map(_is_asked_for, forms)):
            continue
        is_wide = dtype_bits(wide.instruction.shapes[0].dtype) == _WIDE and not _narrow_type(program, wide)
        if is_wide and not is_input and _narrow_type(program, narrow):
            yield narrow, wide


def _is_asked_for(value: TracedValue) -> bool:
    """Whether a value is the result of the program's own cast to 32 bits."""
    instruction = value.instruction
    is_cast = instruction.opcode == "convert" and primitive_of(instruction.op_name) == "convert_element_type"
    return is_cast and dtype_bits(instruction.shapes[0].dtype) == _WIDE


def _narrow_type(program: Program, value: TracedValue, moves: frozenset[str] = MOVES) -> str:
    """The 16-bit floating-point type of an earlier form of a value; "" without one."""
    for each in history(program, value, moves):
        for shape in each.instruction.shapes[:1]:
            if shape.dtype.startswith(("f", "bf")) and dtype_bits(shape.dtype) == _NARROW:
                return of_hlo(shape.dtype)
    return ""


def _was_narrow(program: Program, value: TracedValue) -> bool:
    """Whether a value is a 16-bit one, or a matmul of two whose result has not been rounded to them."""
    origin = resolve(program, value, MOVES)
    if not is_product(origin):
        return bool(_narrow_type(program, value, MOVES_OR_REPEATS))  # also rows that are repeated
    operands = origin.operands()
    return all(_narrow_type(program, each) for each in operands)


def _promoter(program: Program, wide: TracedValue) -> TracedValue | None:
    """The elementwise operation in which a value became 32-bit; None if it is not known."""
    before = _wide_before(program, wide)
    return next((value for value, is_promoter in before if is_promoter), None)


def _sent_wide(program: Program, wide: TracedValue) -> set[str]:
    """Names of the collectives that sent a value after it was promoted; none if its promoter is unknown."""
    names = set[str]()
    for value, is_promoter in _wide_before(program, wide):
        if is_promoter:
            return names
        if op_of(value.instruction):
            names.add(value.instruction.name)
    return set()


def _wide_before(program: Program, wide: TracedValue) -> Iterator[tuple[TracedValue, bool]]:
    """The 32-bit values that a value is computed from, and whether an operand of each had 16 bits.

    Collectives, and rows written or read by index, are followed too.
    """
    left, seen = [wide], set[tuple[object, ...]]()
    while left and len(seen) < _MOST_STEPS:
        value = resolve(program, left.pop(0), MOVES_OR_REPEATS)
        opcode, is_moved = value.instruction.opcode, op_of(value.instruction) is not None
        is_followed = opcode in (*ELEMENTWISE, *_BY_INDEX, "reduce") or is_moved or is_product(value)
        if value_key(value) in seen or not is_followed:
            continue
        seen.add(value_key(value))
        before = sources(program, value)
        yield value, opcode in ELEMENTWISE and any(_was_narrow(program, one) for one in before)
        left += [one for one in before if not _narrow_type(program, one)]


# Opcodes that move rows by index, or join arrays.
_BY_INDEX = ("gather", "scatter", "concatenate", "pad")

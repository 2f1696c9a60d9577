"""Work that a loop repeats in each turn, although its operands are the same in all of them."""

from meshwright.audit.facts.matmuls import Product, products
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import TracedValue, callers, same_each_turn, trip_count
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.unnecessary_products import is_reported, remark_on_products
from meshwright.units import format_number_of


def repeated_in_loops(program: Program, prices: Prices) -> list[Remark]:
    """A warning of products in loops whose operands do not change from turn to turn.

    XLA moves such work out of a loop only if that takes no more memory.
    """
    total, repeated = 0.0, list[tuple[Product, int]]()
    for product in products(program):
        total += product.flops
        turns = _turns_without_change(program, product.value)
        if turns > 1:
            repeated.append((product, turns))
    excess = sum(product.flops * (1 - 1 / turns) for product, turns in repeated)
    if not is_reported(excess, total):
        return []
    largest, turns = max(repeated, key=lambda pair: pair[0].flops)
    num_bytes = largest.value.instruction.shapes[0].num_bytes
    return [
        remark_on_products(
            "computed_repeatedly",
            largest,
            len(repeated),
            f"computed in each of {format_number_of(turns, 'turn')} of a loop from operands that do not "
            f"change, {excess:.3g} FLOPs per device for the same values",
            f"compute it once before the loop, and let the loop read the result ({num_bytes:,} B for each "
            "run): keys and values of an encoder's output are a cache, like those of earlier tokens",
            excess,
            program,
            prices,
        )
    ]


def _turns_without_change(program: Program, product: TracedValue) -> int:
    """How often the loops around a product compute it from the same operands; 1 if they never repeat it."""
    operands, turns = product.operands(), 1
    for depth, loop in enumerate(callers(product.place)):
        is_loop = loop.instruction.opcode == "while"
        if is_loop and all(same_each_turn(program, each, depth) for each in operands):
            turns *= round(trip_count(program, loop) or 1)
    return turns

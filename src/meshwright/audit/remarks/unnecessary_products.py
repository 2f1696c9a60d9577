"""The form of a remark on products that a program need not compute, and the least share that counts."""

from meshwright.audit.facts.communication import narrowest_dtype
from meshwright.audit.facts.matmuls import Product, innermost_name
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import Program
from meshwright.audit.remarks import Remark
from meshwright.units import and_more

# Unnecessary products are reported if they have a larger share of the program's FLOPs.
_LEAST_SHARE = 0.05


def is_reported(excess_flops: float, total_flops: float) -> bool:
    """Whether unnecessary FLOPs are a large enough share of a program's."""
    return excess_flops > _LEAST_SHARE * total_flops


def remark_on_products(
    kind: str,
    largest: Product,
    num_products: int,
    what: str,
    change: str,
    excess_flops: float,
    program: Program,
    prices: Prices,
) -> Remark:
    """A remark on `num_products` products, named after the largest.

    what: follows "the matmul `name` and 2 more: ". excess_flops: unnecessary FLOPs per device, of all of
    these products.
    """
    instruction = largest.value.instruction
    name = innermost_name(instruction)
    return Remark(
        kind,
        name,
        f"the matmul `{name}`{and_more(num_products - 1)}: {what}",
        instruction.where,
        change,
        0,
        prices.product_seconds(excess_flops, narrowest_dtype(program, largest.value.operand(0))),
        instruction=instruction.name,
    )

"""Sums over devices of large arrays that every device then multiplies to smaller ones.

A product with the same matrix on all devices is linear: the sum of the products is the product of the sum.
"""

from collections.abc import Iterable

from meshwright.audit.facts.emitted import Emitted, is_product
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import Program
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.differing import DifferingOverAny
from meshwright.audit.remarks.sums import after_scaling

# A sum is reported if the products of its result have this many times fewer numbers. The backward pass of
# factors that follow one another sums their small product so, which no reordering by the user avoids.
_FEWER = 16


def summed_too_early(program: Program, prices: Prices, sent: Iterable[Emitted]) -> list[Remark]:
    """Warnings of all-reduced arrays that only products read, which have smaller results."""
    differing = DifferingOverAny(program, prices.mesh)
    found: dict[str, list[tuple[Emitted, float]]] = {}
    for one in sent:
        if one.collective.op != "all_reduce" or one.collective.gathers or not one.axes:
            continue
        uses = list(after_scaling(program, one.uses(program)))
        results = sum(shape.num_elements for user, _ in uses for shape in user.instruction.shapes[:1])
        if not uses or results * _FEWER > one.elements:
            continue
        is_linear = all(
            is_product(user)
            and at in (0, 1)
            and len(user.instruction.operands) > 1
            and not differing.differs(user.operand(1 - at), one.axes)
            for user, at in uses
        )
        if is_linear:
            found.setdefault(one.tensor, []).append((one, results))
    return [_remark(several, prices) for several in found.values()]


def _remark(several: list[tuple[Emitted, float]], prices: Prices) -> Remark:
    sums = [one for one, _ in several]
    largest, results = max(several, key=lambda pair: prices.sent(pair[0]))
    over = prices.over(largest.axes, largest.collective.groups.size)
    return Remark(
        "summed_too_early",
        largest.tensor,
        f"`{largest.tensor}` of {largest.elements:,.0f} numbers is summed over {over}, and only "
        f"multiplied by matrices that all devices have, to {results:,.0f} numbers",
        largest.where,
        "multiply first and sum the smaller results. The gradient of merged low-rank weights, W + A @ B, is "
        "such a sum: multiply x by the factors one after another, x @ W + (x @ A) @ B, so that only "
        "gradients of A and B are computed and summed; or take gradients in jax.shard_map, with the psum "
        "at the end",
        sum(map(prices.sent, sums)),
        prices.total_seconds(sums),
        instruction=largest.collective.name,
    )

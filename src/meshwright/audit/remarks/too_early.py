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

# A sum is reported if its array has at least this many times more numbers than the products that read it.
# With less the warning would name low-rank factors too: the backward pass of x @ a @ b sums a small product
# before the next one, and no reordering by the user avoids that.
_FEWER = 16


def summed_too_early(program: Program, prices: Prices, sent: Iterable[Emitted]) -> list[Remark]:
    """Warnings of all-reduced arrays that only products read, which have smaller results."""
    differing = DifferingOverAny(program, prices.mesh)
    too_early: dict[str, list[tuple[Emitted, float]]] = {}
    for emitted in sent:
        if emitted.collective.op != "all_reduce" or emitted.collective.gathers or not emitted.axes:
            continue
        uses = list(after_scaling(program, emitted.uses(program)))
        results = sum(shape.num_elements for user, _ in uses for shape in user.instruction.shapes[:1])
        if not uses or results * _FEWER > emitted.elements:
            continue
        is_linear = all(
            is_product(user)
            and at in (0, 1)
            and len(user.instruction.operands) > 1
            and not differing.differs(user.operand(1 - at), emitted.axes)
            for user, at in uses
        )
        if is_linear:
            too_early.setdefault(emitted.tensor, []).append((emitted, results))
    return [_remark(several, prices) for several in too_early.values()]


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

"""Products whose results only few devices keep, such as the head of a pipeline that each stage computes.

A device drops a result if a select by the device's number replaces it by zeros, and nothing else reads it.
"""

from collections import deque
from collections.abc import Iterator, Mapping

from meshwright.audit.facts.communication import narrowest_dtype
from meshwright.audit.facts.matmuls import products
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.facts.shards import device_values
from meshwright.audit.hlo.op_names import primitive_of, scope_of
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import (
    MOVES,
    CallPath,
    TracedValue,
    ancestors,
    history,
    places,
    sources,
    value_key,
)
from meshwright.audit.remarks import Remark

_Key = tuple[object, ...]
# Dropped products are reported if they take a larger share of the program's FLOPs.
_LEAST_SHARE = 0.05


def dropped_products(program: Program, prices: Prices) -> list[Remark]:
    """A warning for products whose results only some devices keep."""
    selects = dict(_selects(program))
    if not selects:
        return []
    needed = _needed(program, selects)
    kept_by: dict[_Key, float] = {}
    for value, share in selects.values():
        for ancestor in ancestors(program, value):
            key = value_key(ancestor)
            kept_by[key] = max(share, kept_by.get(key, 0.0))
    of_program = list(products(program))
    dropped = [
        (one, one.flops * (1 - kept_by[key]))
        for one in of_program
        if (key := value_key(one.value)) in kept_by and key not in needed
    ]
    excess = sum(flops for _, flops in dropped)
    if excess <= _LEAST_SHARE * sum(one.flops for one in of_program):
        return []
    largest, _ = max(dropped, key=lambda pair: pair[1])
    instruction = largest.value.instruction
    scope = scope_of(instruction.op_name)
    name = scope[-1] if scope else primitive_of(instruction.op_name) or instruction.name
    others = f" and {len(dropped) - 1} more" if len(dropped) > 1 else ""
    kept = round(kept_by[value_key(largest.value)] * program.num_devices)
    what = (
        f"the matmul `{name}`{others}: all {program.num_devices} devices compute it, and all but {kept} "
        f"replace the result by zeros, which wastes {excess:.3g} FLOPs per device"
    )
    change = (
        "share its work: give each device a part of the rows (psum_scatter of the masked operand, before the "
        "matmul), and sum the results"
    )
    seconds = prices.product_seconds(excess, narrowest_dtype(program, largest.value.operand(0)))
    where, at = instruction.op_name, instruction.name
    return [Remark("computed_repeatedly", name, what, where, change, 0, seconds, instruction=at)]


def _selects(program: Program) -> Iterator[tuple[_Key, tuple[TracedValue, float]]]:
    """Selects by the device's number between a value and zeros.

    For each select its key, the value, and the share of the devices that keep the value.
    """
    for place in places(program):
        for instruction in place.computation.instructions.values():
            if instruction.opcode != "select":
                continue
            select = TracedValue(instruction, place)
            zeros = [_is_zero(program, select.operand(at)) for at in (1, 2)]
            if zeros.count(True) != 1:
                continue
            *_, chosen = history(program, select.operand(0), MOVES | {"broadcast"})
            takes_first = device_values(program, chosen)
            if not takes_first or len(set(takes_first)) == 1:
                continue
            share = sum(takes_first) / len(takes_first)
            kept = zeros.index(False)
            yield value_key(select), (select.operand(1 + kept), 1 - share if kept else share)


def _is_zero(program: Program, value: TracedValue) -> bool:
    *_, origin = history(program, value, MOVES | {"broadcast"})
    literal = origin.instruction.literal
    return origin.instruction.opcode == "constant" and literal in ("0", "-0", "0.0", "{0}")


def _needed(program: Program, selects: Mapping[_Key, object]) -> set[_Key]:
    """Values that results or collectives need, without the operands that the selects may drop."""
    left = deque([TracedValue(program.main.result, CallPath(program.main))])
    for place in places(program):  # another device may need what a collective sends
        sent = (one for one in place.computation.instructions.values() if op_of(one))
        left += (TracedValue(one, place) for one in sent)
    seen = {value_key(one) for one in left}
    while left:
        value = left.popleft()
        before = sources(program, value)
        if value_key(value) in selects:
            before = [one for at, one in enumerate(before) if at == 0 or _is_zero(program, one)]
        fresh = [one for one in before if value_key(one) not in seen]
        seen |= {value_key(one) for one in fresh}
        left += fresh
    return seen

"""Products whose results only few devices keep, such as the head of a pipeline that each stage computes.

A device drops a result if a select by the device's number replaces it by zeros, and nothing else reads it; or
if a select keeps it only in the turn of a loop whose number is the device's, so that devices work in turn.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.audit.facts.matmuls import products
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.facts.shards import device_values
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import (
    MOVES_OR_REPEATS,
    CallPath,
    TracedValue,
    ancestors,
    places,
    resolve,
    same_each_turn,
    sources,
    value_key,
)
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.unnecessary_products import is_reported, remark_on_products

_Key = tuple[object, ...]


def dropped_products(program: Program, prices: Prices) -> list[Remark]:
    """A warning for products whose results only some devices keep."""
    selects = dict(_selects(program))
    if not selects:
        return []
    needed = _needed(program, selects)
    kept_by: dict[_Key, float] = {}
    in_turns = set[_Key]()
    for chosen in selects.values():
        for ancestor in ancestors(program, chosen.value):
            key = value_key(ancestor)
            kept_by[key] = max(chosen.share, kept_by.get(key, 0.0))
            if chosen.in_turns:
                in_turns.add(key)
    of_program = list(products(program))
    dropped = [
        (product, product.flops * (1 - kept_by[key]))
        for product in of_program
        if (key := value_key(product.value)) in kept_by and key not in needed
    ]
    excess = sum(flops for _, flops in dropped)
    if not is_reported(excess, sum(one.flops for one in of_program)):
        return []
    largest, _ = max(dropped, key=lambda pair: pair[1])
    kept = round(kept_by[value_key(largest.value)] * program.num_devices)
    drop, change = "replace the result by zeros", _SHARE
    if value_key(largest.value) in in_turns:
        drop, change = "drop the result in each turn: they work one after another", _MICROBATCHES
    what = (
        f"all {program.num_devices} devices compute it, and all but {kept} {drop}, which wastes {excess:.3g} "
        "FLOPs per device"
    )
    return [
        remark_on_products(
            "computed_repeatedly", largest, len(dropped), what, change, excess, program, prices
        )
    ]


_SHARE = (
    "share its work: give each device a part of the rows (psum_scatter of the masked operand, before the "
    "matmul), and sum the results"
)
_MICROBATCHES = (
    "cut the batch into microbatches that follow one another through the stages: in each turn a stage works "
    "on the microbatch that it received (ppermute), the first stage takes a new one, and stages are idle "
    "only while the pipeline fills or drains"
)


@dataclass(frozen=True)
class Chosen:
    """A value that a select keeps on some devices.

    operand: the number of the value among the select's operands. share: the part of the devices that keep
    it. in_turns: each device keeps it in another turn of a loop, and `share` is of one turn.
    """

    value: TracedValue
    operand: int
    share: float
    in_turns: bool = False


def _selects(program: Program) -> Iterator[tuple[_Key, Chosen]]:
    """(key of a select, the value that it drops on some devices), for each select by the device's number."""
    for place in places(program):
        for instruction in place.computation.instructions.values():
            value = TracedValue(instruction, place)
            if instruction.opcode == "select":
                chosen = zeros_elsewhere(program, value) or _of_turns(program, value)
            elif instruction.opcode == "multiply":
                chosen = _of_mask(program, value)
            else:
                continue
            if chosen:
                yield value_key(value), chosen


def zeros_elsewhere(program: Program, select: TracedValue) -> Chosen | None:
    """The value that a select replaces by zeros on some devices."""
    zeros = [is_zero(program, select.operand(at)) for at in (1, 2)]
    if zeros.count(True) != 1:
        return None
    condition = resolve(program, select.operand(0), MOVES_OR_REPEATS)
    takes_first = device_values(program, condition)
    if not takes_first or len(set(takes_first)) == 1:
        return None
    share = sum(takes_first) / len(takes_first)
    kept = 1 + zeros.index(False)
    return Chosen(select.operand(kept), kept, share if kept == 1 else 1 - share)


def _of_mask(program: Program, product: TracedValue) -> Chosen | None:
    """The value that a mask of 0 and 1, by the device's number and the loop's turn, multiplies."""
    for at in (0, 1):
        mask = resolve(program, product.operand(at), MOVES_OR_REPEATS)
        if mask.instruction.opcode == "compare" and (share := _share_of_turn(program, mask, product)):
            return Chosen(product.operand(1 - at), 1 - at, share, in_turns=True)
    return None


def _of_turns(program: Program, select: TracedValue) -> Chosen | None:
    """The value that a select in a loop takes only in the turn with the device's number.

    A condition of inequality chooses the value by its third operand.
    """
    condition = resolve(program, select.operand(0), MOVES_OR_REPEATS)
    share = _share_of_turn(program, condition, select)
    kept = 2 if condition.instruction.attributes.get("direction") == "NE" else 1
    return Chosen(select.operand(kept), kept, share, in_turns=True) if share else None


def _share_of_turn(program: Program, condition: TracedValue, user: TracedValue) -> float | None:
    """The part of the devices whose number is the loop's turn, or a number that changes with it.

    None if a condition does not compare such numbers.
    """
    is_compared = condition.instruction.attributes.get("direction") in ("EQ", "NE")
    if not is_compared or condition.instruction.opcode != "compare" or not user.place.loops:
        return None
    sides = [condition.operand(at) for at in (0, 1)]
    numbers = [device_values(program, side) for side in sides]
    of_device = [set(values) for values in numbers if values and len(set(values)) > 1]
    depth = max(at for at, frame in enumerate(user.place.frames) if frame.caller.opcode == "while")
    turns = [
        side
        for side, values in zip(sides, numbers, strict=True)
        if values is None and not same_each_turn(program, side, depth)
    ]
    if len(of_device) != 1 or len(turns) != 1:
        return None
    return 1 / len(of_device[0])


def is_zero(program: Program, value: TracedValue) -> bool:
    """Whether a value is the constant 0, also broadcast to an array."""
    origin = resolve(program, value, MOVES_OR_REPEATS)
    literal = origin.instruction.literal
    return origin.instruction.opcode == "constant" and literal in ("0", "-0", "0.0", "{0}")


def _needed(program: Program, selects: Mapping[_Key, Chosen]) -> set[_Key]:
    """Values that results or collectives need, without the operands that the selects may drop."""
    left = deque([TracedValue(program.main.result, CallPath(program.main))])
    for place in places(program):  # another device may need what a collective sends
        sent = (one for one in place.computation.instructions.values() if op_of(one))
        left += (TracedValue(one, place) for one in sent)
    seen = {value_key(one) for one in left}
    while left:
        value = left.popleft()
        before = sources(program, value)
        if chosen := selects.get(value_key(value)):
            before = [one for at, one in enumerate(before) if at != chosen.operand]
        fresh = [one for one in before if value_key(one) not in seen]
        seen |= {value_key(one) for one in fresh}
        left += fresh
    return seen

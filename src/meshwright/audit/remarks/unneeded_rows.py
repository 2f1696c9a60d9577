"""Products of rows that a mask or a slice drops.

A router chooses k of E experts for each row by a top k. If every expert multiplies all rows, and a mask of
the choice then replaces the others by zeros, a device computes E / k times the necessary FLOPs. A step that
computes the logits of all positions, and reads the last ones, computes T times the necessary ones.
"""

from collections.abc import Iterator, Sequence
from math import prod

from meshwright.audit.facts.emitted import ELEMENTWISE, is_product
from meshwright.audit.facts.matmuls import Product, products
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import Instruction, Program
from meshwright.audit.hlo.trace import (
    MOVES,
    MOVES_OR_REPEATS,
    SLICES,
    TracedValue,
    places,
    readers,
    resolve,
    sources,
    value_key,
)
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.dropped import is_zero
from meshwright.audit.remarks.fault_rule import REDUCES, written_rows
from meshwright.audit.remarks.unnecessary_products import is_reported, remark_on_products
from meshwright.audit.remarks.whole_dimension import needs_whole

DROPPED_ROWS = "computed_and_dropped"
# Limit of the values that a search from a mask, or from a product, visits.
_MOST_STEPS = 64
# Operations that compute each number of a result from the same number of their operands.
_BY_NUMBER = ELEMENTWISE | {"erf", "abs", "compare"}
# A sliced product is reported if at most this share of its rows is necessary.
_MOST_NECESSARY = 1 / 8


def masked_products(program: Program, prices: Prices) -> list[Remark]:
    """A warning for products of all rows when a mask of each row's top k keeps only a part."""
    of_program = {value_key(one.value): one for one in products(program)}
    masked: dict[tuple[object, ...], tuple[Product, float]] = {}
    for place in places(program):
        for instruction in place.computation.instructions.values():
            value = TracedValue(instruction, place)
            if instruction.opcode not in ("multiply", "select") and not is_product(value):
                continue
            pair = _mask_and_rows(program, value)
            if pair is None:
                continue
            mask, rows = pair
            kept = _share_kept(program, mask)
            if kept is None:
                continue
            for key in _products_only_for(program, value, rows):
                product = of_program.get(key)
                if product and _rows_of(product.value) >= mask.instruction.shapes[0].num_elements:
                    masked[key] = product, 1 - kept
    excess = sum(product.flops * share for product, share in masked.values())
    if not is_reported(excess, sum(one.flops for one in of_program.values())):
        return []
    largest, share = max(masked.values(), key=lambda pair: pair[0].flops)
    return [
        remark_on_products(
            DROPPED_ROWS,
            largest,
            len(masked),
            f"all {_rows_of(largest.value):,} rows are multiplied, and a mask of a top k then keeps "
            f"{1 - share:.1%} of them: {excess:.3g} FLOPs per device for rows that become zeros",
            "give each expert only its rows: sort the rows by expert and multiply them in groups "
            "(jax.lax.ragged_dot), or write them by index into one buffer for each expert; if devices hold "
            "different experts, exchange the rows (jax.lax.all_to_all) in place of a gather of all rows",
            excess,
            program,
            prices,
        )
    ]


def sliced_products(program: Program, prices: Prices) -> list[Remark]:
    """A warning for products of rows that are sliced away, or zeros, such as logits of all positions.

    The gradient of a slice, or of rows that are read by index, has zeros in all other rows.
    """
    of_program, written = list(products(program)), _Written(program)
    shares = [
        (product, min(_share_read(program, product.value), *map(written.share, product.value.operands())))
        for product in of_program
    ]
    sliced = [(product, share) for product, share in shares if share <= _MOST_NECESSARY]
    excess = sum(product.flops * (1 - share) for product, share in sliced)
    if not is_reported(excess, sum(one.flops for one in of_program)):
        return []
    largest, share = max(sliced, key=lambda pair: pair[0].flops)
    return [
        remark_on_products(
            DROPPED_ROWS,
            largest,
            len(sliced),
            f"only {share:.2%} of the rows are read from the result, or are not zeros: {excess:.3g} FLOPs "
            "per device for the others",
            "take the rows before the matmul, not from its result: for the last position's logits, "
            "x[:, -1:] @ head in place of (x @ head)[:, -1:]; for rows by index, x[rows, index] @ w",
            excess,
            program,
            prices,
        )
    ]


def _share_read(program: Program, product: TracedValue) -> float:
    """The share of a product's result that slices and look-ups take; 1 if anything else reads it.

    Elementwise operations, reductions and their sums over devices are followed to their own readers.
    """
    share, left, seen = 0.0, [product], {value_key(product)}
    while left:
        if len(seen) > _MOST_STEPS:
            return 1.0
        value = left.pop()
        whole = value.instruction.shapes[0].num_elements
        for user, at in readers(program, value):
            instruction, key = user.instruction, value_key(user)
            if at == 0 and instruction.opcode in ("slice", "gather"):
                share += 0.0 if key in seen else instruction.shapes[0].num_elements / whole
            elif at < 0 or not _is_followed(instruction):
                return 1.0
            elif key not in seen:
                left.append(user)
            seen.add(key)
    return share or 1.0


class _Written:
    """Shares of arrays, without the zeros around a slice or around rows that are written by index."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._known: dict[tuple[object, ...], float] = {}

    def share(self, value: TracedValue, depth: int = 0) -> float:
        """The share of an array's numbers that may differ from zero; 1 if it is unknown."""
        origin = resolve(self._program, value, MOVES - SLICES)
        key = value_key(origin)
        if depth > _MOST_STEPS:
            return 1.0
        if key not in self._known:
            self._known[key] = 1.0  # for a loop's carry, which depends on itself
            self._known[key] = self._of(origin, depth + 1)
        return self._known[key]

    def _of(self, origin: TracedValue, depth: int) -> float:
        opcode, operands = origin.instruction.opcode, origin.operands()
        if rows := written_rows(origin):
            return self._of_rows(origin, rows)
        if opcode == "pad" and is_zero(self._program, operands[1]):
            return self._of_rows(origin, [operands[1], operands[0]])
        if opcode == "add":
            return min(1.0, sum(self.share(each, depth) for each in operands))
        if opcode in ("negate", "divide", "broadcast") or op_of(origin.instruction) == "all_reduce":
            return self.share(operands[0], depth)
        if is_product(origin):
            operands = [each for each in operands if _rows_of(each) == _rows_of(origin)]
        elif opcode != "multiply":
            return 1.0
        return min((self.share(each, depth) for each in operands), default=1.0)

    def _of_rows(self, whole: TracedValue, rows: Sequence[TracedValue]) -> float:
        """The share of the written rows, rows[1:], in an array that was rows[0] before."""
        if not is_zero(self._program, rows[0]):
            return 1.0
        written, size = sum(each.shape.num_elements for each in rows[1:]), whole.shape.num_elements
        return min(1.0, written / size) if size else 1.0


def _rows_of(value: TracedValue) -> int:
    return prod(value.instruction.shapes[0].dims[:-1])


def _is_followed(instruction: Instruction) -> bool:
    by_opcode = instruction.opcode in (*_BY_NUMBER, *REDUCES, "broadcast")
    return by_opcode or op_of(instruction) == "all_reduce"


def _mask_and_rows(program: Program, value: TracedValue) -> tuple[TracedValue, TracedValue] | None:
    """The mask and the rows that it keeps; None if a value has no mask.

    The mask of a multiplication is the operand with fewer numbers.
    """
    if value.instruction.opcode == "select":  # its operands are the mask, the rows, and values for the others
        return resolve(program, value.operand(0), MOVES_OR_REPEATS), value.operand(1)
    if len(value.instruction.operands) != 2:
        return None
    pair = [resolve(program, value.operand(at), MOVES_OR_REPEATS) for at in (0, 1)]
    mask = min((0, 1), key=lambda at: pair[at].instruction.shapes[0].num_elements)
    rows = value.operand(1 - mask)
    if pair[mask].instruction.shapes[0].num_elements >= rows.instruction.shapes[0].num_elements:
        return None
    return pair[mask], rows


def _share_kept(program: Program, mask: TracedValue) -> float | None:
    """k / E of a mask that compares the choice of a top k; None for other values."""
    left, seen = [mask], 0
    while left and seen < _MOST_STEPS:
        origin = resolve(program, left.pop(), MOVES_OR_REPEATS)
        seen += 1
        if origin.instruction.opcode == "compare":
            for side in (origin.operand(0), origin.operand(1)):
                chosen = resolve(program, side, MOVES_OR_REPEATS)
                if (share := _share_chosen(program, chosen)) is not None:
                    return share
        elif origin.instruction.opcode in (*ELEMENTWISE, *REDUCES):
            left += sources(program, origin)
    return None


def _share_chosen(program: Program, chosen: TracedValue) -> float | None:
    """The share of a dimension whose indices a top k, or an argmax, returns; None for other values.

    XLA reduces (values, indices) together for an argmax, so that both choices are elements of a tuple.
    """
    is_choice = chosen.instruction.opcode == "reduce" or needs_whole(chosen) in ("top_k", "sort")
    if not is_choice or not chosen.path:
        return None
    before, after = chosen.operand(0).instruction.shapes[0], chosen.shape
    share = after.num_elements / max(before.num_elements, 1)
    return share if after.dtype.startswith(("s", "u")) and share < 1 else None


def _products_only_for(
    program: Program, value: TracedValue, rows: TracedValue
) -> Iterator[tuple[object, ...]]:
    """Keys of the products that only `value` depends on, through elementwise operations and each other."""
    accepted, waiting = {value_key(value)}, [resolve(program, rows, MOVES)]
    for _ in range(_MOST_STEPS):
        ready = [
            result
            for result in waiting
            if all(at >= 0 and value_key(user) in accepted for user, at in readers(program, result))
        ]
        if not ready:
            return
        waiting = [result for result in waiting if result not in ready]
        for result in ready:
            key = value_key(result)
            if key in accepted:
                continue
            accepted.add(key)
            if is_product(result):
                yield key
            if is_product(result) or result.instruction.opcode in _BY_NUMBER:
                waiting += [resolve(program, each, MOVES) for each in result.operands()]

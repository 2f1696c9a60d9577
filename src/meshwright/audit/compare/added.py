"""All-reduces that a compiler merges: each device adds its partial sums, and one all-reduce sums both.

    all_reduce(x) + all_reduce(y)  ->  all_reduce(x + y)

XLA does so for shared and routed experts, whose results are added to each other. Equal sums it computes once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.audit.compare.line_up import TensorRow
from meshwright.audit.compare.rewrites import planned_bytes
from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.hlo.op_names import scope_of
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import TracedValue, called_by, sources, value_key

# Operations through which a term of a sum is followed: sums, and changes of form.
_SUMS = frozenset((
    "add", "bitcast", "convert", "copy", "get-tuple-element", "parameter", "reshape", "transpose",
))  # fmt: skip
# XLA for GPU computes a product of few rows as elementwise products and a reduction; XLA for TPU writes
# products as convolutions.
_PRODUCTS = ("dot", "custom-call", "reduce", "convolution")


def join_added(rows: Iterable[TensorRow], program: Program) -> list[TensorRow]:
    """Mark a missing all-reduce as equivalent if its product is a term of another all-reduce.

    The other must be over the same axes, have the same size, and run the same number of times.
    """
    rows = list(rows)
    for index, row in enumerate(rows):
        if row.status != "missing" or any(p.op != "all_reduce" for p in row.planned):
            continue
        axes, sizes = {frozenset(p.axes) for p in row.planned}, {p.gathered_bytes for p in row.planned}
        num_planned = sum(p.count for p in row.planned)
        for other in rows:
            if other.direction != row.direction or other.status not in ("match", "equivalent"):
                continue
            sums = [
                e
                for e in other.emitted
                if e.op == "all_reduce" and {frozenset(e.axes)} == axes and {e.gathered_bytes} == sizes
            ]
            if num_planned and sum(e.runs for e in sums if _has_term(program, e, row.tensor)) == num_planned:
                note = f"added to {other.tensor} before one sum of both"
                rows[index] = replace(row, status="equivalent", note=note)
                break
    return rows


# Biases whose gradients are equal if attention and feed-forward are added to one residual stream.
_OF_PARALLEL = frozenset(("wo_bias", "w_out_bias"))


def join_equal(rows: Iterable[TensorRow], *, parallel: bool) -> list[TensorRow]:
    """Mark a missing gradient as equivalent if it equals another, which the compiler sums for both.

    parallel: as in `ModelConfig`. The gradients of the two biases are then sums of the same cotangents.
    """
    rows = list(rows)
    if not parallel:
        return rows
    for index, row in enumerate(rows):
        others = [
            other.tensor
            for other in rows
            if {row.tensor, other.tensor} == _OF_PARALLEL
            and other.direction == row.direction
            and other.status in ("match", "equivalent")
            and planned_bytes(other.planned) == planned_bytes(row.planned)
        ]
        if row.status == "missing" and others:
            note = f"equal to the gradient of {others[0]}, which is summed once"
            rows[index] = replace(row, status="equivalent", note=note)
    return rows


def _has_term(program: Program, e: Emitted, tensor: str) -> bool:
    """Whether a product in the scope `tensor` is a term of the all-reduce `e`."""
    seen, left = set[tuple[object, ...]](), [e.operand()]
    while left:
        value = left.pop()
        if value_key(value) in seen:
            continue
        seen.add(value_key(value))
        instruction = value.instruction
        if instruction.opcode in _PRODUCTS and tensor in scope_of(instruction.op_name):
            return True
        left += _terms(program, value)
    return False


def _terms(program: Program, value: TracedValue) -> Iterator[TracedValue]:
    """The values that add up to `value`, or that differ from it only in form."""
    opcode = value.instruction.opcode
    if opcode == "scatter":  # rows are added to its first operand
        yield value.operand(0)
    elif opcode in _SUMS or called_by(program, value.instruction):
        yield from sources(program, value)

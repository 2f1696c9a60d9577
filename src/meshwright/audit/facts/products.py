"""The matrix products that a compiled program runs, each with its FLOPs of a step, type, pass and tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.audit.facts.branches import is_counted, smaller_branches
from meshwright.audit.facts.collectives import bits_of, uncast_dtype
from meshwright.audit.facts.flops import flops_of
from meshwright.audit.facts.kernels import attention_flops, is_attention_kernel
from meshwright.audit.facts.naming import name_beside, own_name
from meshwright.audit.hlo.parse import Instruction, Program, dtype_bits
from meshwright.audit.hlo.trace import CallPath, TracedValue, places, run_count


@dataclass(frozen=True)
class Product:
    """A dot, convolution, library call or attention kernel at its place.

    flops: of one device in a step. op_name: JAX's, "" where nothing tells it.
    """

    value: TracedValue
    flops: float
    op_name: str

    def bits(self, program: Program, *, widened: bool) -> int:
        """Bits of a number of its wider operand; of what a compiler widened, as the program has it."""
        instruction = self.value.instruction
        operands = [self.value.operand(i) for i in range(min(2, len(instruction.operands)))]
        if widened:
            return max(bits_of(uncast_dtype(program, one, instruction.op_name)) for one in operands)
        return max(dtype_bits(one.instruction.shapes[0].dtype) for one in operands)


def products(program: Program) -> Iterator[Product]:
    """Every product of a step; loop bodies count by their trips, or once where these are unknown.

    Of the branches of a conditional those of the largest (see `branches`).
    """
    found = list(_unnamed(program))
    taken = {name for value, _ in found if (name := own_name(value))}
    for value, flops in found:
        yield Product(value, flops, own_name(value) or name_beside(program, value, taken))


def _unnamed(program: Program) -> Iterator[tuple[TracedValue, float]]:
    smaller = smaller_branches(program)
    for place in places(program):
        if not is_counted(place, smaller):
            continue
        for instruction in place.computation.instructions.values():
            if flops := _flops(program, instruction, place):
                yield TracedValue(instruction, place), flops * (run_count(program, place) or 1)


def dot_flops(program: Program) -> float:
    """FLOPs of one device's products in one step; `gaps.not_understood` names what is missing.

    Each multiply-add is 2.
    """
    return sum(product.flops for product in products(program))


def _flops(program: Program, instruction: Instruction, place: CallPath) -> int:
    if is_attention_kernel(instruction):
        return attention_flops(program, TracedValue(instruction, place)) or 0
    return flops_of(instruction, place.computation)

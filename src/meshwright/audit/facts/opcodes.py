"""The instructions of a program that communicate."""

from meshwright.audit.facts.slices import crossing_op
from meshwright.audit.hlo.parse import Instruction
from meshwright.cost.collectives import Op

OPS: dict[str, Op] = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "collective-permute": "permute",
}


def op_of(instruction: Instruction) -> Op | None:
    """Our name of a collective instruction, its start included; None for others and for a done."""
    if instruction.opcode == "send":
        return crossing_op(instruction)
    return OPS.get(instruction.opcode.removesuffix("-start"))

"""Reduce-scatters as XLA for TPU writes them: a sum, fused with the slice of it that a device keeps.

    %all-reduce-scatter (input: bf16[4096,3584]) -> bf16[288,3584] {
      %pad = bf16[4608,3584] pad(%input, %zero), padding=0_512x0_0
      %sum = bf16[4608,3584] all-reduce(%pad), ...
      ROOT %mine = bf16[288,3584] dynamic-slice(%sum, %start, %zero), ...
    }
    %fusion = bf16[288,3584] fusion(%gradient), calls=%all-reduce-scatter, metadata={op_name="..."}

The emitter of such a fusion sends what a reduce-scatter sends. The all-reduce in it has no name: the
fusion has. Where the slices are not whole tiles it pads, and permutes bring the rows that end on a
neighbour to where they belong.
"""

from dataclasses import dataclass

from meshwright.audit.hlo.parse import ArrayShape, Program
from meshwright.audit.hlo.trace import COPIES, TracedValue, history, readers, resolve


@dataclass(frozen=True)
class FusedScatter:
    """One tensor's reduce-scatter: the fusion's result (an element of it by `path`) is its own slice."""

    fusion: TracedValue
    result: ArrayShape
    padding_bytes: int


def fused_scatter(program: Program, reduced: TracedValue, operand: TracedValue) -> FusedScatter | None:
    """The reduce-scatter that an all-reduce in a fusion is; None where it is none.

    reduced: the all-reduce's result for one tensor. operand: that tensor.
    """
    place = reduced.place
    if not place.frames or place.frames[-1].caller.opcode != "fusion":
        return None
    uses = [user for user, at in readers(program, reduced) if at == 0]
    if len(uses) != 1 or uses[0].instruction.opcode != "dynamic-slice" or uses[0].place != place:
        return None
    root = place.computation.result
    path = ()
    if root.opcode == "tuple":
        parts = [resolve(program, TracedValue(root, place).operand(i)) for i in range(len(root.operands))]
        path = tuple(i for i, part in enumerate(parts) if part.instruction is uses[0].instruction)[:1]
    return FusedScatter(
        fusion=TracedValue(place.frames[-1].caller, place.parent, path),
        result=uses[0].instruction.shapes[0],
        padding_bytes=_padding(program, operand),
    )


def _padding(program: Program, operand: TracedValue) -> int:
    """Bytes that are sent beyond those of the array that enters the fusion."""
    for value in history(program, operand, COPIES | {"pad"}):
        if value.place == operand.place and value.instruction.opcode == "parameter":
            return operand.instruction.shapes[0].num_bytes - value.instruction.shapes[0].num_bytes
    return 0

"""Whether a product runs while an array is gathered."""

from meshwright.audit.flops import multiplies
from meshwright.audit.hlo import Computation, Instruction, Program
from meshwright.audit.sent import Sent
from meshwright.audit.trace import called_by


def has_async_gathers(program: Program) -> bool:
    """Whether the compiler lets collectives run beside products: TPU's and GPU's do, the CPU's does not."""
    return any(
        i.opcode in ("all-gather-start", "all-reduce-start", "reduce-scatter-start", "async-start")
        or "AsyncCollectiveStart" in i.attributes.get("custom_call_target", "")
        for c in program.computations.values()
        for i in c.instructions.values()
    )


def is_exposed(program: Program, one: Sent) -> bool:
    """Whether no product stands between start and done, in a program printed in the order of its schedule.

    What runs in one fusion with a product is hidden by it.
    """
    instruction, place = one.value.instruction, one.value.place
    if any(frame.caller.opcode == "fusion" for frame in place.frames) and _computes(
        program, place.computation
    ):
        return False
    if place.frames and place.frames[-1].caller.opcode == "async-start":
        instruction, place = place.frames[-1].caller, place.parent
    if not instruction.opcode.endswith("-start"):
        return True
    listed = list(place.computation.instructions.values())
    start = next(i for i, each in enumerate(listed) if each is instruction)
    for later in listed[start + 1 :]:
        if instruction.name in later.operands and later.opcode.endswith("-done"):
            return True
        if _hides(program, later, place.computation):
            return False
    return True


def _hides(program: Program, instruction: Instruction, computation: Computation) -> bool:
    called = called_by(program, instruction)
    return multiplies(instruction, computation) or any(_computes(program, one) for one in called)


def _computes(program: Program, computation: Computation) -> bool:
    """Whether a computation holds a product, itself or in what it calls."""
    return any(_hides(program, each, computation) for each in computation.instructions.values())

"""Accidents of transfers: all-reduces of which a slice is used, exposed gathers, wide types."""

from meshwright.audit.facts.collectives import is_cast
from meshwright.audit.facts.devices import own_slices
from meshwright.audit.facts.sent import Sent
from meshwright.audit.hlo.parse import Program
from meshwright.audit.hlo.trace import MOVES, TracedValue, history
from meshwright.audit.remarks.rules import Fault, ProgramContext

_NARROW = ("bf16", "f16")


def summed_whole(one: Sent, context: ProgramContext) -> Fault | None:
    """An all-reduce of which each device needs its slice.

    XLA:CPU writes every reduce-scatter of the partitioner so; there a sum that is only sliced is none,
    unless the user wrote it.
    """
    c = one.collective
    if c.op != "all_reduce":
        return None
    uses = list(one.uses(context.program))
    shape = one.value.instruction.shapes[min(c.index, len(one.value.instruction.shapes) - 1)]
    sliced = own_slices(context.program, c.groups, shape, uses)
    only = bool(uses) and len(sliced) == len(uses)
    if not sliced or (only and not (one.is_written or context.schedule.is_async)):
        return None
    also = "" if only else "; other uses read the whole"
    return (
        "summed_whole",
        f"`{one.tensor}` is all-reduced over {context.over(one)}, but each device keeps a slice{also}",
        "reduce-scatter it: constrain the sum to the sharding of what it updates before anything else uses "
        "it; a norm can be computed from the norms of the slices",
    )


def exposed(one: Sent, context: ProgramContext) -> Fault | None:
    """A gather that no product hides, by a compiler that hides others."""
    if one.emitted.op != "all_gather" or not context.schedule.is_async or context.schedule.beside(one.value):
        return None
    return (
        "gather_on_critical_path",
        f"`{one.tensor}` is gathered over {context.over(one)} while no matmul runs: its time is exposed",
        "start it earlier (prefetch the next layer's weights), or overlap it with its own matmul "
        "(collective matmul)",
    )


def widened(one: Sent, context: ProgramContext) -> Fault | None:
    """Numbers of 16 bits that are sent as 32.

    XLA:CPU widens what it sends or multiplies, and gives that no name; that is no accident of the program.
    """
    c = one.collective
    if c.dtype != "f32":
        return None
    pasts = [_dtypes_on_the_way(context.program, user, at) for user, at in one.uses(context.program)]
    narrowed = [dtype for dtype in _NARROW if all(dtype in past for past in pasts)]
    if not pasts:
        return None
    if c.source_dtype in _NARROW and c.source_dtype not in narrowed and _is_cast(one, context.program):
        narrow, why = c.source_dtype, f"it was upcast from {c.source_dtype} before"
        change = f"send it as {narrow} and upcast after: half the bytes"
    elif c.source_dtype == "f32" and narrowed and one.emitted.op == "all_gather":
        narrow, why = narrowed[0], f"it is cast down to {narrowed[0]} right after"
        change = f"cast it to {narrow} before the gather: half the bytes"
    else:
        return None
    return "widened", f"`{one.tensor}` is sent as f32 over {context.over(one)}: {why}", change


def _is_cast(one: Sent, program: Program) -> bool:
    """Whether the user's own cast made it wide."""
    past = (value.instruction for value in history(program, one.operand(), MOVES))
    return any(is_cast(each) and each.shapes[0].dtype == "f32" for each in past)


def _dtypes_on_the_way(program: Program, user: TracedValue, at: int) -> set[str]:
    """The types that numbers had between a collective and what reads them."""
    read = user.operand(at) if at >= 0 else user
    return {shape.dtype for v in history(program, read, MOVES) for shape in v.instruction.shapes[:1]}

"""Accidents of weights: gathered again and again, for few tokens, or stored as no product uses them."""

from meshwright.audit.facts.sent import Sent, is_computed
from meshwright.audit.hlo.dependence import same_each_turn
from meshwright.audit.hlo.trace import CallPath, TracedValue, trip_count
from meshwright.audit.remarks.rules import Fault, ProgramContext

# A weight that is gathered for a product is too large for it where moving the activations instead
# would send this much less.
_FEWER_BYTES = 4


def table(one: Sent, context: ProgramContext) -> Fault | None:
    """An embedding gathered whole to look up a few of its rows."""
    if one.emitted.op != "all_gather":
        return None
    for user, at in one.uses(context.program):
        looked_up = user.instruction.shapes[0].num_bytes
        if user.instruction.opcode == "gather" and at == 0 and one.collective.gathered_bytes > 2 * looked_up:
            return (
                "table_gathered",
                f"the whole table `{one.tensor}` is gathered over {context.over(one)} "
                f"({one.collective.gathered_bytes:,} B) to look up rows of {looked_up:,} B",
                "look up rows in each device's shard and all-reduce them: keep the table sharded and "
                "constrain only the result",
            )
    return None


def repeated(one: Sent, context: ProgramContext) -> Fault | None:
    """A weight gathered in a loop in each turn of which it is the same."""
    if one.emitted.op != "all_gather":
        return None
    for depth, frame in enumerate(one.value.place.frames):
        if frame.caller.opcode != "while" or not same_each_turn(context.program, one.operand(), depth):
            continue
        if is_computed(context.program, one.operand()):
            continue
        loop = TracedValue(frame.caller, _place_of(one, depth))
        trips = trip_count(context.program, loop)
        if trips == 1:
            continue
        turns = f"{trips:,} times" if trips else "in every iteration"
        return (
            "weight_gathered_repeatedly",
            f"`{one.tensor}` is gathered over {context.over(one)} {turns} in the loop "
            f"{frame.caller.op_name or frame.caller.name}, which does not change it",
            "gather it once, before the loop, if memory allows; or keep it sharded as its matmuls use it "
            + ("(tensor parallelism)" if context.differentiated else "(tensor parallelism), without FSDP"),
        )
    return None


def for_few_tokens(one: Sent, context: ProgramContext) -> Fault | None:
    """A weight gathered for so few tokens that to move these were far cheaper; in inference only."""
    if (
        one.emitted.op != "all_gather"
        or context.differentiated
        or is_computed(context.program, one.operand())
    ):
        return None
    for user, other in one.products(context.program):
        activations = other.instruction.shapes[0].num_bytes + user.instruction.shapes[0].num_bytes
        if one.collective.gathered_bytes > _FEWER_BYTES * activations:
            return (
                "weight_gathered_for_few_tokens",
                f"`{one.tensor}` ({one.collective.gathered_bytes:,} B) is gathered over {context.over(one)} "
                f"for a matmul with only {activations:,} B of activations",
                "keep the weight sharded and move the activations: tensor parallelism in place of FSDP",
            )
    return None


def moved_weight(one: Sent, context: ProgramContext) -> Fault | None:
    """A weight stored by one axis and used by another."""
    c = one.collective
    moves = one.emitted.op in ("permute", "all_to_all") and not c.follows_sum
    if not moves or one.is_written or one.is_windowed or is_computed(context.program, one.operand()):
        return None
    return stored_otherwise(one, context)


def stored_otherwise(one: Sent, context: ProgramContext) -> Fault:
    return (
        "weight_resharded",
        f"`{one.tensor}` is stored with one sharding and used with another: {one.emitted.op} over "
        f"{context.over(one)} before its matmul",
        "store it with the sharding that its matmul uses",
    )


def _place_of(one: Sent, depth: int) -> CallPath:
    place = one.value.place
    while len(place.frames) > depth:
        place = place.parent
    return place

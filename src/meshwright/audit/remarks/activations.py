"""Accidents of activations: gathered where they should be summed, or sharded anew in every layer."""

from meshwright.audit.facts.devices import own_slices
from meshwright.audit.facts.sent import Sent, is_computed
from meshwright.audit.hlo.parse import Program
from meshwright.audit.hlo.trace import MOVES, history
from meshwright.audit.remarks.rules import Fault, ProgramContext
from meshwright.audit.remarks.weights import stored_otherwise

UNCONSTRAINED = "activations_not_constrained"


def over_the_batch(one: Sent, context: ProgramContext) -> Fault | None:
    """Activations summed or gathered over axes of the batch that weights are sharded over, too.

    The partitioner shards activations as the weights then, and not by the batch: FSDP without constraints.
    """
    c, axes = one.collective, set(one.emitted.axes) & context.fsdp_axes
    forward = c.phase == "forward" or not context.differentiated
    operand = one.operand()
    if (
        not (axes and forward)
        or one.emitted.op not in ("all_reduce", "all_gather", "reduce_scatter")
        or one.is_written
        or one.elements <= context.batch_elements
        or not (is_computed(context.program, operand) or _is_carried(one, context.program))
    ):
        return None
    return (
        UNCONSTRAINED,
        f"activations (`{one.tensor}`) are communicated over {context.over(one)}, which shards both batch "
        "and weights: the partitioner sharded the activations like the weights, not by batch",
        "constrain the activations to the batch's axes: with_sharding_constraint(x, P(batch axes)) after the "
        "embedding and in each layer, so that the weights are gathered instead",
    )


def two_sides(one: Sent, context: ProgramContext) -> Fault | None:
    """A fault where both operands of a matmul are gathered over the same devices, which compute it alike."""
    if one.emitted.op != "all_gather" or not is_computed(context.program, one.operand()):
        return None
    for _, other in one.products(context.program):
        *_, origin = history(context.program, other, MOVES)
        partner = next((s for s in context.sent if s.value.instruction is origin.instruction), None)
        if partner and partner is not one and _same_devices(partner, one):
            return (
                "contraction_gathered",
                f"both operands of a matmul, `{one.tensor}` and `{partner.tensor}`, are gathered over "
                f"{context.over(one)}: these devices all compute the same product",
                "keep both sharded along the contracted dimension and reduce the partial results (all-reduce "
                "or reduce-scatter): constrain only the result",
            )
    return None


def sliced_again(one: Sent, context: ProgramContext) -> Fault | None:
    """A gathered array of which each device then keeps its own slice."""
    if one.emitted.op != "all_gather":
        return None
    uses = list(one.uses(context.program, elementwise=True))
    sliced = own_slices(context.program, one.collective.groups, one.value.instruction.shapes[-1], uses)
    if not uses or len(sliced) < len(uses):
        return None
    if is_computed(context.program, one.operand()):
        return (
            "contraction_gathered",
            f"`{one.tensor}` is gathered over {context.over(one)}, then each device keeps only its slice",
            "drop the constraint that gathers it: the matmul can use the shards and reduce the result",
        )
    return stored_otherwise(one, context)


def batch_gathered(one: Sent, context: ProgramContext) -> Fault | None:
    """Activations gathered along their first dimension for a product whose weight is smaller."""
    dims = one.value.instruction.attributes.get("dimensions", "")
    if one.emitted.op != "all_gather" or dims != "{0}" or not _is_moved_activation(one, context):
        return None
    for _, other in one.products(context.program):
        weight_bytes = other.instruction.shapes[0].num_bytes * one.collective.groups.size
        if one.collective.gathered_bytes > weight_bytes:
            return (
                "activation_gathered",
                f"activations (`{one.tensor}`) are gathered along their first dimension, the batch, over "
                f"{context.over(one)}: {one.collective.gathered_bytes:,} B, while the matmul's weight is "
                f"{weight_bytes:,} B",
                "constrain the result (with_sharding_constraint, or out_sharding) to stay sharded along the "
                "batch, so that the weight is gathered instead",
            )
    return None


def resharded(one: Sent, context: ProgramContext) -> Fault | None:
    """Activations that change their sharding in a loop over layers."""
    c = one.collective
    moves = one.emitted.op in ("all_gather", "all_to_all", "permute") and not c.follows_sum
    if not (moves and one.value.place.loops and _is_moved_activation(one, context)):
        return None
    return (
        "activation_resharded",
        f"activations (`{one.tensor}`) are resharded inside a loop: {one.emitted.op} over "
        f"{context.over(one)}, {one.runs:,} times per step",
        "use one sharding throughout the loop: one constraint in it contradicts another",
    )


def _is_moved_activation(one: Sent, context: ProgramContext) -> bool:
    """Computed, not moved by the user's own collective, and not the gather of sequence parallelism."""
    if (
        one.is_written
        or one.is_windowed
        or one.collective.phase == "update"
        or not (is_computed(context.program, one.operand()) or _is_carried(one, context.program))
    ):
        return False
    return not any(_scatters_the_same(other, one) for other in context.sent)


def _is_carried(one: Sent, program: Program) -> bool:
    """Whether it is what a loop hands from turn to turn."""
    depths = [i for i, frame in enumerate(one.value.place.frames) if frame.caller.opcode == "while"]
    *_, origin = history(program, one.operand(), MOVES)
    return bool(depths) and origin.instruction.opcode == "parameter" and bool(origin.place.frames)


def _same_devices(first: Sent, second: Sent) -> bool:
    one, other = ({frozenset(group) for group in s.collective.groups.members} for s in (first, second))
    return one == other


def _scatters_the_same(other: Sent, one: Sent) -> bool:
    """Whether `other` is the sum whose shards `one` gathers again: sequence parallelism."""
    c = other.collective
    scatters = c.op == "reduce_scatter" or c.scattered
    return scatters and c.groups.size == one.collective.groups.size and other.elements == one.elements

"""Rules for stored arrays that are moved or gathered: weights, stacks of layers, and their updates."""

from meshwright.audit.facts.emitted import Emitted, is_computed
from meshwright.audit.facts.matmuls import products
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import (
    MOVES,
    CallPath,
    TracedValue,
    resolve,
    same_each_turn,
    trip_count,
)
from meshwright.audit.remarks.fault_rule import (
    FEWER_BYTES,
    MOVED,
    SIDES,
    TURN_BY_TURN,
    Fault,
    ProgramContext,
    is_cut_in_a_loop,
    is_integer,
    is_like_a_result,
    is_shift,
    parts_before,
    side_of_gathered,
    stored_otherwise,
)


def flat_array(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Slices moved of one long array that holds all weights."""
    c = emitted.collective
    moves = emitted.op in MOVED and not c.follows_sum
    if not moves or emitted.is_written or primitive_of(c.op_name) not in _PIECES:
        return None
    stored = next(
        (value.instruction for value in parts_before(emitted, context.program) if value.is_input),
        None,
    )
    name = stored.label if stored else ""
    if stored is None or len(stored.shapes[0].dims) != 1 or name in context.batch_names:
        return None
    return (
        "weight_resharded",
        f"slices of the one-dimensional array `{name}` are moved over {context.over(emitted)} "
        f"({emitted.op}): each slice, such as one weight, is stored on a part of the devices",
        "store each weight as an array of its own, sharded along one of its dimensions: a tree of arrays, "
        "not one array of all (ravel_pytree)",
    )


_PIECES = ("slice", "split", "dynamic_slice", "reshape")  # JAX's primitives


def repeated_gather(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A weight gathered in each turn of a loop that does not change it."""
    if emitted.op != "all_gather":
        return None
    repeating = loop_that_repeats(emitted, context.program)
    if repeating is None or (context.differentiated and is_of_layers(emitted, repeating)):
        return None
    trips = trip_count(context.program, repeating)
    turns = f"{round(trips):,} times" if trips else "in every iteration"
    return (
        "weight_gathered_repeatedly",
        f"`{emitted.tensor}` is gathered over {context.over(emitted)} {turns} in the loop "
        f"{repeating.instruction.label}, which does not change it",
        "gather it once, before the loop, if memory allows; or keep it sharded as its matmuls use it "
        + ("(tensor parallelism)" if context.differentiated else "(tensor parallelism), without FSDP"),
    )


def loop_that_repeats(emitted: Emitted, program: Program) -> TracedValue | None:
    """The outermost loop of several turns, each of which gathers the same input; None without one."""
    if is_computed(program, emitted.operand()):
        return None
    for depth, frame in enumerate(emitted.value.place.frames):
        if frame.caller.opcode != "while" or not same_each_turn(program, emitted.operand(), depth):
            continue
        loop = TracedValue(frame.caller, _place_of(emitted, depth))
        if trip_count(program, loop) != 1:
            return loop
    return None


def is_of_layers(emitted: Emitted, loop: TracedValue) -> bool:
    """Whether a collective is in a loop within `loop`: over layers, within the microbatches of FSDP."""
    return len(emitted.value.place.loops) > len(loop.place.loops) + 1


def stack_of_layers(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A stack of layers gathered whole before a loop that reads a layer in each turn."""
    if emitted.op != "all_gather" or emitted.is_written or is_computed(context.program, emitted.operand()):
        return None
    stored = resolve(context.program, emitted.operand(), MOVES)
    is_batch = emitted.collective.parameter in context.batch_names or is_integer(stored.instruction)
    if is_batch or emitted.value.place.loops:
        return None
    if emitted.dimensions != [0]:
        return _gathered_before_its_loop(emitted, context)
    # The partitioner names the gather after the slice in the loop, whose operand it gathers.
    name = emitted.collective.op_name
    is_of_loop = "/while/" in name and primitive_of(name) in (*TURN_BY_TURN, "gather")
    if not is_of_loop or not any(
        user.instruction.opcode == "while" for user, _ in emitted.uses(context.program)
    ):
        return None
    shape = emitted.result().instruction.shapes[-1]
    origin = resolve(context.program, emitted.operand(), MOVES)
    if len(origin.instruction.shapes[0].dims) != len(shape.dims):  # rows of a batch, cut into a stack
        return None
    count = shape.dims[0]
    return (
        "stack_gathered",
        f"the whole stack `{emitted.tensor}` of {count} arrays ({emitted.collective.gathered_bytes:,} B) is "
        f"gathered over {context.over(emitted)} before the loop that reads one in each turn, so that every "
        "device holds all of them",
        "shard a dimension of the stack other than the one that the loop runs over (layers, or time), so "
        "that each turn gathers its own part or none: P(None, axis)",
    )


def _gathered_before_its_loop(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A stack gathered along another dimension than its layers, before the loop over its layers."""
    shape = emitted.result().instruction.shapes[-1]
    if len(shape.dims) < _STACKED or not is_cut_in_a_loop(emitted, context.program):
        return None
    return (
        "stack_gathered",
        f"the whole stack `{emitted.tensor}` of {shape.dims[0]} arrays "
        f"({emitted.collective.gathered_bytes:,} B) is gathered over {context.over(emitted)} before the loop "
        "that reads one in each turn, so that every device holds all of them",
        "gather each turn's own array within the loop: constrain it there, and not the stack before",
    )


# Dimensions of a stack of matrices.
_STACKED = 3


def for_few_tokens(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A weight gathered for few tokens in inference.

    Moving the activations would be cheaper.
    """
    if (
        emitted.op != "all_gather"
        or context.differentiated
        or is_computed(context.program, emitted.operand())
        or is_like_a_result(resolve(context.program, emitted.operand(), MOVES).instruction, context)
    ):
        return None
    for user, other in emitted.products(context.program):
        activations = other.instruction.shapes[0].num_bytes + user.instruction.shapes[0].num_bytes
        if emitted.collective.gathered_bytes > FEWER_BYTES * activations:
            return (
                "weight_gathered_for_few_tokens",
                f"{context.gathered(emitted)} for a matmul with only {activations:,} B of activations",
                "keep the weight sharded and move the activations: tensor parallelism in place of FSDP",
            )
    return None


# An exchange of tokens takes two all-to-alls, before and after the experts.
_EXCHANGES = 2


def of_all_experts(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Weights gathered along a batch dimension of their product, such as experts."""
    if emitted.op != "all_gather" or is_computed(context.program, emitted.operand()):
        return None
    along = emitted.dimensions
    shape = emitted.value.instruction.shapes[-1]
    for user, other in emitted.products(context.program):
        side = side_of_gathered(user, other)
        weight = user.operand(side).instruction.shapes[0]
        batch_sizes = {weight.dims[dim] for dim in user.instruction.numbers(f"{SIDES[side]}_batch_dims")}
        # Between the matmuls of experts the rows stay; before the first and after the last they are sent.
        activations = min(other.instruction.shapes[0].num_bytes, user.instruction.shapes[0].num_bytes)
        if (
            len(along) == 1
            and shape.dims[along[0]] in batch_sizes
            and emitted.collective.gathered_bytes > _EXCHANGES * activations
        ):
            return (
                "weight_gathered_for_few_tokens",
                f"{context.gathered(emitted)} along a batch dimension of its matmul, such as experts, for "
                f"{activations:,} B of activations on each device",
                "keep the experts where they are stored and exchange the tokens: constrain the dispatched "
                "rows as tokens are split (P(None, axis)), then as the experts (P(axis)): one all-to-all; "
                "and their results as the experts, then as tokens",
            )
    return None


def moved_weight(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A weight stored by one axis and used by another."""
    c = emitted.collective
    moves = emitted.op in ("permute", "all_to_all") and not c.follows_sum
    if (
        not moves
        or emitted.is_written
        or emitted.is_windowed
        or is_shift(emitted)
        or emitted.collective.parameter in context.batch_names
        or is_computed(context.program, emitted.operand())
        or primitive_of(c.op_name) in _TURNS
    ):
        return None
    if any(emitted.products(context.program)):
        is_read = any(one.instruction.opcode == "gather" for one in parts_before(emitted, context.program))
        if is_read:  # rows of a table, by index
            return None
        is_moved_on = emitted.op == "all_to_all" and (not c.parameter or _is_exchanged_back(emitted, context))
        return None if is_moved_on else stored_otherwise(emitted, context)
    if emitted.op == "all_to_all":
        return None
    return (
        "input_resharded",
        f"`{emitted.tensor}` is stored with one sharding and used with another: {emitted.op} over "
        f"{context.over(emitted)}",
        "store it with the sharding of its use",
    )


# Operations that a user writes in order to move elements: their transfers are no accident.
_TURNS = ("rev", "transpose")


def _is_exchanged_back(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether computed arrays are exchanged over the same axes: heads for positions, then back (Ulysses)."""
    return any(
        other.op == "all_to_all"
        and other.axes == emitted.axes
        and is_computed(context.program, other.operand())
        for other in context.sent
    )


def returned_whole(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered only to be returned: an update whose input is sharded, or results of a batch."""
    if emitted.op != "all_gather" or emitted.is_written:
        return None
    # A program without matmuls combines stored arrays, as an average of checkpoints does.
    combines = not any(products(context.program))
    if not (combines or is_computed(context.program, emitted.operand())):
        return None
    uses = list(emitted.uses(context.program))
    if not uses or any(at >= 0 for _, at in uses):
        return None
    shape = emitted.value.instruction.shapes[-1]
    stored = next(
        (
            parameter
            for parameter in context.program.main.parameters
            if parameter.shapes
            and parameter.shapes[0].dims == emitted.operand().instruction.shapes[0].dims
            and parameter.label not in context.batch_names
        ),
        None,
    )
    if stored is None or not (context.differentiated or combines):
        is_of_batch = bool(set(emitted.axes) & context.batch_axes)
        if not is_of_batch and (len(shape.dims) < _DIMS_OF_A_CACHE or emitted.is_part):
            return None
        which, part = (", the batch's axis,", "part of the batch") if is_of_batch else ("", "own part")
        return (
            "returned_whole",
            f"{context.gathered(emitted)}{which} only to be returned: every device gets all of it",
            f"return it as it was computed, each device with its {part} (out_shardings)",
        )
    if stored.shapes[0].num_elements * emitted.collective.groups.size != shape.num_elements:
        return None
    # Under ZeRO-1 weights are whole as inputs and as results; only their moments are sharded.
    given = sum(one.dims == shape.dims for each in context.program.main.parameters for one in each.shapes)
    if given >= sum(one.dims == shape.dims for one in context.program.main.result.shapes):
        return None
    name = stored.label
    return (
        "returned_whole",
        f"{context.gathered(emitted)} only to be returned, although inputs of its shape, such as `{name}`, "
        "are sharded",
        "return it with the sharding of the input (out_shardings): otherwise every device holds all of it, "
        "and the next step, which gets whole arrays, is compiled again",
    )


# Sequences, positions, heads and elements of a layer's cache. Results of fewer dimensions, such as logits,
# may be wanted whole.
_DIMS_OF_A_CACHE = 4

# Gathers of one operation of the update, from which it is an iteration of matmuls.
_ITERATES = 3


def iterated_update(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A matrix gathered for each of an optimizer's matmuls, such as Newton-Schulz iterations (Muon)."""
    if not _is_of_iteration(emitted, context):
        return None
    alike = sum(_is_of_iteration(one, context) and one.elements == emitted.elements for one in context.sent)
    if alike < _ITERATES:
        return None
    return (
        "update_gathered",
        f"matrices of {emitted.elements:,.0f} numbers are gathered over {context.over(emitted)} {alike:,} "
        "times for matmuls of the update, such as an orthogonalisation by Newton and Schulz",
        "give each device whole matrices: stack matrices of one shape, constrain the stack to be split along "
        "its first dimension (one all-to-all), iterate there, and constrain the results as the weights are",
    )


def _is_of_iteration(emitted: Emitted, context: ProgramContext) -> bool:
    is_gather = emitted.op == "all_gather" and not emitted.is_written
    if not is_gather or emitted.collective.phase != "update":
        return False
    return is_computed(context.program, emitted.operand()) and any(emitted.products(context.program))


def moved_update(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An update that is exchanged before it is returned, since a weight and its state differ in sharding."""
    if emitted.op != "all_to_all" or emitted.is_written or not context.differentiated:
        return None
    uses = list(emitted.uses(context.program, elementwise=True))
    if not uses or any(at >= 0 for _, at in uses) or not is_computed(context.program, emitted.operand()):
        return None
    return (
        "weight_resharded",
        f"the update (`{emitted.tensor}`) is exchanged over {context.over(emitted)} before it is returned: "
        "gradients or the optimizer's state are sharded along another dimension than the weight",
        "store the optimizer's state with the sharding of its weight",
    )


def _place_of(emitted: Emitted, depth: int) -> CallPath:
    """The place, around a collective, of the caller of frame `depth`."""
    place = emitted.value.place
    while len(place.frames) > depth:
        place = place.parent
    return place

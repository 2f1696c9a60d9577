"""Rules for collectives that send more bytes than the devices need.

They hold for programs of any kind. Bytes are not needed if a device reads few of them, could compute them
from fewer, gets the same ones in each step or turn of a loop, or could reduce arrays before it sends them.
"""

from collections.abc import Iterator, Sequence

from meshwright.audit.facts.emitted import ELEMENTWISE, Emitted, is_computed, is_product
from meshwright.audit.facts.groups import copied_over
from meshwright.audit.facts.shards import own_slices
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import Instruction
from meshwright.audit.hlo.trace import (
    COPIES,
    MOVES,
    SLICES,
    WRITES,
    TracedValue,
    ancestors,
    entered_as,
    readers,
    resolve,
    sources,
    value_key,
)
from meshwright.audit.remarks.arithmetic import is_scaled_one_hot
from meshwright.audit.remarks.by_index import FOR_A_PART
from meshwright.audit.remarks.fault_rule import (
    BATCH_SHUFFLED,
    MOVED,
    Fault,
    FaultRule,
    ProgramContext,
    is_integer,
    written_rows,
)
from meshwright.units import format_number_of

# A transfer is reported if it sends at least this factor more numbers than necessary.
_FEWER = 2
# Limit of the values that a backward search visits.
_MOST_STEPS = 64
_ELEMENTWISE_OR_JOINED = ELEMENTWISE | {"pad", "concatenate"}


def read_in_part(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered or passed on by the user although a device reads few rows, as its neighbour's."""
    if emitted.op not in ("all_gather", "permute") or not emitted.is_written:
        return None
    place, num_read = emitted.value.place, 0
    for user, at in _ends(context, emitted.result(), _ELEMENTWISE_OR_JOINED, emitted.elements / _FEWER):
        is_part = at == 0 and user.instruction.opcode in SLICES
        if not is_part or len(user.place.loops) != len(place.loops):
            return None
        num_read += user.instruction.shapes[-1].num_elements
    if not num_read or num_read * _FEWER > emitted.elements:
        return None
    shape, uses = emitted.value.instruction.shapes[-1], list(emitted.uses(context.program))
    share = f"each device reads {num_read / emitted.elements:.0%} of it"
    if emitted.op == "permute":
        return (
            "sent_for_a_part",
            f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is passed on over "
            f"{context.over(emitted)}, {emitted.runs:,} times a step, and {share}",
            _SLICE_FIRST,
        )
    slices = own_slices(context.program, emitted.collective.groups, shape, uses)
    return (
        FOR_A_PART,
        f"{context.gathered(emitted)}, and {share}",
        _EXCHANGE if uses and len(slices) == len(uses) else _SEND_A_PART,
    )


# If each device takes a different slice of the gathered array.
_EXCHANGE = (
    "exchange the slices: jax.lax.all_to_all(x, axis, split_axis=the dimension that is sliced, "
    "concat_axis=the one that is gathered, tiled=True)"
)
_SLICE_FIRST = (
    "slice before the ppermute: pass on only the part that the receiver reads, such as the microbatch of "
    "this turn or the rows at a shard's edge"
)
_SEND_A_PART = (
    "send only the part that a device reads: jax.lax.ppermute from the device that has it (a neighbour's "
    "rows, the end of a window), or slice before the gather"
)


def sent_from_less(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Numbers that a device could compute from fewer after the transfer: repeated heads, one-hot rows."""
    if emitted.op not in MOVED:
        return None
    fewer = _made_from(context, emitted.operand())
    sent = emitted.operand().instruction.shapes[-1].num_elements
    if fewer is None or fewer * _FEWER > sent:
        return None
    if _has_written_rows(context, emitted.operand()):
        return (
            "sent_from_less",
            f"`{emitted.tensor}` is sent over {context.over(emitted)} ({emitted.op}): {sent:,} numbers per "
            f"device, of which at most {fewer:,} are written; the others are padding, which the matmuls "
            "multiply too",
            "make the buffers smaller: the capacity of each expert follows from the rows of one device "
            "(tokens of this device x experts per token / experts x a capacity factor), not from the rows of "
            "all devices; or send exactly the rows (jax.lax.ragged_all_to_all)",
        )
    return (
        "sent_from_less",
        f"`{emitted.tensor}` is sent over {context.over(emitted)} ({emitted.op}): {sent:,} numbers per "
        f"device, which are repeated or computed from {fewer:,}",
        _BY_INDEX if is_scaled_one_hot(context.program, emitted.operand()) else _REPEAT_AFTER,
    )


_REPEAT_AFTER = (
    "send those, and repeat or compute after the transfer: for keys and values of grouped-query attention, "
    "gather the KV heads, then jnp.repeat"
)
_BY_INDEX = (
    "send no one-hot numbers, and multiply by none: move rows by index (buffer.at[expert, place].set(rows, "
    "mode='drop'), and buffer[expert, place] back); or exchange the rows (a constraint on the product's "
    "other operand) so that each device combines its own"
)


def _made_from(context: ProgramContext, value: TracedValue) -> int | None:
    """The number of elements that a value is computed from; None if unknown.

    Follows elementwise operations, broadcasts, concatenations and rows written into zeros backwards.
    """
    left, total = [value], 0
    seen = set[tuple[object, ...]]()
    for _ in range(_MOST_STEPS):
        if not left:
            return total
        origin = resolve(context.program, left.pop(), MOVES)
        instruction, key = origin.instruction, value_key(origin)
        if key in seen or instruction.opcode in ("constant", "iota", "partition-id"):
            continue
        seen.add(key)
        if instruction.opcode in _ELEMENTWISE_OR_JOINED | {"broadcast", "compare", "and", "or"}:
            left += sources(context.program, origin)
        elif written := written_rows(origin):
            left += written
        elif instruction.opcode in ("parameter", "while", "fusion") and origin.path:
            return None  # an element of a tuple
        else:
            total += instruction.shapes[0].num_elements
    return None


def _has_written_rows(context: ProgramContext, value: TracedValue) -> bool:
    """Whether an array that is sent has rows written by index."""
    return bool(written_rows(resolve(context.program, value, MOVES)))


def updated_whole(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Arrays gathered for elementwise operations whose results are fewer, or are sliced again."""
    if emitted.op != "all_gather":
        return None
    groups, shape = emitted.collective.groups, emitted.value.instruction.shapes[-1]
    ends = list(_ends(context, emitted.result(), ELEMENTWISE))
    cut = own_slices(context.program, groups, shape, ends)
    whole = [(user, at) for user, at in ends if user not in cut]
    directly = [user for user, _ in emitted.uses(context.program)]
    if emitted.is_written and not whole and any(user not in directly for user in cut):
        return (
            "updated_whole",
            f"{context.gathered(emitted)} for elementwise operations, and each device keeps its own part of "
            "the result",
            "leave out the all_gather and compute each device's part from the shards; scatter the other "
            "operands, such as gradients (psum_scatter)",
        )
    if not whole or any(at >= 0 for _, at in whole):
        return None
    results = {value_key(user) for user, _ in whole}
    partners = {
        gather.collective.name
        for user, _ in whole
        for gather in _gathers_of(context, user)
        if gather.value.instruction.shapes[-1].dims == shape.dims
    }
    if emitted.collective.name not in partners or len(partners) <= len(results):
        return None
    return (
        "updated_whole",
        f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is one of {len(partners)} arrays that "
        f"are gathered over {context.over(emitted)} to be combined element by element, but only "
        f"{format_number_of(len(results), 'result')} must be whole, and every device computes all of it",
        "compute each device's own part from the shards, and gather the result: an optimizer's state stays "
        "sharded, and only the new weights are gathered (ZeRO-1)",
    )


def _gathers_of(context: ProgramContext, value: TracedValue) -> Iterator[Emitted]:
    """The all-gathers whose results a value is computed from by elementwise operations."""
    by_name = {one.value.instruction.name: one for one in context.sent if one.op == "all_gather"}
    for origin in _origins(context, value, MOVES - SLICES):
        if origin.instruction.name in by_name:
            yield by_name[origin.instruction.name]


def _origins(context: ProgramContext, value: TracedValue, moves: frozenset[str]) -> Iterator[TracedValue]:
    """The values that `value` is computed from by elementwise operations and `moves`."""
    left, seen = [value], set[tuple[object, ...]]()
    while left and len(seen) < _MOST_STEPS:
        origin = resolve(context.program, left.pop(), moves)
        if value_key(origin) in seen:
            continue
        seen.add(value_key(origin))
        if origin.instruction.opcode in ELEMENTWISE:
            left += sources(context.program, origin)
        else:
            yield origin


def summed_round_a_ring(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Whole arrays passed round the devices, which only add them up."""
    if emitted.op != "permute" or emitted.collective.follows_sum:
        return None
    origin = resolve(context.program, emitted.operand(), MOVES - SLICES)
    is_carry = origin.instruction.opcode == "parameter" and bool(origin.place.loops and origin.path)
    permutes = {one.value.instruction.name for one in context.sent if one.op == "permute"}
    passed_on = added = False
    for user, at in emitted.uses(context.program):
        is_next_turn = at < 0 and is_carry and user.path == origin.path
        if is_next_turn or user.instruction.name in permutes:
            passed_on = True
        elif user.instruction.opcode in ("add", "reduce"):
            added = True
        else:
            return None
    if not (added and passed_on):
        return None
    return (
        "summed_round_a_ring",
        f"`{emitted.tensor}` is passed on whole over {context.over(emitted)}, {emitted.runs:,} times, and "
        "only added up: each turn sends the whole array",
        "sum it with jax.lax.psum, which sends less than two arrays in all, or with psum_scatter if each "
        "device needs a part",
    )


def kept_gathered(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Weights gathered in each turn of a loop, and kept whole for the backward pass."""
    is_of_weight = emitted.op == "all_gather" and not is_computed(context.program, emitted.operand())
    if not (is_of_weight and context.differentiated and emitted.value.place.loops):
        return None
    for user, at in emitted.uses(context.program):
        if user.instruction.opcode != "dynamic-update-slice" or at != 1:
            continue
        stack = user.instruction.shapes[0]
        if stack.num_elements < emitted.elements * emitted.runs:
            continue
        return (
            "gathered_weights_kept",
            f"`{emitted.tensor}` is gathered over {context.over(emitted)} in each of {emitted.runs:,} turns, "
            f"and the loop keeps all gathered arrays ({stack.num_bytes:,} B) for the backward pass: its "
            "shards save no memory",
            "gather it again in the backward pass: jax.checkpoint around the layer, with a policy that does "
            "not save gathered weights",
        )
    return None


def moved_state(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A donated cache that is stored with one sharding, and exchanged to be read with another."""
    if emitted.op != "all_to_all" or emitted.is_written or context.differentiated:
        return None
    origin = _stored(context, emitted.operand())
    if origin is None or origin.shapes[0].num_elements > _FEWER * emitted.elements:
        return None
    donated = [context.program.main.parameters[number] for number in context.program.donated]
    if origin not in donated:
        return None
    name = origin.label
    return (
        "input_resharded",
        f"`{name}` is stored with one sharding and read with another: each step exchanges it over "
        f"{context.over(emitted)}, and returns it in the stored sharding",
        "store it with the sharding that its readers need, such as a cache split over heads",
    )


def _stored(context: ProgramContext, value: TracedValue) -> Instruction | None:
    """The program's input that a value is, moved or with a part overwritten; None if it is not one."""
    for _ in range(_MOST_STEPS):
        value = entered_as(context.program, value)
        if value.instruction.opcode in WRITES:
            value = value.operand(0)
        elif value.is_input:
            return value.instruction
        else:
            return None
    return None


def batch_turned(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Rows of a batch exchanged between devices in a training step, although their order does not matter."""
    if emitted.op != "permute" or emitted.is_written or not context.differentiated:
        return None
    origin = resolve(context.program, emitted.operand(), COPIES | {"convert"})
    instruction = origin.instruction
    if not origin.is_input:
        return None
    name = instruction.label
    if not context.is_of_batch(instruction) or not set(emitted.axes) & context.batch_axes:
        return None
    return (
        BATCH_SHUFFLED,
        f"all rows of the batch (`{name}`, {emitted.collective.gathered_bytes:,} B per device) go to another "
        f"device over {context.over(emitted)} ({primitive_of(emitted.collective.op_name)}), although each "
        "device holds some",
        "pair or reverse the rows within each device: x.reshape(devices, -1, ...)[:, ::-1] with the first "
        "dimension split, or jax.shard_map",
    )


def returned_by_hand(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """The rows of a batch gathered by the user's all_gather, only to be returned."""
    if emitted.op != "all_gather" or not emitted.is_written or context.differentiated:
        return None
    uses = list(emitted.uses(context.program))
    if not uses or any(at >= 0 for _, at in uses) or not is_computed(context.program, emitted.operand()):
        return None
    rows = emitted.operand().instruction.shapes[0].dims[:1]
    mesh = context.prices.mesh
    split = [
        parameter
        for parameter in context.program.main.parameters
        if parameter.shapes
        and parameter.shapes[0].dims[:1] == rows
        and not set(emitted.axes) & {*copied_over(parameter, mesh)}
    ]
    if emitted.dimensions != [0] or not split:
        return None
    return (
        "returned_whole",
        f"{context.gathered(emitted)}, the batch's axis, only to be returned: every device gets all of it",
        "return each device's part (out_specs with the batch's axis) in place of the all_gather",
    )


def input_of_no_matmul(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An input that is not trained, such as a mask, stored in shards and read whole elementwise."""
    if emitted.op != "all_gather" or emitted.is_written:
        return None
    origin = resolve(context.program, emitted.operand(), COPIES | {"convert", "transpose"})
    stored, dims = origin.instruction, emitted.value.instruction.shapes[-1].dims
    if not origin.is_input or len(dims) <= 1 or is_integer(stored):
        return None
    name = stored.label
    returned = [shape.dims for shape in context.program.main.result.shapes]
    if name in context.batch_names or stored.shapes[0].dims in returned:
        return None
    uses = list(_ends(context, emitted.result(), frozenset({"broadcast"})))
    opcodes = {user.instruction.opcode for user, _ in uses}
    if any(at < 0 for _, at in uses) or not opcodes <= ELEMENTWISE | {"compare"}:
        return None
    times = sum(other.collective.parameter == emitted.collective.parameter for other in context.sent)
    return (
        "input_resharded",
        f"`{name}` is stored in shards and read whole: it is gathered over {context.over(emitted)}, "
        f"{times:,} times per step, for elementwise operations",
        "store it whole (P()) if all devices read it in each step, or compute it on each device, such as a "
        "mask from jnp.arange",
    )


def at_fixed_places(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A split dimension read at indices that do not depend on data: frames of a signal."""
    is_lookup = primitive_of(emitted.collective.op_name) == "gather" and not emitted.is_written
    if not is_lookup or emitted.op not in ("all_reduce", "all_gather"):
        return None
    after = (user for user, at in emitted.uses(context.program) if at == 0)
    for each in (*after, *_lookups_before(context, emitted.operand())):
        if each.instruction.opcode == "gather" and not _depends_on_data(context, each.operand(1)):
            return _fixed(emitted, context, "read at fixed indices (frames, patches)")
    return None


def _lookups_before(context: ProgramContext, value: TracedValue) -> Iterator[TracedValue]:
    """The look-ups (HLO's gather) whose results a value is computed from by elementwise operations."""
    origins = _origins(context, value, MOVES)
    return (origin for origin in origins if origin.instruction.opcode == "gather")


def mixed_by_constants(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered for a product with a constant matrix: a resize, an interpolation."""
    if emitted.op != "all_gather" or emitted.is_written:
        return None
    for user, other in emitted.products(context.program):
        if is_product(user) and not _depends_on_data(context, other):
            return _fixed(emitted, context, "multiplied with a constant matrix (a resize, an interpolation)")
    return None


def _fixed(emitted: Emitted, context: ProgramContext, how: str) -> Fault:
    return (
        "activation_resharded",
        f"{context.moved(emitted)}, because the dimension that is split there is {how}",
        "shard another dimension there, such as the batch or the channels; or exchange only the rows at the "
        "shards' edges in jax.shard_map (ppermute)",
    )


def _depends_on_data(context: ProgramContext, value: TracedValue) -> bool:
    """Whether a value depends on an input of the program."""
    return any(one.is_input for one in ancestors(context.program, value))


def _ends(
    context: ProgramContext, value: TracedValue, through: frozenset[str], most: float = float("inf")
) -> Iterator[tuple[TracedValue, int]]:
    """The first readers of a value that are not in `through`, each with the number of its operand.

    through: opcodes whose results are followed to their own readers. Slices of more than `most` numbers, such
    as the pieces that a roll joins again, are followed too.
    """
    left, seen = [value], set[tuple[object, ...]]()
    while left:
        for user, at in readers(context.program, left.pop()):
            key, opcode = value_key(user), user.instruction.opcode
            is_piece = opcode == "slice" and user.instruction.shapes[0].num_elements > most
            if at < 0 or not (opcode in through or is_piece):
                yield user, at
            elif key not in seen:
                seen.add(key)
                left.append(user)


NEED_RULES: Sequence[FaultRule] = (
    moved_state,
    batch_turned,
    returned_by_hand,
    at_fixed_places,
    mixed_by_constants,
    updated_whole,
    read_in_part,
    sent_from_less,
    summed_round_a_ring,
    kept_gathered,
    input_of_no_matmul,
)

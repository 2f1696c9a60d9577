"""Rules for sums over devices: too often, too large, or whole where a slice is enough."""

from collections.abc import Iterable, Iterator, Sequence

from meshwright.audit.facts.emitted import ELEMENTWISE, Emitted, is_computed, is_product
from meshwright.audit.facts.instruction_work import flops_of
from meshwright.audit.facts.shards import own_slices
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program
from meshwright.audit.hlo.trace import (
    COPIES,
    MOVES,
    MOVES_OR_REPEATS,
    TracedValue,
    readers,
    resolve,
    sources,
    value_key,
)
from meshwright.audit.remarks.dropped import zeros_elsewhere
from meshwright.audit.remarks.fault_rule import (
    FEWER_BYTES,
    MOST_VALUES,
    REDUCES,
    Fault,
    ProgramContext,
    same_devices,
)
from meshwright.audit.remarks.whole_dimension import SAME_REMEDY, needs_whole


def summed_each_turn(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A sum over devices in each turn of a loop that only adds up: gradients of microbatches."""
    place = emitted.value.place
    if emitted.collective.op != "all_reduce" or emitted.collective.gathers or not place.loops:
        return None
    uses = list(after_scaling(context.program, emitted.uses(context.program)))
    if uses and all(_writes_to_the_carry(context.program, *use) for use in uses):
        return _summed_for_storage(emitted, context, uses)
    if _is_summed_for_shards(emitted, context, uses):
        return (
            "summed_repeatedly",
            f"`{emitted.tensor}` is summed over {context.over(emitted)} in each of {emitted.runs:,} turns of "
            "a loop that only adds up each device's slice, although the gathered weight is whole during the "
            "loop",
            "add up each device's own whole gradient in the loop and reduce-scatter it once, after it: run "
            "the loop in jax.shard_map, with an all_gather of the weight before it",
        )
    if not uses or not all(_adds_to_the_carry(context.program, *use) for use in uses):
        return None
    return (
        "summed_repeatedly",
        f"`{emitted.tensor}` is all-reduced over {context.over(emitted)} in each of {emitted.runs:,} turns "
        "of a loop that only adds the results up",
        "add up the devices' own parts in the loop and all-reduce the total once, after it: take gradients "
        "in jax.shard_map and sum them (psum) after the loop over microbatches",
    )


def _is_summed_for_shards(
    emitted: Emitted, context: ProgramContext, uses: Sequence[tuple[TracedValue, int]]
) -> bool:
    """Whether a loop adds up each device's slice of a sum, and reads a gathered array of the same size."""
    c, program = emitted.collective, context.program
    slices = own_slices(program, c.groups, emitted.value.instruction.shapes[-1], uses)
    if not uses or len(slices) < len(uses):
        return False
    added = [use for each in slices for use in readers(program, each)]
    if not added or not all(_adds_to_the_carry(program, *use) for use in added):
        return False
    loop = emitted.value.place.loops[-1]
    return any(
        other.op == "all_gather"
        and other.elements == emitted.elements
        and any(user.instruction is loop for user, _ in other.uses(program))
        for other in context.sent
    )


# (opcode, number of an operand) of operations that scale this operand, if the other one is a constant.
_SCALINGS = (("multiply", 0), ("multiply", 1), ("divide", 0))


def summed_apart(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Sums over the same devices whose results are only added up: one sum of the total would do."""
    if emitted.collective.op != "all_reduce" or emitted.collective.gathers:
        return None
    uses = list(after_scaling(context.program, emitted.uses(context.program)))
    if not uses or not all(_is_added_to_sums(*use, emitted, context) for use in uses):
        return None
    # The compilers of TPUs and GPUs add partial gradients, as of queries, keys and values, before the sum.
    product = resolve(context.program, emitted.operand(), MOVES)
    if context.program.platform.virtual and emitted.collective.phase == "backward" and is_product(product):
        return None
    return (
        "summed_repeatedly",
        f"`{emitted.tensor}` is all-reduced over {context.over(emitted)}, and the result is only added to "
        "results of other such sums",
        "add the partial results on each device, and all-reduce their sum once: look up or multiply in one "
        "jax.shard_map with a psum at its end",
    )


def _is_added_to_sums(user: TracedValue, at: int, emitted: Emitted, context: ProgramContext) -> bool:
    """Whether an addition adds operand `at` only to results of other all-reduces over the same devices.

    These results have no other reader: a residual that a norm reads between two layers must be summed there.
    """
    if user.instruction.opcode != "add" or at not in (0, 1):
        return False
    left, seen = [user.operand(1 - at)], 0
    while left and seen < MOST_VALUES:
        origin = resolve(context.program, left.pop(), MOVES)
        if len(list(readers(context.program, origin))) > 1:
            return False
        other = next((s for s in context.sent if s.value.instruction is origin.instruction), None)
        if other is not None and other.collective.op == "all_reduce" and same_devices(other, emitted):
            seen += 1
        elif origin.instruction.opcode == "add":
            left += sources(context.program, origin)
        else:
            return False
    return True


def after_scaling(
    program: Program, uses: Iterable[tuple[TracedValue, int]]
) -> Iterator[tuple[TracedValue, int]]:
    """The uses; in place of a product with a constant, or a quotient by one, the uses of its result.

    A constant divided by a sum does not scale it: such quotients cannot be added before the sum.
    """
    for user, at in uses:
        if (user.instruction.opcode, at) in _SCALINGS:
            other = resolve(program, user.operand(1 - at), MOVES_OR_REPEATS)
            if other.instruction.opcode == "constant":
                yield from after_scaling(program, readers(program, user))
                continue
        yield user, at


def _summed_for_storage(
    emitted: Emitted, context: ProgramContext, uses: Sequence[tuple[TracedValue, int]]
) -> Fault | None:
    """A result that is summed in each turn of a loop and written to a part of the loop's output.

    A pipeline may return its results so. None if the turns sum no more numbers than the output holds; a
    pipeline sums more, since turns in which it fills or drains sum too.
    """
    stored = max(user.instruction.shapes[0].num_elements for user, _ in uses)
    summed = emitted.elements * emitted.runs
    if summed <= stored:
        return None
    return (
        "summed_repeatedly",
        f"`{emitted.tensor}` is all-reduced over {context.over(emitted)} in each of {emitted.runs:,} turns, "
        f"{summed:,.0f} numbers in all, to be written into an array of {stored:,}",
        "write each device's own part (zeros if it has none) in the loop, and sum the array once after it",
    )


def _writes_to_the_carry(program: Program, user: TracedValue, at: int) -> bool:
    """Whether an instruction writes its operand `at` to a part of an array of the loop's carry."""
    is_written = at == 1 and user.instruction.opcode == "dynamic-update-slice"
    return is_written and _replaces_operand(program, user, 0)


def _adds_to_the_carry(program: Program, user: TracedValue, at: int) -> bool:
    """Whether an instruction adds its operand `at` to an array of the loop's carry, for the next turn."""
    is_sum = at in (0, 1) and user.instruction.opcode == "add"
    return is_sum and _replaces_operand(program, user, 1 - at)


def _replaces_operand(program: Program, user: TracedValue, index: int) -> bool:
    """Whether operand `index` is in the loop's carry, and the result takes its place for the next turn."""
    other = resolve(program, user.operand(index), MOVES)
    is_carry = other.instruction.opcode == "parameter" and bool(other.place.frames and other.path)
    if not is_carry or any(value_key(reader) != value_key(user) for reader, _ in readers(program, other)):
        return False  # a residual, which the layers of the loop read too
    return all(after < 0 and next_.path == other.path for next_, after in readers(program, user))


# A result is wide if its other dimension is this many times the dimension summed over, as logits have it.
_WIDE = 8


def wide_sum(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Partial sums far larger than a product's operands: logits of a table that is split by its width."""
    c = emitted.collective
    forward = c.phase == "forward" or not context.differentiated  # gradients of weights are sums over tokens
    if c.op != "all_reduce" or not forward or emitted.is_written or c.gathers:
        return None
    product = resolve(context.program, emitted.operand(), MOVES)
    if not is_product(product) or len(set(product.instruction.operands)) < 2:
        return None
    devices = emitted.collective.groups.size
    operands = [product.operand(n) for n in (0, 1)]
    smaller = min((one.instruction.shapes[0] for one in operands), key=lambda one: one.num_bytes)
    # XLA for TPUs writes products as convolutions.
    flops = flops_of(product.instruction, product.place.computation)
    summed = devices * flops // (2 * max(1, product.instruction.shapes[0].num_elements))
    # The other dimension of a weight counts even if activations of few rows are the smaller operand.
    weights = [one for one in operands if not is_computed(context.program, one)]
    sizes = [one.instruction.shapes[0].num_elements for one in weights] + [smaller.num_elements]
    others = devices * max(sizes) // max(summed, 1)
    num_bytes = devices * smaller.num_bytes
    if others < _WIDE * summed or emitted.collective.gathered_bytes < FEWER_BYTES * num_bytes:
        return None
    return (
        "partial_results_summed",
        f"partial results (`{emitted.tensor}`, {emitted.collective.gathered_bytes:,} B) are summed over "
        f"{context.over(emitted)}: both operands, the smaller of {num_bytes:,} B, are split along the short "
        f"dimension that the matmul sums over ({summed:,})",
        "split the operands along another dimension (a table by its vocabulary, attention by heads and not "
        "by the elements of a head): each device then has a part of the result, and nothing is summed",
    )


def whole_sum(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An all-reduce whose result each device needs only a slice of.

    XLA:CPU writes all reduce-scatters of the partitioner in this form, so a sum that is only sliced counts
    there only if the user wrote it.
    """
    c = emitted.collective
    if c.op != "all_reduce":
        return None
    uses = list(emitted.uses(context.program))
    shape = emitted.value.instruction.shapes[min(c.index, len(emitted.value.instruction.shapes) - 1)]
    # XLA may compute a square of the whole sum before it slices that.
    ends = list(emitted.uses(context.program, elementwise=True))
    sliced = own_slices(context.program, c.groups, shape, uses)
    only = bool(ends) and len(own_slices(context.program, c.groups, shape, ends)) == len(ends)
    is_forward = c.phase == "forward" or not context.differentiated
    product = resolve(context.program, emitted.operand(), MOVES)
    if only and not sliced and is_forward and emitted.is_written and is_product(product):
        return (
            SUMMED_WHOLE,
            f"`{emitted.tensor}` is all-reduced over {context.over(emitted)}, and each device keeps a slice "
            "of what it computes from it element by element",
            "split the matmul's weight by columns, in place of the rows that the matmul sums over, and the "
            "next matmul's weight by rows: then only the next result is summed; or scatter this sum "
            "(psum_scatter) and compute with the slices",
        )
    if not sliced or (only and not (emitted.is_written or context.schedule.is_async)):
        return None
    others = [use for use in uses if use[0] not in sliced]
    if not only and (state := _whole_state(others, shape, context)):
        return (
            REPLICATED_STATE,
            f"`{emitted.tensor}` is all-reduced over {context.over(emitted)} to update `{state}`, which is "
            "whole on each device, although each device keeps a slice of the weight",
            f"shard the optimizer state over {context.over(emitted)} too, as the weights are (ZeRO-1): the "
            "all-reduce becomes a reduce-scatter",
        )
    reader = _reader_of_whole(others, context)
    also = "" if only else f"; {reader or 'another use'} reads the whole"
    change = (
        "reduce-scatter it: jax.lax.psum_scatter(..., tiled=True) in place of the psum and the slice"
        if emitted.is_written and only
        else "reduce-scatter it: constrain the sum to the sharding of the array that it updates before any "
        "other use"
    )
    if reader:
        change += _FROM_SLICES.get(SAME_REMEDY.get(reader, reader), _FROM_SLICES_OTHERWISE)
    return (
        SUMMED_WHOLE,
        f"`{emitted.tensor}` is all-reduced over {context.over(emitted)}, but each device keeps a slice"
        f"{also}",
        change,
    )


# Endings of the remedy of a sum that is read whole, by the reader's primitive.
_FROM_SLICES = {
    "sort": ". The sort (a quantile, a median) gathers the slices again: leave it out of the step, take it "
    "of each device's slice (jax.shard_map) and average, or count the numbers below some thresholds",
    "concatenate": ", and do not join the arrays: a norm of all gradients is the root of the sum of each "
    "array's squares (optax.global_norm)",
    "reduce_sum": "; a norm can be computed from the norms of the slices",
}

_FROM_SLICES_OTHERWISE = "; compute the other use from the slices, too"

REPLICATED_STATE = "replicated_optimizer_state"
SUMMED_WHOLE = "summed_whole"


def _whole_state(
    others: Iterable[tuple[TracedValue, int]], shape: ArrayShape, context: ProgramContext
) -> str | None:
    """The input, of the whole sum's shape, that elementwise operations combine with a sum."""
    left, seen = [user for user, at in others if at >= 0], 0
    while left and seen < MOST_VALUES:
        user = left.pop(0)
        seen += 1
        if user.instruction.opcode not in ELEMENTWISE:
            continue
        for parameter in _elementwise_inputs(user, context):
            name = parameter.label
            if parameter.shapes[0].dims == shape.dims and name not in context.batch_names:
                return name
        left += [each for each, at in readers(context.program, user) if at >= 0]
    return None


def _elementwise_inputs(user: TracedValue, context: ProgramContext) -> Iterator[Instruction]:
    """The program's inputs that a value is an elementwise function of."""
    left, seen = list(sources(context.program, user)), 0
    while left and seen < MOST_VALUES:
        origin = resolve(context.program, left.pop(), COPIES | {"convert"})
        seen += 1
        if origin.is_input:
            yield origin.instruction
        elif origin.instruction.opcode in ELEMENTWISE:
            left += sources(context.program, origin)


def _reader_of_whole(others: Iterable[tuple[TracedValue, int]], context: ProgramContext) -> str:
    """The primitive of the first reader of a whole array past elementwise operations; "" if unknown."""
    left, seen = [user for user, at in others if at >= 0], 0
    while left and seen < MOST_VALUES:
        user = left.pop(0)
        name = primitive_of(user.instruction.op_name)
        if user.instruction.opcode in (*ELEMENTWISE, "abs"):
            left += [each for each, at in readers(context.program, user) if at >= 0]
        elif known := needs_whole(user) or (name in _FROM_SLICES and name):
            return known
        elif user.instruction.opcode in REDUCES:
            return "reduce_sum"
        seen += 1
    return ""


def summed_for_one(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """The user's psum of an array that is zeros on all devices but one, as of a pipeline's last stage.

    Only programs that also pass arrays on over the same axes are pipelines: other programs may have no
    cheaper way to send one device's array to all.
    """
    c, program = emitted.collective, context.program
    passes_on = any(other.op == "permute" and other.axes == emitted.axes for other in context.sent)
    if c.op != "all_reduce" or not emitted.is_written or emitted.value.place.loops or not passes_on:
        return None
    select = resolve(program, emitted.operand(), MOVES)
    is_returned = all(at < 0 for _, at in emitted.uses(program))  # to all devices, as out_specs asks
    if select.instruction.opcode != "select" or is_returned:
        return None
    chosen = zeros_elsewhere(program, select)
    if chosen is None or round(chosen.share * c.groups.size) != 1:
        return None
    return (
        SUMMED_WHOLE,
        f"`{emitted.tensor}` ({c.gathered_bytes:,} B) is all-reduced over {context.over(emitted)}, although "
        "it is zeros on all devices but one: the sum only copies that device's array to all",
        "compute what reads it, such as the head and the loss, on the device that has it, and sum the small "
        "result; or return each device's own array (out_specs with that axis) and take the last; if all "
        "devices must work on it, scatter it (psum_scatter), which sends half",
    )

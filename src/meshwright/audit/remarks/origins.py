"""Rules that know a collective's cause: one operation of the user's, by its name in JAX or by its sizes.

They come before the other rules, which know only how an array is moved.
"""

import re
from collections.abc import Iterator, Sequence
from math import prod

from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.matmuls import products
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import Computation, Instruction, Program, arrays
from meshwright.audit.hlo.trace import (
    COPIES,
    MOVES,
    CallPath,
    TracedValue,
    loop_body,
    readers,
    resolve,
    same_each_turn,
)
from meshwright.audit.remarks.fault_rule import (
    BATCH_GATHERED,
    MOVED,
    TURN_BY_TURN,
    Fault,
    FaultRule,
    ProgramContext,
    is_cut_in_a_loop,
)

# Functions of jax.random that draw numbers, and the primitives that these call.
DRAWS = re.compile(
    r"threefry2x32|random_bits|rng_bit_generator"
    r"|jit\(_(bernoulli|uniform|normal\w*|truncated_normal|randint|gumbel|exponential|cauchy|laplace)\)"
)


def random_bits(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Random bits sent between devices: the counters of JAX's older threefry are cut in halves."""
    c = emitted.collective
    if emitted.op not in MOVED or emitted.is_written or not c.dtype.startswith(("u", "s")):
        return None
    if not DRAWS.search(c.op_name):
        return None
    return (
        "random_numbers_moved",
        f"random bits (`{emitted.tensor}`, {c.gathered_bytes:,} B) are moved over {context.over(emitted)} "
        f"({emitted.op}): the generator draws them in an order that the devices' shards do not have",
        "let each device draw its own numbers: jax.config.update('jax_threefry_partitionable', True), the "
        "default since jax 0.5; or jax.random.fold_in(key, axis_index) in jax.shard_map",
    )


def padded_dimension(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A weight padded and moved for a constraint on a dimension that the devices do not divide."""
    size = emitted.collective.groups.size
    if emitted.op not in MOVED or emitted.is_written or not size:
        return None
    # XLA for CPU sends one operand to each device; the parts of the first ones may have no padding.
    operands = emitted.value.operands()
    origins = (resolve(context.program, each, MOVES) for each in operands)
    origin = next((each for each in origins if each.instruction.opcode == "pad"), None)
    if origin is None:
        return None
    stored = resolve(context.program, origin.operand(0), MOVES)
    if not stored.is_input:
        return None
    pairs = zip(origin.operand(0).instruction.shapes[0].dims, origin.instruction.shapes[0].dims, strict=True)
    grown = [(before, after) for before, after in pairs if before != after]
    if len(grown) != 1 or grown[0][0] % size == 0 or grown[0][1] % size:
        return None
    count, padded = grown[0]
    return (
        "weight_resharded",
        f"`{emitted.tensor}` is padded from {count} to {padded} and moved over {context.over(emitted)} "
        f"({emitted.op}), because a constraint splits a dimension of {count}, such as heads, over {size} "
        f"devices: {1 - count / padded:.0%} of its work is on zeros",
        f"constrain a dimension that {size} divides (the batch, or positions), choose a multiple of {size} "
        f"in the model, or split those {count} over an axis whose size divides them",
    )


def looped_batch(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A batch gathered because a loop runs over its split rows: lax.map, or lax.scan over examples."""
    if emitted.op != "all_gather" or emitted.is_written:
        return None
    name = emitted.collective.op_name
    if len(emitted.dimensions) != 1 or "/while/" not in name or primitive_of(name) not in TURN_BY_TURN:
        return None
    [along] = emitted.dimensions
    if along and not is_cut_in_a_loop(emitted, context.program, along):
        return None
    origin = resolve(context.program, emitted.operand(), COPIES | {"convert"})
    is_batch = _is_of_batch(origin.instruction, emitted, context)
    if not is_batch and not _shares_its_weight(emitted, context):
        return None
    # XLA for TPUs leaves the gather in the loop, where each turn repeats it.
    in_loop = bool(emitted.value.place.loops)
    if not in_loop and not any(
        user.instruction.opcode == "while" for user, _ in emitted.uses(context.program)
    ):
        return None
    when = "in each turn of" if in_loop else "before"
    loops = [
        user.instruction for user, _ in emitted.uses(context.program) if user.instruction.opcode == "while"
    ]
    is_recurrence = any(_is_needed_next(context.program, loop) for loop in loops)
    stored = resolve(context.program, emitted.operand(), MOVES)
    is_cut = len(stored.instruction.shapes[0].dims) < len(emitted.value.instruction.shapes[-1].dims)
    return (
        BATCH_GATHERED,
        f"the batch (`{emitted.tensor}`, {emitted.collective.gathered_bytes:,} B) is gathered over "
        f"{context.over(emitted)} {when} a loop over its rows (lax.map, or lax.scan): every device runs all "
        "turns",
        _ROWS_OF_A_TURN if is_cut else _OTHER_DIMENSION if is_recurrence else _OWN_ROWS,
    )


_OWN_ROWS = (
    "loop over each device's own rows, in jax.shard_map with the batch's axis in in_specs (and a psum of "
    "sums over rows); or use jax.vmap over the rows in place of the loop"
)
_ROWS_OF_A_TURN = (
    "the reshape to [turns, rows, ...] gives each device whole turns in place of a part of each turn's rows, "
    "as for gradient accumulation: reshape to [rows, turns, ...] and swap the two, x.reshape(B // turns, "
    "turns, ...).swapaxes(0, 1), or constrain the reshaped array to P(None, batch axes)"
)
_OTHER_DIMENSION = (
    "split another dimension than the one that the loop runs over, such as sequences, environments or "
    "channels in place of time: a turn that needs the result of the turn before cannot run on another device "
    "at the same time"
)


def _is_of_batch(stored: Instruction, emitted: Emitted, context: ProgramContext) -> bool:
    """Whether an input is a part of the batch, and the collective goes over the axes that split it."""
    return (
        stored.opcode == "parameter"
        and context.is_of_batch(stored)
        and bool(set(emitted.axes) & context.batch_axes)
    )


def _shares_its_weight(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether a loop multiplies all rows of a gathered array by one weight, as a loop over examples does.

    A loop over layers multiplies each of them by an array that changes from turn to turn, and a recurrence
    passes its state on.
    """
    for product in products(context.program):
        place = product.value.place
        if not place.loops:
            continue
        depth = max(at for at, frame in enumerate(place.frames) if frame.caller.opcode == "while")
        left, right = product.value.operand(0), product.value.operand(1)
        for rows, weight in ((left, right), (right, left)):
            origin = resolve(context.program, rows, MOVES)
            if origin.instruction is emitted.value.instruction:
                is_same = same_each_turn(context.program, weight, depth)
                return is_same and not _passes_on(context.program, place.frames[depth].caller)
    return False


def _passes_on(program: Program, loop: Instruction) -> bool:
    """Whether a loop computes an array for its next turn, apart from arrays into which it stores rows."""
    return any(True for _ in _computed_arrays(program, loop_body(program, loop)))


def _is_needed_next(program: Program, loop: Instruction) -> bool:
    """Whether a turn reads an array that the turn before computed, and not only to add to it."""
    body = loop_body(program, loop)
    carried = (
        TracedValue(body.parameters[0], CallPath(body), path) for path in _computed_arrays(program, body)
    )
    return any(
        user.instruction.opcode not in ("add", "tuple")
        for value in carried
        for user, _ in readers(program, value)
    )


def _computed_arrays(program: Program, body: Computation) -> Iterator[tuple[int, ...]]:
    """Paths of the arrays that a loop computes for its next turn, apart from those it stores rows into."""
    for path, shape in arrays(body.result.shape):
        value = resolve(program, TracedValue(body.result, CallPath(body), path), MOVES)
        if shape.dims and value.instruction.opcode not in ("parameter", "dynamic-update-slice"):
            yield path


def tiled(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array moved because jnp.tile, or a concatenation with itself, repeats a split dimension."""
    if emitted.op not in MOVED or emitted.is_written:
        return None
    name = emitted.collective.op_name
    if primitive_of(name) not in ("tile", "concatenate") or not (
        "tile" in name or _joins_itself(emitted, context)
    ):
        return None
    return (
        BATCH_GATHERED,
        f"{context.moved(emitted)}, because jnp.tile repeats the dimension that is split "
        "there: the copies of a row belong to other devices",
        "repeat each row next to itself, which stays on its device: jnp.repeat(x, times, axis=0), and put "
        "the rows that are combined with it in the same order; or tile within each device, in jax.shard_map",
    )


def _joins_itself(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether all readers of a moved array join it with itself."""
    users = [user for user, _ in emitted.uses(context.program)]
    return bool(users) and all(
        user.instruction.opcode == "concatenate" and len(set(user.instruction.operands)) == 1
        for user in users
    )


# Convolutions with more groups than one, by their attributes.
_GROUPS = ("feature_group_count", "batch_group_count")


def grouped_convolution(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered for a convolution by groups, such as jax.vmap over the members of an ensemble."""
    if emitted.op != "all_gather" or emitted.is_written:
        return None
    for user, _ in emitted.products(context.program):
        groups = prod(int(user.instruction.attributes.get(name, 1)) for name in _GROUPS)
        if groups > 1:
            return (
                "contraction_gathered",
                f"{context.gathered(emitted)} for a convolution of {groups:,} groups, as jax.vmap over "
                "kernels makes: XLA does not divide its groups, and all devices compute all of them",
                "convolve in jax.shard_map, with the axis of the groups (of the members that jax.vmap maps "
                "over) in in_specs and out_specs, so that each device convolves with its own kernels",
            )
    return None


# In order of precedence.
ORIGIN_RULES: Sequence[FaultRule] = (
    random_bits,
    padded_dimension,
    looped_batch,
    tiled,
    grouped_convolution,
)

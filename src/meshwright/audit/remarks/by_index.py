"""Rules for rows that are looked up or added by index: of tables, of the batch, of nodes of a graph."""

import re
from collections.abc import Iterator, Sequence
from math import prod

from meshwright.audit.facts.emitted import ELEMENTWISE, REDUCTIONS, Emitted, is_computed, is_product
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.shards import device_values
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import Instruction, Program
from meshwright.audit.hlo.trace import MOVES, MOVES_OR_REPEATS, TracedValue, ancestors, resolve, sources
from meshwright.audit.remarks.fault_rule import (
    BATCH_SHUFFLED,
    CONSTRAINTS,
    FEWER_BYTES,
    MOST_VALUES,
    Fault,
    ProgramContext,
    is_integer,
    is_like_a_result,
)
from meshwright.audit.remarks.origins import DRAWS
from meshwright.audit.remarks.whole_dimension import WHOLE_DIMENSION, needs_whole


def table_gathered(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An embedding gathered whole to look up a few of its rows."""
    if emitted.op != "all_gather" or emitted.is_written:
        return None
    for user, at in emitted.uses(context.program):
        looked_up = user.instruction.shapes[0].num_bytes
        if (
            user.instruction.opcode == "gather"
            and at == 0
            and emitted.collective.gathered_bytes > 2 * looked_up
        ):
            if is_computed(context.program, emitted.operand()):
                return _looked_up(emitted, context)
            return (
                "table_gathered",
                f"the whole table `{emitted.tensor}` is gathered over {context.over(emitted)} "
                f"({emitted.collective.gathered_bytes:,} B) to look up rows of {looked_up:,} B",
                _remedy_of_table(emitted, context, looked_up * emitted.collective.groups.size),
            )
    return None


def _remedy_of_table(emitted: Emitted, context: ProgramContext, rows_of_all: int) -> str:
    """The remedy for a gathered table. rows_of_all: bytes of the rows that all devices look up."""
    if chosen := _chosen_among_all(emitted, context):
        return chosen
    if _is_made_whole(emitted, context):
        return _LEAVE_IN_SHARDS
    if rows_of_all >= emitted.collective.gathered_bytes:
        return _LOOK_UP_OWN_ROWS
    if not set(emitted.axes) & context.batch_axes:
        return _LOOK_UP_IN_SHARDS
    return _EXCHANGE_ROWS if _is_mapped(emitted) else _GATHER_INDICES


_LOOK_UP_IN_SHARDS = (
    "look up rows in each device's shard and all-reduce them: keep the table sharded and constrain only the "
    "result"
)
# If the batch's axis splits the indices, too.
_GATHER_INDICES = (
    "the looked-up indices are sharded over the same axis: gather the indices, a few bytes, look up in each "
    "device's shard and reduce-scatter the rows, in jax.shard_map; or shard the table over another axis"
)
# If jax.vmap maps a look-up over tables of which each device has some.
_EXCHANGE_ROWS = (
    "each device has some of the tables, and the indices are split by the batch over the same axis: look up "
    "where the tables are (constrain the indices to be whole, a few bytes, and the rows to be split as the "
    "tables), then constrain the rows to be split by the batch (one all-to-all)"
)


def _looked_up(emitted: Emitted, context: ProgramContext) -> Fault:
    """A computed array gathered to read some of its elements by index, such as sorted logits."""
    return (
        WHOLE_DIMENSION,
        f"{context.moved(emitted)} to be read by index along its split dimension, no matmul",
        "read it by index along a dimension that is whole: constrain it as its product yields it, then along "
        "another dimension (one all-to-all); or read each device's own elements in jax.shard_map, zeros for "
        "the others, and sum",
    )


def _chosen_among_all(emitted: Emitted, context: ProgramContext) -> str:
    """The remedy for rows that are drawn, or that a top k or a sort of scores chooses; "" for others."""
    chooses = (_chooser(context.program, each) for each in _indices_of(emitted, context.program))
    name = next(filter(None, chooses), "")
    if not name:
        return ""
    return (
        f"{name} chooses among the rows of all devices: choose within each device's own rows in "
        "jax.shard_map (the tokens of an expert, hard examples, negatives), so that no row leaves its device"
    )


def _chooser(program: Program, indices: TracedValue) -> str:
    """The source of chosen indices: "jax.random", or a "top_k" or "sort" of scores; "" for others.

    A sort chooses no rows if it keeps all of them, or sorts integers such as the numbers of experts.
    """
    left, seen = [indices], 0
    while left and seen < MOST_VALUES:
        origin = resolve(program, left.pop(), MOVES_OR_REPEATS)
        instruction = origin.instruction
        seen += 1
        if DRAWS.search(instruction.op_name):
            return "jax.random"
        if chooser := needs_whole(origin):
            scores = origin.operand(0).instruction.shapes[0]
            is_choice = indices.instruction.shapes[0].num_elements < scores.num_elements
            is_scored = chooser in ("top_k", "sort") and re.match(r"b?f\d", scores.dtype)
            return chooser if is_choice and is_scored else ""
        is_moved = op_of(instruction) in ("all_gather", "all_reduce")
        if instruction.opcode in (*ELEMENTWISE, *_OF_INDICES) or is_moved:
            left += sources(program, origin)
    return ""


# Operations that a choice passes before it is an index, beyond the elementwise ones: they keep indices in
# bounds, join them, or cut a flattened index into its parts.
_OF_INDICES = ("compare", "clamp", "concatenate", "remainder", "and", "shift-right-logical")


# If the rows that all devices look up are as large as the table, sending the rows saves nothing.
_LOOK_UP_OWN_ROWS = (
    "the rows that all devices look up are about as large as the whole array: if each sequence reads only "
    "its own rows (beams, or pages), index within the sequence (a batched gather: take_along_axis, or "
    "jax.vmap over sequences) or in jax.shard_map; otherwise shard the array over another axis, such as heads"
)

# The sum of a table's gradient is reported if the rows that a device looked up are smaller by this factor.
_SPARSE = 8


def table_summed(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """The gradient of a whole table summed over devices that each looked up a few rows."""
    c = emitted.collective
    if c.op != "all_reduce" or c.gathers or emitted.is_written or not context.differentiated:
        return None
    if not primitive_of(c.op_name).startswith("scatter"):
        return None
    origin = resolve(context.program, emitted.operand(), MOVES)
    if origin.instruction.opcode == "scatter":
        shapes = [each.instruction.shapes[0] for each in origin.operands()]
    elif origin.instruction.opcode == "while":  # XLA for CPU may make a loop of the scatter
        shapes = list(origin.instruction.shapes)
    else:
        return None
    # The two largest arrays are the table and the rows' gradients.
    rows, *_ = sorted(shape.num_bytes for shape in shapes)[-2:]
    if c.gathered_bytes < _SPARSE * rows:
        return None
    gathers = (one for one in context.sent if one.elements == emitted.elements)
    is_made_whole = any(_is_made_whole(one, context) for one in gathers)
    return (
        "table_summed",
        f"the gradient of a whole table (`{emitted.tensor}`, {c.gathered_bytes:,} B) is summed over "
        f"{context.over(emitted)}, although each device looked up rows of {rows:,} B",
        _LEAVE_IN_SHARDS if is_made_whole else _SHARD_COLUMNS,
    )


_SHARD_COLUMNS = (
    "shard the table along its columns over that axis, so that each device has a part of all rows' "
    "gradients; or exchange the rows' gradients with their indices in jax.shard_map"
)


# The remedy if a constraint gathers the table.
_LEAVE_IN_SHARDS = (
    "leave out the constraint that makes the table whole, and constrain only the rows that are looked up: a "
    "table split along its columns, P(None, axis), is then looked up in shards, and the rows are exchanged "
    "(one all-to-all), as are their gradients"
)


def _is_made_whole(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether a constraint gathers a stored array that is no part of the batch."""
    if emitted.op != "all_gather" or primitive_of(emitted.collective.op_name) not in CONSTRAINTS:
        return False
    stored = resolve(context.program, emitted.operand(), MOVES)
    return stored.is_input and not context.is_of_batch(stored.instruction)


def batch_by_index(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Rows fetched from other devices by index: of a batch shuffled within the step, or of a table."""
    c, name = emitted.collective, primitive_of(emitted.collective.op_name)
    is_lookup = name == "gather" or name.startswith("scatter")
    if emitted.op not in (*REDUCTIONS, "all_gather") or emitted.is_written or not is_lookup:
        return None
    chosen = _chosen_among_all(emitted, context)
    rows = _rows_read_by(emitted, context) if name == "gather" else None
    if rows is None and chosen and is_computed(context.program, emitted.operand()):
        return (
            BATCH_SHUFFLED,
            f"rows of activations (`{emitted.tensor}`, {c.gathered_bytes:,} B) are moved over "
            f"{context.over(emitted)} by index ({emitted.op}), although each device holds some",
            chosen,
        )
    if rows is None or (emitted.op == "all_gather" and is_integer(rows)):  # perhaps the indices
        return None
    name = rows.label
    whole = rows.shapes[0].num_elements * c.groups.size
    if emitted.elements * emitted.runs * 2 < whole and not chosen:
        return None
    if not (context.is_of_batch(rows) or (chosen and is_like_a_result(rows, context))):
        return (
            "table_gathered",
            f"rows of `{name}` ({c.gathered_bytes:,} B) are fetched over {context.over(emitted)} by index "
            f"({emitted.op})",
            chosen or _LOOK_UP_OWN_ROWS,
        )
    return (
        BATCH_SHUFFLED,
        f"rows of the batch (`{name}`, {c.gathered_bytes:,} B) are fetched over {context.over(emitted)} by "
        f"index ({emitted.op}), although each device holds some",
        chosen
        or "shuffle or sample within each device's rows (a permutation for each device, in jax.shard_map), "
        "or shuffle on the host when the batch is loaded",
    )


def batch_in_an_index(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Rows moved over the batch's axis because an index array counts the batch: x[arange(B), i].

    The batch is then an indexed dimension, which the partitioner does not keep sharded.
    """
    name = primitive_of(emitted.collective.op_name)
    over = set(emitted.axes) & context.batch_axes
    if not over or emitted.is_written or not name.startswith(("gather", "scatter")):
        return None
    if _is_mapped(emitted):  # the count is of tables, since the remedy is in place
        return None
    groups = emitted.collective.groups.members
    if not any(_counts(context.program, each, groups) for each in _indices_of(emitted, context.program)):
        return None
    return (
        "batch_indexed",
        f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is moved over "
        f"{context.over(emitted)}, the batch's axis, for a {name} whose indices count the batch, such as "
        "x[jnp.arange(B), i]",
        "index each sequence by itself, so that the batch stays a batch dimension: "
        "jax.vmap(lambda x, i: x[i]), jnp.take_along_axis, or jax.vmap(lambda x, i, y: x.at[i].set(y))",
    )


def _is_mapped(emitted: Emitted) -> bool:
    """Whether jax.vmap maps the operation that a collective is named after."""
    return any(part.startswith("vmap(") for part in emitted.collective.op_name.split("/"))


def _indices_of(emitted: Emitted, program: Program) -> Iterator[TracedValue]:
    """The indices of the gathers and scatters that read a collective's result or compute its operand.

    A gather has the operands (array, indices), a scatter (arrays, indices, updates).
    """
    for user, _ in emitted.uses(program, elementwise=True):
        if user.instruction.opcode in ("gather", "scatter"):
            yield user.operand(len(user.instruction.operands) // 2)
    left, seen = [emitted.operand()], 0
    while left and seen < MOST_VALUES:
        origin = resolve(program, left.pop(), MOVES)
        if origin.instruction.opcode in ("gather", "scatter"):
            yield origin.operand(len(origin.instruction.operands) // 2)
        elif origin.instruction.opcode in ELEMENTWISE or op_of(origin.instruction) == "all_reduce":
            left += sources(program, origin)
        seen += 1


def _counts(program: Program, indices: TracedValue, groups: Sequence[Sequence[int]]) -> bool:
    """Whether a column of the indices is always 0, 1, 2, ... and indexes a dimension split within groups.

    The partitioner subtracts the offsets of the device's shard from each row of indices. A dimension is whole
    within a group if all its devices have the same offset.
    """
    left, seen = [indices], 0
    counted: set[int] = set()
    whole: set[int] = set()
    while left and seen < MOST_VALUES:
        origin = resolve(program, left.pop(), MOVES_OR_REPEATS)
        instruction = origin.instruction
        if instruction.opcode == "concatenate":
            columns = list(enumerate(origin.operands()))
            if len(instruction.shapes[0].dims) > 1:
                counted |= {column for column, part in columns if _is_count(program, part)}
            else:
                offsets = [(column, device_values(program, part)) for column, part in columns]
                whole |= {column for column, values in offsets if values and not _differ(values, groups)}
        elif instruction.opcode in (*ELEMENTWISE, "clamp") or op_of(instruction) == "all_gather":
            left += sources(program, origin)
        seen += 1
    return bool(counted - whole)


def _differ(values: Sequence[int], groups: Sequence[Sequence[int]]) -> bool:
    return any(len({values[device] for device in group}) > 1 for group in groups)


def _is_count(program: Program, part: TracedValue) -> bool:
    """Whether a value depends on an iota, or on a constant 0, 1, 2, ..., and on no input of the program."""
    has_count = False
    for value in ancestors(program, part):
        instruction = value.instruction
        if value.is_input:
            return False
        numbers = re.findall(r"-?\d+", instruction.literal) if instruction.opcode == "constant" else []
        has_count |= instruction.opcode == "iota" or (
            len(numbers) > 1 and [int(number) for number in numbers] == list(range(len(numbers)))
        )
    return has_count


def _rows_read_by(emitted: Emitted, context: ProgramContext) -> Instruction | None:
    """The input whose rows a collective sends: all rows, or only the rows that a gather looks up.

    Over other axes than the batch's, it must be of the batch or have the shape of a result.
    None without such an input.
    """
    program = context.program
    left, seen = [emitted.operand()], 0
    while left and seen < MOST_VALUES:
        origin = resolve(program, left.pop(), MOVES)
        instruction = origin.instruction
        if origin.is_input:
            are_rows = context.is_of_batch(instruction) or is_like_a_result(instruction, context)
            return instruction if are_rows or set(emitted.axes) & context.batch_axes else None
        if instruction.opcode == "gather":
            left = [origin.operand(0)]
        elif instruction.opcode in ELEMENTWISE:
            left += sources(program, origin)
        seen += 1
    return None


def rows_of_all(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Rows that the user gathers from all devices, of which each device takes a part by index.

    A mixture of experts does so if each device computes one expert's rows.
    """
    if emitted.op != "all_gather" or not emitted.is_written:
        return None
    read = 0
    for user, at in emitted.uses(context.program):
        size = user.instruction.shapes[0].num_elements if user.instruction.shapes else 0
        is_look_up = user.instruction.opcode == "gather" and at == 0
        if is_look_up and prod(user.instruction.numbers("slice_sizes")) > _SINGLES:
            read += size
        # A router multiplies all rows, to a few numbers for each.
        elif not (is_product(user) and size * FEWER_BYTES <= emitted.elements):
            return None
    if not read or read * _PART > emitted.elements:
        return None
    return (
        FOR_A_PART,
        f"{context.gathered(emitted)}, and each device takes {read / emitted.elements:.0%} of its rows by "
        "index",
        "choose on the device that has the rows (a router's product needs only its own), and send each row "
        "only where it is needed: jax.lax.all_to_all of one buffer for each device, or ragged_all_to_all, "
        "and the results back the same way",
    )


FOR_A_PART = "gathered_for_a_part"
# Rows have more numbers than this. Others are single results, such as the places of a top k.
_SINGLES = 8
# A gather is reported if a device takes at most one in this many of its rows.
_PART = 2


def added_by_index(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Rows added by index to an array that is split: each device sends partial sums of all rows."""
    c = emitted.collective
    is_sum = c.op == "all_reduce" and not c.gathers and not emitted.is_written
    name, shape = primitive_of(c.op_name), emitted.value.instruction.shapes[-1]
    if not is_sum or context.differentiated or not name.startswith("scatter") or len(shape.dims) <= 1:
        return None
    origin = resolve(context.program, emitted.operand(), MOVES)
    if origin.instruction.opcode not in ("scatter", "while"):  # XLA for CPU may make a loop of the scatter
        return None
    if not any(_looks_up_rows_of(other, emitted) for other in context.sent):
        return None  # an array that is stored whole
    return (
        "added_by_index",
        f"rows are added by index ({name}) to an array that all devices sum: {c.gathered_bytes:,} B over "
        f"{context.over(emitted)}, {emitted.runs:,} times a step, although each device adds to few rows, or "
        "keeps few",
        _chosen_among_all(emitted, context)
        or "split the rows' features over that axis, in place of the rows, for the look-ups and these sums "
        "(one all-to-all before and after): each device then adds up whole columns, and nothing is summed; "
        "or give each device the entries that add to its own rows (sort edges by their target)",
    )


def _looks_up_rows_of(other: Emitted, emitted: Emitted) -> bool:
    """Whether `other` fetches rows by index, over the axes of a sum, from an array of the sum's size."""
    is_lookup = primitive_of(other.collective.op_name) == "gather" and other.axes == emitted.axes
    return is_lookup and other.elements_of_all == emitted.elements_of_all

"""The rules that recognise mistakes, one function each: weights, activations, any transfer.

Each checks one collective in its program and returns a fault or None.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from meshwright.audit.facts.communication import bits_of, is_cast
from meshwright.audit.facts.compiled_schedule import ProgramSchedule
from meshwright.audit.facts.emitted import ELEMENTWISE, REDUCTIONS, Emitted, is_computed, is_product
from meshwright.audit.facts.instruction_work import flops_of
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.facts.shards import device_values, own_slices
from meshwright.audit.hlo.op_names import primitive_of, split_op_name
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program
from meshwright.audit.hlo.trace import (
    COPIES,
    MOVES,
    CallPath,
    TracedValue,
    ancestors,
    called_by,
    history,
    readers,
    same_each_turn,
    sources,
    trip_count,
    value_key,
)
from meshwright.dtypes import NUMBER_TYPES, number_type, of_hlo, types_for

Fault = tuple[str, str, str]  # kind, what, change

WHOLE_DIMENSION = "gathered_for_one_operation"


@dataclass(frozen=True)
class ProgramContext:
    """Facts about the program that rules need in addition to a collective.

    fsdp_axes: mesh axes that shard both the batch and weights. batch_axes: mesh axes that shard the batch.
    batch_elements: numbers of the batch on one device, such as its tokens. batch_names: its inputs.
    """

    program: Program
    sent: tuple[Emitted, ...]
    prices: Prices
    differentiated: bool
    schedule: ProgramSchedule
    fsdp_axes: frozenset[str] = frozenset()
    batch_axes: frozenset[str] = frozenset()
    batch_elements: int = 0
    batch_names: frozenset[str] = frozenset()

    def over(self, emitted: Emitted) -> str:
        """The devices that a collective joins, in words."""
        return self.prices.over(emitted.axes, emitted.collective.groups.size)


FaultRule = Callable[[Emitted, ProgramContext], Fault | None]


# A weight's gather is reported if moving the activations instead would send fewer bytes by this factor.
_FEWER_BYTES = 4


def table(emitted: Emitted, context: ProgramContext) -> Fault | None:
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
            shares = set(emitted.axes) & context.batch_axes
            rows_of_all = looked_up * emitted.collective.groups.size
            return (
                "table_gathered",
                f"the whole table `{emitted.tensor}` is gathered over {context.over(emitted)} "
                f"({emitted.collective.gathered_bytes:,} B) to look up rows of {looked_up:,} B",
                _EXCHANGE_ROWS
                if shares and _is_mapped(emitted) and rows_of_all < emitted.collective.gathered_bytes
                else _LOOK_UP_OWN_ROWS
                if rows_of_all >= emitted.collective.gathered_bytes
                else "the looked-up indices are sharded over the same axis: gather the indices, a few bytes, "
                "look up in each device's shard and reduce-scatter the rows, in jax.shard_map; or shard the "
                "table over another axis"
                if shares
                else "look up rows in each device's shard and all-reduce them: keep the table sharded and "
                "constrain only the result",
            )
    return None


# If jax.vmap maps a look-up over tables of which each device has some.
_EXCHANGE_ROWS = (
    "each device has some of the tables, and the indices are split by the batch over the same axis: look up "
    "where the tables are (constrain the indices to be whole, a few bytes, and the rows to be split as the "
    "tables), then constrain the rows to be split by the batch (one all-to-all)"
)


def _looked_up(emitted: Emitted, context: ProgramContext) -> Fault:
    """A computed array gathered to read some of its elements by index: sorted logits, say."""
    return (
        WHOLE_DIMENSION,
        f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is moved over "
        f"{context.over(emitted)} ({emitted.op}) to be read by index along its split dimension, no matmul",
        "read it by index along a dimension that is whole: constrain it along another dimension before (one "
        "all-to-all); or read each device's own elements in jax.shard_map, zeros for the others, and sum",
    )


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
    *_, origin = history(context.program, emitted.operand(), MOVES)
    if origin.instruction.opcode == "scatter":
        shapes = [origin.operand(at).instruction.shapes[0] for at in range(len(origin.instruction.operands))]
    elif origin.instruction.opcode == "while":  # XLA for CPU may make a loop of the scatter
        shapes = list(origin.instruction.shapes)
    else:
        return None
    # The two largest arrays are the table and the rows' gradients.
    rows, *_ = sorted(shape.num_bytes for shape in shapes)[-2:]
    if c.gathered_bytes < _SPARSE * rows:
        return None
    return (
        "table_summed",
        f"the gradient of a whole table (`{emitted.tensor}`, {c.gathered_bytes:,} B) is summed over "
        f"{context.over(emitted)}, although each device looked up rows of {rows:,} B",
        "shard the table along its columns over that axis, so that each device has a part of all rows' "
        "gradients; or exchange the rows' gradients with their indices in jax.shard_map",
    )


def batch_by_index(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Rows fetched from other devices by index: of a batch shuffled within the step, or of a table."""
    c = emitted.collective
    if (
        emitted.op not in (*REDUCTIONS, "all_gather")
        or emitted.is_written
        or primitive_of(c.op_name) != "gather"
    ):
        return None
    rows = _rows_read_by(emitted, context)
    if rows is None or (emitted.op == "all_gather" and is_integer(rows)):  # perhaps the indices
        return None
    name = rows.op_name or rows.name
    whole = rows.shapes[0].num_elements * c.groups.size
    if emitted.elements * emitted.runs * 2 < whole:
        return None
    if name not in context.batch_names and not is_integer(rows):
        return (
            "table_gathered",
            f"rows of `{name}` ({c.gathered_bytes:,} B) are fetched over {context.over(emitted)} by index "
            f"({emitted.op})",
            _LOOK_UP_OWN_ROWS,
        )
    return (
        "batch_shuffled",
        f"rows of the batch (`{name}`, {c.gathered_bytes:,} B) are fetched over {context.over(emitted)} by "
        f"index ({emitted.op}), although each device holds some",
        "shuffle or sample within each device's rows (a permutation for each device, in jax.shard_map), or "
        "shuffle on the host when the batch is loaded",
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
    while left and seen < _FEW:
        *_, origin = history(program, left.pop(), MOVES)
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
    while left and seen < _FEW:
        *_, origin = history(program, left.pop(), MOVES | {"broadcast"})
        instruction = origin.instruction
        if instruction.opcode == "concatenate":
            columns = list(enumerate(origin.operand(i) for i in range(len(instruction.operands))))
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
        if instruction.opcode == "parameter" and not value.place.frames:
            return False
        numbers = re.findall(r"-?\d+", instruction.literal) if instruction.opcode == "constant" else []
        has_count |= instruction.opcode == "iota" or (
            len(numbers) > 1 and [int(number) for number in numbers] == list(range(len(numbers)))
        )
    return has_count


def _rows_read_by(emitted: Emitted, context: ProgramContext) -> Instruction | None:
    """The input whose rows a collective sends: all of them, or those that a gather looks up.

    None if the input is not of the batch, and is not sent over the batch's axes either.
    """
    program = context.program
    left, seen = [emitted.operand()], 0
    while left and seen < _FEW:
        *_, origin = history(program, left.pop(), MOVES)
        instruction = origin.instruction
        if instruction.opcode == "parameter" and not origin.place.frames:
            name = instruction.op_name or instruction.name
            is_of_batch = is_integer(instruction) or name in context.batch_names
            return instruction if is_of_batch or set(emitted.axes) & context.batch_axes else None
        if instruction.opcode == "gather":
            left = [origin.operand(0)]
        elif instruction.opcode in ELEMENTWISE:
            left += sources(program, origin)
        seen += 1
    return None


def is_integer(parameter: Instruction) -> bool:
    """Whether an input holds integers or booleans, as tokens, labels and masks of rows, not 4-bit weights."""
    return re.fullmatch(r"[su](8|16|32|64)|pred", parameter.shapes[0].dtype) is not None


def flat_array(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Slices moved of one long array that holds all weights."""
    c = emitted.collective
    moves = emitted.op in ("permute", "all_to_all", "all_gather") and not c.follows_sum
    if not moves or emitted.is_written or primitive_of(c.op_name) not in _PIECES:
        return None
    stored = next(
        (
            value.instruction
            for value in _parts_before(emitted, context.program)
            if value.instruction.opcode == "parameter" and not value.place.frames
        ),
        None,
    )
    name = (stored.op_name or stored.name) if stored else ""
    if stored is None or len(stored.shapes[0].dims) != 1 or name in context.batch_names:
        return None
    return (
        "weight_resharded",
        f"slices of the one-dimensional array `{name}` are moved over {context.over(emitted)} "
        f"({emitted.op}): each slice, such as one weight, is stored on a part of the devices",
        "store each weight as an array of its own, sharded along one of its dimensions: a tree of arrays, "
        "not one array of all (ravel_pytree)",
    )


def _parts_before(emitted: Emitted, program: Program) -> Iterator[TracedValue]:
    """The values that a collective's operand is assembled from, also by earlier collectives."""
    left, seen = [emitted.operand()], 0
    while left and seen < _FEW:
        *_, origin = history(program, left.pop(), MOVES)
        yield origin
        is_moved = op_of(origin.instruction) in _MOVED
        if is_moved or origin.instruction.opcode in (*ELEMENTWISE, *_JOINED):
            left += sources(program, origin)
        seen += 1


_MOVED = ("permute", "all_to_all", "all_gather")
_JOINED = ("concatenate", "pad", "select", "dynamic-update-slice")
_PIECES = ("slice", "split", "dynamic_slice", "reshape")  # JAX's primitives


def repeated_gather(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A weight gathered in each turn of a loop that does not change it."""
    if emitted.op != "all_gather":
        return None
    for depth, frame in enumerate(emitted.value.place.frames):
        if frame.caller.opcode != "while" or not same_each_turn(context.program, emitted.operand(), depth):
            continue
        if is_computed(context.program, emitted.operand()):
            continue
        loop = TracedValue(frame.caller, _place_of(emitted, depth))
        trips = trip_count(context.program, loop)
        if trips == 1:
            continue
        turns = f"{round(trips):,} times" if trips else "in every iteration"
        return (
            "weight_gathered_repeatedly",
            f"`{emitted.tensor}` is gathered over {context.over(emitted)} {turns} in the loop "
            f"{frame.caller.op_name or frame.caller.name}, which does not change it",
            "gather it once, before the loop, if memory allows; or keep it sharded as its matmuls use it "
            + ("(tensor parallelism)" if context.differentiated else "(tensor parallelism), without FSDP"),
        )
    return None


# The remedy for all factorisations is listed under this one.
_FACTORS = "cholesky"
# What to write for operations along a whole dimension, by JAX's primitive.
_WITHOUT_PARTS = {
    "top_k": "take the top k of each device's shard, gather these, and take their top k (jax.shard_map)",
    "sort": "sort along a dimension that is whole: constrain the operand as its product yields it, then "
    "along another dimension (one all-to-all)",
    "fft": "transform whole lines on each device in jax.shard_map, since XLA gathers the operand of an FFT: "
    "shard it along another dimension before, by one all-to-all",
    "cumsum": "sum within each device's shard, exchange the shards' totals, and add the totals of "
    "earlier shards (jax.shard_map)",
    _FACTORS: "XLA does not divide a factorisation: of many matrices, shard the dimension that counts them "
    "(one all-to-all, and jax.shard_map); one large matrix needs an algorithm by blocks",
}
_SAME_REMEDY = (
    {"approx_top_k": "top_k", "argsort": "sort"}
    | dict.fromkeys(
        (
            "cumprod",
            "cummax",
            "cummin",
            "cumlogsumexp",
            "associative_scan",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
        ),
        "cumsum",
    )
    | dict.fromkeys(("eigh", "eig", "svd", "qr", "geqrf", "lu", "triangular_solve", "schur"), _FACTORS)
)
_CONSTRAINTS = ("sharding_constraint", "reshard")
_BY_OPCODE = {"sort": "sort", "topk": "top_k", "fft": "fft"}


def along_the_whole(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array moved for an operation along its sharded dimension that needs only parts of it."""
    if emitted.op not in ("all_gather", "all_to_all") or emitted.is_written or emitted.collective.follows_sum:
        return None
    name = primitive_of(emitted.collective.op_name)
    if emitted.op == "all_to_all" and name in _CONSTRAINTS:  # the remedy
        return None
    operation = next(filter(None, map(_needs_whole, emitted.uses(context.program, elementwise=True))), None)
    if operation is None and name in (*_WITHOUT_PARTS, *_SAME_REMEDY):
        operation = name
    # The remedy for factorisations is an exchange that gives each device whole matrices.
    is_remedy = emitted.op == "all_to_all" and _SAME_REMEDY.get(operation or "", operation) == _FACTORS
    if operation is None or is_remedy:
        return None
    return (
        WHOLE_DIMENSION,
        f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is moved over "
        f"{context.over(emitted)} ({emitted.op}) for {operation}, no matmul",
        _without_the_whole(operation, emitted),
    )


# The array has one dimension, as the quantile of a flattened array has.
_SORT_OF_A_VECTOR = (
    "no other dimension can be split, since the sorted array has only one: for a quantile or a median, count "
    "each device's numbers below some thresholds and sum the counts (psum), or sort a sample of each shard; "
    "for a permutation, permute within each device"
)


# Sizes of a scan's transfers, each half of the one before, that tell it from other slices.
_HALVINGS = 4


def scanned_in_halves(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Parts moved by jax.lax.associative_scan along a split dimension, which halves it again and again."""
    c = emitted.collective
    if emitted.op not in _MOVED or emitted.is_written or not _is_of_scan(emitted):
        return None
    sizes = sorted(
        {
            other.collective.gathered_bytes
            for other in context.sent
            if other.op in _MOVED and _is_of_scan(other) and other.source == emitted.source
        }
    )
    halvings = sum(2 * small == large for small, large in pairwise(sizes))
    if halvings < _HALVINGS:
        return None
    return (
        (
            WHOLE_DIMENSION,
            f"arrays of {sizes[0]:,} to {sizes[-1]:,} B, each half as large as the next, are moved over "
            f"{context.over(emitted)} for a scan (jax.lax.associative_scan) along a dimension that is split "
            "there",
            "scan within each device's shard in jax.shard_map, gather the shards' totals, scan these, and "
            "combine"
            " each shard with the total before it; or constrain 16-bit operands to be split along another "
            "dimension, such as channels, and the result back (one all-to-all each)",
        )
        if c.gathered_bytes in sizes
        else None
    )


def _is_of_scan(emitted: Emitted) -> bool:
    """Whether it is named after a primitive of which associative_scan consists."""
    return primitive_of(emitted.collective.op_name) in ("slice", "pad", "concatenate")


def added_by_index(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Rows added by index to an array that is split: each device sends partial sums of all rows."""
    c = emitted.collective
    is_sum = c.op == "all_reduce" and not c.gathers and not emitted.is_written
    name, shape = primitive_of(c.op_name), emitted.value.instruction.shapes[-1]
    if not is_sum or context.differentiated or not name.startswith("scatter") or len(shape.dims) <= 1:
        return None
    *_, origin = history(context.program, emitted.operand(), MOVES)
    if origin.instruction.opcode not in ("scatter", "while"):  # XLA for CPU may make a loop of the scatter
        return None
    if not any(_looks_up_alike(other, emitted) for other in context.sent):
        return None  # an array that is stored whole
    return (
        "added_by_index",
        f"rows are added by index ({name}) to an array that all devices sum: {c.gathered_bytes:,} B over "
        f"{context.over(emitted)}, {emitted.runs:,} times a step, although each device adds to few rows, or "
        "keeps few",
        "split the rows' features over that axis, in place of the rows, for the look-ups and these sums (one "
        "all-to-all before and after): each device then adds up whole columns, and nothing is summed; or "
        "give each device the entries that add to its own rows (sort edges by their target)",
    )


def _looks_up_alike(other: Emitted, emitted: Emitted) -> bool:
    """Whether a collective fetches rows, by index, of an array of the size of a sum and over its devices."""
    is_lookup = primitive_of(other.collective.op_name) == "gather" and other.axes == emitted.axes
    return is_lookup and other.elements_of_all == emitted.elements_of_all


def _without_the_whole(operation: str, emitted: Emitted) -> str:
    """The remedy for an operation along a whole dimension."""
    listed = _SAME_REMEDY.get(operation, operation)
    dims = emitted.value.instruction.shapes[-1].dims
    is_vector = sum(size > 1 for size in dims) == 1
    return _SORT_OF_A_VECTOR if listed == "sort" and is_vector else _WITHOUT_PARTS[listed]


def _needs_whole(use: tuple[TracedValue, int]) -> str | None:
    """The primitive of a reader that takes a whole dimension."""
    instruction = use[0].instruction
    target = instruction.attributes.get("custom_call_target", "").strip('"').lower()
    if target == "topk":
        return "top_k"
    names = (primitive_of(name) for name in split_op_name(instruction.op_name))
    known = next((name for name in names if name in _WITHOUT_PARTS or name in _SAME_REMEDY), None)
    return known or _BY_OPCODE.get(instruction.opcode)


def written_whole(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered whole to write a part of it, at an offset that the program computes."""
    if emitted.op != "all_gather" or emitted.is_written or emitted.value.place.loops:
        return None
    for user, at in emitted.uses(context.program):
        if user.instruction.opcode == "dynamic-update-slice" and at == 0:
            part = user.operand(1).instruction.shapes[0].num_bytes
            return (
                WHOLE_DIMENSION,
                f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is gathered over "
                f"{context.over(emitted)} only to write {part:,} B of it (dynamic_update_slice)",
                "keep the dimension of the written rows whole and shard another one (heads, or the batch), "
                "or write in jax.shard_map, in which each device writes its own rows",
            )
    return None


def only_reduced(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered only for a maximum, a sum or a norm; its shards can be reduced first."""
    if emitted.op != "all_gather" or emitted.collective.follows_sum:
        return None
    if not emitted.collective.groups.size:
        return None  # groups that differ in size
    uses = [
        (user, at)
        for user, at in emitted.uses(context.program, elementwise=True, joined=True)
        if not (emitted.is_written and _returns_shards(user, emitted))
    ]
    shard_elements = emitted.elements / emitted.collective.groups.size
    reads = _REDUCES if not emitted.is_written else (*_REDUCES, "gather")  # of a target's logit
    # The user's all_gather may add a dimension, so that a sum over it is as large as a shard. It is reported
    # only if nothing is between: a masked sum, as of the totals of earlier shards, needs the gathered totals.
    is_plain = all(user.instruction.opcode in _REDUCES for user, _ in emitted.uses(context.program))
    most = shard_elements if emitted.is_written and is_plain else shard_elements - 1
    if not any(user.instruction.opcode in _REDUCES for user, _ in uses) or not all(
        user.instruction.opcode in reads and user.instruction.shapes[0].num_elements <= most
        for user, _ in uses
    ):
        return None
    names = (primitive_of(user.instruction.op_name) for user, _ in uses)
    operations = ", ".join(dict.fromkeys(filter(None, names))) or "a reduction"
    change = (
        "reduce each device's shard (its maximum, its sum, the logits of targets in it), then combine the "
        "results: jax.lax.pmax and psum in place of all_gather"
        if emitted.is_written
        else "reduce each device's shard and combine the results: keep the operand sharded "
        "(with_sharding_constraint, of logits along the vocabulary), and sum a norm's squares array by "
        "array, not in one concatenated array"
    )
    return (
        WHOLE_DIMENSION,
        f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is gathered over "
        f"{context.over(emitted)} only to be reduced ({operations})",
        change,
    )


_REDUCES = ("reduce", "reduce-window")


def _returns_shards(user: TracedValue, emitted: Emitted) -> bool:
    """Whether a reader is the reduce-scatter that a gradient of an all-gather ends in."""
    return op_of(user.instruction) == "reduce_scatter" and user.instruction.attributes.get(
        "replica_groups"
    ) == emitted.value.instruction.attributes.get("replica_groups")


def summed_each_turn(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A sum over devices in each turn of a loop that only adds up: gradients of microbatches."""
    place = emitted.value.place
    if emitted.collective.op != "all_reduce" or emitted.collective.gathers or not place.loops:
        return None
    uses = list(_after_scaling(context.program, emitted.uses(context.program)))
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
    uses = list(_after_scaling(context.program, emitted.uses(context.program)))
    if not uses or not all(_is_added_to_sums(*use, emitted, context) for use in uses):
        return None
    return (
        "summed_repeatedly",
        f"`{emitted.tensor}` is all-reduced over {context.over(emitted)}, and the result is only added to "
        "results of other such sums",
        "add the partial results on each device, and all-reduce their sum once: look up or multiply in one "
        "jax.shard_map with a psum at its end",
    )


def _is_added_to_sums(user: TracedValue, at: int, emitted: Emitted, context: ProgramContext) -> bool:
    """Whether an addition adds operand `at` only to results of other all-reduces over the same devices."""
    if user.instruction.opcode != "add" or at not in (0, 1):
        return False
    left, seen = [user.operand(1 - at)], 0
    while left and seen < _FEW:
        *_, origin = history(context.program, left.pop(), MOVES)
        other = next((s for s in context.sent if s.value.instruction is origin.instruction), None)
        if other is not None and other.collective.op == "all_reduce" and _same_devices(other, emitted):
            seen += 1
        elif origin.instruction.opcode == "add":
            left += sources(context.program, origin)
        else:
            return False
    return True


def _after_scaling(
    program: Program, uses: Iterable[tuple[TracedValue, int]]
) -> Iterator[tuple[TracedValue, int]]:
    """The uses; in place of a product with a constant, or a quotient by one, the uses of its result.

    A constant divided by a sum does not scale it: such quotients cannot be added before the sum.
    """
    for user, at in uses:
        if (user.instruction.opcode, at) in _SCALINGS:
            *_, other = history(program, user.operand(1 - at), MOVES | {"broadcast"})
            if other.instruction.opcode == "constant":
                yield from _after_scaling(program, readers(program, user))
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
    *_, other = history(program, user.operand(index), MOVES)
    is_carry = other.instruction.opcode == "parameter" and bool(other.place.frames and other.path)
    if not is_carry or any(value_key(reader) != value_key(user) for reader, _ in readers(program, other)):
        return False  # a residual, which the layers of the loop read too
    return all(after < 0 and next_.path == other.path for next_, after in readers(program, user))


def stack_of_layers(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A stack of layers gathered whole before a loop that reads a layer in each turn."""
    if emitted.op != "all_gather" or emitted.is_written or is_computed(context.program, emitted.operand()):
        return None
    dims = emitted.value.instruction.attributes.get("dimensions", "")
    *_, stored = history(context.program, emitted.operand(), MOVES)
    is_batch = emitted.collective.parameter in context.batch_names or is_integer(stored.instruction)
    if is_batch or emitted.value.place.loops:
        return None
    if dims != "{0}":
        return _gathered_before_its_loop(emitted, context)
    # The partitioner names the gather after the slice in the loop, whose operand it gathers.
    name = emitted.collective.op_name
    is_of_loop = "/while/" in name and primitive_of(name) in _SLICES
    if not is_of_loop or not any(
        user.instruction.opcode == "while" for user, _ in emitted.uses(context.program)
    ):
        return None
    shape = emitted.result().instruction.shapes[-1]
    *_, origin = history(context.program, emitted.operand(), MOVES)
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


def is_cut_in_a_loop(emitted: Emitted, program: Program, along: int = 0) -> bool:
    """Whether a loop reads one entry of an array's dimension `along` in each turn."""
    dims = emitted.result().instruction.shapes[-1].dims
    entry = (*dims[:along], 1, *dims[along + 1 :])
    loops = {
        user.instruction.name: user for user, _ in emitted.uses(program) if user.instruction.opcode == "while"
    }
    for loop in loops.values():
        body = program.computations[loop.instruction.attributes["body"].lstrip("%")]
        inside = [body, *(one for each in body.instructions.values() for one in called_by(program, each))]
        for computation in inside:
            for each in computation.instructions.values():
                if each.opcode == "dynamic-slice" and each.shapes[0].dims == entry:
                    return computation.instructions[each.operands[0]].shapes[0].dims == dims
    return False


_SLICES = ("dynamic_slice", "dynamic_index_in_dim", "gather", "squeeze")


def for_few_tokens(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A weight gathered for few tokens in inference.

    Moving the activations would be cheaper.
    """
    if (
        emitted.op != "all_gather"
        or context.differentiated
        or is_computed(context.program, emitted.operand())
    ):
        return None
    for user, other in emitted.products(context.program):
        activations = other.instruction.shapes[0].num_bytes + user.instruction.shapes[0].num_bytes
        if emitted.collective.gathered_bytes > _FEWER_BYTES * activations:
            return (
                "weight_gathered_for_few_tokens",
                f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is gathered over "
                f"{context.over(emitted)} for a matmul with only {activations:,} B of activations",
                "keep the weight sharded and move the activations: tensor parallelism in place of FSDP",
            )
    return None


# An exchange of tokens takes two all-to-alls, before and after the experts.
_EXCHANGES = 2


def of_all_experts(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Weights gathered along a batch dimension of their product, such as experts."""
    if emitted.op != "all_gather" or is_computed(context.program, emitted.operand()):
        return None
    dims = emitted.value.instruction.attributes.get("dimensions", "")
    along = [int(dim) for dim in re.findall(r"\d+", dims)]
    shape = emitted.value.instruction.shapes[-1]
    for user, other in emitted.products(context.program):
        side = "rhs" if other.instruction is user.operand(0).instruction else "lhs"
        batched = re.findall(r"\d+", user.instruction.attributes.get(f"{side}_batch_dims", ""))
        weight = user.operand(int(side == "rhs")).instruction.shapes[0]
        batch_sizes = {weight.dims[int(dim)] for dim in batched}
        activations = other.instruction.shapes[0].num_bytes + user.instruction.shapes[0].num_bytes
        if (
            len(along) == 1
            and shape.dims[along[0]] in batch_sizes
            and emitted.collective.gathered_bytes > _EXCHANGES * activations
        ):
            return (
                "weight_gathered_for_few_tokens",
                f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is gathered over "
                f"{context.over(emitted)} along a batch dimension of its matmul, such as experts, for "
                f"{activations:,} B of activations on each device",
                "keep the experts where they are stored and exchange the tokens: shard the dispatched rows "
                "along that dimension over the experts' axis (one all-to-all), and the results as before",
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
        or _is_shift(emitted)
        or emitted.collective.parameter in context.batch_names
        or is_computed(context.program, emitted.operand())
        or primitive_of(c.op_name) in _TURNS
    ):
        return None
    if any(emitted.products(context.program)):
        is_read = any(one.instruction.opcode == "gather" for one in _parts_before(emitted, context.program))
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


_CUTS = ("split", "concatenate", "slice")


def cut_along_shards(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array moved because a sharded dimension is cut or joined, as by the halves of a rotary position."""
    name = primitive_of(emitted.collective.op_name)
    moves = emitted.op in ("permute", "all_to_all", "all_gather") and not emitted.collective.follows_sum
    if (
        not moves
        or name not in _CUTS
        or emitted.is_written
        or emitted.is_windowed
        or _is_halo(emitted, context)
        or any(emitted.products(context.program))
        or _is_moved_before(emitted, context.program)
    ):
        return None
    change = (
        "shard another dimension there, such as the batch, or keep the pieces as separate arrays, such as a "
        "class token and its sequence"
        if name == "concatenate"
        else "shard another dimension there (the batch, or the heads and not the elements of a head), or "
        "reshape it to [shards, rest] so that each device has a part of every piece"
    )
    return (
        "activation_resharded",
        f"`{emitted.tensor}` is moved over {context.over(emitted)} ({emitted.op}), because {name} cuts or "
        "joins the dimension that is sharded there",
        change,
    )


def _is_moved_before(emitted: Emitted, program: Program) -> bool:
    """Whether another collective has moved parts of its operand before."""
    return any(op_of(value.instruction) in _MOVED for value in _parts_before(emitted, program))


# The distances of an exchange of halos: from the device before and from the one after.
_BOTH_WAYS = 2
# A halo in both directions is smaller than the shard divided by this. Permutes in both directions that send
# more move an array that is cut at both ends.
_SHARD_PER_HALO = 2


def _is_halo(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether a permute sends edges of shards to the neighbours, or all shards one device on."""
    distances = len(_distances(emitted, context))
    if not _is_shift(emitted) or distances > _BOTH_WAYS:
        return False
    *_, shard = history(context.program, emitted.operand(), MOVES)
    sent = emitted.operand().instruction.shapes[0].num_elements
    return distances < _BOTH_WAYS or sent * _SHARD_PER_HALO < shard.instruction.shapes[0].num_elements


def _distances(emitted: Emitted, context: ProgramContext) -> set[int]:
    """The distances, in device numbers, over which an operation's permutes send parts of this tensor."""
    name = emitted.collective.op_name
    return {
        b - a
        for sent in context.sent
        if sent.op == "permute" and sent.collective.op_name == name and sent.tensor == emitted.tensor
        for a, b in _pairs(sent)
    }


def merged_dimensions(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array exchanged because a reshape merges its sharded dimension with an earlier one, or cuts it."""
    moves = emitted.op in ("permute", "all_to_all") and not emitted.collective.follows_sum
    if (
        not moves
        or primitive_of(emitted.collective.op_name) != "reshape"
        or emitted.is_written
        or emitted.is_windowed
        or _is_shift(emitted)
    ):
        return None
    return (
        "activation_resharded",
        f"`{emitted.tensor}` is moved over {context.over(emitted)} ({emitted.op}), because a reshape merges "
        "its sharded dimension with another or cuts it",
        "keep the dimensions apart (einsum over both), shard the first of the merged dimensions, or leave "
        "out the constraint on the merged array",
    )


def returned_whole(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered only to be returned: an update whose input is sharded, or results of a batch."""
    if (
        emitted.op != "all_gather"
        or emitted.is_written
        or not is_computed(context.program, emitted.operand())
    ):
        return None
    uses = list(emitted.uses(context.program))
    if not uses or any(at >= 0 for _, at in uses):
        return None
    shape = emitted.value.instruction.shapes[-1]
    stored = next(
        (
            one
            for one in context.program.main.parameters
            if one.shapes
            and one.shapes[0].dims == emitted.operand().instruction.shapes[0].dims
            and (one.op_name or one.name) not in context.batch_names
        ),
        None,
    )
    if stored is None or not context.differentiated:
        if not set(emitted.axes) & context.batch_axes:
            return None
        return (
            "returned_whole",
            f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is gathered over "
            f"{context.over(emitted)}, the batch's axis, only to be returned: every device gets all of it",
            "return it as it was computed, each device with its part of the batch (out_shardings)",
        )
    if stored.shapes[0].num_elements * emitted.collective.groups.size != shape.num_elements:
        return None
    # Under ZeRO-1 weights are whole as inputs and as results; only their moments are sharded.
    given = sum(one.dims == shape.dims for each in context.program.main.parameters for one in each.shapes)
    if given >= sum(one.dims == shape.dims for one in context.program.main.result.shapes):
        return None
    name = stored.op_name or stored.name
    return (
        "returned_whole",
        f"`{emitted.tensor}` ({emitted.collective.gathered_bytes:,} B) is gathered over "
        f"{context.over(emitted)} only to be returned, although inputs of its shape, such as `{name}`, are "
        "sharded",
        "return it with the sharding of the input (out_shardings): otherwise every device holds all of it, "
        "and the next step, which gets whole arrays, is compiled again",
    )


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


def there_and_back(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A computed array exchanged to another sharding and back, with no product between."""
    if emitted.op != "all_to_all" or emitted.is_written:
        return None
    # The layers between may multiply the array (a residual), and need it in the other sharding.
    if not is_computed(context.program, emitted.operand()) or any(emitted.products(context.program)):
        return None
    for user, at in emitted.uses(context.program, elementwise=True, joined=True):
        back = next((one for one in context.sent if one.value.instruction is user.instruction), None)
        if at < 0 or back is None or back.is_written or (back.op, back.axes) != (emitted.op, emitted.axes):
            continue
        if back.collective.gathered_bytes == emitted.collective.gathered_bytes:
            return (
                "moved_there_and_back",
                f"`{emitted.tensor}` is exchanged over {context.over(emitted)} and back "
                f"({back.tensor}, {emitted.collective.gathered_bytes:,} B each), with only elementwise "
                "operations between",
                "compute them in the sharding that the array has before and after: drop the constraint "
                "between, or give it the axes of the neighbouring matmuls",
            )
    return None


def _is_shift(emitted: Emitted) -> bool:
    """Whether each device sends to the next or the one before: a pipeline's shift, or a halo's rows."""
    pairs = _pairs(emitted)
    if emitted.op != "permute" or not pairs or any(a == b for a, b in pairs):
        return False
    # All go the same way, except the ones that close a ring; or few devices send, as the last of a pipeline.
    (_, times), *others = Counter(b - a for a, b in pairs).most_common()
    num_devices = emitted.mesh.num_devices if emitted.mesh else 0
    is_ring = len(pairs) > 2 and len(others) <= 1 and 2 * times > len(pairs)
    return is_ring or 2 * len(pairs) < num_devices


def _pairs(emitted: Emitted) -> list[tuple[int, int]]:
    """(sender, receiver) of each pair of a permute."""
    text = emitted.value.instruction.attributes.get("source_target_pairs", "")
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]


def stored_otherwise(emitted: Emitted, context: ProgramContext) -> Fault:
    return (
        "weight_resharded",
        f"`{emitted.tensor}` is stored with one sharding and used with another: {emitted.op} over "
        f"{context.over(emitted)} before its matmul",
        "store it with the sharding that its matmul uses",
    )


def _place_of(emitted: Emitted, depth: int) -> CallPath:
    place = emitted.value.place
    while len(place.frames) > depth:
        place = place.parent
    return place


UNCONSTRAINED = "activations_not_constrained"


def batch_moved(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """The batch itself moved before its matmul, to the sharding of weights: FSDP without constraints."""
    axes = set(emitted.axes) & context.fsdp_axes
    if (
        not axes
        or emitted.op not in ("all_gather", "all_to_all")
        or emitted.is_written
        or emitted.collective.parameter not in context.batch_names
    ):
        return None
    return unconstrained(emitted, context)


def over_the_batch(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Activations summed or gathered over axes that shard both batch and weights.

    The partitioner has sharded the activations like the weights then, and not by the batch: FSDP without
    constraints.
    """
    c, axes = emitted.collective, set(emitted.axes) & context.fsdp_axes
    forward = c.phase == "forward" or not context.differentiated
    operand = emitted.operand()
    if (
        not (axes and forward)
        or emitted.op not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        or emitted.is_written
        or emitted.elements <= context.batch_elements
        or _is_by_index(emitted, context)
        or not (is_computed(context.program, operand) or _is_carried(emitted, context.program))
    ):
        return None
    return unconstrained(emitted, context)


def _is_by_index(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether rows of all devices are read or added by index, such as messages between nodes of a graph."""
    if emitted.op in ("all_reduce", "reduce_scatter"):  # XLA for CPU may make a loop of the scatter
        return primitive_of(emitted.collective.op_name).startswith("scatter")
    parts = _parts_before(emitted, context.program) if emitted.op == "all_to_all" else ()
    # To split the rows again, after their features were.
    if any(primitive_of(value.instruction.op_name).startswith("scatter") for value in parts):
        return True
    uses = list(emitted.uses(context.program))
    return bool(uses) and all(user.instruction.opcode == "gather" and at == 0 for user, at in uses)


def unconstrained(emitted: Emitted, context: ProgramContext) -> Fault:
    return (
        UNCONSTRAINED,
        f"activations (`{emitted.tensor}`) are communicated over {context.over(emitted)}, which shards both "
        "batch and weights: the partitioner sharded the activations like the weights, not by batch",
        "constrain the activations to the batch's axes: with_sharding_constraint(x, P(batch axes)) after the "
        "embedding and in each layer, so that the weights are gathered instead",
    )


def over_a_part(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Activations gathered in parts of an axis, whose size does not divide a dimension of a reshape."""
    if emitted.op != "all_gather" or not emitted.is_part or not _is_moved_activation(emitted, context):
        return None
    (axis,) = emitted.axes[:1] or ("",)
    whole, size = context.prices.mesh.sizes.get(axis, 1), emitted.collective.groups.size
    if not size:  # groups that differ in size
        return None
    return (
        "activation_resharded",
        f"activations (`{emitted.tensor}`) are gathered in groups of {size} of the {whole} devices over "
        f"`{axis}`, since {whole} does not divide a dimension that a reshape makes, such as heads",
        f"choose a number of heads that is a multiple of {whole}, pad them, or shard them over an axis of "
        f"{whole // size} devices; if another dimension of the reshape is a multiple of {whole}, such as "
        "channels, make it the first and transpose after",
    )


def two_sides(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Both operands of a matmul gathered over the same devices, which repeat the product."""
    if emitted.op != "all_gather":
        return None
    for user, other in emitted.products(context.program):
        partner = _gathered_as(other, context)
        if partner and _is_named_first(emitted, partner, context) and _same_devices(partner, emitted):
            return (
                "contraction_gathered",
                f"both operands of a {_product_name(user)}, `{emitted.tensor}` and `{partner.tensor}`, are "
                f"gathered over {context.over(emitted)}: these devices all compute the same product",
                _GATHER_ONE
                if _are_rows(emitted, user, other)
                else "keep both sharded along the contracted dimension and reduce the partial results "
                "(all-reduce or reduce-scatter): constrain only the result",
            )
    return None


_GATHER_ONE = (
    "both are split along their rows, not along the contracted dimension: gather only one of them, so that "
    "each device computes its own rows of the result, and combine the sums or maxima of the devices' rows"
)


def _are_rows(emitted: Emitted, product: TracedValue, other: TracedValue) -> bool:
    """Whether a gathered operand was split along a dimension of the product's result, not a summed one."""
    side = 1 if other.instruction is product.operand(0).instruction else 0
    name = ("lhs", "rhs")[side] + "_contracting_dims"
    dims = product.operand(side).instruction.shapes[0].dims
    summed = prod(dims[int(dim)] for dim in re.findall(r"\d+", product.instruction.attributes.get(name, "")))
    along = re.findall(r"\d+", emitted.value.instruction.attributes.get("dimensions", ""))
    gathered = [emitted.value.instruction.shapes[-1].dims[int(dim)] for dim in along]
    results = product.instruction.shapes[0].dims
    return len(gathered) == 1 and gathered[0] != summed and gathered[0] in results


def _product_name(product: TracedValue) -> str:
    return "convolution" if product.instruction.opcode == "convolution" else "matmul"


def _is_named_first(emitted: Emitted, partner: Emitted, context: ProgramContext) -> bool:
    """Whether a warning is about this gather, and not its partner: activations, otherwise the first."""
    computed, other = (is_computed(context.program, each.operand()) for each in (emitted, partner))
    return computed if computed != other else context.sent.index(emitted) < context.sent.index(partner)


def _gathered_as(value: TracedValue, context: ProgramContext) -> Emitted | None:
    """The gather that an operand of a product is, perhaps after elementwise operations."""
    left, seen = [value], 0
    while left and seen < _FEW:
        *_, origin = history(context.program, left.pop(), MOVES)
        sent = next((s for s in context.sent if s.value.instruction is origin.instruction), None)
        if sent is not None:
            return sent if sent.op == "all_gather" else None
        if origin.instruction.opcode in ELEMENTWISE:
            left += sources(context.program, origin)
        seen += 1
    return None


_FEW = 16


def sliced_again(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered by the compiler, which each device then slices to its own part."""
    if emitted.op != "all_gather" or emitted.is_written:
        return None
    uses = list(emitted.uses(context.program, elementwise=True))
    sliced = own_slices(
        context.program, emitted.collective.groups, emitted.value.instruction.shapes[-1], uses
    )
    name = primitive_of(emitted.collective.op_name)
    # A norm also reduces the whole array to a mean and a variance, which could come from sums over shards.
    others = [user for user, _ in uses if user not in sliced]
    is_reduced = all(user.instruction.opcode in _REDUCES for user in others)
    *_, stored = history(context.program, emitted.operand(), MOVES)
    if (
        stored.instruction.opcode == "parameter"
        and not stored.place.frames
        and is_integer(stored.instruction)
    ):
        return None  # indices of rows: a few bytes
    # `repeated_calls` reports an array that a shard_map takes whole.
    if not sliced or not is_reduced or name == "shard_map":
        return None
    is_of_batch = emitted.collective.parameter in context.batch_names
    is_constrained = name in _CONSTRAINTS and (is_of_batch or bool(others))
    if is_constrained or is_computed(context.program, emitted.operand()):
        is_of_rule = name == "custom_partitioning"
        return (
            "contraction_gathered",
            f"`{emitted.tensor}` is gathered over {context.over(emitted)}, then each device keeps only its "
            "slice",
            "let the operation's own rule (custom_partitioning's partition and sharding_rule) keep the "
            "dimension split, if parts are computed independently"
            if is_of_rule
            else "drop the constraint that gathers it: the matmul can use the shards and reduce the result",
        )
    return stored_otherwise(emitted, context)


def batch_gathered(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Activations gathered along their first dimension for a product whose weight is smaller."""
    dims = emitted.value.instruction.attributes.get("dimensions", "")
    if emitted.op != "all_gather" or dims != "{0}" or not _is_moved_activation(emitted, context):
        return None
    for _, other in emitted.products(context.program):
        weight_bytes = other.instruction.shapes[0].num_bytes * emitted.collective.groups.size
        if emitted.collective.gathered_bytes > weight_bytes:
            return (
                "activation_gathered",
                f"activations (`{emitted.tensor}`) are gathered along their first dimension, the batch, over "
                f"{context.over(emitted)}: {emitted.collective.gathered_bytes:,} B, while the matmul's "
                f"weight is {weight_bytes:,} B",
                "constrain the result (with_sharding_constraint, or out_sharding) to stay sharded along the "
                "batch, so that the weight is gathered instead",
            )
    return None


# An all-reduce sends its operand twice.
_SENT_BY_A_SUM = 2


def along_the_contraction(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Activations gathered along the dimension that a product sums over, for a far smaller result."""
    if emitted.op != "all_gather" or not _is_moved_activation(emitted, context):
        return None
    shape = emitted.value.instruction.shapes[-1]
    along = re.findall(r"\d+", emitted.value.instruction.attributes.get("dimensions", ""))
    if along != [str(len(shape.dims) - 1)]:
        return None
    for user, other in emitted.products(context.program):
        side = 1 if other.instruction is user.operand(0).instruction else 0
        name = ("lhs", "rhs")[side] + "_contracting_dims"
        summed = re.findall(r"\d+", user.instruction.attributes.get(name, ""))
        dims = user.operand(side).instruction.shapes[0].dims
        if summed != [str(len(dims) - 1)] or dims[-1] != shape.dims[-1]:
            continue
        # The weight's columns are split over the same devices, so that a device has a part of the result.
        result_bytes = user.instruction.shapes[0].num_bytes * emitted.collective.groups.size
        if emitted.collective.gathered_bytes > _SENT_BY_A_SUM * result_bytes:
            return (
                "contraction_gathered",
                f"activations (`{emitted.tensor}`, {emitted.collective.gathered_bytes:,} B) are gathered "
                f"over {context.over(emitted)} along the dimension that the matmul sums over, for a result "
                f"of {result_bytes:,} B",
                "store the matmul's weight sharded along the dimension that is summed over, its rows "
                "(P(axis, None)): each device multiplies its shard, and the results are reduced",
            )
    return None


# A result is wide if its other dimension is this many times the dimension summed over, as logits have it.
_WIDE = 8


def wide_sum(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Partial sums far larger than a product's operands: logits of a table that is split by its width."""
    c = emitted.collective
    forward = c.phase == "forward" or not context.differentiated  # gradients of weights are sums over tokens
    if c.op != "all_reduce" or not forward or emitted.is_written or c.gathers:
        return None
    *_, product = history(context.program, emitted.operand(), MOVES)
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
    if others < _WIDE * summed or emitted.collective.gathered_bytes < _FEWER_BYTES * num_bytes:
        return None
    return (
        "partial_results_summed",
        f"partial results (`{emitted.tensor}`, {emitted.collective.gathered_bytes:,} B) are summed over "
        f"{context.over(emitted)}: both operands, the smaller of {num_bytes:,} B, are split along the short "
        f"dimension that the matmul sums over ({summed:,})",
        "split the operands along another dimension (a table by its vocabulary, attention by heads and not "
        "by the elements of a head): each device then has a part of the result, and nothing is summed",
    )


def resharded_activations(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Activations that change their sharding in a loop over layers."""
    c = emitted.collective
    moves = emitted.op in ("all_gather", "all_to_all", "permute") and not c.follows_sum
    if not (moves and emitted.value.place.loops and _is_moved_activation(emitted, context)):
        return None
    if _is_reduced_in_two_steps(emitted, context):
        return None
    if _is_squared(emitted, context):
        return (
            "activation_resharded",
            f"`{emitted.tensor}` is gathered over {context.over(emitted)}, {emitted.runs:,} times per step, "
            "to be multiplied with its own transpose, which needs all of its rows",
            "give each device whole matrices before the loop, by an exchange: shard the dimension that "
            "counts the matrices, or gather once",
        )
    if primitive_of(c.op_name) in _CUTS_BY_TURNS:
        return (
            "activation_resharded",
            f"`{emitted.tensor}` is gathered over {context.over(emitted)} in each of {emitted.runs:,} turns "
            "of a loop that reads or writes a part of its sharded dimension",
            "run the loop in jax.shard_map, with in_specs and out_specs that keep the array split, so that "
            "each device loops over its own part; the same for a Pallas kernel, whose grid is such a loop",
        )
    return (
        "activation_resharded",
        f"activations (`{emitted.tensor}`) are resharded inside a loop: {emitted.op} over "
        f"{context.over(emitted)}, {emitted.runs:,} times per step",
        "split the batch over these devices, and not the state of the recurrence, which each turn "
        "multiplies: then no turn sends anything"
        if _is_carried(emitted, context.program)
        else "use one sharding throughout the loop: one constraint in it contradicts another",
    )


# In a loop these primitives read or write another part of an array in each turn.
_CUTS_BY_TURNS = ("dynamic_slice", "dynamic_update_slice")


def _is_reduced_in_two_steps(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether results of the devices' reductions are gathered to be reduced again, as for an argmax."""
    *_, origin = history(context.program, emitted.operand(), MOVES)
    uses = list(emitted.uses(context.program))
    return (
        origin.instruction.opcode in _REDUCES
        and bool(uses)
        and all(user.instruction.opcode in _REDUCES for user, _ in uses)
    )


def _is_squared(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether a product multiplies a gathered array with one device's shard of the same array."""

    def origin(value: TracedValue) -> Instruction:
        *_, first = history(context.program, value, MOVES)
        return first.instruction

    source = origin(emitted.operand())
    of_same = (sent for sent in context.sent if sent.op == "all_gather" and origin(sent.operand()) is source)
    return any(origin(other) is source for sent in of_same for _, other in sent.products(context.program))


def _is_moved_activation(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether it moves a computed value.

    Excluded are collectives that the user wrote, and the gather of sequence parallelism.
    """
    if (
        emitted.is_written
        or emitted.is_windowed
        or _is_shift(emitted)
        or emitted.collective.phase == "update"
        or not (is_computed(context.program, emitted.operand()) or _is_carried(emitted, context.program))
    ):
        return False
    return not any(_scatters_the_same(other, emitted) for other in context.sent)


def _is_carried(emitted: Emitted, program: Program) -> bool:
    """Whether it moves a value that a loop carries from turn to turn."""
    depths = [i for i, frame in enumerate(emitted.value.place.frames) if frame.caller.opcode == "while"]
    *_, origin = history(program, emitted.operand(), MOVES)
    return bool(depths) and origin.instruction.opcode == "parameter" and bool(origin.place.frames)


def _same_devices(first: Emitted, second: Emitted) -> bool:
    groups = [{frozenset(group) for group in s.collective.groups.members} for s in (first, second)]
    return groups[0] == groups[1]


def _scatters_the_same(other: Emitted, emitted: Emitted) -> bool:
    """Whether `other` is the sum whose shards `one` gathers: sequence parallelism."""
    c = other.collective
    scatters = c.op == "reduce_scatter" or c.scattered
    return scatters and c.groups.size == emitted.collective.groups.size and other.elements == emitted.elements


_NARROW = tuple(name for name in types_for("operands") if number_type(name).bits == 16)


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
        "reduce-scatter it: constrain the sum to the sharding of the array that it updates before any other "
        "use"
    )
    if reader:
        change += _FROM_SLICES.get(_SAME_REMEDY.get(reader, reader), _FROM_SLICES_OTHERWISE)
    return (
        "summed_whole",
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


def _whole_state(
    others: Iterable[tuple[TracedValue, int]], shape: ArrayShape, context: ProgramContext
) -> str | None:
    """The input, of the whole sum's shape, that elementwise operations combine with a sum."""
    left, seen = [user for user, at in others if at >= 0], 0
    while left and seen < _FEW:
        user = left.pop(0)
        seen += 1
        if user.instruction.opcode not in ELEMENTWISE:
            continue
        for one in _elementwise_inputs(user, context):
            name = one.op_name or one.name
            if one.shapes[0].dims == shape.dims and name not in context.batch_names:
                return name
        left += [each for each, at in readers(context.program, user) if at >= 0]
    return None


def _elementwise_inputs(user: TracedValue, context: ProgramContext) -> Iterator[Instruction]:
    """The program's inputs that a value is an elementwise function of."""
    left, seen = list(sources(context.program, user)), 0
    while left and seen < _FEW:
        *_, origin = history(context.program, left.pop(), COPIES | {"convert"})
        seen += 1
        if origin.instruction.opcode == "parameter" and not origin.place.frames:
            yield origin.instruction
        elif origin.instruction.opcode in ELEMENTWISE:
            left += sources(context.program, origin)


def _reader_of_whole(others: Iterable[tuple[TracedValue, int]], context: ProgramContext) -> str:
    """The primitive of the first reader of a whole array past elementwise operations; "" if unknown."""
    left, seen = [user for user, at in others if at >= 0], 0
    while left and seen < _FEW:
        user = left.pop(0)
        name = primitive_of(user.instruction.op_name)
        if user.instruction.opcode in (*ELEMENTWISE, "abs"):
            left += [each for each, at in readers(context.program, user) if at >= 0]
        elif known := _needs_whole((user, 0)) or (name in _FROM_SLICES and name):
            return known
        elif user.instruction.opcode in _REDUCES:
            return "reduce_sum"
        seen += 1
    return ""


def exposed(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """A gather that no product overlaps, by a compiler that can overlap."""
    if (
        emitted.op != "all_gather"
        or not context.schedule.is_async
        or context.schedule.overlapped_products(emitted.value)
    ):
        return None
    return (
        "gather_on_critical_path",
        f"`{emitted.tensor}` is gathered over {context.over(emitted)} while no matmul runs: its time is "
        "exposed",
        "start it earlier (prefetch the next layer's weights), or overlap it with its own matmul "
        "(collective matmul)",
    )


_BITS = 8
_FINDS_SCALES = (*_REDUCES, "abs")
_NARROWEST = frozenset(name for name in types_for("operands") if number_type(name).bits == _BITS)


def sent_before_its_cast(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Numbers that are stored or multiplied in 8 bits, sent in more.

    Reductions, which find the scales, may read the wide numbers.
    """
    sent = emitted.dtype
    wide = number_type(sent).bits if sent in NUMBER_TYPES else 0
    if bits_of(emitted.collective.dtype) <= _BITS:  # upcast after it was sent
        return None
    is_sum = emitted.op == "all_reduce" and emitted.is_written
    if not (emitted.op in ("all_gather", "all_to_all") or is_sum) or wide <= _BITS:
        return None
    share = f"{_BITS / wide:.0%} of the bytes"
    past = list(history(context.program, emitted.operand(), MOVES))
    stored = _types_of(past) & _NARROWEST if any(is_cast(value.instruction) for value in past) else set[str]()
    if stored and not _types_of(value for value in past if is_cast(value.instruction)) <= _NARROWEST:
        narrow = min(stored)
        why, change = f"it was upcast from {narrow} before", f"send it as {narrow} and upcast after: {share}"
        if is_sum:
            change = (
                f"a sum cannot stay {narrow}: exchange the parts as {narrow} (jax.lax.all_to_all), sum them "
                f"on each device, quantise the sums again and gather these as {narrow}: {share}"
            )
    elif is_sum:
        return None
    else:
        uses = emitted.uses(context.program, elementwise=True)
        read = [use for use in uses if use[0].instruction.opcode not in _FINDS_SCALES]
        casts = [_types_of(_on_the_way(context.program, *use)) for use in read]
        narrowed = _NARROWEST.intersection(*casts) if casts else frozenset[str]()
        if not narrowed:
            return None
        narrow = min(narrowed)
        why = f"it is cast down to {narrow} after"
        change = f"scale and cast it on each device, and constrain the result to the same shards: {share}"
    return "widened", f"`{emitted.tensor}` is sent as {sent} over {context.over(emitted)}: {why}", change


def _types_of(values: Iterable[TracedValue]) -> set[str]:
    """The types of `values`, by our names."""
    return {of_hlo(shape.dtype) for value in values for shape in value.instruction.shapes[:1]}


def widened_send(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Numbers of 16 bits sent as 32, or of 8 as more.

    Nameless casts of XLA:CPU, which widens sent and multiplied numbers, are not the program's mistake.
    """
    if fault := sent_before_its_cast(emitted, context) or _widened_round_a_ring(emitted, context):
        return fault
    c = emitted.collective
    if c.dtype != "f32":
        return None
    pasts = [_dtypes_on_the_way(context.program, user, at) for user, at in emitted.uses(context.program)]
    narrowed = [dtype for dtype in _NARROW if all(dtype in past for past in pasts)]
    if not pasts:
        return None
    if c.source_dtype in _NARROW and c.source_dtype not in narrowed and _is_cast(emitted, context.program):
        narrow, why = c.source_dtype, f"it was upcast from {c.source_dtype} before"
        change = f"send it as {narrow} and upcast after: half the bytes"
    elif c.source_dtype == "f32" and narrowed and emitted.op == "all_gather":
        narrow, why = narrowed[0], f"it is cast down to {narrowed[0]} right after"
        change = (
            f"cast it to {narrow} before the gather, and constrain the result to the same shards, so that "
            "the partitioner does not gather first: half the bytes"
        )
    else:
        return None
    return "widened", f"`{emitted.tensor}` is sent as f32 over {context.over(emitted)}: {why}", change


def _widened_round_a_ring(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array upcast before a loop that only sends it on, such as the keys of ring attention."""
    program = context.program
    *turn, origin = history(program, emitted.operand(), MOVES)
    place = origin.place
    is_carry = origin.instruction.opcode == "parameter" and place.loops and origin.path
    if emitted.op != "permute" or not is_carry or emitted.collective.dtype != "f32":
        return None
    if _types_of(turn).intersection(_NARROW):  # carried in 16 bits, and widened by XLA for CPU
        return None
    *_, after = history(program, TracedValue(place.computation.result, place, origin.path), MOVES)
    if after.instruction is not emitted.value.instruction:
        return None
    before = TracedValue(place.frames[-1].caller, place.parent).operand(0, origin.path)
    narrow = next(iter(_types_of(history(program, before, MOVES)).intersection(_NARROW)), None)
    if narrow is None:
        return None
    return (
        "widened",
        f"`{emitted.tensor}` is sent as f32 over {context.over(emitted)}, {emitted.runs:,} times: it was "
        f"upcast from {narrow} before the loop",
        f"pass it on as {narrow} and upcast it in each turn, where it is read: half the bytes",
    )


def _is_cast(emitted: Emitted, program: Program) -> bool:
    """Whether the user's own cast widened it."""
    past = (value.instruction for value in history(program, emitted.operand(), MOVES))
    return any(is_cast(each) and each.shapes[0].dtype == "f32" for each in past)


def _dtypes_on_the_way(program: Program, user: TracedValue, at: int) -> set[str]:
    """The types of a collective's numbers up to their reader."""
    return {shape.dtype for v in _on_the_way(program, user, at) for shape in v.instruction.shapes[:1]}


def _on_the_way(program: Program, user: TracedValue, at: int) -> Iterable[TracedValue]:
    """The forms of a collective's numbers up to their reader."""
    return history(program, user.operand(at) if at >= 0 else user, MOVES)


# In order of precedence.
FAULT_RULES: tuple[FaultRule, ...] = (
    batch_in_an_index,
    table,
    table_summed,
    batch_by_index,
    flat_array,
    returned_whole,
    iterated_update,
    moved_update,
    scanned_in_halves,
    there_and_back,
    along_the_whole,
    written_whole,
    only_reduced,
    stack_of_layers,
    batch_moved,
    over_the_batch,
    repeated_gather,
    over_a_part,
    merged_dimensions,
    two_sides,
    sliced_again,
    cut_along_shards,
    moved_weight,
    for_few_tokens,
    of_all_experts,
    batch_gathered,
    along_the_contraction,
    wide_sum,
    resharded_activations,
    added_by_index,
    summed_each_turn,
    summed_apart,
    whole_sum,
)

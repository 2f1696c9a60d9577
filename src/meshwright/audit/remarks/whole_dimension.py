"""Rules for arrays made whole along a split dimension by an operation that is no matmul."""

from itertools import pairwise

from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.shards import own_slices
from meshwright.audit.hlo.op_names import primitive_of, split_op_name
from meshwright.audit.hlo.trace import TracedValue
from meshwright.audit.remarks.fault_rule import CONSTRAINTS, MOVED, REDUCES, Fault, ProgramContext

WHOLE_DIMENSION = "gathered_for_one_operation"
SCAN = "associative_scan"

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

SAME_REMEDY = (
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

_BY_OPCODE = {"sort": "sort", "topk": "top_k", "fft": "fft"}


def along_the_whole(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array moved for an operation along its sharded dimension that needs only parts of it."""
    if emitted.op not in ("all_gather", "all_to_all") or emitted.is_written or emitted.collective.follows_sum:
        return None
    name = primitive_of(emitted.collective.op_name)
    if emitted.op == "all_to_all" and name in CONSTRAINTS:  # the remedy
        return None
    readers = (user for user, _ in emitted.uses(context.program, elementwise=True))
    operation = next(filter(None, map(needs_whole, readers)), None)
    if operation is None and name in (*_WITHOUT_PARTS, *SAME_REMEDY):
        operation = name
    # The remedy for factorisations is an exchange that gives each device whole matrices.
    is_remedy = emitted.op == "all_to_all" and SAME_REMEDY.get(operation or "", operation) == _FACTORS
    if operation is None or is_remedy:
        return None
    return (
        WHOLE_DIMENSION,
        f"{context.moved(emitted)} for {operation}, no matmul",
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
    if emitted.op not in MOVED or emitted.is_written or not _is_of_scan(emitted):
        return None
    sizes = sorted(
        {
            other.collective.gathered_bytes
            for other in context.sent
            if other.op in MOVED and _is_of_scan(other) and other.source == emitted.source
        }
    )
    halvings = sum(2 * small == large for small, large in pairwise(sizes))
    if halvings < _HALVINGS:
        return None
    return (
        WHOLE_DIMENSION,
        f"arrays of {sizes[0]:,} to {sizes[-1]:,} B, each half as large as the next, are moved over "
        f"{context.over(emitted)} for a scan (jax.lax.{SCAN}) along a dimension that is split there",
        "scan within each device's shard in jax.shard_map, gather the shards' totals, scan these, and "
        "combine each shard with the total before it; or constrain 16-bit operands to be split along another "
        "dimension, such as channels, and the result back (one all-to-all each)",
    )


def _is_of_scan(emitted: Emitted) -> bool:
    """Whether a collective is named after a primitive that associative_scan calls."""
    return primitive_of(emitted.collective.op_name) in ("slice", "pad", "concatenate")


def _without_the_whole(operation: str, emitted: Emitted) -> str:
    """The remedy for an operation along a whole dimension."""
    listed = SAME_REMEDY.get(operation, operation)
    dims = emitted.value.instruction.shapes[-1].dims
    is_vector = sum(size > 1 for size in dims) == 1
    return _SORT_OF_A_VECTOR if listed == "sort" and is_vector else _WITHOUT_PARTS[listed]


def needs_whole(reader: TracedValue) -> str | None:
    """The primitive of a reader that takes a whole dimension."""
    instruction = reader.instruction
    target = instruction.attributes.get("custom_call_target", "").strip('"').lower()
    if target == "topk":
        return "top_k"
    names = (primitive_of(name) for name in split_op_name(instruction.op_name))
    known = next((name for name in names if name in _WITHOUT_PARTS or name in SAME_REMEDY), None)
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
                f"{context.gathered(emitted)} only to write {part:,} B of it (dynamic_update_slice)",
                "keep the dimension of the written rows whole and shard another one (heads, or the batch), "
                "or write in jax.shard_map, in which each device writes its own rows",
            )
    return None


def read_at_an_offset(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array gathered whole to read a part of it at an offset that the program computes, such as a crop."""
    if emitted.op != "all_gather" or emitted.is_written or emitted.value.place.loops:
        return None
    uses = list(emitted.uses(context.program))
    groups, shape = emitted.collective.groups, emitted.value.instruction.shapes[-1]
    if not uses or own_slices(context.program, groups, shape, uses):
        return None
    if not all(user.instruction.opcode == "dynamic-slice" and at == 0 for user, at in uses):
        return None
    part = sum(user.instruction.shapes[0].num_bytes for user, _ in uses)
    return (
        WHOLE_DIMENSION,
        f"{context.gathered(emitted)} only to read {part:,} B of it at a computed offset (dynamic_slice)",
        "cut the part out where the dimension is whole: before the step (in the input pipeline), or with the "
        "array split along another dimension (the batch, or channels); or exchange only the rows that move "
        "between devices in jax.shard_map",
    )


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
    reads = REDUCES if not emitted.is_written else (*REDUCES, "gather")  # of a target's logit
    # The user's all_gather may add a dimension, so that a sum over it is as large as a shard. It is reported
    # only if nothing is between: a masked sum, as of the totals of earlier shards, needs the gathered totals.
    is_plain = all(user.instruction.opcode in REDUCES for user, _ in emitted.uses(context.program))
    most = shard_elements if emitted.is_written and is_plain else shard_elements - 1
    if not any(user.instruction.opcode in REDUCES for user, _ in uses) or not all(
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
        f"{context.gathered(emitted)} only to be reduced ({operations})",
        change,
    )


def _returns_shards(user: TracedValue, emitted: Emitted) -> bool:
    """Whether a reader is the reduce-scatter that a gradient of an all-gather ends in."""
    return op_of(user.instruction) == "reduce_scatter" and user.instruction.attributes.get(
        "replica_groups"
    ) == emitted.value.instruction.attributes.get("replica_groups")

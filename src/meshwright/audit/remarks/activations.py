"""Rules for activations and batches that are moved or gathered between operations."""

from math import prod

from meshwright.audit.facts.emitted import ELEMENTWISE, Emitted, is_computed
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.shards import own_slices
from meshwright.audit.hlo.op_names import primitive_of
from meshwright.audit.hlo.read import Instruction, Program
from meshwright.audit.hlo.trace import MOVES, TracedValue, resolve, sources
from meshwright.audit.remarks.fault_rule import (
    BATCH_GATHERED,
    CONSTRAINTS,
    MOST_VALUES,
    MOVED,
    REDUCES,
    SENT_BY_A_SUM,
    SIDES,
    Fault,
    ProgramContext,
    is_integer,
    is_like_a_result,
    is_shift,
    pairs_of,
    parts_before,
    same_devices,
    side_of_gathered,
    stored_otherwise,
)

_CUTS = ("split", "concatenate", "slice")


def cut_along_shards(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array moved because a sharded dimension is cut or joined, as by the halves of a rotary position."""
    name = primitive_of(emitted.collective.op_name)
    moves = emitted.op in MOVED and not emitted.collective.follows_sum
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
    return any(op_of(value.instruction) in MOVED for value in parts_before(emitted, program))


# The distances of an exchange of halos: from the device before and from the one after.
_BOTH_WAYS = 2

# A halo in both directions is smaller than the shard divided by this. Permutes in both directions that send
# more move an array that is cut at both ends.
_SHARD_PER_HALO = 2


def _is_halo(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether a permute sends edges of shards to the neighbours, or all shards one device on."""
    distances = len(_distances(emitted, context))
    if not is_shift(emitted) or distances > _BOTH_WAYS:
        return False
    shard = resolve(context.program, emitted.operand(), MOVES)
    sent = emitted.operand().instruction.shapes[0].num_elements
    return distances < _BOTH_WAYS or sent * _SHARD_PER_HALO < shard.instruction.shapes[0].num_elements


def _distances(emitted: Emitted, context: ProgramContext) -> set[int]:
    """The distances, in device numbers, over which an operation's permutes send parts of this tensor."""
    name = emitted.collective.op_name
    return {
        b - a
        for sent in context.sent
        if sent.op == "permute" and sent.collective.op_name == name and sent.tensor == emitted.tensor
        for a, b in pairs_of(sent)
    }


def merged_dimensions(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An array moved because a reshape merges its sharded dimension with an earlier one, or cuts it."""
    moves = emitted.op in MOVED and not emitted.collective.follows_sum
    # A gather may be named after its reader.
    names = (emitted.collective.op_name, emitted.value.instruction.op_name)
    if (
        not moves
        or "reshape" not in map(primitive_of, names)
        or emitted.is_written
        or emitted.is_windowed
        or is_shift(emitted)
    ):
        return None
    if emitted.op == "all_gather":
        return _gathered_to_merge(emitted, context)
    return (
        "activation_resharded",
        f"`{emitted.tensor}` is moved over {context.over(emitted)} ({emitted.op}), because a reshape merges "
        "its sharded dimension with another or cuts it",
        _APART,
    )


_APART = (
    "keep the dimensions apart (einsum over both), shard the first of the merged dimensions, or leave out "
    "the constraint on the merged array"
)


def _gathered_to_merge(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """An activation gathered by a reshape that merges its dimensions, so that all devices have all rows.

    No fault for a weight, which FSDP may gather at a reshape; nor if a reader still has the split dimension
    as one of its own, as after jnp.repeat of heads.
    """
    if len(emitted.dimensions) != 1 or emitted.dimensions == [0] or not _is_activation(emitted, context):
        return None
    size = emitted.value.instruction.shapes[-1].dims[emitted.dimensions[0]]
    read = [user.operand(at).instruction.shapes[0] for user, at in emitted.uses(context.program) if at >= 0]
    if all(size in shape.dims for shape in read):
        return None
    return (
        BATCH_GATHERED,
        f"{context.gathered(emitted)}, because a reshape merges its split dimension (number "
        f"{emitted.dimensions[0]}) with an earlier one: every device then computes all rows",
        f"{_APART}; jax.vmap over the other dimension keeps them apart, too",
    )


def _is_activation(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether a collective moves a computed value, a part of the batch, or an input shaped like a result."""
    stored = resolve(context.program, emitted.operand(), MOVES)
    if not stored.is_input:
        return is_computed(context.program, emitted.operand())
    return context.is_of_batch(stored.instruction) or is_like_a_result(stored.instruction, context)


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
        # An exchange that a constraint asks for: rows that go to their experts.
        or (emitted.op == "all_to_all" and primitive_of(c.op_name) in CONSTRAINTS)
        or not (is_computed(context.program, operand) or _is_carried(emitted, context.program))
    ):
        return None
    return unconstrained(emitted, context)


def _is_by_index(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether rows of all devices are read or added by index, such as messages between nodes of a graph."""
    if emitted.op in ("all_reduce", "reduce_scatter"):  # XLA for CPU may make a loop of the scatter
        return primitive_of(emitted.collective.op_name).startswith("scatter")
    parts = parts_before(emitted, context.program) if emitted.op == "all_to_all" else ()
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
        if partner and _is_named_first(emitted, partner, context) and same_devices(partner, emitted):
            return (
                "contraction_gathered",
                f"both operands of a {_product_name(user)}, `{emitted.tensor}` and `{partner.tensor}`, are "
                f"gathered over {context.over(emitted)}: these devices all compute the same product",
                _GATHER_ONE
                if are_rows(emitted, user, other)
                else "keep both sharded along the contracted dimension and reduce the partial results "
                "(all-reduce or reduce-scatter): constrain only the result",
            )
    return None


_GATHER_ONE = (
    "both are split along their rows, not along the contracted dimension: gather only one of them, so that "
    "each device computes its own rows of the result, and combine the sums or maxima of the devices' rows"
)


def are_rows(emitted: Emitted, product: TracedValue, other: TracedValue) -> bool:
    """Whether a gathered operand was split along a dimension of the product's result, not a summed one."""
    side = side_of_gathered(product, other)
    dims = product.operand(side).instruction.shapes[0].dims
    summed = prod(dims[dim] for dim in product.instruction.numbers(f"{SIDES[side]}_contracting_dims"))
    gathered = [emitted.value.instruction.shapes[-1].dims[dim] for dim in emitted.dimensions]
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
    while left and seen < MOST_VALUES:
        origin = resolve(context.program, left.pop(), MOVES)
        sent = next((s for s in context.sent if s.value.instruction is origin.instruction), None)
        if sent is not None:
            return sent if sent.op == "all_gather" else None
        if origin.instruction.opcode in ELEMENTWISE:
            left += sources(context.program, origin)
        seen += 1
    return None


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
    is_reduced = all(user.instruction.opcode in REDUCES for user in others)
    stored = resolve(context.program, emitted.operand(), MOVES)
    if stored.is_input and is_integer(stored.instruction):
        return None  # indices of rows: a few bytes
    # `repeated_calls` reports an array that a shard_map takes whole.
    if not sliced or not is_reduced or name == "shard_map":
        return None
    is_of_batch = emitted.collective.parameter in context.batch_names
    is_constrained = name in CONSTRAINTS and (is_of_batch or bool(others))
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
    if emitted.op != "all_gather" or emitted.dimensions != [0] or not _is_moved_activation(emitted, context):
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


def along_the_contraction(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Activations gathered along the dimension that a product sums over, for a far smaller result."""
    if emitted.op != "all_gather" or not _is_moved_activation(emitted, context):
        return None
    shape = emitted.value.instruction.shapes[-1]
    if emitted.dimensions != [len(shape.dims) - 1]:
        return None
    for user, other in emitted.products(context.program):
        side = side_of_gathered(user, other)
        summed = user.instruction.numbers(f"{SIDES[side]}_contracting_dims")
        dims = user.operand(side).instruction.shapes[0].dims
        if summed != [len(dims) - 1] or dims[-1] != shape.dims[-1]:
            continue
        # The weight's columns are split over the same devices, so that a device has a part of the result.
        result_bytes = user.instruction.shapes[0].num_bytes * emitted.collective.groups.size
        if emitted.collective.gathered_bytes > SENT_BY_A_SUM * result_bytes:
            return (
                "contraction_gathered",
                f"activations (`{emitted.tensor}`, {emitted.collective.gathered_bytes:,} B) are gathered "
                f"over {context.over(emitted)} along the dimension that the matmul sums over, for a result "
                f"of {result_bytes:,} B",
                "store the matmul's weight sharded along the dimension that is summed over, its rows "
                "(P(axis, None)): each device multiplies its shard, and the results are reduced",
            )
    return None


def resharded_activations(emitted: Emitted, context: ProgramContext) -> Fault | None:
    """Activations that change their sharding in a loop over layers."""
    c = emitted.collective
    moves = emitted.op in MOVED and not c.follows_sum
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
    origin = resolve(context.program, emitted.operand(), MOVES)
    uses = list(emitted.uses(context.program))
    return (
        origin.instruction.opcode in REDUCES
        and bool(uses)
        and all(user.instruction.opcode in REDUCES for user, _ in uses)
    )


def _is_squared(emitted: Emitted, context: ProgramContext) -> bool:
    """Whether a product multiplies a gathered array with one device's shard of the same array."""

    def origin(value: TracedValue) -> Instruction:
        first = resolve(context.program, value, MOVES)
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
        or is_shift(emitted)
        or emitted.collective.phase == "update"
        or not (is_computed(context.program, emitted.operand()) or _is_carried(emitted, context.program))
    ):
        return False
    return not any(_scatters_the_same(other, emitted) for other in context.sent)


def _is_carried(emitted: Emitted, program: Program) -> bool:
    """Whether it moves a value that a loop carries from turn to turn."""
    depths = [i for i, frame in enumerate(emitted.value.place.frames) if frame.caller.opcode == "while"]
    origin = resolve(program, emitted.operand(), MOVES)
    return bool(depths) and origin.instruction.opcode == "parameter" and bool(origin.place.frames)


def _scatters_the_same(other: Emitted, emitted: Emitted) -> bool:
    """Whether `other` scatters a sum whose shards `emitted` gathers: sequence parallelism."""
    c = other.collective
    scatters = c.op == "reduce_scatter" or c.scattered
    return scatters and c.groups.size == emitted.collective.groups.size and other.elements == emitted.elements

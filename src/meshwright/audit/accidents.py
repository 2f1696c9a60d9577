"""The usual accidents of a sharded program, recognised in what the compiler made of it.

Each rule looks at one collective where it stands and says what is wrong, or nothing; the most telling
rule speaks. Tensors are named as JAX names the program's inputs and its named scopes.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from meshwright.audit.collectives import is_differentiated
from meshwright.audit.compare import NEGLIGIBLE_BYTES
from meshwright.audit.dependence import same_each_turn
from meshwright.audit.devices import own_slices
from meshwright.audit.hlo import Program
from meshwright.audit.overlap import has_async_gathers, is_exposed
from meshwright.audit.prices import Prices
from meshwright.audit.sent import Sent, is_computed, is_product
from meshwright.audit.trace import MOVES, Place, Value, history, trip_count

# A weight that is gathered for a product is too large for it where moving the activations instead
# would send this much less.
_FEWER_BYTES = 4
_NARROW = ("bf16", "f16")


@dataclass(frozen=True)
class Warning:
    """An accident. bytes: what each device sends, or holds, in vain in a step; seconds: the time of that
    on the links, or to read it from memory; None where no hardware was named. change: the cure.
    """

    kind: str
    tensor: str
    instruction: str
    what: str
    where: str
    change: str
    bytes: int
    seconds: float | None

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Context:
    """What rules look at beside one collective."""

    program: Program
    sent: tuple[Sent, ...]
    prices: Prices
    differentiated: bool
    asynchronous: bool


_Fault = tuple[str, str, str]  # kind, what, change
_Rule = Callable[[Sent, Context], _Fault | None]


def accidents(program: Program, sent: Iterable[Sent], prices: Prices) -> list[Warning]:
    """A warning for each tensor and kind of accident, in the program's order."""
    everyone = tuple(sent)
    context = Context(program, everyone, prices, is_differentiated(program), has_async_gathers(program))
    found: dict[tuple[str, str], Warning] = {}
    for one in everyone:
        if one.collective.gathered_bytes <= NEGLIGIBLE_BYTES or one.collective.groups.size == 1:
            continue
        for fault in _faults(one, context):
            warning = _warning(fault, one, prices)
            key = warning.kind, warning.tensor
            found[key] = _joined(found[key], warning) if key in found else warning
    return list(found.values())


def _faults(one: Sent, context: Context) -> list[_Fault]:
    found = next((fault for rule in _RULES if (fault := rule(one, context))), None)
    return [fault for fault in (found, _widened(one, context)) if fault]


def _warning(fault: _Fault, one: Sent, prices: Prices) -> Warning:
    kind, what, change = fault
    bytes_sent, seconds = prices.sent(one.emitted), prices.seconds(one.emitted)
    return Warning(kind, one.tensor, one.collective.name, what, one.where, change, bytes_sent, seconds)


def _joined(first: Warning, other: Warning) -> Warning:
    known = first.seconds is not None and other.seconds is not None
    seconds = (first.seconds or 0.0) + (other.seconds or 0.0) if known else None
    return replace(first, bytes=first.bytes + other.bytes, seconds=seconds)


def _table(one: Sent, context: Context) -> _Fault | None:
    """An embedding gathered whole to look up a few of its rows."""
    if one.emitted.op != "all_gather":
        return None
    for user, at in one.uses(context.program):
        looked_up = user.instruction.shapes[0].num_bytes
        if user.instruction.opcode == "gather" and at == 0 and one.collective.gathered_bytes > 2 * looked_up:
            return (
                "table_gathered",
                f"the table `{one.tensor}` is gathered whole over {_over(one, context)}, "
                f"{one.collective.gathered_bytes:,} B, to look up rows of {looked_up:,} B",
                "look up in the shard that each device holds and sum the rows over those devices: leave the "
                "table sharded and constrain the result only",
            )
    return None


def _repeated(one: Sent, context: Context) -> _Fault | None:
    """A weight gathered in a loop in each turn of which it is the same."""
    if one.emitted.op != "all_gather":
        return None
    for depth, frame in enumerate(one.value.place.frames):
        if frame.caller.opcode != "while" or not same_each_turn(context.program, one.operand(), depth):
            continue
        if is_computed(context.program, one.operand()):
            continue
        loop = Value(frame.caller, _place_of(one, depth))
        trips = trip_count(context.program, loop)
        if trips == 1:
            continue
        turns = f"{trips:,} times" if trips else "in every turn"
        return (
            "weight_gathered_repeatedly",
            f"`{one.tensor}` is gathered over {_over(one, context)} {turns} in the loop "
            f"{frame.caller.op_name or frame.caller.name}, the same each time",
            "gather it once, before the loop, or keep it sharded as its products use it (tensor "
            "parallelism); in decoding switch off FSDP",
        )
    return None


def _for_few_tokens(one: Sent, context: Context) -> _Fault | None:
    """A weight gathered for so few tokens that to move these were far cheaper; in inference only."""
    if (
        one.emitted.op != "all_gather"
        or context.differentiated
        or is_computed(context.program, one.operand())
    ):
        return None
    for user, at in one.uses(context.program, elementwise=True):
        if not is_product(user) or at not in (0, 1):
            continue
        other = user.operand(1 - at).instruction.shapes[0]
        activations = other.num_bytes + user.instruction.shapes[0].num_bytes
        if one.collective.gathered_bytes > _FEWER_BYTES * activations:
            return (
                "weight_gathered_for_few_tokens",
                f"`{one.tensor}` is gathered over {_over(one, context)} for a product whose activations are "
                f"{activations:,} B: {one.collective.gathered_bytes:,} B",
                "leave the weight sharded and move the activations: tensor parallelism in place of FSDP",
            )
    return None


def _two_sides(one: Sent, context: Context) -> _Fault | None:
    """Both operands of a product gathered over the same devices, which then all compute the same."""
    if one.emitted.op != "all_gather" or not is_computed(context.program, one.operand()):
        return None
    for user, at in one.uses(context.program, elementwise=True):
        if not is_product(user) or at not in (0, 1):
            continue
        *_, origin = history(context.program, user.operand(1 - at), MOVES)
        partner = next((s for s in context.sent if s.value.instruction is origin.instruction), None)
        if partner and partner is not one and _same_devices(partner, one):
            return (
                "contraction_gathered",
                f"both sides of a product are gathered over {_over(one, context)}, `{one.tensor}` and "
                f"`{partner.tensor}`: each of these devices computes the same",
                "leave both sharded along the dimension that is summed, and sum the partial products "
                "(all-reduce or reduce-scatter): constrain the result only",
            )
    return None


def _sliced_again(one: Sent, context: Context) -> _Fault | None:
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
            f"`{one.tensor}` is gathered over {_over(one, context)} and each device keeps its slice again",
            "drop the constraint that gathers it: the product can use the shards and sum over these devices",
        )
    return _wrong_axis(one, context)


def _moved_weight(one: Sent, context: Context) -> _Fault | None:
    """A weight stored by one axis and used by another."""
    c = one.collective
    moves = one.emitted.op in ("permute", "all_to_all") and not c.follows_sum
    if not moves or one.is_written or is_computed(context.program, one.operand()):
        return None
    return _wrong_axis(one, context)


def _wrong_axis(one: Sent, context: Context) -> _Fault:
    return (
        "weight_resharded",
        f"`{one.tensor}` is stored sharded in one way and used in another: {one.emitted.op} over "
        f"{_over(one, context)} before its product",
        "store it sharded over the axis and the dimension that its product uses",
    )


def _batch_gathered(one: Sent, context: Context) -> _Fault | None:
    """Activations gathered along their first dimension, so that devices share the work no more."""
    dims = one.value.instruction.attributes.get("dimensions", "")
    if one.emitted.op != "all_gather" or dims != "{0}" or not _is_moved_activation(one, context):
        return None
    if all(user.instruction.opcode in ("tuple", "while") or at < 0 for user, at in one.uses(context.program)):
        return None  # it is only returned
    return (
        "activation_gathered",
        f"activations (`{one.tensor}`) are gathered along their first dimension, the batch, over "
        f"{_over(one, context)}: each of these devices then computes the whole of it",
        "constrain the result (with_sharding_constraint, or out_sharding) to stay sharded along the batch, "
        "so that the weight is gathered instead",
    )


def _resharded(one: Sent, context: Context) -> _Fault | None:
    """Activations that change their sharding in a loop over layers."""
    c = one.collective
    moves = one.emitted.op in ("all_gather", "all_to_all", "permute") and not c.follows_sum
    if not (moves and one.value.place.loops and _is_moved_activation(one, context)):
        return None
    return (
        "activation_resharded",
        f"activations (`{one.tensor}`) change their sharding inside a loop: {one.emitted.op} over "
        f"{_over(one, context)}, {one.runs:,} times a step",
        "give the arrays on both sides the same sharding; one constraint in the loop contradicts another",
    )


def _is_moved_activation(one: Sent, context: Context) -> bool:
    """Computed, not moved by the user's own collective, and not the gather of sequence parallelism."""
    if (
        one.is_written
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
    return scatters and c.groups.size == one.collective.groups.size and _elements(other) == _elements(one)


def _elements(one: Sent) -> float:
    return one.emitted.elements_per_step / one.runs


def _summed_whole(one: Sent, context: Context) -> _Fault | None:
    """An all-reduce of which each device needs its slice.

    XLA:CPU writes every reduce-scatter of the partitioner so; there a sum that is only sliced is none,
    unless the user wrote it.
    """
    c = one.collective
    if c.op != "all_reduce":
        return None
    uses = list(one.uses(context.program))
    shape = one.value.instruction.shapes[min(c.index, len(one.value.instruction.shapes) - 1)]
    sliced = own_slices(context.program, c.groups, shape, uses)
    only = bool(uses) and len(sliced) == len(uses)
    if not sliced or (only and not (one.is_written or context.asynchronous)):
        return None
    also = "" if only else ", and uses the whole only beside it"
    return (
        "summed_whole",
        f"`{one.tensor}` is all-reduced over {_over(one, context)} and each device keeps a slice{also}",
        "reduce-scatter it: constrain the sum to the sharding of what it updates, before anything else uses "
        "it; a norm is the sum of the slices' norms",
    )


def _exposed(one: Sent, context: Context) -> _Fault | None:
    """A gather that no product hides, by a compiler that hides others."""
    if one.emitted.op != "all_gather" or not context.asynchronous or not is_exposed(context.program, one):
        return None
    return (
        "gather_on_critical_path",
        f"`{one.tensor}` is gathered over {_over(one, context)} while no product runs",
        "let it start earlier (prefetch the next layer's weights), or run it in steps under its product "
        "(collective matmul)",
    )


def _widened(one: Sent, context: Context) -> _Fault | None:
    """Numbers of 16 bits that are sent as 32.

    XLA:CPU sends all as 32 and converts back at once; that is no accident of the program.
    """
    c = one.collective
    if c.dtype != "f32":
        return None
    pasts = [_dtypes_on_the_way(context.program, user, at) for user, at in one.uses(context.program)]
    narrowed = [dtype for dtype in _NARROW if all(dtype in past for past in pasts)]
    if not pasts:
        return None
    if c.source_dtype in _NARROW and c.source_dtype not in narrowed:
        narrow, why = c.source_dtype, f"it was converted up from {c.source_dtype} before"
        change = f"send it as {narrow} and convert after, which halves the bytes"
    elif c.source_dtype == "f32" and narrowed and one.emitted.op == "all_gather":
        narrow, why = narrowed[0], f"it is converted down to {narrowed[0]} right after"
        change = f"convert it to {narrow} while it is sharded, then gather, which halves the bytes"
    else:
        return None
    return "widened", f"`{one.tensor}` is sent as f32 over {_over(one, context)}: {why}", change


def _dtypes_on_the_way(program: Program, user: Value, at: int) -> set[str]:
    """The types that numbers had between a collective and what reads them."""
    read = user.operand(at) if at >= 0 else user
    return {shape.dtype for v in history(program, read, MOVES) for shape in v.instruction.shapes[:1]}


_RULES: tuple[_Rule, ...] = (
    _table,
    _repeated,
    _two_sides,
    _sliced_again,
    _moved_weight,
    _for_few_tokens,
    _batch_gathered,
    _resharded,
    _summed_whole,
    _exposed,
)


def _over(one: Sent, context: Context) -> str:
    return context.prices.over(one.emitted.axes, one.collective.groups.size)


def _place_of(one: Sent, depth: int) -> Place:
    place = one.value.place
    while len(place.frames) > depth:
        place = place.parent
    return place

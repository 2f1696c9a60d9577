"""The rule for numbers that are sent in a wider type than they are stored or read in."""

from collections.abc import Iterable, Iterator

from meshwright.audit.facts.communication import bits_of, is_cast
from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import MOVES, TracedValue, history, resolve
from meshwright.audit.remarks.fault_rule import MOST_VALUES, MOVED, REDUCES, Fault, ProgramContext
from meshwright.dtypes import NUMBER_TYPES, number_type, of_hlo, types_for

_NARROW = tuple(name for name in types_for("operands") if number_type(name).bits == 16)

_BITS = 8

_FINDS_SCALES = (*REDUCES, "abs")

# A fault, and the share of the collective's bytes that it makes unnecessary.
_Widened = tuple[Fault, float]
_HALF = 0.5  # 32 bits in place of 16

_NARROWEST = frozenset(name for name in types_for("operands") if number_type(name).bits == _BITS)


def sent_before_its_cast(emitted: Emitted, context: ProgramContext) -> _Widened | None:
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
    past = list(_unscaled(context.program, emitted.operand()))
    stored = _types_of(past) & _NARROWEST if any(is_cast(value.instruction) for value in past) else set[str]()
    if stored and not _types_of(value for value in past if is_cast(value.instruction)) <= _NARROWEST:
        narrow = min(stored)
        why = f"it was upcast from {narrow} before"
        change = f"send it as {narrow} and upcast after, also its scales: {share}"
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
    what = f"`{emitted.tensor}` is sent as {sent} over {context.over(emitted)}: {why}"
    return ("widened", what, change), 1 - _BITS / wide


def _unscaled(program: Program, value: TracedValue) -> Iterator[TracedValue]:
    """The earlier forms of a value, also before it was multiplied by scales, which are broadcast to it."""
    for _ in range(MOST_VALUES):
        *_, value = past = list(history(program, value, MOVES))
        yield from past
        if value.instruction.opcode not in ("multiply", "add", "subtract"):
            return
        operands = value.operands()
        origins = [resolve(program, each, MOVES).instruction for each in operands]
        computed = [
            each
            for each, origin in zip(operands, origins, strict=True)
            if origin.opcode not in ("broadcast", "constant")
        ]
        if len(computed) != 1:
            return
        value = computed[0]


def _types_of(values: Iterable[TracedValue]) -> set[str]:
    """The types of `values`, by our names."""
    return {of_hlo(shape.dtype) for value in values for shape in value.instruction.shapes[:1]}


def widened_send(emitted: Emitted, context: ProgramContext) -> _Widened | None:
    """Numbers of 16 bits sent as 32, or of 8 as more, and the share of the bytes that is unnecessary.

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
    is_cast_before = _is_cast(emitted, context.program) or _is_read_wide(emitted, context.program, pasts)
    if c.source_dtype in _NARROW and c.source_dtype not in narrowed and is_cast_before:
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
    what = f"`{emitted.tensor}` is sent as f32 over {context.over(emitted)}: {why}"
    return ("widened", what, change), _HALF


def _widened_round_a_ring(emitted: Emitted, context: ProgramContext) -> _Widened | None:
    """An array upcast before a loop that only sends it on, such as the keys of ring attention."""
    program = context.program
    *turn, origin = history(program, emitted.operand(), MOVES)
    place = origin.place
    is_carry = origin.instruction.opcode == "parameter" and place.loops and origin.path
    if emitted.op != "permute" or not is_carry or emitted.collective.dtype != "f32":
        return None
    if _types_of(turn).intersection(_NARROW):  # carried in 16 bits, and widened by XLA for CPU
        return None
    after = resolve(program, TracedValue(place.computation.result, place, origin.path), MOVES)
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
    ), _HALF


def _is_cast(emitted: Emitted, program: Program) -> bool:
    """Whether the user's own cast widened it."""
    past = (value.instruction for value in history(program, emitted.operand(), MOVES))
    return any(is_cast(each) and each.shapes[0].dtype == "f32" for each in past)


def _is_read_wide(emitted: Emitted, program: Program, pasts: Iterable[set[str]]) -> bool:
    """Whether the program itself has widened numbers that it moves: products read them without a cast.

    Only for XLA for CPU, in which the program's cast of a product's result has no name. If XLA widens numbers
    itself, it casts them back before they are read.
    """
    is_multiplied = emitted.op in MOVED and any(emitted.products(program))
    return (
        is_multiplied and program.platform.virtual and not any(past.intersection(_NARROW) for past in pasts)
    )


def _dtypes_on_the_way(program: Program, user: TracedValue, at: int) -> set[str]:
    """The types of a collective's numbers up to their reader."""
    return {shape.dtype for v in _on_the_way(program, user, at) for shape in v.instruction.shapes[:1]}


def _on_the_way(program: Program, user: TracedValue, at: int) -> Iterable[TracedValue]:
    """The forms of a collective's numbers up to their reader."""
    # A loop's path names the element that it carries; others' paths select a part of their result.
    path = user.path if user.instruction.opcode == "while" else ()
    return history(program, user.operand(at, path) if at >= 0 else user, MOVES)

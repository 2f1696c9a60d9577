"""The collectives that a compiled program runs, each with its bytes, devices, pass and tensor."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod

from meshwright.audit.facts.groups import DeviceGroups, parse_groups, parse_pairs
from meshwright.audit.facts.naming import MOVED, laid_end_to_end, origin_name, reader_name, summed_operand
from meshwright.audit.facts.opcodes import crossing_groups, op_of, received, rows_said
from meshwright.audit.facts.shards import FusedScatter, Offsets, fused_scatter, is_shard_in_zeros, kept_slices
from meshwright.audit.hlo.op_names import (
    PassName,
    is_of_call,
    phase_of,
    primitive_of,
    scope_of,
    split_op_name,
)
from meshwright.audit.hlo.read import ArrayShape, Computation, Instruction, Program, dtype_bits, leaves
from meshwright.audit.hlo.trace import COPIES, CallPath, TracedValue, history, places, resolve, run_count
from meshwright.cost.collectives import Op
from meshwright.dtypes import EMULATED, NUMBER_TYPES, of_hlo
from meshwright.errors import AuditError


@dataclass(frozen=True)
class EmittedCollective:
    """The communication of one tensor; a combined instruction yields one per tensor.

    name: the HLO instruction. index: its operand, which may hold several tensors end to end. value: the
    instruction at its place in the chain of calls.

    Types. dtype: the sent type. source_dtype: the narrowest earlier type of the same numbers (bf16 if XLA:CPU
    widened bf16 to f32 to send it). uncast_dtype: the narrowest type since the program's own last cast, so
    that a cast of the program is not taken for the compiler's.

    Bytes. gathered_bytes: V, bytes of the gathered array on one device in dtype: the result of an all-gather,
    the operand of all other ops. padding_bytes: further bytes that fill tiles or, with `has_room`, the
    capacity for experts' rows beyond an even load. together_bytes: bytes of all tensors that the instruction
    sends; 0 if it sends only this one.

    Runs. count: runs in one step; None if a loop's trip count is unknown. conditional: it is in a branch, and
    runs only if that is taken.

    Meaning. parameter: the program's input, by JAX's name (`w['w_in']`), if it is sent unchanged.
    operand_op_name: the op_name of the instruction that computed the operand. scattered: an all_reduce of
    which each device keeps only its own slice, which makes it a reduce_scatter. slice_offsets: start of the
    slice on each device (see groups.axes_that_change). gathers: an all_reduce of shards written into zeros,
    which makes it an all_gather. follows_sum: a permute after a sum that returns the slices of a padded
    reduce-scatter to their owners; or a gather after a sum in slices and across them. num_rings: directed
    rings that carry it at once, if the TPU's compiler names its `colors`, each of one direction or both.

    Names. An instruction without a name takes the name of its fusion, or of the computation of its operand.
    One with the name of a call that also computes the operand takes the name of its reader.
    """

    name: str
    index: int
    op: Op
    dtype: str
    gathered_bytes: int
    groups: DeviceGroups
    count: int | None
    value: TracedValue = field(compare=False, repr=False)
    op_name: str
    phase: PassName
    scope: tuple[str, ...]
    primitive: str
    operand_op_name: str
    parameter: str | None
    source_dtype: str
    uncast_dtype: str = ""
    reduction: str | None = None
    conditional: bool = False
    scattered: bool = False
    slice_offsets: Offsets | None = None
    gathers: bool = False
    padding_bytes: int = 0
    has_room: bool = False
    together_bytes: int = 0
    follows_sum: bool = False
    num_rings: int | None = None
    source_file: str = ""
    source_line: int | None = None

    @property
    def uncast_bytes(self) -> int:
        """V in uncast_dtype, as for a compiler that sends the narrow type."""
        dtype = self.uncast_dtype or self.source_dtype
        return self.gathered_bytes * bits_of(dtype) // bits_of(self.dtype)


def collectives(program: Program) -> list[EmittedCollective]:
    """Every collective of one step, in the order of the entry's chains of calls.

    A start and its done count once, and so do the pieces into which the TPU compiler cuts one
    collective to overlap it (same channel and chain_id). See `gaps.not_understood` for the rest.
    """
    return list(_collectives(program))


def _collectives(program: Program) -> Iterator[EmittedCollective]:
    differentiated = is_differentiated(program)
    started = {chain[:2] for chain, place in _pieces(program) if is_start(place.computation)}
    chains: set[tuple[object, ...]] = set()
    for place in places(program):
        for instruction in place.computation.instructions.values():
            if op_of(instruction) is None or unreadable_groups(instruction, program.num_devices):
                continue
            chain = piece_of(instruction, place)
            # Counted at its start, also if its done is in another loop; once if no start is printed.
            again = chain is not None and (
                not is_start(place.computation) if chain[:2] in started else chain in chains
            )
            if not again:
                value = TracedValue(instruction, place)
                yield from _read(program, value, differentiated)
            chains |= {chain} if chain else set()


def _pieces(program: Program) -> Iterator[tuple[tuple[object, ...], CallPath]]:
    for place in places(program):
        for instruction in place.computation.instructions.values():
            if op_of(instruction) and (chain := piece_of(instruction, place)):
                yield chain, place


def is_start(computation: Computation) -> bool:
    """Whether a fusion's computation starts an asynchronous collective of XLA for TPU."""
    return _calls(computation, "AsyncCollectiveStart")


def is_done(computation: Computation) -> bool:
    """Whether a fusion's computation waits for an asynchronous collective."""
    return _calls(computation, "AsyncCollectiveDone")


def _calls(computation: Computation, target: str) -> bool:
    return any(
        target in each.attributes.get("custom_call_target", "") for each in computation.instructions.values()
    )


def is_differentiated(program: Program) -> bool:
    """Whether the program holds a gradient."""
    return any("jvp(" in i.op_name for c in program.computations.values() for i in c.instructions.values())


def piece_of(instruction: Instruction, place: CallPath) -> tuple[object, ...] | None:
    """The key that all pieces of one overlapped collective share; None if it is whole."""
    chain = re.search(r'chain_id="(\w+)"', instruction.attributes.get("frontend_attributes", ""))
    if not chain:
        return None
    return instruction.attributes.get("channel_id"), chain[1], tuple(loop.name for loop in place.loops)


def _read(program: Program, value: TracedValue, differentiated: bool) -> Iterator[EmittedCollective]:
    """One EmittedCollective for each tensor of an instruction."""
    instruction = value.instruction
    op = op_of(instruction)
    assert op
    num_operands = _num_tensors(instruction, op)
    operands = [value.operand(i) for i in range(num_operands)]
    results = _results(value, op)
    if op == "all_to_all" and len(results) > 1:
        # One array cut into a piece for each device: the pieces are one communication.
        yield _instruction(program, value, op, operands, results, 0, differentiated)
        return
    for index, (operand, result) in enumerate(zip(operands, results, strict=True)):
        is_scattered = op == "all_reduce" and fused_scatter(program, _result(value, index), operand)
        # The operand of a reduce-scatter is one tensor, even if it was joined from pieces of its positions.
        pieces = [] if is_scattered else _end_to_end(program, instruction, op, operand)
        length = sum(piece.instruction.shapes[0].num_elements for piece, _ in pieces)
        for piece, name in pieces:
            part = piece, Fraction(piece.instruction.shapes[0].num_elements, length), name
            yield _instruction(program, value, op, [operand], (result,), index, differentiated, part)
        if not pieces:
            yield _instruction(program, value, op, [operand], (result,), index, differentiated)


def _end_to_end(
    program: Program, instruction: Instruction, op: Op, operand: TracedValue
) -> list[tuple[TracedValue, str]]:
    """The tensors sent end to end in one array, each with its name if known.

    A collective with JAX's name sends one array of the program. One with several tensors has no name, except
    in XLA for GPU from JAX 0.11 on: a flat sum there has the names of all tensors in order, or one name for
    all.
    """
    op_name = instruction.op_name
    in_a_row = op == "all_reduce" and len(operand.instruction.shapes[0].dims) == 1
    if op not in ("all_reduce", "all_gather") or (op_name and not in_a_row):
        return []
    pieces = laid_end_to_end(program, operand, by_compiler=bool(op_name))
    names = split_op_name(op_name)
    given = names if len(names) == len(pieces) else [""] * len(pieces)
    return list(zip(pieces, given, strict=True))


def _has_one_name_for_many(instruction: Instruction, op: Op) -> bool:
    """Whether a sum of several tensors has the name of one of them."""
    several = op in ("all_reduce", "reduce_scatter") and len(instruction.operands) > 1
    return several and len(split_op_name(instruction.op_name)) == 1


def _instruction(
    program: Program,
    value: TracedValue,
    op: Op,
    operands: list[TracedValue],
    results: tuple[ArrayShape, ...],
    index: int,
    differentiated: bool,
    piece: tuple[TracedValue, Fraction, str] | None = None,
) -> EmittedCollective:
    """The collective of one tensor.

    piece: one tensor among several in one array, its share of the array, and its name if known.
    """
    instruction = value.instruction
    sent = [operand.shape for operand in operands]
    first, share, own_name = piece or (operands[0], _share_of_tile(program, operands[0]), "")
    origin = list(history(program, first, MOVED))
    groups = groups_of(instruction, program.num_devices)
    reduces = op == "all_reduce" and instruction.opcode != "send" and not piece
    fused = fused_scatter(program, _result(value, index), operands[0]) if reduces else None
    offsets = kept_slices(program, value, index, groups) if reduces and not fused else None
    op_name, named = _fusion_name(fused) if fused else _op_name(value, index)
    operand_op_name = origin_name(program, first)
    if not op_name or piece or (named is instruction and _has_one_name_for_many(instruction, op)):
        op_name = own_name or operand_op_name or op_name
    if not scope_of(op_name) or (is_of_call(op_name) and not _is_made_in(op_name, operand_op_name)):
        reader = reader_name(program, _result(value, index))
        # Gradients are made in loops of the backward pass, though the update reads them.
        if reader and not (scope_of(op_name) and phase_of(reader, differentiated) == "update"):
            op_name = reader
    padding = fused.padding_bytes if fused else 0
    num_bytes = round(share * sum(s.num_bytes for s in (results if op == "all_gather" else sent))) - padding
    even_load = rows_said(op_name) if op in ("all_to_all", "all_gather", "reduce_scatter") else None
    if even_load:
        # Sent rows depend on data. XLA for CPU sends the capacity of a round, others only the rows, which XLA
        # for TPU cuts into tiles.
        is_ragged, dims = instruction.opcode.startswith("ragged"), sent[0].dims
        whole, num_bytes = (
            num_bytes,
            even_load[1] * sent[0].num_bytes // (dims[0] if is_ragged else prod(dims[:-1])),
        )
        op, padding = even_load[0], 0 if is_ragged else whole - num_bytes
    runs = run_count(program, value.place)
    return EmittedCollective(
        name=instruction.name,
        index=index,
        op="reduce_scatter" if fused else op,
        dtype=of_hlo(results[0].dtype),
        gathered_bytes=num_bytes,
        groups=groups,
        count=None if runs is None else round(runs),
        value=value,
        op_name=op_name,
        phase=phase_of(op_name, differentiated),
        scope=scope_of(op_name),
        primitive=primitive_of(op_name),
        operand_op_name=operand_op_name,
        parameter=_parameter(origin[-1]),
        source_dtype=_narrowest(origin, sent[0].dtype),
        uncast_dtype=_narrowest(
            _since_cast(origin, phase_of(op_name, differentiated), gathers=op == "all_gather"), sent[0].dtype
        ),
        reduction=_reduction(program, instruction),
        conditional=value.place.is_conditional,
        scattered=offsets is not None,
        slice_offsets=offsets,
        gathers=reduces and not fused and is_shard_in_zeros(program, operands[0]),
        padding_bytes=padding,
        has_room=even_load is not None,
        together_bytes=_together_bytes(value, op, share),
        follows_sum=_follows_sum(program, op, operands[0]),
        num_rings=_num_rings(instruction),
        source_file=named.source_file,
        source_line=named.source_line,
    )


def _together_bytes(value: TracedValue, op: Op, share: Fraction) -> int:
    """Bytes of all tensors that an instruction combines; 0 for a single one."""
    count = _num_tensors(value.instruction, op)
    if count == 1 and share == 1:
        return 0
    sent = [value.operand(i).shape for i in range(count)]
    return sum(shape.num_bytes for shape in (_results(value, op) if op == "all_gather" else sent))


def groups_of(instruction: Instruction, num_devices: int) -> DeviceGroups:
    """Groups of a collective in any of HLO's forms."""
    if instruction.opcode == "send":
        return crossing_groups(instruction, num_devices)
    pairs = instruction.attributes.get("source_target_pairs")
    if pairs:
        return parse_pairs(pairs)
    text = instruction.attributes.get("replica_groups", "{}")
    # The comma before device_ids makes it an attribute of its own to the parser.
    text += f", device_ids={ids}" if (ids := instruction.attributes.get("device_ids")) else ""
    return parse_groups(text, num_devices)


def unreadable_groups(instruction: Instruction, num_devices: int) -> str:
    """The reason why a collective's groups cannot be parsed, or ""."""
    try:
        groups_of(instruction, num_devices)
    except AuditError as error:
        return str(error)
    return ""


def _num_tensors(instruction: Instruction, op: Op) -> int:
    """Number of operands with data.

    A permute that writes in place also has its targets and offsets as operands.
    """
    if instruction.opcode.startswith("ragged"):
        return 1  # the others are the array that rows are written to, and the bounds of each piece
    in_place = op == "permute" and len(instruction.operands) > 1 and "slice_sizes" in instruction.attributes
    # The other operand of a send is a token.
    return 1 if in_place or instruction.opcode == "send" else len(instruction.operands)


def _results(value: TracedValue, op: Op) -> tuple[ArrayShape, ...]:
    """Result arrays; an asynchronous start's shape is (operands, results, contexts ...)."""
    instruction, shape = value.instruction, value.instruction.shape
    if instruction.opcode == "send":
        return received(value.place.computation, instruction).shapes[:1]
    if _has_operands(instruction, op) and not isinstance(shape, ArrayShape):
        return leaves(shape[1])
    return leaves(shape)


def _has_operands(instruction: Instruction, op: Op) -> bool:
    """Whether its shape has its operands before its results, as for a start.

    A started all-reduce has them only in XLA for GPU from JAX 0.11 on.
    """
    is_start = instruction.opcode.endswith("-start")
    return is_start and (op != "all_reduce" or len(leaves(instruction.shape)) > len(instruction.operands))


def _result(value: TracedValue, index: int) -> TracedValue:
    """One tensor's result of a collective: an element of a tuple if several are combined."""
    return TracedValue(
        value.instruction, value.place, (index,) if len(value.instruction.operands) > 1 else ()
    )


def _fusion_name(fused: FusedScatter) -> tuple[str, Instruction]:
    """JAX's name of a scattered tensor: its element's name, otherwise the fusion's."""
    instruction, path = fused.fusion.instruction, fused.fusion.path
    element = _named_element(fused.fusion, path[0]) if path else None
    if element:
        return element.op_name, element
    merged = split_op_name(instruction.op_name)
    return merged[path[0]] if path and path[0] < len(merged) else merged[0], instruction


def _named_element(value: TracedValue, index: int) -> Instruction | None:
    """The named instruction that takes element `index` out of a tuple."""
    users = value.place.computation.users[value.instruction.name]
    return next((u for u in users if u.attributes.get("index") == str(index) and u.op_name), None)


def _op_name(value: TracedValue, index: int) -> tuple[str, Instruction]:
    """JAX's name of one tensor, and the instruction that has it.

    In a combined collective this is the instruction that takes the tensor out of the tuple.
    """
    instruction = value.instruction
    element = _named_element(value, index) if len(instruction.operands) > 1 else None
    if element:
        return element.op_name, element
    merged = split_op_name(instruction.op_name)
    return merged[index] if index < len(merged) == len(instruction.operands) else merged[0], instruction


def _parameter(origin: TracedValue) -> str | None:
    return origin.instruction.label if origin.is_input else None


def narrowest_dtype(program: Program, value: TracedValue) -> str:
    """The narrowest earlier type of a value's numbers, by our names."""
    origin = list(history(program, value, MOVED))
    return _narrowest(origin, value.instruction.shapes[0].dtype)


def uncast_dtype(program: Program, value: TracedValue, op_name: str) -> str:
    """The narrowest type since the program's own last cast in the pass of `op_name`."""
    origin = list(history(program, value, MOVED))
    last = origin[-1]
    if last.instruction.opcode == "multiply" and EMULATED in scope_of(last.instruction.op_name):
        origin += history(
            program, last.operand(0), MOVED
        )  # operand 0 is the numbers, operand 1 the scales of their blocks
    origin = _since_cast(origin, phase_of(op_name, differentiated=True), gathers=False)
    return _narrowest(origin, value.instruction.shapes[0].dtype)


def _since_cast(origin: list[TracedValue], phase: PassName, *, gathers: bool) -> list[TracedValue]:
    """A value's forms back to the program's own last cast, included.

    gathers: the value is gathered next.
    """
    casts = (i for i, one in enumerate(origin) if _is_own_cast(one.instruction, phase, gathers=gathers))
    return origin[: next(casts, len(origin)) + 1]


def _is_made_in(op_name: str, operand_op_name: str) -> bool:
    """Whether the sent value was computed within the `shard_map` of this name.

    It is a partial sum of each device then, to be added.
    """
    return primitive_of(op_name) == "shard_map" and operand_op_name.startswith(f"{op_name}/")


def _is_own_cast(instruction: Instruction, phase: PassName, *, gathers: bool) -> bool:
    """Whether a conversion is the program's own.

    A compiler's cast has no name, or the name of a cast of another pass that was merged with it. Casts of
    sums and of products' operands may also have the name of a reshape or a product. Before a gather this is
    the name of the program's own cast, moved past a reshape. Casts that emulate a number type do not count as
    the program's.
    """
    if is_cast(instruction):
        is_of_pass = phase_of(instruction.op_name, True) == phase
        return is_of_pass and EMULATED not in scope_of(instruction.op_name)
    return gathers and instruction.opcode == "convert" and bool(instruction.op_name)


def is_cast(instruction: Instruction) -> bool:
    """Whether an instruction is a conversion that the program requests."""
    return instruction.opcode == "convert" and primitive_of(instruction.op_name) == "convert_element_type"


def _narrowest(origin: list[TracedValue], dtype: str) -> str:
    """The narrowest floating-point type of `origin`, and `dtype` at most."""
    shapes = [v.instruction.shape for v in origin]
    seen = [dtype] + [shape.dtype for shape in shapes if isinstance(shape, ArrayShape)]
    floats = [name for name in seen if re.match(r"b?f\d", name)]
    return of_hlo(min(floats or [dtype], key=dtype_bits))


def _share_of_tile(program: Program, operand: TracedValue) -> Fraction:
    """The share of sent bytes that holds numbers.

    XLA for TPU sends a single number as a row of 128, by a bitcast. Sums of such a row are rows too, but a
    gather of single numbers has numbers in its whole result.
    """
    sizes: list[int] = []
    value: TracedValue | None = operand
    while value:
        past = list(history(program, value, COPIES))
        shapes = [one.instruction.shape for one in past]
        sizes += [shape.num_elements for shape in shapes if isinstance(shape, ArrayShape)]
        end = past[-1].instruction
        value = None if end.opcode.startswith("all-gather") else summed_operand(past[-1])
        value = value if value and len(value.instruction.shapes) == 1 else None
    return Fraction(min(sizes), sizes[0]) if sizes and min(sizes) == 1 else Fraction(1)


def _follows_sum(program: Program, op: Op, operand: TracedValue) -> bool:
    end = resolve(program, operand, MOVED)
    if op == "permute":
        return op_of(end.instruction) in ("all_reduce", "reduce_scatter")
    return op == "all_gather" and end.instruction.opcode == "recv-done" and summed_operand(end) is not None


def _num_rings(instruction: Instruction) -> int | None:
    config = instruction.attributes.get("backend_config", "")
    strategy = re.search(r'"strategy":"(\w+)".*?\{colors:(\d+)', config)
    if not strategy:
        return None
    return int(strategy[2]) * (1 if strategy[1].startswith("UniDirection") else 2)


def _reduction(program: Program, instruction: Instruction) -> str | None:
    name = instruction.attributes.get("to_apply", "").lstrip("%")
    return program.computations[name].result.opcode if name in program.computations else None


def bits_of(dtype: str) -> int:
    """Bits of one element of a type, by our name or by HLO's.

    >>> bits_of("fp8"), bits_of("bf16"), bits_of("c64")
    (8, 16, 64)
    """
    return NUMBER_TYPES[dtype].bits if dtype in NUMBER_TYPES else dtype_bits(dtype)

"""The shard of an array that each device keeps or writes.

Offsets are integers that differ from device to device. If each device keeps its slice of an all-reduce, this
is a reduce-scatter; an all-reduce of shards written into zeros is an all-gather. XLA for TPU writes its
reduce-scatters as a sum, fused with the slice of it that a device keeps:

    %all-reduce-scatter (input: bf16[4096,3584]) -> bf16[288,3584] {
      %pad = bf16[4608,3584] pad(%input, %zero), padding=0_512x0_0
      %sum = bf16[4608,3584] all-reduce(%pad), ...
      ROOT %mine = bf16[288,3584] dynamic-slice(%sum, %start, %zero), ...
    }
    %fusion = bf16[288,3584] fusion(%gradient), calls=%all-reduce-scatter, metadata={op_name="..."}

Such a fusion sends the bytes of a reduce-scatter. Its all-reduce has no name; the fusion has one. If slices
are not whole tiles it pads, and permutes move the rows that end on a neighbour to their owner.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from meshwright.audit.facts.groups import DeviceGroups
from meshwright.audit.hlo.read import ArrayShape, Program
from meshwright.audit.hlo.trace import COPIES, MOVES, TracedValue, history, readers, resolve

# For each device, the start of its slice in each dimension.
Offsets = tuple[tuple[int, ...], ...]

_MOVED = COPIES | {"convert"}
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0,
    "minimum": min,
    "maximum": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shift-right-logical": lambda a, b: a >> b,
    "shift-left": lambda a, b: a << b,
}


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def device_values(program: Program, value: TracedValue) -> tuple[int, ...] | None:
    """The integer that each partition computes for a scalar; None if it depends on data.

    XLA's partitioner writes a shard's offset as a table indexed by partition-id, or as arithmetic on
    partition-id, often hoisted out of the loop that uses it. A pass of the TPU's compiler numbers devices as
    replica x partitions + partition.
    """
    source = resolve(program, value, _MOVED)
    instruction = source.instruction
    if instruction.opcode in ("partition-id", "replica-id"):
        counts = {"partition-id": program.num_partitions, "replica-id": program.num_replicas}
        return _numbers(counts.pop(instruction.opcode), *counts.values())
    if instruction.opcode == "constant":
        table = _table(instruction.literal)
        return table * program.num_devices if len(table) == 1 else None
    if instruction.opcode == "dynamic-slice" and len(instruction.operands) == 2:
        return _looked_up(program, source)
    if instruction.opcode == "clamp":
        low, middle, high = (device_values(program, source.operand(i)) for i in range(3))
        if not (low and middle and high):
            return None
        return tuple(max(least, min(most, x)) for least, x, most in zip(low, middle, high, strict=True))
    if instruction.opcode == "select":
        chosen, yes, no = (device_values(program, source.operand(i)) for i in range(3))
        if not (chosen and yes and no):
            return None
        return tuple(a if take else b for take, a, b in zip(chosen, yes, no, strict=True))
    if instruction.opcode == "compare":
        left, right = (device_values(program, source.operand(i)) for i in (0, 1))
        holds = _COMPARISONS.get(instruction.attributes.get("direction", ""))
        if not (holds and left and right):
            return None
        return tuple(int(holds(a, b)) for a, b in zip(left, right, strict=True))
    if instruction.opcode in _ARITHMETIC:
        left, right = (device_values(program, source.operand(i)) for i in (0, 1))
        calculate = _ARITHMETIC[instruction.opcode]
        return left and right and tuple(map(calculate, left, right))
    return None


def _numbers(count: int, other: int) -> tuple[int, ...] | None:
    """Each device's partition or replica; None if a program has several of both."""
    if count > 1:
        return tuple(range(count)) if other == 1 else None
    return (0,) * other


def slice_offsets(program: Program, piece: TracedValue, first: int) -> Offsets | None:
    """The offsets of a dynamic-slice (`first`=1) or dynamic-update-slice (2) on each device."""
    indices = range(first, len(piece.instruction.operands))
    by_dim = [device_values(program, piece.operand(i)) for i in indices]
    known = [values for values in by_dim if values is not None]
    return tuple(zip(*known, strict=True)) if known and len(known) == len(by_dim) else None


def kept_slices(program: Program, value: TracedValue, index: int, groups: DeviceGroups) -> Offsets | None:
    """Start of the slice that each device keeps of a reduced tensor; None if it keeps more."""
    reduced = TracedValue(
        value.instruction, value.place, (index,) if len(value.instruction.operands) > 1 else ()
    )
    if value.instruction.opcode.endswith("-start"):
        done = next((u for u in value.place.computation.users[value.instruction.name]), None)
        reduced = TracedValue(done, value.place, reduced.path) if done else reduced
    uses = list(readers(program, reduced))
    if not uses or any(user.instruction.opcode != "dynamic-slice" or at != 0 for user, at in uses):
        return None
    shape = value.instruction.shapes[index]
    offsets = {_own_slice(program, groups, shape, user) for user, _ in uses}
    return offsets.pop() if len(offsets) == 1 else None


def own_slices(
    program: Program, groups: DeviceGroups, shape: ArrayShape, uses: Iterable[tuple[TracedValue, int]]
) -> list[TracedValue]:
    """The dynamic-slices among an array's readers that keep each device's own block."""
    return [
        user
        for user, at in uses
        if at == 0
        and user.instruction.opcode == "dynamic-slice"
        and _own_slice(program, groups, shape, user) is not None
    ]


def _own_slice(
    program: Program, groups: DeviceGroups, shape: ArrayShape, piece: TracedValue
) -> Offsets | None:
    """Offsets of a dynamic-slice that gives the devices of a group different blocks of a tensor.

    None if it does not. It may also cut by axes outside the group, since two consecutive slices become one.
    """
    offsets = slice_offsets(program, piece, first=1)
    block = piece.instruction.shapes[0]
    num_parts = shape.num_elements // max(1, block.num_elements)
    if offsets is None or any(
        start % size for at in offsets for start, size in zip(at, block.dims, strict=True)
    ):
        return None
    shares = {len({offsets[device] for device in group}) for group in groups.members}
    return offsets if all(share > 1 and num_parts % share == 0 for share in shares) else None


def is_shard_in_zeros(program: Program, operand: TracedValue) -> bool:
    """Whether an operand is this device's shard written into an array of zeros."""
    written = resolve(program, operand, MOVES)
    if written.instruction.opcode != "dynamic-update-slice":
        return False
    into = resolve(program, written.operand(0), MOVES)
    if into.instruction.opcode == "broadcast":
        into = resolve(program, into.operand(0), MOVES)
    is_zero = into.instruction.opcode == "constant" and float(into.instruction.literal or 1) == 0
    offsets = slice_offsets(program, written, first=2)
    return is_zero and offsets is not None and len(set(offsets)) > 1


def _looked_up(program: Program, piece: TracedValue) -> tuple[int, ...] | None:
    """Entries of a constant one-dimensional table at each device's index."""
    table = resolve(program, piece.operand(0), _MOVED).instruction
    entries = _table(table.literal) if table.opcode == "constant" else ()
    index = device_values(program, piece.operand(1))
    if not entries or index is None or piece.instruction.shapes[0].num_elements != 1:
        return None
    return tuple(entries[max(0, min(i, len(entries) - 1))] for i in index)


def _table(literal: str) -> tuple[int, ...]:
    """The integers of a scalar or one-dimensional constant; none for other and shortened ones."""
    if not re.fullmatch(r"\{?[-\d,\s]+\}?", literal):
        return ()
    return tuple(int(number) for number in re.findall(r"-?\d+", literal))


@dataclass(frozen=True)
class FusedScatter:
    """One tensor's reduce-scatter in a fusion.

    fusion: the result; its `path` is the tensor's element. result: shape of the kept slice.
    """

    fusion: TracedValue
    result: ArrayShape
    padding_bytes: int


def fused_scatter(program: Program, reduced: TracedValue, operand: TracedValue) -> FusedScatter | None:
    """The reduce-scatter of an all-reduce and a slice in one fusion; None if there is none.

    reduced: the all-reduce's result for one tensor. operand: that tensor.
    """
    place = reduced.place
    if not place.frames or place.frames[-1].caller.opcode != "fusion":
        return None
    uses = [user for user, at in readers(program, reduced) if at == 0]
    if len(uses) != 1 or uses[0].instruction.opcode != "dynamic-slice" or uses[0].place != place:
        return None
    root = place.computation.result
    path = ()
    if root.opcode == "tuple":
        parts = [resolve(program, part) for part in TracedValue(root, place).operands()]
        path = tuple(i for i, part in enumerate(parts) if part.instruction is uses[0].instruction)[:1]
    return FusedScatter(
        fusion=TracedValue(place.frames[-1].caller, place.parent, path),
        result=uses[0].instruction.shapes[0],
        padding_bytes=_padding(program, operand),
    )


def _padding(program: Program, operand: TracedValue) -> int:
    """Bytes sent beyond the bytes of the array that enters the fusion."""
    for value in history(program, operand, COPIES | {"pad"}):
        if value.place == operand.place and value.instruction.opcode == "parameter":
            return operand.instruction.shapes[0].num_bytes - value.instruction.shapes[0].num_bytes
    return 0

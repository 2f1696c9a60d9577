"""Integers that differ from device to device: the offsets by which a device picks its own shard."""

import re
from collections.abc import Callable, Mapping

from meshwright.audit.hlo import Program
from meshwright.audit.trace import COPIES, Value, resolve

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


def device_values(program: Program, value: Value) -> tuple[int, ...] | None:
    """The integer that each partition computes for a scalar; None where it depends on data.

    XLA's partitioner writes a shard's offset as a table looked up by partition-id, or as
    arithmetic on partition-id, often hoisted out of the loop that uses it.
    """
    found = resolve(program, value, _MOVED)
    instruction = found.instruction
    if instruction.opcode == "partition-id":
        return tuple(range(program.num_partitions))
    if instruction.opcode == "constant":
        table = _table(instruction.literal)
        return table * program.num_partitions if len(table) == 1 else None
    if instruction.opcode == "dynamic-slice" and len(instruction.operands) == 2:
        return _looked_up(program, found)
    if instruction.opcode in _ARITHMETIC:
        left, right = (device_values(program, found.operand(i)) for i in (0, 1))
        calculate = _ARITHMETIC[instruction.opcode]
        return left and right and tuple(map(calculate, left, right))
    return None


def slice_offsets(program: Program, piece: Value, first: int) -> tuple[tuple[int, ...], ...] | None:
    """For each device, the offsets of a dynamic-slice (`first`=1) or dynamic-update-slice (2)."""
    indices = range(first, len(piece.instruction.operands))
    by_dim = [device_values(program, piece.operand(i)) for i in indices]
    known = [values for values in by_dim if values is not None]
    return tuple(zip(*known, strict=True)) if known and len(known) == len(by_dim) else None


def _looked_up(program: Program, piece: Value) -> tuple[int, ...] | None:
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

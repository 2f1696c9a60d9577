"""Warnings of XLA's partitioner, mapped to the program's tensors."""

import re
from collections.abc import Iterable
from math import prod

from meshwright.audit.compile.compile import LOGGED_OPERATION, REPLICATED
from meshwright.audit.facts.groups import tiles_of
from meshwright.audit.hlo.op_names import primitive_of, scope_of
from meshwright.audit.hlo.read import dtype_bits
from meshwright.audit.remarks import Remark

_REPLICATION = "involuntary_replication"
_RESHARDED = re.compile(r"from sharding (\{.*?\}) to (\{.*?\}) ")
# A list of all devices: thousands of characters on a large mesh.
_DEVICES = re.compile(r"\{\{[\d,{}]{60,}\}\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def compiler_warnings(lines: Iterable[str]) -> list[Remark]:
    """`warning_lines`, mapped to tensors."""
    return list(
        dict.fromkeys(_replicated(line) if REPLICATED.search(line) else _other(line) for line in lines)
    )


def replicates(remarks: Iterable[Remark]) -> bool:
    """Whether the compiler replicates a tensor involuntarily."""
    return any(one.kind == _REPLICATION for one in remarks)


def _replicated(line: str) -> Remark:
    operation, shardings = LOGGED_OPERATION.search(line), _RESHARDED.search(line)
    before, after = shardings.groups() if shardings else ("one sharding", "another")
    size = _whole_bytes(operation[2], operation[3], before) if operation else None
    tensor, where = _named(line)
    on_each = f" ({size:,} B)" if size else ""
    return Remark(
        _REPLICATION,
        tensor,
        f"the compiler replicates `{tensor}`{on_each} on every device to reshard it from {before} to {after}",
        where,
        "choose two shardings that one collective converts, or reshard in two steps: gather the axes that "
        "move, then slice",
        size,
        instruction=operation[1] if operation else "",
    )


def _other(line: str) -> Remark:
    tensor, where = _named(line)
    operation = LOGGED_OPERATION.search(line)
    text = _DEVICES.sub("{...}", line)
    instruction = operation[1] if operation else ""
    return Remark("other", tensor, text, where, "", None, instruction=instruction)


def _named(line: str) -> tuple[str, str]:
    """The tensor, by its innermost named scope, and JAX's whole name of the operation."""
    match = _OP_NAME.search(line)
    name = match[1] if match else ""
    scope = scope_of(name)
    return (scope[-1] if scope else primitive_of(name)), name


def _whole_bytes(dtype: str, dims: str, sharding: str) -> int:
    """Bytes of a whole tensor. dims: of one device's part, as the compiler names it."""
    local = prod(int(size) for size in dims.split(",") if size)
    return local * tiles_of(sharding) * dtype_bits(dtype) // 8

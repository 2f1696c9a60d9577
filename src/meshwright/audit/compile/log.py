"""What XLA says on stderr while it partitions a program, mapped to the program's tensors."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod

from meshwright.audit.hlo.op_names import primitive_of, scope_of
from meshwright.audit.hlo.parse import dtype_bits
from meshwright.audit.hlo.shardings import tiles_of

# Warnings and errors as XLA logs them, of the files that shard a program and fit it into memory.
_LINE = re.compile(r"^[WE]\d{4} \S+ +\d+ (\w*(?:spmd|shard|remat|collective)\w*)\.cc:\d+\] (.*)")
_REPLICATED = re.compile(r"nvoluntary full rematerialization")
_REPLICATION = "involuntary_replication"
_RESHARDED = re.compile(r"from sharding (\{.*?\}) to (\{.*?\}) ")
_OPERATION = re.compile(r"%([\w.\-]+) = (\w+)\[([\d,]*)\]")
# Device after device, thousands of characters on a large mesh.
_DEVICES = re.compile(r"\{\{[\d,{}]{60,}\}\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class CompilerWarning:
    """A line of the compiler. kind: involuntary_replication, or other. bytes: of the tensor that every
    device then holds whole; None where the compiler does not say. change: the cure.
    """

    kind: str
    tensor: str
    instruction: str
    what: str
    where: str
    change: str
    bytes: int | None

    def to_dict(self) -> dict:
        return asdict(self)


def warning_lines(log: str) -> list[str]:
    """The lines of a compiler's log that warn of a tensor's partitioning or of memory, each once.

    What a pass says of itself, of every program, is no warning of this one.
    """
    found = (_LINE.match(line) for line in log.splitlines())
    told = ((one[1], one[2]) for one in found if one)
    return list(dict.fromkeys(f"{file}: {what}" for file, what in told if _is_of_program(file, what)))


def _is_of_program(file: str, what: str) -> bool:
    return bool(_REPLICATED.search(what) or _OPERATION.search(what)) or "remat" in file


def compiler_warnings(lines: Iterable[str]) -> list[CompilerWarning]:
    """`warning_lines`, mapped to tensors."""
    return list(
        dict.fromkeys(_replicated(line) if _REPLICATED.search(line) else _other(line) for line in lines)
    )


def replicates(found: Iterable[CompilerWarning]) -> bool:
    """Whether the compiler replicates a tensor that nobody asked it to."""
    return any(one.kind == _REPLICATION for one in found)


def _replicated(line: str) -> CompilerWarning:
    operation, shardings = _OPERATION.search(line), _RESHARDED.search(line)
    before, after = shardings.groups() if shardings else ("one sharding", "another")
    size = _whole_bytes(operation[2], operation[3], before) if operation else None
    tensor, where = _named(line)
    on_each = f" ({size:,} B)" if size else ""
    return CompilerWarning(
        _REPLICATION,
        tensor,
        operation[1] if operation else "",
        f"the compiler replicates `{tensor}`{on_each} on every device to reshard it from {before} to {after}",
        where,
        "choose two shardings that one collective converts, or reshard in two steps: gather the axes that "
        "move, then slice",
        size,
    )


def _other(line: str) -> CompilerWarning:
    tensor, where = _named(line)
    operation = _OPERATION.search(line)
    said = _DEVICES.sub("{...}", line)
    return CompilerWarning("other", tensor, operation[1] if operation else "", said, where, "", None)


def _named(line: str) -> tuple[str, str]:
    """The tensor, by its innermost named scope, and JAX's whole name of the operation."""
    found = _OP_NAME.search(line)
    name = found[1] if found else ""
    scope = scope_of(name)
    return (scope[-1] if scope else primitive_of(name)), name


def _whole_bytes(dtype: str, dims: str, sharding: str) -> int:
    """Bytes of the tensor of which the compiler names one device's part."""
    local = prod(int(size) for size in dims.split(",") if size)
    return local * tiles_of(sharding) * dtype_bits(dtype) // 8


@contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """What the process, C++ included, writes to stderr meanwhile; it is passed on at the end."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            os.write(2, file.read())

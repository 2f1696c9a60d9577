"""Optimised HLO text, as from `jax.stages.Compiled.as_text()`, as plain data.

A `Program` has computations, a `Computation` has instructions in printed order. Their meaning is left to
`trace`, which follows values and loops, and to `facts`, which counts. Tables before the computations have the
source lines of instructions. Tested with XLA of JAX 0.10.2 for CPU, TPU and GPU.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

from meshwright.errors import AuditError
from meshwright.platforms import CPU, PLATFORMS, Platform


class StackFrames:
    """The tables FileNames, FileLocations and StackFrames before the computations.

    XLA before 2025 wrote source_file and source_line into each line; now a line names a stack frame.
    """

    def __init__(self, text: str) -> None:
        head = text[: text.find("\n%")]
        self.files = {
            int(n): name for n, name in re.findall(r'^(\d+) "(.*)"$', _section(head, "FileNames"), re.M)
        }
        location = re.compile(r"^(\d+) \{file_name_id=(\d+).*?\bline=(\d+)", re.M)
        locations = location.findall(_section(head, "FileLocations"))
        self.locations = {int(n): (int(file), int(line)) for n, file, line in locations}
        frame = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.M)
        self.frames = {int(n): int(place) for n, place in frame.findall(_section(head, "StackFrames"))}

    def source(self, metadata: Mapping[str, str]) -> tuple[str, int | None]:
        """(file, line) of an instruction's metadata; ("", None) without any."""
        if "source_line" in metadata:
            return metadata.get("source_file", ""), int(metadata["source_line"])
        place = self.frames.get(int(metadata.get("stack_frame_id", -1)), -1)
        file, line = self.locations.get(place, (-1, None))
        return self.files.get(file, ""), line


def _section(head: str, title: str) -> str:
    """The lines of one table, up to the next blank line."""
    table = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", head, re.M | re.S)
    return table[1] if table else ""


# XLA's number of the host's memory.
_HOST_MEMORY = 5
_BITS = {"pred": 8, "token": 0, "opaque": 0, "tf32": 32}
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([\w.\-<>]+)\s*(?:\(.*)?\{$")
_INSTRUCTION = re.compile(r"(ROOT\s+)?%?([\w.\-<>]+)\s+=\s+")
_END = re.compile(r"\}(,|$)")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|->|<=|[()\[\]{},]')
_METADATA = re.compile(r'(\w+)=(?:"((?:[^"\\]|\\.)*)"|(\d+))')
# Attributes that name the computations that an instruction runs as a whole.
_RUN_BY = {
    "fusion": ("calls",),
    "call": ("to_apply",),
    "async-start": ("calls",),
    "while": ("condition", "body"),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
}
# XLA for GPU (from JAX 0.11 on) overlaps copies in and out of stacks of layers with the rest of a loop. They
# are read as synchronous fusions.
_OF_ASYNC_FUSIONS = {"fusion-start": "fusion", "fusion-update": "opt-barrier", "fusion-done": "opt-barrier"}
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")


@dataclass(frozen=True)
class ArrayShape:
    """An array's element type (HLO's name: f32, bf16, s8), local dims, and layout as printed."""

    dtype: str
    dims: tuple[int, ...]
    layout: str | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding; four-bit types are packed."""
        return -(-self.num_elements * dtype_bits(self.dtype) // 8)

    @property
    def allocated_bytes(self) -> int:
        """Bytes with the minor dimensions padded to whole tiles, if the layout has tiles (TPU).

        >>> ArrayShape("f32", (4, 100), "{1,0:T(8,128)}").allocated_bytes == 8 * 128 * 4
        True
        """
        tile = re.search(r"T\(([\d,]+)\)", self.layout or "")
        if not tile:
            return self.num_bytes
        order = [int(d) for d in re.findall(r"\d+", (self.layout or "").partition(":")[0])]
        minor_first = [self.dims[d] for d in order]
        sizes = [int(size) for size in reversed(tile[1].split(","))]
        minor_first += [1] * (len(sizes) - len(minor_first))
        whole = [-(-n // size) * size for n, size in zip(minor_first, sizes, strict=False)]
        return -(-prod(whole + minor_first[len(sizes) :]) * dtype_bits(self.dtype) // 8)

    @property
    def memory_space(self) -> int:
        """0 is the device's main memory; a TPU's on-chip memories and the host's have other numbers."""
        space = re.search(r"S\((\d+)\)", self.layout or "")
        return int(space[1]) if space else 0

    @property
    def on_host(self) -> bool:
        """Whether it is in the host's memory."""
        return self.memory_space == _HOST_MEMORY


_Shapes: TypeAlias = "ArrayShape | tuple[_Shapes, ...]"


@dataclass(frozen=True)
class Instruction:
    """One line `%name = shape opcode(operands), attributes`.

    literal: the text in the parentheses of a constant, parameter or iota. op_name: JAX's path of scopes; ""
    for an instruction of the compiler's own.
    """

    name: str
    shape: _Shapes
    opcode: str
    operands: tuple[str, ...]
    attributes: Mapping[str, str]
    literal: str = ""
    op_name: str = ""
    source_file: str = ""
    source_line: int | None = None

    @property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """The arrays of the result, tuples flattened."""
        return leaves(self.shape)

    @property
    def label(self) -> str:
        """JAX's name; otherwise the compiler's."""
        return self.op_name or self.name

    @property
    def where(self) -> str:
        """JAX's name, with its file and line if the program has them."""
        line = f" ({self.source_file}:{self.source_line})" if self.source_file and self.source_line else ""
        return f"{self.label}{line}"

    def numbers(self, attribute: str) -> list[int]:
        """The numbers in an attribute such as `dimensions={0,2}`; none without it."""
        return [int(number) for number in re.findall(r"\d+", self.attributes.get(attribute, ""))]


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in printed order; `root` is the result's name."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @property
    def result(self) -> Instruction:
        return self.instructions[self.root]

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """Parameters in the order of their numbers."""
        unsorted = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(unsorted, key=lambda i: int(i.literal)))

    @cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instructions that read each instruction."""
        by_name: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                by_name.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in by_name.items()}


_BEFORE_PARTITIONING = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "xla.sdy.FuncResultSharding",
)


# Instructions that have a sharding only before the partitioner has run.
_COMPUTED = ("dot", "convolution", "add", "multiply", "reduce", "transpose", "reshape", "dynamic-slice")


@dataclass(frozen=True)
class Program:
    """A compiled module for one device of `num_partitions` (SPMD: all run the same), in `num_replicas`.

    is_scheduled: instructions are in the order of execution. donated: numbers of the inputs whose memory
    results reuse.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int = 1
    num_replicas: int = 1
    is_scheduled: bool = False
    donated: frozenset[int] = frozenset()

    @property
    def main(self) -> Computation:
        return self.computations[self.entry]

    @property
    def num_devices(self) -> int:
        """Devices that its groups number: partitions (jit, pjit) or replicas (pmap, torch/XLA)."""
        return self.num_partitions if self.num_partitions > 1 else self.num_replicas

    @cached_property
    def platform(self) -> Platform:
        """The platform whose compiler printed it; CPUs if nothing tells."""
        instructions = [one for c in self.computations.values() for one in c.instructions.values()]
        layouts = [shape.layout or "" for one in instructions for shape in one.shapes]
        configs = [one.attributes.get("backend_config", "") for one in instructions]
        for platform in PLATFORMS.values():
            marks = (platform.compiler.layout_mark, layouts), (platform.compiler.config_mark, configs)
            if any(mark and any(map(mark.search, texts)) for mark, texts in marks):
                return platform
        return CPU


def dtype_bits(dtype: str) -> int:
    """Bits of one element of an HLO type: f32 32, bf16 16, f8e4m3fn 8, s4 4, pred 8.

    >>> dtype_bits("bf16"), dtype_bits("f8e4m3fn"), dtype_bits("s4"), dtype_bits("c64")
    (16, 8, 4, 64)
    """
    digits = re.fullmatch(r"(?:bf|[fsuc])(\d+)(?:e\d+m\d+\w*)?", dtype)
    if dtype in _BITS:
        return _BITS[dtype]
    if not digits:
        raise AuditError(f"HLO element type {dtype!r} is unknown: its bytes cannot be counted")
    return int(digits[1])


def leaves(shape: _Shapes) -> tuple[ArrayShape, ...]:
    """The arrays of a possibly nested tuple, in order."""
    if isinstance(shape, ArrayShape):
        return (shape,)
    return tuple(leaf for part in shape for leaf in leaves(part))


def arrays(shape: _Shapes, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], ArrayShape]]:
    """The arrays of a possibly nested tuple, each with its path."""
    if isinstance(shape, ArrayShape):
        yield path, shape
    else:
        for index, part in enumerate(shape):
            yield from arrays(part, (*path, index))


def parse_hlo(text: str) -> Program:
    """The program of an optimised HLO module's text.

    Raises AuditError if the text has no entry computation, a line is not HLO, or a part is missing.
    """
    frames = StackFrames(text)
    computations: dict[str, Computation] = {}
    entry = ""
    for name, is_entry, lines in _computation_blocks(text):
        computations[name] = _computation(name, lines, frames)
        entry = name if is_entry else entry
    if not entry:
        raise AuditError("the text is not an HLO module: it has no ENTRY computation")
    module = re.search(r"^HloModule\s+([^\s,]+)", text, re.M)
    num_partitions, num_replicas = (_count(text, name) for name in ("num_partitions", "replica_count"))
    if num_partitions == num_replicas == 1:  # torch/XLA's headers have neither
        num_devices = _devices_of_groups(text)
        is_global = "use_global_device_ids=true" in text
        num_partitions, num_replicas = (num_devices, 1) if is_global else (1, num_devices)
    return Program(
        module[1] if module else "",
        computations,
        entry,
        num_partitions=num_partitions,
        num_replicas=num_replicas,
        is_scheduled=bool(re.search(r"^HloModule.*\bis_scheduled=true", text, re.M)),
        donated=_donated(text),
    )


def _donated(text: str) -> frozenset[int]:
    """Numbers of the inputs that results alias: `input_output_alias={ {0}: (3, {}, may-alias) }`."""
    header = re.search(r"^HloModule.*\binput_output_alias=\{(.*?\)) \}", text, re.M)
    return frozenset(map(int, re.findall(r": \((\d+),", header[1]))) if header else frozenset()


def check_complete(program: Program) -> None:
    """Raises AuditError if the text lacks an instruction's operand or computation."""
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            runs = (instruction.attributes.get(key, "") for key in _RUN_BY.get(instruction.opcode, ()))
            called = re.findall(r"[\w.\-<>]+", " ".join(runs))
            if unread := [name for name in instruction.operands if name not in computation.instructions]:
                raise AuditError(
                    f"HLO instruction {instruction.name} reads {unread[0]}, which the text lacks"
                )
            if unknown := [name for name in called if name not in program.computations]:
                raise AuditError(
                    f"HLO instruction {instruction.name} runs {unknown[0]}, which the text lacks"
                )


def check_partitioned(program: Program) -> None:
    """Raises AuditError if the text is from before the partitioner, which makes the collectives."""
    for computation in program.computations.values():
        for instruction in computation.instructions.values():
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            if "sharding" in instruction.attributes and instruction.opcode in _COMPUTED:
                raise AuditError(
                    f"HLO that is not partitioned yet: {instruction.name} has a sharding, which the "
                    "partitioner turns into shards and collectives; "
                    "fits: the text after optimisations, as compiled.as_text() gives it"
                )
            if target in _BEFORE_PARTITIONING:
                raise AuditError(
                    f"HLO that is not partitioned yet: {instruction.name} is a custom call of {target}, "
                    "which the partitioner removes as it makes the collectives; "
                    "fits: the text after optimisations, as compiled.as_text() gives it"
                )


def _devices_of_groups(text: str) -> int:
    """The number of devices that the groups of collectives have; 1 without groups."""
    lists = re.findall(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}\s]+\})\}", text)
    numbered = [int(number) for one in lists for number in re.findall(r"\d+", one)]
    tiled = re.findall(r"replica_groups=\[(\d+),(\d+)\]<=", text)
    return max([1 + max(numbered, default=0), *(int(count) * int(size) for count, size in tiled)])


def _count(text: str, name: str) -> int:
    """A number of the module's header, which omits 1."""
    number = re.search(rf"^HloModule.*\b{name}=(\d+)", text, re.M)
    return int(number[1]) if number else 1


def _computation_blocks(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """(name, is the entry, instruction lines) of each computation."""
    name, is_entry, lines = "", False, []
    for line in text.splitlines():
        line = line.strip()
        header = None if _INSTRUCTION.match(line) else _COMPUTATION.match(line)
        if header and not name:
            name, is_entry, lines = header[2], bool(header[1]), []
        elif name and _END.match(line):
            yield name, is_entry, lines
            name = ""
        elif name and lines and not _INSTRUCTION.match(line):
            lines[-1] += line
        elif name and line:
            lines.append(line)
    if name:
        raise AuditError(f"the text is cut short: it ends inside the computation {name}")


def _computation(name: str, lines: list[str], frames: StackFrames) -> Computation:
    instructions: dict[str, Instruction] = {}
    root = ""
    for line in lines:
        instruction = _instruction(line, frames)
        instructions[instruction.name] = instruction
        root = instruction.name if line.startswith("ROOT ") else root
    if not root:
        raise AuditError(f"the computation {name} has no ROOT: a part of the text is missing")
    return Computation(name, instructions, root)


def _instruction(line: str, frames: StackFrames) -> Instruction:
    line = _INDEX_COMMENT.sub("", line)
    start = _INSTRUCTION.match(line)
    if not start:
        raise AuditError(f"HLO line without an instruction: {line[:120]!r}")
    shape, end = _shape(line, start.end())
    opcode = _OPCODE.match(line, end)
    if not opcode:
        raise AuditError(f"HLO instruction {start[2]} without an opcode: {line[:120]!r}")
    inside, attributes = _split(line, opcode.end())
    plain = opcode[1] in ("constant", "parameter", "iota")
    fields = _attributes(attributes)
    metadata = {k: s or n for k, s, n in _METADATA.findall(fields.pop("metadata", ""))}
    file, line_number = frames.source(metadata)
    if opcode[1] == "fusion-start" and not isinstance(shape, ArrayShape):
        shape = shape[1]  # of (operands, result, contexts ...)
    return Instruction(
        name=start[2],
        shape=shape,
        opcode=_OF_ASYNC_FUSIONS.get(opcode[1], opcode[1]),
        operands=() if plain else tuple(part.split()[-1].lstrip("%") for part in inside if part.strip()),
        attributes=fields,
        literal=",".join(inside) if plain else "",
        op_name=re.sub(r"\\(.)", r"\1", metadata.get("op_name", "")),
        source_file=file,
        source_line=line_number,
    )


def _shape(text: str, start: int) -> tuple[_Shapes, int]:
    """The shape that begins at `start`, and its end."""
    if text[start] != "(":
        array = _ARRAY.match(text, start)
        if not array:
            raise AuditError(f"HLO shape not understood: {text[start : start + 80]!r}")
        dims = tuple(int(d.strip().lstrip("<=")) for d in array[2].split(",") if d.strip())
        return ArrayShape(array[1], dims, array[3]), array.end()
    parts: list[_Shapes] = []
    start += 1
    while text[start] != ")":
        if text[start] in ", ":
            start += 1
            continue
        part, start = _shape(text, start)
        parts.append(part)
    return tuple(parts), start + 1


def _split(text: str, start: int) -> tuple[list[str], list[str]]:
    """Comma-separated parts inside the parenthesis open at `start`, and those after it."""
    inside: list[str] = []
    after: list[str] = []
    depth, begin, parts = 1, start, inside
    for token in _TOKEN.finditer(text, start):
        symbol = token[0]
        if symbol in "([{":
            depth += 1
        elif symbol in ")]}":
            depth -= 1
            if depth == 0 and parts is inside:
                inside.append(text[begin : token.start()])
                parts, begin = after, token.end()
        elif symbol == "," and depth == (1 if parts is inside else 0):
            parts.append(text[begin : token.start()])
            begin = token.end()
    after.append(text[begin:])
    return inside, [part for part in after if part.strip()]


def _attributes(parts: list[str]) -> dict[str, str]:
    pairs = (part.strip().partition("=") for part in parts)
    return {key: value for key, _, value in pairs}

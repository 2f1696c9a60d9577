"""The buffers that are live at the peak of a compiled program's memory.

Only XLA:CPU reports its assigned buffers. All compilers print instructions in the order of their schedule,
which gives the live buffers: a buffer is live from the instruction that makes it to its last reader.
Buffers of a loop's body add to the buffers that are live around the loop. An update of a slice, a loop's
state and a bitcast take no buffer. The text does not show a compiler's further allocations (alignment,
fragments, buffers of its collectives); the audit reports both totals.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from meshwright.audit.facts.naming import origin_name
from meshwright.audit.hlo.op_names import scope_of
from meshwright.audit.hlo.read import Instruction, Program, arrays
from meshwright.audit.hlo.trace import RUNS, CallPath, TracedValue, called_by, loop_body, resolve
from meshwright.units import format_bytes, format_number_of

Path = tuple[int, ...]
_FUSED = ("fusion", "async-start")
_SAME = ("bitcast", "opt-barrier", "while", "add-dependency")
_WITHOUT = ("parameter", "constant", "after-all", "partition-id", "replica-id", "send")
# Buffers that an audit lists.
_SHOWN = 12
# Tensors that a sentence on the peak names.
_NAMED = 3
# Index of the result in the tuple of an asynchronous start.
_RESULT = {"copy-start": 0, "slice-start": 0, "recv": 0}
# The operand whose buffer an instruction overwrites with its result.
_IN_PLACE = {"dynamic-update-slice": 0, "ragged-all-to-all": 1, "ragged-all-to-all-start": 1}


@dataclass(frozen=True)
class Held:
    """A buffer that is live at the peak.

    num_bytes: tile padding included. tensor: innermost scopes of JAX's name of its values; "" if none has
    one. instruction, shape: of the instruction that made it.
    """

    num_bytes: int
    tensor: str
    instruction: str
    shape: str

    def to_dict(self) -> dict:
        return {"bytes": self.num_bytes} | {k: v for k, v in asdict(self).items() if k != "num_bytes"}


@dataclass(frozen=True)
class Peak:
    """The temporaries at the peak of the schedule.

    num_bytes: bytes of all of them. held: the buffers, largest first.
    """

    num_bytes: int
    held: tuple[Held, ...]

    def by_tensor(self) -> str:
        """The tensors with the most bytes in words, each with the number of its buffers."""
        sizes: dict[str, list[int]] = {}
        for buffer in self.held:
            sizes.setdefault(buffer.tensor or buffer.instruction, []).append(buffer.num_bytes)
        largest = sorted(sizes.items(), key=lambda pair: -sum(pair[1]))[:_NAMED]
        return ", ".join(
            f"`{tensor}` ({format_number_of(len(several), 'buffer')}, {format_bytes(sum(several))})"
            for tensor, several in largest
        )

    def to_dict(self) -> dict:
        """The keys of `memory.peak` in `mw audit`, with the largest buffers only."""
        return {"bytes": self.num_bytes, "buffers": [one.to_dict() for one in self.held[:_SHOWN]]}


@dataclass(eq=False)
class _Buffer:
    num_bytes: int
    made: int
    values: list[TracedValue]
    last: int = 0


def buffer_peak(program: Program) -> Peak | None:
    """The peak of one device's temporaries, without arguments and results.

    None if the program has no schedule.
    """
    if not program.is_scheduled:
        return None
    num_bytes, held = _Liveness(program).peak(CallPath(program.main))
    buffers = sorted((_held(program, buffer) for buffer in held), key=lambda held: -held.num_bytes)
    return Peak(num_bytes, tuple(buffers))


# Largest ratio of a peak to the host's temporaries that counts as equal: the compiler rounds.
_SAME_PEAK = 1.01


def chip_memory(memory: Mapping[str, int] | None, program: Program) -> Mapping[str, int] | None:
    """A compiler's figures by cause, with the chip's temporaries.

    libtpu's peak is the chip's or the host's, whichever has more temporaries. With libtpu 0.0.42 and
    LLaMA-3.2-1B with `offload=true` on 8 v5p, it has the chip's 2.12 GB for 4 layers (the host has 1.39),
    and the host's 5.58 for 16.
    If the host has more, the chip's come from `buffer_peak`.
    """
    if memory is None or memory["temporaries"] > _SAME_PEAK * memory.get("host", 0):
        return memory
    peak = buffer_peak(program)
    if peak is None:
        return memory
    others = memory["total"] - memory["temporaries"]
    return {**memory, "temporaries": peak.num_bytes, "total": others + peak.num_bytes}


def input_bytes(program: Program) -> int:
    """Bytes of the program's inputs on one device, tile padding included."""
    return sum(shape.allocated_bytes for one in program.main.parameters for shape in one.shapes)


def integer_input_bytes(program: Program) -> int:
    """Bytes of the program's integer inputs: tokens, positions, counters, random keys."""
    inputs = (each for each in program.main.parameters if each.attributes.get(RUNS) != "0")
    shapes = (shape for each in inputs for shape in each.shapes)
    return sum(shape.allocated_bytes for shape in shapes if re.match(r"[su](32|64)|pred", shape.dtype))


def constant_bytes(program: Program) -> int:
    """Bytes of the arrays that are part of the program: masks, tables of angles, numbers."""
    instructions = (one for c in program.computations.values() for one in c.instructions.values())
    constants = (one for one in instructions if one.opcode == "constant")
    return sum(shape.allocated_bytes for one in constants for shape in one.shapes)


def layer_saved_bytes(program: Program) -> int:
    """Bytes that loops over layers keep for the backward pass.

    These are the arrays into which each turn writes its slice. 0 if no layer runs in a loop.
    """
    kept = 0
    for computation in program.computations.values():
        for loop in computation.instructions.values():
            if loop.opcode == "while" and loop.op_name.endswith(_FORWARD_LOOP):
                body = loop_body(program, loop)
                made = (TracedValue(body.result, CallPath(body), path) for path, _ in arrays(loop.shape))
                written = ((value, resolve(program, value, _KEPT).instruction) for value in made)
                shapes = dict(arrays(loop.shape))
                kept += sum(
                    shapes[value.path].num_bytes
                    for value, made_by in written
                    if made_by.opcode == "dynamic-update-slice"
                )
    return kept


# JAX's name of the forward loop over layers in a differentiated program.
_FORWARD_LOOP = "/jvp(layers)/while"
_KEPT = frozenset({"bitcast", "copy", "convert"})


class _Liveness:
    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[str, tuple[int, list[_Buffer]]] = {}

    def peak(self, place: CallPath) -> tuple[int, list[_Buffer]]:
        """The most bytes of a computation's buffers that are live at once, and these buffers."""
        name = place.computation.name
        if name not in self._known:
            self._known[name] = self._worked_out(place)
        return self._known[name]

    def _worked_out(self, place: CallPath) -> tuple[int, list[_Buffer]]:
        instructions = list(place.computation.instructions.values())
        buffers = self._buffers(place, instructions)
        starts: dict[int, list[_Buffer]] = defaultdict(list)
        for buffer in buffers:
            starts[buffer.made].append(buffer)
        best: tuple[int, list[_Buffer]] = (0, [])
        live: list[_Buffer] = []
        for index, instruction in enumerate(instructions):
            live = [buffer for buffer in live if buffer.last >= index]
            live = _without_shared(instruction, live, starts[index], index) + starts[index]
            inside = max(
                (self.peak(place.enter(instruction, called)) for called in self._run_by(instruction)),
                key=lambda peak: peak[0],
                default=(0, []),
            )
            total = sum(buffer.num_bytes for buffer in live) + inside[0]
            if total > best[0]:
                best = total, live + inside[1]
        return best

    def _run_by(self, instruction: Instruction) -> list:
        """The called computations that have a schedule; a fusion's has none."""
        return [] if instruction.opcode in _FUSED else called_by(self.program, instruction)

    def _buffers(self, place: CallPath, instructions: list[Instruction]) -> list[_Buffer]:
        """Buffers that a computation makes, except its result's, which the caller counts."""
        known: dict[str, Mapping[Path, _Buffer]] = {}
        for index, instruction in enumerate(instructions):
            for operand in instruction.operands:
                for path, buffer in known.get(operand, {}).items():
                    if _reads(instruction, path):
                        buffer.last = index
            known[instruction.name] = by_path = self._of(TracedValue(instruction, place), index, known)
            for path, buffer in by_path.items():
                buffer.values.append(TracedValue(instruction, place, path))
        returned = set(known[place.computation.root].values())
        made = {buffer: None for by_path in known.values() for buffer in by_path.values()}
        return [buffer for buffer in made if buffer not in returned]

    def _of(
        self, value: TracedValue, index: int, known: Mapping[str, Mapping[Path, _Buffer]]
    ) -> dict[Path, _Buffer]:
        """The buffers of an instruction's arrays: its operands' or new ones."""
        instruction = value.instruction
        opcode, operands = instruction.opcode, [known.get(name, {}) for name in instruction.operands]
        if opcode == "tuple":
            return {(i, *path): each for i, paths in enumerate(operands) for path, each in paths.items()}
        if opcode == "get-tuple-element":
            return _below(operands[0], int(instruction.attributes["index"]))
        if opcode in _SAME:
            return dict(operands[0])
        if opcode.endswith("-done"):
            return self._finished(value.operand(0).instruction, operands[0])
        return {} if opcode in _WITHOUT else dict(self._made(value, index, operands))

    def _finished(self, start: Instruction, started: Mapping[Path, _Buffer]) -> dict[Path, _Buffer]:
        """The buffers of a done: the result's in the tuple of its start."""
        if start.opcode == "all-reduce-start":
            return dict(started)
        result = _below(started, _RESULT.get(start.opcode, 1))
        return {(0, *path): one for path, one in result.items()} if start.opcode == "recv" else result

    def _made(
        self, value: TracedValue, index: int, operands: list[Mapping[Path, _Buffer]]
    ) -> Iterator[tuple[Path, _Buffer]]:
        instruction = value.instruction
        is_start = instruction.opcode.endswith("-start") or instruction.opcode == "recv"
        only = _RESULT.get(instruction.opcode, 1) if is_start else None
        for path, shape in arrays(instruction.shape):
            if only is not None and isinstance(instruction.shape, tuple) and path[0] != only:
                continue
            at = self._updated(value, path)
            if at is not None:
                if () in operands[at]:
                    yield path, operands[at][()]
            elif shape.memory_space == 0:
                yield path, _Buffer(shape.allocated_bytes, index, [], index)

    def _updated(self, value: TracedValue, path: Path) -> int | None:
        """The operand whose buffer a result reuses; None if the result has a new buffer.

        A slice update overwrites its operand, also inside a fusion, and a ragged exchange the array to fill.
        """
        instruction = value.instruction
        aliases = instruction.attributes.get("output_to_operand_aliasing", "")
        alias = re.search(rf"\{{{','.join(map(str, path))}\}}: \((\d+), ", aliases)
        if alias:
            return int(alias[1])
        if instruction.opcode in _IN_PLACE:
            return _IN_PLACE[instruction.opcode]
        if instruction.opcode != "fusion":
            return None
        (called,) = called_by(self.program, instruction)
        place = value.place.enter(instruction, called)
        root = resolve(self.program, TracedValue(called.result, place, path), frozenset({"bitcast"}))
        if root.instruction.opcode != "dynamic-update-slice" or root.place != place:
            return None
        name = root.instruction.operands[0]
        while (updated := called.instructions[name]).opcode == "bitcast":
            name = updated.operands[0]
        return int(updated.literal) if updated.opcode == "parameter" else None


def _without_shared(
    instruction: Instruction, live: list[_Buffer], fresh: list[_Buffer], index: int
) -> list[_Buffer]:
    """The live buffers without operands whose place a new buffer takes.

    An elementwise result reuses the buffer of an operand of the same size that is not read again.
    """
    if instruction.opcode != "convert" and instruction.attributes.get("kind") != "kLoop":
        return live
    left = list(live)
    for buffer in fresh:
        ending = (old for old in left if old.last == index and old.num_bytes == buffer.num_bytes)
        if old := next(ending, None):
            left.remove(old)
    return left


def _reads(instruction: Instruction, path: Path) -> bool:
    """Whether an instruction reads this part of its operand: of a tuple, only the element that it takes."""
    return instruction.opcode != "get-tuple-element" or path[:1] == (int(instruction.attributes["index"]),)


def _below(by_path: Mapping[Path, _Buffer], index: int) -> dict[Path, _Buffer]:
    return {path[1:]: one for path, one in by_path.items() if path[:1] == (index,)}


def _held(program: Program, buffer: _Buffer) -> Held:
    made = buffer.values[0]
    names = (origin_name(program, one) for one in buffer.values if one.instruction.opcode != "tuple")
    tensor = max((scope_of(name) for name in names), key=len, default=())
    shape = dict(arrays(made.instruction.shape))[made.path]
    dims = ",".join(map(str, shape.dims))
    return Held(buffer.num_bytes, "/".join(tensor), made.instruction.name, f"{shape.dtype}[{dims}]")

"""The buffers that make the peak of a compiled program's memory.

Only XLA:CPU hands out which buffers it assigned. But every compiler prints its instructions in the order
in which they run, so what is live when can be worked out: a buffer from the instruction that makes it to
the last that reads it, those of a loop's body on top of what is live around the loop. An update of a
slice, a loop's state and a bitcast take no buffer of their own. What a compiler places beyond that
(alignment, fragments, buffers of its collectives) is not in the text; the audit says both totals.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from meshwright.audit.facts.naming import origin_name
from meshwright.audit.hlo.op_names import scope_of
from meshwright.audit.hlo.read import Instruction, Program, arrays
from meshwright.audit.hlo.trace import RUNS, CallPath, TracedValue, called_by, resolve

Path = tuple[int, ...]
_FUSED = ("fusion", "async-start")
_SAME = ("bitcast", "opt-barrier", "while", "add-dependency")
_WITHOUT = ("parameter", "constant", "after-all", "partition-id", "replica-id", "send")
# Buffers that an audit lists.
_SHOWN = 12
# Where an asynchronous start's result stands in its tuple.
_RESULT = {"copy-start": 0, "slice-start": 0, "recv": 0}


@dataclass(frozen=True)
class Held:
    """A buffer that is live at the peak: its bytes, tile padding included, and what made it.

    tensor: innermost scopes of JAX's name, "" where nothing has one.
    """

    num_bytes: int
    tensor: str
    instruction: str
    shape: str

    def to_dict(self) -> dict:
        return {"bytes": self.num_bytes} | {k: v for k, v in asdict(self).items() if k != "num_bytes"}


@dataclass(frozen=True)
class Peak:
    """num_bytes: of all temporaries that are live at the peak of the schedule; held: the largest first."""

    num_bytes: int
    held: tuple[Held, ...]

    def to_dict(self) -> dict:
        """The keys of `memory.peak` in `mw audit`: the largest buffers alone."""
        return {"bytes": self.num_bytes, "buffers": [one.to_dict() for one in self.held[:_SHOWN]]}


@dataclass(eq=False)
class _Buffer:
    num_bytes: int
    made: int
    values: list[TracedValue]
    last: int = 0


def buffer_peak(program: Program) -> Peak | None:
    """What one device holds at once at most beside arguments and results; None without a schedule."""
    if not program.is_scheduled:
        return None
    num_bytes, held = _Liveness(program).peak(CallPath(program.main))
    found = sorted((_held(program, one) for one in held), key=lambda one: -one.num_bytes)
    return Peak(num_bytes, tuple(found))


def input_bytes(program: Program) -> int:
    """Bytes of the program's inputs that are whole numbers: tokens, positions, counters, random keys."""
    own = (one for one in program.main.parameters if one.attributes.get(RUNS) != "0")
    shapes = (shape for one in own for shape in one.shapes)
    return sum(shape.allocated_bytes for shape in shapes if re.match(r"[su](32|64)|pred", shape.dtype))


def layer_saved_bytes(program: Program) -> int:
    """Bytes that loops over layers keep for the backward pass: what a turn writes into arrays of all turns.

    0 where no layer runs in a loop.
    """
    kept = 0
    for computation in program.computations.values():
        for loop in computation.instructions.values():
            if loop.opcode == "while" and loop.op_name.endswith(_FORWARD_LOOP):
                body = program.computations[loop.attributes["body"].lstrip("%")]
                made = (TracedValue(body.result, CallPath(body), path) for path, _ in arrays(loop.shape))
                written = ((one, resolve(program, one, _KEPT).instruction) for one in made)
                shapes = dict(arrays(loop.shape))
                kept += sum(
                    shapes[one.path].num_bytes
                    for one, made_by in written
                    if made_by.opcode == "dynamic-update-slice"
                )
    return kept


# JAX's name of the loop over layers as it is differentiated, in the forward pass.
_FORWARD_LOOP = "/jvp(layers)/while"
_KEPT = frozenset({"bitcast", "copy", "convert"})


class _Liveness:
    def __init__(self, program: Program) -> None:
        self.program = program
        self._known: dict[str, tuple[int, list[_Buffer]]] = {}

    def peak(self, place: CallPath) -> tuple[int, list[_Buffer]]:
        """Bytes of the buffers that a computation makes and are live at once, and the buffers."""
        name = place.computation.name
        if name not in self._known:
            self._known[name] = self._worked_out(place)
        return self._known[name]

    def _worked_out(self, place: CallPath) -> tuple[int, list[_Buffer]]:
        instructions = list(place.computation.instructions.values())
        buffers = self._buffers(place, instructions)
        starts: dict[int, list[_Buffer]] = defaultdict(list)
        for one in buffers:
            starts[one.made].append(one)
        best: tuple[int, list[_Buffer]] = (0, [])
        live: list[_Buffer] = []
        for index, instruction in enumerate(instructions):
            live = [one for one in live if one.last >= index]
            live = _without_shared(instruction, live, starts[index], index) + starts[index]
            inside = max(
                (self.peak(place.enter(instruction, called)) for called in self._run_by(instruction)),
                key=lambda one: one[0],
                default=(0, []),
            )
            total = sum(one.num_bytes for one in live) + inside[0]
            if total > best[0]:
                best = total, live + inside[1]
        return best

    def _run_by(self, instruction: Instruction) -> list:
        """Computations with a schedule of their own: not those of a fusion."""
        return [] if instruction.opcode in _FUSED else called_by(self.program, instruction)

    def _buffers(self, place: CallPath, instructions: list[Instruction]) -> list[_Buffer]:
        """Buffers that a computation makes; those of its result are its caller's."""
        known: dict[str, Mapping[Path, _Buffer]] = {}
        for index, instruction in enumerate(instructions):
            for operand in instruction.operands:
                for one in known.get(operand, {}).values():
                    one.last = index
            known[instruction.name] = found = self._of(TracedValue(instruction, place), index, known)
            for path, one in found.items():
                one.values.append(TracedValue(instruction, place, path))
        given = set(known[place.computation.root].values())
        everyone = {one: None for found in known.values() for one in found.values()}
        return [one for one in everyone if one not in given]

    def _of(
        self, value: TracedValue, index: int, known: Mapping[str, Mapping[Path, _Buffer]]
    ) -> dict[Path, _Buffer]:
        """The buffers of an instruction's arrays: its operands' or new ones."""
        instruction = value.instruction
        opcode, operands = instruction.opcode, [known.get(name, {}) for name in instruction.operands]
        if opcode == "tuple":
            return {(i, *path): one for i, found in enumerate(operands) for path, one in found.items()}
        if opcode == "get-tuple-element":
            return _below(operands[0], int(instruction.attributes["index"]))
        if opcode in _SAME:
            return dict(operands[0])
        if opcode.endswith("-done"):
            return self._finished(value.operand(0).instruction, operands[0])
        return {} if opcode in _WITHOUT else dict(self._made(value, index, operands))

    def _finished(self, start: Instruction, started: Mapping[Path, _Buffer]) -> dict[Path, _Buffer]:
        """The buffers of a done: those of the result in its start's tuple."""
        if start.opcode == "all-reduce-start":
            return dict(started)
        found = _below(started, _RESULT.get(start.opcode, 1))
        return {(0, *path): one for path, one in found.items()} if start.opcode == "recv" else found

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
        """The operand into whose buffer a result is written, as by an update of a slice, alone or fused."""
        instruction = value.instruction
        said = instruction.attributes.get("output_to_operand_aliasing", "")
        found = re.search(rf"\{{{','.join(map(str, path))}\}}: \((\d+), ", said)
        if found:
            return int(found[1])
        if instruction.opcode == "dynamic-update-slice":
            return 0
        if instruction.opcode != "fusion":
            return None
        (called,) = called_by(self.program, instruction)
        place = value.place.enter(instruction, called)
        root = resolve(self.program, TracedValue(called.result, place, path), frozenset({"bitcast"}))
        if root.instruction.opcode != "dynamic-update-slice" or root.place != place:
            return None
        name = root.instruction.operands[0]
        while (one := called.instructions[name]).opcode == "bitcast":
            name = one.operands[0]
        return int(one.literal) if one.opcode == "parameter" else None


def _without_shared(
    instruction: Instruction, live: list[_Buffer], fresh: list[_Buffer], index: int
) -> list[_Buffer]:
    """What stays live beside what is made: an elementwise result takes the place of an operand that ends."""
    if instruction.opcode != "convert" and instruction.attributes.get("kind") != "kLoop":
        return live
    left = list(live)
    for one in fresh:
        ending = (old for old in left if old.last == index and old.num_bytes == one.num_bytes)
        if old := next(ending, None):
            left.remove(old)
    return left


def _below(found: Mapping[Path, _Buffer], index: int) -> dict[Path, _Buffer]:
    return {path[1:]: one for path, one in found.items() if path[:1] == (index,)}


def _held(program: Program, buffer: _Buffer) -> Held:
    made = buffer.values[0]
    names = (origin_name(program, one) for one in buffer.values if one.instruction.opcode != "tuple")
    tensor = max((scope_of(name) for name in names), key=len, default=())
    shape = dict(arrays(made.instruction.shape))[made.path]
    dims = ",".join(map(str, shape.dims))
    return Held(buffer.num_bytes, "/".join(tensor), made.instruction.name, f"{shape.dtype}[{dims}]")

"""The flow of values in a compiled program, and how often each computation runs."""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from meshwright.audit.hlo.op_names import OF_BLOCKS
from meshwright.audit.hlo.read import ArrayShape, Computation, Instruction, Program
from meshwright.models.scopes import at_most, by_even_load, in_extra_passes

COPIES = frozenset({"copy", "bitcast", "reshape", "copy-done", "copy-start", "opt-barrier"})
SLICES = frozenset({"slice", "dynamic-slice", "slice-start", "slice-done"})
# Operations that return their first operand with a part of it written.
WRITES = ("dynamic-update-slice", "scatter")
MOVES = COPIES | SLICES | {"convert", "transpose", "bitcast-convert"}
# Moves, and operations that repeat their operand along further dimensions.
MOVES_OR_REPEATS = MOVES | {"broadcast"}
# Custom calls of XLA for TPU that concatenate arrays or cut off padding of zeros.
_MOVING_CALLS = ("ConcatBitcast", "ZeroCrop")
_CALLS = frozenset({"fusion", "call", "async-start"})
CALLED = (
    "calls", "to_apply", "body", "condition", "true_computation", "false_computation", "branch_computations",
)  # fmt: skip
# Runs of a call, if not 1: for programs that a loop dispatches (link.py).
RUNS = "runs"
_NAMED_TRIPS = re.compile(
    "|".join(re.sub(r"\d+", r"(\\d+)", scope) for scope in (at_most(0, 2), at_most(0), by_even_load(0)))
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"?(\d+)')


@dataclass(frozen=True)
class CallSite:
    """`caller`, an instruction of `computation`, runs the next computation of the chain."""

    computation: Computation
    caller: Instruction


@dataclass(frozen=True)
class CallPath:
    """A computation with one chain of calls from the entry to it."""

    computation: Computation
    frames: tuple[CallSite, ...] = ()

    @property
    def parent(self) -> "CallPath":
        return CallPath(self.frames[-1].computation, self.frames[:-1])

    @property
    def loops(self) -> tuple[Instruction, ...]:
        """The while instructions around this place, outermost first."""
        return tuple(frame.caller for frame in self.frames if frame.caller.opcode == "while")

    @property
    def is_conditional(self) -> bool:
        return any(frame.caller.opcode == "conditional" for frame in self.frames)

    def enter(self, caller: Instruction, called: Computation) -> "CallPath":
        return CallPath(called, (*self.frames, CallSite(self.computation, caller)))


@dataclass(frozen=True)
class TracedValue:
    """An instruction's result at a place; `path` selects an element of a tuple."""

    instruction: Instruction
    place: CallPath
    path: tuple[int, ...] = ()

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the program: a parameter of the entry, not of a called computation."""
        return self.instruction.opcode == "parameter" and not self.place.frames

    @property
    def shape(self) -> ArrayShape:
        """The shape of the array, or of the tuple's element."""
        return self.instruction.shapes[self.path[0] if self.path else 0]

    def operand(self, index: int, path: tuple[int, ...] = ()) -> "TracedValue":
        name = self.instruction.operands[index]
        return TracedValue(self.place.computation.instructions[name], self.place, path)

    def operands(self) -> list["TracedValue"]:
        """All operands, in order."""
        return [self.operand(index) for index in range(len(self.instruction.operands))]


def places(program: Program, start: CallPath | None = None) -> Iterator[CallPath]:
    """Every chain of calls from the entry: fusions, calls, loop bodies, branches, async wrappers.

    Left out are the small functions that reduce, sort and scatter apply to single elements, and loops and
    calls with 0 runs.
    """
    start = start or CallPath(program.main)
    yield start
    for instruction in start.computation.instructions.values():
        if instruction.opcode == "while" and in_extra_passes() in instruction.op_name:
            continue
        if instruction.attributes.get(RUNS) == "0":
            continue
        for called in called_by(program, instruction):
            yield from places(program, start.enter(instruction, called))


def called_by(program: Program, instruction: Instruction) -> list[Computation]:
    """Computations that an instruction runs as a whole, in the order of its text."""
    if instruction.opcode not in _CALLS | {"while", "conditional"}:
        return []
    text = " ".join(instruction.attributes.get(key, "") for key in CALLED)
    return [
        program.computations[name]
        for name in re.findall(r"%?([\w.\-]+)", text)
        if name in program.computations
    ]


def loop_body(program: Program, loop: Instruction) -> Computation:
    """The computation that each turn of a while instruction runs."""
    return program.computations[loop.attributes["body"].lstrip("%")]


def callers(place: CallPath) -> Iterator[TracedValue]:
    """The instructions that call a place's computations, outermost first, each at its own place."""
    for depth, frame in enumerate(place.frames):
        yield TracedValue(frame.caller, CallPath(frame.computation, place.frames[:depth]))


def run_count(program: Program, place: CallPath) -> Fraction | None:
    """Runs of a place in a step, or their mean if they depend on data; None if unknown.

    The product of the trip counts of its loops, the shares of its branches and the runs of its calls. A
    branch whose condition is unknown counts as always taken.
    """
    count, called = Fraction(1), [*(frame.computation for frame in place.frames[1:]), place.computation]
    for caller, computation in zip(callers(place), called, strict=False):
        if caller.instruction.opcode == "while":
            trips = trip_count(program, caller)
            if trips is None:
                return None
            count *= trips
        elif caller.instruction.opcode == "conditional":
            count *= share_of_branch(program, caller, computation)
        count *= int(caller.instruction.attributes.get(RUNS, 1))
    return count


def share_of_branch(program: Program, conditional: TracedValue, branch: Computation) -> Fraction:
    """The share of a conditional's runs that take a branch.

    Layers of several kinds run in one loop, which reads each layer's branch from a constant list of numbers.
    If data choose the branch, the share is in the conditional's scope (`at_most_blocks`); 1 for each branch
    without such a scope.
    """
    is_numbered = "branch_computations" in conditional.instruction.attributes
    branches = called_by(program, conditional.instruction)
    number = branches.index(branch)
    if blocks := OF_BLOCKS.findall(conditional.instruction.op_name):
        # The branch with blocks is the first one for a boolean, but number 1 for an index.
        share = Fraction(*map(int, blocks[-1]))
        return share if (number == 1) == is_numbered else 1 - share
    if not is_numbered:
        return Fraction(1)
    chosen = resolve(program, conditional.operand(0), MOVES)
    if chosen.instruction.opcode == "clamp":
        chosen = resolve(program, chosen.operand(1), MOVES)
    numbers = [int(text) for text in re.findall(r"-?\d+", chosen.instruction.literal)]
    if chosen.instruction.opcode != "constant" or len(numbers) != chosen.instruction.shapes[0].num_elements:
        return Fraction(1)
    return Fraction(numbers.count(number), len(numbers))


def known_runs(program: Program, place: CallPath) -> Fraction:
    """`run_count`, or 1 if that is unknown."""
    count = run_count(program, place)
    return Fraction(1) if count is None else count


def trip_count(program: Program, loop: TracedValue) -> int | Fraction | None:
    """Iterations of a while, as a mean over its runs; None if unknown.

    Taken from XLA's own figure, otherwise from the loop's scope if the number depends on data (`at_most`,
    `by_even_load`), otherwise from `i < bound`, `i = start`, `i += step`.
    """
    known = _KNOWN_TRIPS.search(loop.instruction.attributes.get("backend_config", ""))
    if known:
        return int(known[1])
    if scopes := _NAMED_TRIPS.findall(loop.instruction.op_name):
        trips, runs, *others = scopes[-1]
        mean = Fraction(int(trips or "".join(others)), int(runs or 1))
        return int(mean) if mean.denominator == 1 else mean
    named = loop.instruction.attributes
    condition = loop.place.enter(loop.instruction, program.computations[named["condition"].lstrip("%")])
    body = loop.place.enter(loop.instruction, program.computations[named["body"].lstrip("%")])
    compare = resolve(program, TracedValue(condition.computation.result, condition))
    if compare.instruction.opcode != "compare" or compare.instruction.attributes.get("direction") != "LT":
        return None
    counter, bound = resolve(program, compare.operand(0)), _constant(program, compare.operand(1))
    if counter.instruction.opcode != "parameter" or not counter.path:
        return None
    start = _constant(program, loop.operand(0, counter.path))
    step = _step(program, TracedValue(body.computation.result, body, counter.path))
    if bound is None or start is None or not step or step < 0:
        return None
    return max(0, -(-(bound - start) // step))


def _step(program: Program, updated: TracedValue) -> int | None:
    """The constant that a loop adds to its counter; None if there is none."""
    add = resolve(program, updated)
    if add.instruction.opcode != "add":
        return None
    for index in (0, 1):
        other = resolve(program, add.operand(1 - index))
        if other.instruction.opcode == "parameter" and other.path == updated.path:
            return _constant(program, add.operand(index))
    return None


def _constant(program: Program, value: TracedValue) -> int | None:
    source = resolve(program, value).instruction
    whole = re.fullmatch(r"-?\d+", source.literal)
    return int(source.literal) if source.opcode == "constant" and whole else None


def resolve(program: Program, value: TracedValue, through: frozenset[str] = COPIES) -> TracedValue:
    """The origin of a value, past the `through` opcodes that only move it."""
    *_, last = history(program, value, through)
    return last


def history(program: Program, value: TracedValue, through: frozenset[str] = MOVES) -> Iterator[TracedValue]:
    """`value`, then each earlier form of it, back to its computation or the program's input."""
    step: TracedValue | None = value
    while step:
        yield step
        step = _before(program, step, through)


def _before(program: Program, value: TracedValue, through: frozenset[str]) -> TracedValue | None:
    """One step back; None if the value was computed or is an input of the program."""
    instruction, place, path = value.instruction, value.place, value.path
    if instruction.opcode == "get-tuple-element":
        return value.operand(0, (int(instruction.attributes["index"]), *path))
    if instruction.opcode == "tuple" and path:
        return value.operand(path[0], path[1:])
    if instruction.opcode in _CALLS and called_by(program, instruction):
        called = place.enter(instruction, called_by(program, instruction)[0])
        return TracedValue(called.computation.result, called, path)
    if instruction.opcode == "parameter" and place.frames:
        return _argument(program, value)
    if instruction.opcode == "while" and path and is_carried_unchanged(program, instruction, path):
        return value.operand(0, path)
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    is_moved = instruction.opcode in through or target in _MOVING_CALLS
    return value.operand(0, path) if is_moved else None


def _argument(program: Program, value: TracedValue) -> TracedValue | None:
    """The operand that the caller passes for a parameter; None if a loop changes it."""
    caller, number = value.place.frames[-1].caller, int(value.instruction.literal)
    outside = TracedValue(caller, value.place.parent)
    if caller.opcode == "while":
        same = value.path and _is_same(program, outside, value.path)
        return outside.operand(0, value.path) if same else None
    if caller.opcode == "conditional":
        return outside.operand(1 + called_by(program, caller).index(value.place.computation), value.path)
    return outside.operand(number, value.path)


def _is_same(program: Program, loop: TracedValue, path: tuple[int, ...]) -> bool:
    """Whether an element that a loop carries has one value in all turns.

    Either it does not change, or each turn copies it from an unchanged element with the same initial value:
    the TPU's compiler moves a turn's operands into fast memory during the turn before.
    """
    source = _carried(program, loop.instruction, path)
    if source is None or source == path:
        return source == path
    begins = [resolve(program, loop.operand(0, each)) for each in (path, source)]
    same_origin = begins[0].instruction is begins[1].instruction and begins[0].path == begins[1].path
    return same_origin and is_carried_unchanged(program, loop.instruction, source)


def is_carried_unchanged(program: Program, loop: Instruction, path: tuple[int, ...]) -> bool:
    """Whether an element of a loop's tuple has the same value after each turn."""
    return _carried(program, loop, path) == path


def _carried(program: Program, loop: Instruction, path: tuple[int, ...]) -> tuple[int, ...] | None:
    """The element that becomes element `path` of the next turn; None if the body computes it."""
    body = loop_body(program, loop)
    carried = resolve(program, TracedValue(body.result, CallPath(body), path))
    return carried.path if carried.instruction.opcode == "parameter" else None


def readers(program: Program, value: TracedValue) -> Iterator[tuple[TracedValue, int]]:
    """(reading instruction, operand number) for each use of a value's numbers.

    Follows copies, converts and transposes, into fusions and out of them. A value that leaves its loop body,
    its branch or the program is read by that computation's root (operand -1). A loop that reads it has the
    path of the element that it carries.
    """
    place, name = value.place, value.instruction.name
    if name == place.computation.root:
        caller = place.frames[-1].caller if place.frames else None
        if caller and caller.opcode in _CALLS:
            yield from readers(program, TracedValue(caller, place.parent, value.path))
        else:
            yield value, -1
    for user in place.computation.users.get(name, ()):
        for index in (i for i, operand in enumerate(user.operands) if operand == name):
            yield from _reader(program, value, TracedValue(user, place), index)


def _reader(
    program: Program, value: TracedValue, user: TracedValue, index: int
) -> Iterator[tuple[TracedValue, int]]:
    opcode = user.instruction.opcode
    if opcode == "get-tuple-element":
        if value.path[:1] == (int(user.instruction.attributes["index"]),):
            yield from readers(program, TracedValue(user.instruction, user.place, value.path[1:]))
    elif opcode == "tuple":
        yield from readers(program, TracedValue(user.instruction, user.place, (index, *value.path)))
    elif opcode in _CALLS and called_by(program, user.instruction):
        called = user.place.enter(user.instruction, called_by(program, user.instruction)[0])
        yield from readers(program, TracedValue(called.computation.parameters[index], called, value.path))
    elif opcode in MOVES - SLICES:
        yield from readers(program, TracedValue(user.instruction, user.place, value.path))
    elif opcode == "while":
        yield TracedValue(user.instruction, user.place, value.path), index
    else:
        yield user, index


def sources(program: Program, value: TracedValue) -> list[TracedValue]:
    """The direct operands of a value; none for constants and inputs of the program."""
    instruction, path = value.instruction, value.path
    if instruction.opcode == "parameter":
        return _passed(program, value) if value.place.frames else []
    if instruction.opcode == "get-tuple-element":
        return [value.operand(0, (int(instruction.attributes["index"]), *path))]
    if instruction.opcode == "tuple" and path:
        return [value.operand(path[0], path[1:])]
    if instruction.opcode == "while" and path:
        return [value.operand(0, path), _result_of(program, value)]
    called = called_by(program, instruction)
    if called and instruction.opcode not in ("while", "conditional"):
        return [_result_of(program, value)]
    return value.operands()


def ancestors(program: Program, value: TracedValue) -> Iterator[TracedValue]:
    """`value` and all values that it depends on, nearest first, each once."""
    seen, left = {value_key(value)}, deque([value])
    while left:
        ancestor = left.popleft()
        yield ancestor
        fresh = [source for source in sources(program, ancestor) if value_key(source) not in seen]
        seen |= {value_key(source) for source in fresh}
        left += fresh


def same_each_turn(program: Program, value: TracedValue, depth: int) -> bool:
    """Whether a value inside the loop of frame `depth` is the same in each of its turns."""
    seen, left = {value_key(value)}, [value]
    while left:
        ancestor = left.pop()
        if len(ancestor.place.frames) <= depth:
            continue
        if ancestor.instruction.opcode == "parameter" and len(ancestor.place.frames) == depth + 1:
            loop = ancestor.place.frames[-1].caller
            if not ancestor.path or not is_carried_unchanged(program, loop, ancestor.path):
                return False
            continue
        fresh = [source for source in sources(program, ancestor) if value_key(source) not in seen]
        seen |= {value_key(source) for source in fresh}
        left += fresh
    return True


def entered_as(program: Program, value: TracedValue) -> TracedValue:
    """The initial form of a value.

    Follows moves backwards, and leaves loops that update the value through their initial operands.
    """
    while True:
        *_, value = history(program, value)
        in_loop = value.place.frames and value.place.frames[-1].caller.opcode == "while"
        if value.instruction.opcode != "parameter" or not in_loop or not value.path:
            return value
        value = TracedValue(value.place.frames[-1].caller, value.place.parent).operand(0, value.path)


def _passed(program: Program, value: TracedValue) -> list[TracedValue]:
    """The caller's operand for a parameter, and for a loop's also the body's result."""
    caller, path = value.place.frames[-1].caller, value.path
    outside = TracedValue(caller, value.place.parent)
    if caller.opcode == "while":
        return [outside.operand(0, path), TracedValue(value.place.computation.result, value.place, path)]
    if caller.opcode == "conditional":
        return [outside.operand(1 + called_by(program, caller).index(value.place.computation), path)]
    return [outside.operand(int(value.instruction.literal), path)]


def _result_of(program: Program, value: TracedValue) -> TracedValue:
    """The result inside the computation that a call, fusion or loop runs."""
    called = called_by(program, value.instruction)
    is_loop = value.instruction.opcode == "while"
    computation = loop_body(program, value.instruction) if is_loop else called[0]
    place = value.place.enter(value.instruction, computation)
    return TracedValue(computation.result, place, value.path)


def value_key(value: TracedValue) -> tuple[object, ...]:
    """Identity of a value: its instruction, place and path."""
    return value.instruction.name, chain_of(value.place), value.path


def chain_of(place: CallPath) -> tuple[str, ...]:
    """Identity of a place: its computation and its chain of calls."""
    return (place.computation.name, *(frame.caller.name for frame in place.frames))

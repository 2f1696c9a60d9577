"""The schedule of a compiled program: overlap of compute and communication, and its time.

The time is simulated with clocks of compute, of the links, and of the link to the host in each direction:

    a start      puts its collective on the links, or its copy on the link to the host, one after another
    a done       waits for its transfer: the wait is exposed
    a collective without a start and a done holds compute and links
    others       take their seconds of compute (see `work`)
    a loop       runs its first turn, then repeats its second

On GPUs a collective slows the compute that hides it by a share of its own time (`StepEfficiency.overlap`),
since both need processors and memory bandwidth. For TPUs, `TPU_SHARE` of XLA's estimates covers this.

XLA for TPU cuts a collective into pieces, fused with products: the first is its start, the last its done.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isclose

from meshwright.audit.facts.communication import is_done, is_start, piece_of
from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.instruction_work import HostCopySeconds, InstructionSeconds, multiplies
from meshwright.audit.facts.opcodes import op_of, received
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.op_names import scope_of
from meshwright.audit.hlo.read import Computation, Instruction, Program
from meshwright.audit.hlo.trace import (
    CallPath,
    TracedValue,
    called_by,
    loop_body,
    places,
    share_of_branch,
    trip_count,
)
from meshwright.hardware.chip import Chip


def has_async_collectives(program: Program) -> bool:
    """Whether the program overlaps collectives with products; XLA for CPU does not."""
    return any(
        i.opcode in ("all-gather-start", "all-reduce-start", "reduce-scatter-start", "async-start")
        or "AsyncCollectiveStart" in i.attributes.get("custom_call_target", "")
        for c in program.computations.values()
        for i in c.instructions.values()
    )


class ProgramSchedule:
    """The products that run during each collective, by the order of instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.is_async = has_async_collectives(program)
        self._pieces: dict[object, list[TracedValue]] = defaultdict(list)
        for place in places(program) if self.is_async else ():
            for instruction in place.computation.instructions.values():
                if op_of(instruction) and (whole := piece_of(instruction, place)):
                    self._pieces[whole].append(TracedValue(instruction, place))

    def overlapped_products(self, collective: TracedValue) -> tuple[str, ...]:
        """Scopes of the products that overlap a collective, in the order of the schedule.

        XLA for TPU cuts a collective into pieces: products in one fusion with any piece count. For others,
        products between its start and its done count.
        """
        whole = piece_of(collective.instruction, collective.place)
        pieces = self._pieces[whole] if whole else [collective]
        return tuple(dict.fromkeys(_named(product) for one in pieces for product in self._overlapped(one)))

    def _overlapped(self, collective: TracedValue) -> Iterator[Instruction]:
        instruction, place = collective.instruction, collective.place
        if any(frame.caller.opcode == "fusion" for frame in place.frames):
            yield from _products_in(self.program, place.computation)
            return
        if place.frames and place.frames[-1].caller.opcode == "async-start":
            instruction, place = place.frames[-1].caller, place.parent
        if not instruction.opcode.endswith("-start") and instruction.opcode != "send":
            return
        # Across slices the result of a send arrives at its recv.
        back = instruction if instruction.opcode != "send" else received(place.computation, instruction)
        listed = list(place.computation.instructions.values())
        start = next(i for i, each in enumerate(listed) if each is instruction)
        for later in listed[start + 1 :]:
            if back.name in later.operands and later.opcode.endswith("-done"):
                return
            yield from _products_of(self.program, later, place.computation)


def overlaps(
    schedule: ProgramSchedule, emitted: Iterable[Emitted], *, can_overlap: bool = False
) -> dict[int, list[str] | None]:
    """Scopes that overlap each collective, by its identity; None if the compiler never overlaps.

    can_overlap: the compiler can, though it may overlap none of this program.
    """
    known = can_overlap or schedule.is_async
    return {id(one): list(schedule.overlapped_products(one.value)) if known else None for one in emitted}


def _products_of(
    program: Program, instruction: Instruction, computation: Computation
) -> Iterator[Instruction]:
    """The products that an instruction is or calls."""
    if multiplies(instruction, computation):
        yield instruction
    for called in called_by(program, instruction):
        yield from _products_in(program, called)


def _products_in(program: Program, computation: Computation) -> Iterator[Instruction]:
    for each in computation.instructions.values():
        yield from _products_of(program, each, computation)


def _named(product: Instruction) -> str:
    return "/".join(scope_of(product.op_name)) or product.name


# Measured step time on TPUs as a share of XLA's estimates plus the links' prices: the median of three steps
# of MaxText on v5e and v6e (benchmarks/results/scheduled.json). Fitted on one of the chips, it is off by 0 to
# 6% on the other.
TPU_SHARE = 0.87
_WRAPPERS = ("fusion", "async-start")


@dataclass(frozen=True)
class StepTimeline:
    """The simulated time of a step.

    seconds: of the step. compute_seconds: the part with compute. exposed: seconds per step that
    each collective adds to compute, by its identity.
    """

    seconds: float
    compute_seconds: float
    exposed: dict[int, float]


@dataclass(frozen=True)
class _Clocks:
    """Seconds since the program began.

    to_host, from_host: when each direction of the link to the host is free. flying: arrival time and
    collectives of each transfer in flight, by its key.
    """

    compute: float = 0.0
    links: float = 0.0
    to_host: float = 0.0
    from_host: float = 0.0
    flying: dict[object, tuple[float, tuple[Emitted, ...]]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """The time when all work is done."""
        return max(self.compute, self.links, self.to_host, self.from_host)

    def later(self, seconds: float) -> "_Clocks":
        flying = {key: (at + seconds, sent) for key, (at, sent) in self.flying.items()}
        moved = {name: vars(self)[name] + seconds for name in _CLOCKS}
        return replace(self, flying=flying, **moved)


_CLOCKS = ("compute", "links", "to_host", "from_host")


def program_timeline(
    program: Program, chip: Chip, prices: Prices, emitted: Iterable[Emitted]
) -> StepTimeline | None:
    """The time of a program's schedule.

    None if the program has no schedule, or if the time of its work is unknown.
    """
    work = InstructionSeconds(program, chip)
    if not program.is_scheduled or not work.is_known or prices.placement is None:
        return None
    walk = _Walk(program, work, prices, emitted)
    end = walk.run(CallPath(program.main), _Clocks(), 1.0)
    share = TPU_SHARE if work.clock is not None else 1.0
    exposed = {key: share * seconds for key, seconds in walk.exposed.items()}
    return StepTimeline(share * end.end, share * walk.computing, exposed)


class _Walk:
    """A simulated run of a program's schedule, with the exposed seconds of each collective."""

    def __init__(
        self,
        program: Program,
        work: InstructionSeconds,
        prices: Prices,
        collectives: Iterable[Emitted],
    ) -> None:
        self.program, self.work, self.prices = program, work, prices
        self.exposed: dict[int, float] = {}
        self.computing = 0.0
        self._slowed = 1 - work.chip.overlap if work.clock is None else 0.0
        self._sent: dict[object, list[Emitted]] = {}
        for emitted in collectives:
            self.exposed[id(emitted)] = 0.0
            self._sent.setdefault(_key(emitted.value), []).append(emitted)

    def run(self, place: CallPath, clocks: _Clocks, weight: float) -> _Clocks:
        """The clocks after one run of a computation that counts as `weight` of a step."""
        instructions = list(place.computation.instructions.values())
        for instruction in instructions:
            clocks = self._after(TracedValue(instruction, place), clocks, weight)
        return clocks

    def _after(self, value: TracedValue, clocks: _Clocks, weight: float) -> _Clocks:
        """The clocks after one instruction."""
        instruction, place = value.instruction, value.place
        if instruction.opcode == "while":
            return self._loop(value, clocks, weight)
        if instruction.opcode == "conditional":
            return self._branches(value, clocks, weight)
        if instruction.opcode == "call":
            for called in called_by(self.program, instruction):
                clocks = self.run(place.enter(instruction, called), clocks, weight)
            return clocks
        if (crossing := self.work.crossing(value)) is not None:
            return self._crosses(value, crossing, clocks)
        for piece in self._collectives(value):
            clocks = self._communicates(instruction, piece, clocks, weight)
        computes = not op_of(instruction) and not instruction.opcode.endswith("-done")
        seconds = self.work.seconds(value) if computes else 0.0
        self.computing += weight * seconds
        clocks = replace(clocks, compute=clocks.compute + seconds)
        return self._arrivals(value, clocks, weight)

    def _branches(self, value: TracedValue, clocks: _Clocks, weight: float) -> _Clocks:
        """The clocks after the mean of the branches, weighted by their runs.

        After the longest branch if the runs are unknown.
        """
        branches = [
            value.place.enter(value.instruction, called)
            for called in called_by(self.program, value.instruction)
        ]
        shares = [float(share_of_branch(self.program, value, place.computation)) for place in branches]
        if not isclose(sum(shares), 1):
            longest = max(branches, key=lambda place: self.run(place, clocks, 0.0).compute)
            return self.run(longest, clocks, weight)
        ends = [self.run(one, clocks, weight * share) for one, share in zip(branches, shares, strict=True)]
        mean = {
            name: sum(share * vars(end)[name] for share, end in zip(shares, ends, strict=True))
            for name in _CLOCKS
        }
        return replace(clocks, **mean)

    def _loop(self, loop: TracedValue, clocks: _Clocks, weight: float) -> _Clocks:
        body = loop_body(self.program, loop.instruction)
        place = loop.place.enter(loop.instruction, body)
        trips = trip_count(self.program, loop)
        trips = 1 if trips is None else trips
        if trips == 0:
            return clocks
        first = self.run(place, clocks, weight * min(1, trips))
        if trips <= 1:
            return first
        second = self.run(place, first, weight * (trips - 1))
        return second.later((trips - 2) * (second.compute - first.compute))

    def _crosses(self, value: TracedValue, crossing: HostCopySeconds, clocks: _Clocks) -> _Clocks:
        """The clocks after a copy between the device's memory and the host's, or its start."""
        link = "to_host" if crossing.to_host else "from_host"
        arrives = max(clocks.compute, vars(clocks)[link]) + crossing.seconds
        after = replace(clocks, **{link: arrives})
        if not value.instruction.opcode.endswith("-start"):
            return replace(after, compute=arrives)
        return replace(after, flying=clocks.flying | {value.instruction.name: (arrives, ())})

    def _collectives(self, value: TracedValue) -> list[TracedValue]:
        """The collectives in an instruction, its fusion or its wrapper."""
        if op_of(value.instruction):
            return [value]
        if value.instruction.opcode not in _WRAPPERS:
            return []
        inside: list[TracedValue] = []
        for called in called_by(self.program, value.instruction):
            place = value.place.enter(value.instruction, called)
            inside += [TracedValue(one, place) for one in called.instructions.values() if op_of(one)]
        return inside

    def _communicates(
        self, outer: Instruction, piece: TracedValue, clocks: _Clocks, weight: float
    ) -> _Clocks:
        sent = tuple(self._sent.get(_key(piece), ()))
        chain = piece_of(piece.instruction, piece.place)
        if chain is not None:
            return self._starts(chain[:2], sent, clocks) if is_start(piece.place.computation) else clocks
        if outer.opcode.endswith("-start") or outer.opcode == "send":
            return self._starts(outer.name, sent, clocks)
        seconds = self._seconds(sent)
        begins = max(clocks.compute, clocks.links)
        free = self._exposed_until(begins, clocks, weight)
        self._expose(sent, begins - free + seconds, weight)
        return replace(clocks, compute=begins + seconds, links=begins + seconds)

    def _exposed_until(self, end: float, clocks: _Clocks, weight: float) -> float:
        """Count the waits of compute for collectives in flight that arrive by `end`, each for its own part.

        Returns the arrival of the last of them, or the clock of compute if there are none.
        """
        free = clocks.compute
        for arrives, sent in sorted(clocks.flying.values(), key=lambda flying: flying[0]):
            if sent and free < arrives <= end:
                self._expose(sent, arrives - free, weight)
                free = arrives
        return free

    def _starts(self, key: object, sent: tuple[Emitted, ...], clocks: _Clocks) -> _Clocks:
        arrives = max(clocks.compute, clocks.links) + self._seconds(sent)
        return replace(clocks, links=arrives, flying=clocks.flying | {key: (arrives, sent)})

    def _arrivals(self, value: TracedValue, clocks: _Clocks, weight: float) -> _Clocks:
        """The clocks after an instruction has waited for the transfers that it ends."""
        instruction = value.instruction
        keys: list[object] = []
        if instruction.opcode.endswith("-done"):
            keys = list(instruction.operands)
        elif instruction.opcode == "fusion":
            keys = [
                chain[:2]
                for piece in self._collectives(value)
                if is_done(piece.place.computation) and (chain := piece_of(piece.instruction, piece.place))
            ]
        for key in keys:
            if key in clocks.flying:
                arrives, sent = clocks.flying[key]
                waits = max(0.0, arrives - clocks.compute)
                slows = self._slowed * max(0.0, self._seconds(sent) - waits)
                self._exposed_until(arrives, clocks, weight)
                self._expose(sent, slows, weight)
                left = {other: one for other, one in clocks.flying.items() if other != key}
                clocks = replace(clocks, compute=clocks.compute + waits + slows, flying=left)
        return clocks

    def _seconds(self, sent: Sequence[Emitted]) -> float:
        """Seconds of one run of collectives sent together; 0 if the links are unknown."""
        return sum((self.prices.seconds(e) or 0.0) / e.runs for e in sent)

    def _expose(self, sent: Sequence[Emitted], seconds: float, weight: float) -> None:
        total = self._seconds(sent)
        for e in sent:
            share = (self.prices.seconds(e) or 0.0) / e.runs / total if total else 1 / len(sent)
            self.exposed[id(e)] += weight * seconds * share


def _key(value: TracedValue) -> object:
    """Identity of a collective at its place, shared by its pieces."""
    whole = piece_of(value.instruction, value.place)
    return whole or (value.instruction.name, tuple(frame.caller.name for frame in value.place.frames))

"""What a compiled program computes while it communicates."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from meshwright.audit.facts.collectives import piece_of
from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.flops import multiplies
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.slices import received
from meshwright.audit.hlo.op_names import scope_of
from meshwright.audit.hlo.parse import Computation, Instruction, Program
from meshwright.audit.hlo.trace import TracedValue, called_by, places


def has_async_collectives(program: Program) -> bool:
    """Whether the compiler lets collectives run beside products: TPU's and GPU's do, the CPU's does not."""
    return any(
        i.opcode in ("all-gather-start", "all-reduce-start", "reduce-scatter-start", "async-start")
        or "AsyncCollectiveStart" in i.attributes.get("custom_call_target", "")
        for c in program.computations.values()
        for i in c.instructions.values()
    )


class ProductSchedule:
    """The products that run while a collective does, in a program printed in the order of its schedule."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.is_async = has_async_collectives(program)
        self._pieces: dict[object, list[TracedValue]] = defaultdict(list)
        for place in places(program) if self.is_async else ():
            for instruction in place.computation.instructions.values():
                if op_of(instruction) and (whole := piece_of(instruction, place)):
                    self._pieces[whole].append(TracedValue(instruction, place))

    def beside(self, collective: TracedValue) -> tuple[str, ...]:
        """Their scopes in the order of the schedule; none where it runs alone.

        XLA for TPU cuts a collective in pieces, each fused with what it runs beside: those count that are
        in one fusion with any piece. Of others, what stands between its start and its done.
        """
        whole = piece_of(collective.instruction, collective.place)
        pieces = self._pieces[whole] if whole else [collective]
        return tuple(dict.fromkeys(_named(product) for one in pieces for product in self._beside(one)))

    def _beside(self, collective: TracedValue) -> Iterator[Instruction]:
        instruction, place = collective.instruction, collective.place
        if any(frame.caller.opcode == "fusion" for frame in place.frames):
            yield from _products_in(self.program, place.computation)
            return
        if place.frames and place.frames[-1].caller.opcode == "async-start":
            instruction, place = place.frames[-1].caller, place.parent
        if not instruction.opcode.endswith("-start") and instruction.opcode != "send":
            return
        # Across slices what is sent is summed elsewhere and comes back to the recv.
        back = instruction if instruction.opcode != "send" else received(place.computation, instruction)
        listed = list(place.computation.instructions.values())
        start = next(i for i, each in enumerate(listed) if each is instruction)
        for later in listed[start + 1 :]:
            if back.name in later.operands and later.opcode.endswith("-done"):
                return
            yield from _products_of(self.program, later, place.computation)


def overlaps(
    schedule: ProductSchedule, found: Iterable[tuple[TracedValue, Emitted]], *, can_overlap: bool = False
) -> dict[int, list[str] | None]:
    """What runs beside each collective, by its identity; None where the compiler overlaps nothing.

    can_overlap: this one overlaps others, though it may overlap none of this program.
    """
    known = can_overlap or schedule.is_async
    return {id(one): list(schedule.beside(value)) if known else None for value, one in found}


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

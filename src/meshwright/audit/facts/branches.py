"""Branches of conditionals: data decides which one runs, so the largest is counted and the report says so."""

from collections.abc import Iterator, Mapping

from meshwright.audit.facts.flops import flops_of
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.hlo.dependence import chain_of
from meshwright.audit.hlo.parse import Program
from meshwright.audit.hlo.trace import CallPath, TracedValue, called_by, places, run_count
from meshwright.units import format_count


def smaller_branches(program: Program) -> dict[tuple[str, ...], str]:
    """The branches that do not count, by their chain of calls, each with what is said of its conditional.

    Of each conditional the branch with the most FLOPs counts, then the one that moves most.
    """
    found: dict[tuple[str, ...], str] = {}
    for place, branches in _conditionals(program):
        sizes = [_size(program, branch) for branch in branches]
        largest = sizes.index(max(sizes))
        if any(size != (0, 0) for size in sizes):
            others = ", ".join(format_count(flops) for i, (flops, _) in enumerate(sizes) if i != largest)
            said = (
                f"{place}: the largest of {len(branches)} branches is counted, "
                f"{format_count(sizes[largest][0])} FLOPs (others: {others})"
            )
            found |= {chain_of(branch): said for i, branch in enumerate(branches) if i != largest}
    return found


def is_counted(place: CallPath, smaller: Mapping[tuple[str, ...], str]) -> bool:
    """Whether a place lies in no branch that does not count."""
    while smaller and place.frames:
        if chain_of(place) in smaller:
            return False
        place = place.parent
    return True


def _conditionals(program: Program) -> Iterator[tuple[str, list[CallPath]]]:
    """Each conditional's name, and its branches where they stand."""
    for place in places(program):
        for instruction in place.computation.instructions.values():
            if instruction.opcode == "conditional":
                name = instruction.op_name or instruction.name
                yield name, [place.enter(instruction, one) for one in called_by(program, instruction)]


def _size(program: Program, branch: CallPath) -> tuple[int, int]:
    """FLOPs of products and bytes of collectives of a branch."""
    flops = moved = 0
    for place in places(program, branch):
        runs = run_count(program, place) or 1
        for instruction in place.computation.instructions.values():
            flops += runs * flops_of(instruction, place.computation)
            if op_of(instruction):
                value = TracedValue(instruction, place)
                moved += runs * sum(
                    shape.num_bytes
                    for i in range(len(instruction.operands))
                    for shape in value.operand(i).instruction.shapes
                )
    return flops, moved

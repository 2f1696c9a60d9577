"""The matrix products that a compiled program runs, with FLOPs, type, pass and tensor."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from meshwright.audit.facts.communication import bits_of, uncast_dtype
from meshwright.audit.facts.factorisations import factorisation_flops
from meshwright.audit.facts.instruction_work import attention_flops, flops_of, is_attention_kernel
from meshwright.audit.facts.naming import einsum_of, is_batched, name_nearby, own_name
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.hlo.op_names import phase_of, primitive_of, scope_of
from meshwright.audit.hlo.read import Instruction, Program, dtype_bits
from meshwright.audit.hlo.trace import (
    CallPath,
    TracedValue,
    called_by,
    chain_of,
    known_runs,
    places,
    share_of_branch,
    sources,
    value_key,
)
from meshwright.units import format_count


def smaller_branches(program: Program) -> dict[tuple[str, ...], str]:
    """The branches that do not count, by chain of calls, with a note on each.

    The branch of a conditional with the most FLOPs counts, and among equals the one with the most bytes. All
    branches count if the program states how often each is taken (`share_of_branch`). The note is about the
    conditional.
    """
    notes: dict[tuple[str, ...], str] = {}
    for place, branches in _conditionals(program):
        if sum(_share(program, branch) for branch in branches) == 1:
            continue
        sizes = [_size(program, branch) for branch in branches]
        largest = sizes.index(max(sizes))
        if any(size != (0, 0) for size in sizes):
            others = ", ".join(format_count(flops) for i, (flops, _) in enumerate(sizes) if i != largest)
            note = (
                f"{place}: the largest of {len(branches)} branches is counted, "
                f"{format_count(sizes[largest][0])} FLOPs (others: {others})"
            )
            notes |= {chain_of(branch): note for i, branch in enumerate(branches) if i != largest}
    return notes


def is_counted_branch(place: CallPath, smaller: Mapping[tuple[str, ...], str]) -> bool:
    """Whether a place is outside of all branches that do not count."""
    while smaller and place.frames:
        if chain_of(place) in smaller:
            return False
        place = place.parent
    return True


def _conditionals(program: Program) -> Iterator[tuple[str, list[CallPath]]]:
    """Each conditional's name, and the places of its branches."""
    for place in places(program):
        for instruction in place.computation.instructions.values():
            if instruction.opcode == "conditional":
                name = instruction.label
                yield name, [place.enter(instruction, one) for one in called_by(program, instruction)]


def _share(program: Program, branch: CallPath) -> Fraction:
    caller = TracedValue(branch.frames[-1].caller, branch.parent)
    return share_of_branch(program, caller, branch.computation)


def _size(program: Program, branch: CallPath) -> tuple[float, float]:
    """FLOPs of products and bytes of collectives of a branch."""
    flops = moved = 0.0
    for place in places(program, branch):
        runs = float(known_runs(program, place))
        for instruction in place.computation.instructions.values():
            flops += runs * _flops(program, instruction, place)
            if op_of(instruction):
                value = TracedValue(instruction, place)
                moved += runs * sum(
                    shape.num_bytes for each in value.operands() for shape in each.instruction.shapes
                )
    return flops, moved


@dataclass(frozen=True)
class Product:
    """A dot, convolution, factorisation, library call or attention kernel at its place.

    flops: per device and step. op_name: JAX's; "" if unknown.
    """

    value: TracedValue
    flops: float
    op_name: str

    @property
    def is_repeated(self) -> bool:
        """Whether XLA computes it a second time to save memory, in its pass over the scheduled program.

        The pass adds `.remat` to the names of copies (HloRematerialization; jax 0.10.2).
        """
        callers = (frame.caller for frame in self.value.place.frames if frame.caller.opcode == "fusion")
        return any(".remat" in one.name for one in (self.value.instruction, *callers))

    def bits(self, program: Program, *, widened: bool) -> int:
        """Bits of a number of the wider operand; before widening if the compiler widens."""
        instruction = self.value.instruction
        operands = [self.value.operand(i) for i in range(min(2, len(instruction.operands)))]
        if widened:
            return max(bits_of(uncast_dtype(program, one, instruction.op_name)) for one in operands)
        return max(dtype_bits(one.instruction.shapes[0].dtype) for one in operands)


def products(program: Program) -> Iterator[Product]:
    """Every product of a step.

    Bodies of loops count by their trips, or once if these are unknown. Branches of conditionals count as in
    `smaller_branches`.
    """
    in_order = sorted(_unnamed(program), key=lambda pair: not is_batched(pair[0].instruction))
    taken = {name for value, _ in in_order if (name := own_name(value))}
    batched = set[str]()
    for value, flops in in_order:
        name = own_name(value) or name_nearby(program, value, taken, batched)
        batched |= {einsum_of(name)} - {""} if is_batched(value.instruction) else set()
        yield Product(value, flops, name)


def _unnamed(program: Program) -> Iterator[tuple[TracedValue, float]]:
    smaller = smaller_branches(program)
    for place in places(program):
        if not is_counted_branch(place, smaller):
            continue
        for instruction in place.computation.instructions.values():
            if flops := _flops(program, instruction, place):
                yield TracedValue(instruction, place), float(flops * known_runs(program, place))


def summed_products(program: Program) -> set[str]:
    """Scopes of products that the program computes as sums of an elementwise product.

    XLA for GPUs and TPUs does so for products of a vector and a matrix, such as a query and a state.
    """
    instructions = (one for c in program.computations.values() for one in c.instructions.values())
    sums = (one.op_name for one in instructions if one.opcode == "reduce")
    return {scope for name in sums if name.endswith("/dot_general") for scope in scope_of(name)}


def dot_flops(program: Program) -> int:
    """FLOPs of one device's products in one step; each multiply-add is 2.

    `gaps.not_understood` lists products that are not counted.
    """
    return round(sum(product.flops for product in products(program)))


def _flops(program: Program, instruction: Instruction, place: CallPath) -> int:
    if is_attention_kernel(instruction):
        return attention_flops(program, TracedValue(instruction, place)) or 0
    return flops_of(instruction, place.computation) or factorisation_flops(instruction, place.computation)


def multiplied_inputs(program: Program) -> set[int]:
    """Identities of the inputs that products before the update depend on: weights and the batch."""
    left = deque(one.value for one in products(program) if not _is_of_update(one))
    seen = {value_key(value) for value in left}
    inputs = set[int]()
    while left:
        value = left.popleft()
        if value.is_input:
            inputs.add(id(value.instruction))
        fresh = [source for source in sources(program, value) if value_key(source) not in seen]
        seen |= {value_key(source) for source in fresh}
        left += fresh
    return inputs


def _is_of_update(product: Product) -> bool:
    return phase_of(product.value.instruction.op_name, differentiated=True) == "update"


def innermost_name(instruction: Instruction) -> str:
    """The innermost scope of an instruction, otherwise JAX's primitive, otherwise its own name."""
    scope = scope_of(instruction.op_name)
    return scope[-1] if scope else primitive_of(instruction.op_name) or instruction.name

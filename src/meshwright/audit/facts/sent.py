"""A collective where it stands in its program, and what is known of it from there."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.audit.facts.collectives import EmittedCollective, bits_of
from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.facts.flops import multiplies
from meshwright.audit.facts.groups import ring_lengths
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.hlo.dependence import ancestors
from meshwright.audit.hlo.parse import Program
from meshwright.audit.hlo.trace import TracedValue, readers

# Collectives that a user wrote by these names are meant; all others come from a sharding.
_WRITTEN = ("all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter", "pshuffle", "ragged_all_to_all")
_ELEMENTWISE = frozenset({
    "add", "subtract", "multiply", "divide", "negate", "maximum", "minimum", "tanh", "exponential",
    "logistic", "power", "select", "clamp", "rsqrt",
})  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """value: the instruction at its place. emitted: one tensor of it, on the mesh."""

    value: TracedValue
    emitted: Emitted

    @property
    def collective(self) -> EmittedCollective:
        return self.emitted.collective

    @property
    def tensor(self) -> str:
        """The input that it sends, as JAX names it, else the innermost named scope, else the primitive."""
        c = self.collective
        return c.parameter or (c.scope[-1] if c.scope else c.primitive or c.name)

    @property
    def runs(self) -> int:
        return self.emitted.runs

    @property
    def elements(self) -> float:
        """Numbers that one run gathers, or sums."""
        return 8 * self.collective.gathered_bytes / bits_of(self.collective.dtype)

    @property
    def is_written(self) -> bool:
        """Whether a user called it by name, in shard_map."""
        return self.collective.primitive.startswith(_WRITTEN)

    @property
    def is_windowed(self) -> bool:
        """Whether it passes blocks round rings: a collective in steps, under a product."""
        lengths = ring_lengths(self.collective.groups)
        return self.emitted.op == "permute" and len(lengths) == 1 and min(lengths) > 2

    @property
    def where(self) -> str:
        c = self.collective
        line = f" ({c.source_file}:{c.source_line})" if c.source_file and c.source_line else ""
        return f"{c.op_name or c.name}{line}"

    def operand(self) -> TracedValue:
        return self.value.operand(self.collective.index)

    def result(self) -> TracedValue:
        """Its tensor of the result, taken from the done of an asynchronous pair."""
        instruction, place = self.value.instruction, self.value.place
        path = (self.collective.index,) if len(instruction.operands) > 1 else ()
        if instruction.opcode.endswith("-start"):
            done = next(iter(place.computation.users[instruction.name]), instruction)
            return TracedValue(done, place, path)
        return TracedValue(instruction, place, path)

    def uses(self, program: Program, *, elementwise: bool = False) -> Iterator[tuple[TracedValue, int]]:
        """What reads its result, and as which operand; `elementwise`: past what keeps the shape."""
        left, seen = [self.result()], set()
        while left:
            for user, at in readers(program, left.pop()):
                key = user.instruction.name, user.place.computation.name
                passes = elementwise and at >= 0 and user.instruction.opcode in _ELEMENTWISE
                if not passes:
                    yield user, at
                elif key not in seen:
                    seen.add(key)
                    left.append(user)

    def products(self, program: Program) -> Iterator[tuple[TracedValue, TracedValue]]:
        """The products that read its result, past what keeps the shape, each with its other operand."""
        for user, at in self.uses(program, elementwise=True):
            if is_product(user) and at in (0, 1):
                yield user, user.operand(1 - at)


def is_computed(program: Program, value: TracedValue) -> bool:
    """Whether a product or another collective has a part in a value: an activation or a gradient then."""
    first = True
    for one in ancestors(program, value):
        if is_product(one) or (not first and op_of(one.instruction) in ("all_reduce", "reduce_scatter")):
            return True
        first = False
    return False


def is_product(value: TracedValue) -> bool:
    """Whether an instruction is a matrix product."""
    return multiplies(value.instruction, value.place.computation)

"""A collective of a program on the mesh of its devices, with its readers and meaning."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.audit.facts.communication import EmittedCollective, bits_of
from meshwright.audit.facts.groups import axes_that_change, group_axes, ring_lengths
from meshwright.audit.facts.instruction_work import multiplies
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import TracedValue, ancestors, history, readers
from meshwright.cost.collectives import Op
from meshwright.notation.array import Axes
from meshwright.notation.collective import gathered_of_block
from meshwright.notation.mesh import Mesh

# Sums of a few numbers (the loss, a norm of gradients) are listed and never decide the verdict.
NEGLIGIBLE_BYTES = 64

# Bytes of a loss or a norm, in float32 or as two numbers.
SINGLE_NUMBER = 8
# The optimizer's pass of a step, and its scope.
UPDATE = "update"

# Passes are forward, backward and update: a recomputed gather may be emitted in either backward pass.
_PASS_OF = {"recompute": "backward", "remat": "backward"}
REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Emitted:
    """A collective of the program on the mesh.

    axes, mesh: its axes; its groups may join only some devices along them. kept: axes whose devices each keep
    their own slice of an all-reduce. note: the difference if groups are not whole axes. widened: the
    compiler sends 16 bits as 32 (XLA:CPU), so bytes count in the earlier type. shuffled: its devices are in
    no order of the axes.
    """

    collective: EmittedCollective
    axes: Axes
    kept: Axes
    note: str
    mesh: Mesh | None = None
    widened: bool = True
    shuffled: bool = False

    @property
    def op(self) -> Op:
        """The collective by meaning: an all-reduce of shards in zeros is an all-gather."""
        return "all_gather" if self.collective.gathers else self.collective.op

    @property
    def reduces(self) -> bool:
        """Whether it sums, or returns the slices of a sum to their owners."""
        return self.op in REDUCTIONS or self.collective.follows_sum

    @property
    def is_part(self) -> bool:
        """Whether its groups join only some devices of its axes: in a slice, then across slices."""
        groups = self.collective.groups
        return self.mesh is not None and not groups.is_permute and groups.size < self.mesh.size(self.axes)

    @property
    def num_bytes(self) -> int:
        """V of one run in the sent type, or the earlier type if `widened`."""
        return self.collective.uncast_bytes if self.widened else self.collective.gathered_bytes

    @property
    def gathered_bytes(self) -> int:
        """V of one run as plans count it.

        The operand of a permute or an all-to-all is one of n blocks, so V is n times its bytes.
        """
        if self.op not in ("permute", "all_to_all"):
            return self.num_bytes
        groups = self.collective.groups
        n = self.mesh.size(self.axes) if self.mesh and groups.is_permute else max(groups.size, 1)
        return gathered_of_block(self.op, self.num_bytes, n)

    @property
    def gathered_per_step(self) -> int:
        return self.gathered_bytes * self.runs

    @property
    def dtype(self) -> str:
        c = self.collective
        return (c.uncast_dtype or c.source_dtype) if self.widened else c.dtype

    @property
    def runs(self) -> int:
        """Runs in a step; 1 if unknown, which the audit reports as a gap."""
        return self.collective.count or 1

    @property
    def bytes_per_step(self) -> int:
        return self.num_bytes * self.runs

    @property
    def value(self) -> TracedValue:
        """The instruction at its place in the chain of calls."""
        return self.collective.value

    @property
    def tensor(self) -> str:
        """JAX's name of the input that it sends, otherwise the innermost scope or the primitive."""
        c = self.collective
        return c.parameter or (c.scope[-1] if c.scope else c.primitive or c.name)

    @property
    def elements(self) -> float:
        """Numbers that one run gathers or sums."""
        return 8 * self.collective.gathered_bytes / bits_of(self.collective.dtype)

    @property
    def elements_of_all(self) -> int:
        """Numbers of the whole array; the operand of an all-to-all is one block of it."""
        c, groups = self.collective, self.collective.groups
        blocks = max(groups.size, 1) if self.op == "all_to_all" else 1
        return 8 * c.gathered_bytes * blocks // bits_of(c.dtype)

    @property
    def dimensions(self) -> list[int]:
        """The dimensions along which an all-gather, an all-to-all or a reduce-scatter works."""
        return self.value.instruction.numbers("dimensions")

    @property
    def is_written(self) -> bool:
        """Whether a user called it by name, in shard_map."""
        return self.collective.primitive.startswith(_WRITTEN)

    @property
    def is_windowed(self) -> bool:
        """Whether it passes blocks round rings: a collective in steps under a product."""
        lengths = ring_lengths(self.collective.groups)
        return self.op == "permute" and len(lengths) == 1 and min(lengths) > 2

    @property
    def source(self) -> str:
        """The file and line that it comes from, empty if the program does not say."""
        c = self.collective
        return f"{c.source_file}:{c.source_line}" if c.source_file and c.source_line else ""

    @property
    def where(self) -> str:
        line = f" ({self.source})" if self.source else ""
        return f"{self.collective.op_name or self.collective.name}{line}"

    def operand(self) -> TracedValue:
        return self.value.operand(self.collective.index)

    def result(self) -> TracedValue:
        """This tensor's result; for an asynchronous pair, the result of the done."""
        instruction, place = self.value.instruction, self.value.place
        path = (self.collective.index,) if len(instruction.operands) > 1 else ()
        if instruction.opcode.endswith("-start"):
            done = next(iter(place.computation.users[instruction.name]), instruction)
            return TracedValue(done, place, path)
        return TracedValue(instruction, place, path)

    def uses(
        self, program: Program, *, elementwise: bool = False, joined: bool = False
    ) -> Iterator[tuple[TracedValue, int]]:
        """The readers of its result, each with the number of its operand.

        elementwise: readers that keep the shape are replaced by their own readers. joined: readers that
        concatenate it with other arrays, and slices of the result, are replaced too. XLA for CPU returns the
        parts of an all-to-all one by one; their concatenation is always replaced by its readers.
        """
        through = (ELEMENTWISE if elementwise else frozenset()) | (_JOINS if joined else frozenset())
        left, seen = [self.result()], set()
        while left:
            for user, at in readers(program, left.pop()):
                key = user.instruction.name, user.place.computation.name
                passes = at >= 0 and (user.instruction.opcode in through or self._joins_parts(program, user))
                if not passes:
                    yield user, at
                elif key not in seen:
                    seen.add(key)
                    left.append(user)

    def _joins_parts(self, program: Program, user: TracedValue) -> bool:
        """Whether an instruction concatenates the parts of this all-to-all."""
        if self.op != "all_to_all" or user.instruction.opcode != "concatenate":
            return False
        parts = user.operands()
        made_by = {tuple(history(program, part))[-1].instruction.name for part in parts}
        return made_by == {self.value.instruction.name}

    def products(self, program: Program) -> Iterator[tuple[TracedValue, TracedValue]]:
        """The products that read its result, each with its other operand.

        Elementwise operations between are skipped.
        """
        for user, at in self.uses(program, elementwise=True):
            if is_product(user) and at in (0, 1):
                yield user, user.operand(1 - at)

    def to_dict(self, tensor: str) -> dict:
        """The keys of `mw audit`; bytes and dtype of one run (see `num_bytes`)."""
        c = self.collective
        return {
            "op": self.op,
            "axes": list(self.axes),
            "tensor": tensor,
            "direction": pass_of(c.phase),
            "bytes": self.num_bytes,
            "dtype": self.dtype,
            "count": c.count,
            "instruction": c.name,
            "source": c.op_name,
        }


def on_mesh(collective: EmittedCollective, mesh: Mesh, *, widened: bool = True) -> Emitted:
    """`collective` with its groups as mesh axes; without axes if its groups follow none."""
    over = group_axes(collective.groups, mesh)
    changing = axes_that_change(collective.slice_offsets, mesh) if collective.slice_offsets else ()
    axes = over.axes or ()
    kept = tuple(axis for axis in changing if axis in axes)
    return Emitted(collective, axes, kept, over.note, mesh, widened, over.shuffled)


def pass_of(direction: str) -> str:
    """forward, backward or update; recomputation is part of backward."""
    return _PASS_OF.get(direction, direction)


# Names of collectives that users write; all others come from a sharding.
_WRITTEN = ("all_gather", "all_to_all", "ppermute", "psum", "reduce_scatter", "pshuffle", "ragged_all_to_all")
ELEMENTWISE = frozenset({
    "add", "subtract", "multiply", "divide", "negate", "maximum", "minimum", "tanh", "exponential",
    "logistic", "power", "select", "clamp", "rsqrt", "sqrt", "sign",
})  # fmt: skip


_JOINS = frozenset({"concatenate", "dynamic-slice", "slice"})


def is_computed(program: Program, value: TracedValue) -> bool:
    """Whether a value depends on a product or on another collective.

    It is an activation or a gradient then.
    """
    first = True
    for ancestor in ancestors(program, value):
        if is_product(ancestor) or (
            not first and op_of(ancestor.instruction) in ("all_reduce", "reduce_scatter")
        ):
            return True
        first = False
    return False


def is_product(value: TracedValue) -> bool:
    """Whether an instruction is a matrix product."""
    return multiplies(value.instruction, value.place.computation)

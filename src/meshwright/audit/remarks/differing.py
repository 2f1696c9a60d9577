"""Whether a value is the same on all devices along a mesh axis.

A value differs over an axis if it depends on an input that is sharded over it, or on the device's number, and
no collective over that axis is between.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.audit.facts.communication import groups_of, unreadable_groups
from meshwright.audit.facts.groups import changes_along, copied_over, group_axes
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.shards import device_values
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import TracedValue, sources, value_key
from meshwright.notation.mesh import Mesh

# Collectives after which all devices of a group have the same values.
SAME_ON_ALL = ("all_gather", "all_reduce")


@dataclass
class DifferingOverAny:
    """Whether values differ over any of several axes of `mesh`; true if that is unknown."""

    program: Program
    mesh: Mesh
    _over: dict[str, "Differing"] = field(default_factory=dict)

    def differs(self, value: TracedValue, axes: Iterable[str]) -> bool:
        over = (self._over.setdefault(axis, Differing(self.program, self.mesh, axis)) for axis in axes)
        return any(each.differs(value) for each in over)


@dataclass
class Differing:
    """Whether values differ over `axis`; true if that is unknown."""

    program: Program
    mesh: Mesh
    axis: str
    _same: set[tuple[object, ...]] = field(default_factory=set)

    def differs(self, value: TracedValue) -> bool:
        seen, left = {value_key(value)}, deque([value])
        while left:
            ancestor = left.popleft()
            began = self._begins(ancestor)
            if began:
                return True
            if began is None:
                fresh = [s for s in sources(self.program, ancestor) if value_key(s) not in seen | self._same]
                seen |= {value_key(source) for source in fresh}
                left += fresh
        self._same |= seen
        return False

    def _begins(self, value: TracedValue) -> bool | None:
        """Whether a value differs regardless of its operands; None if it depends on them."""
        instruction = value.instruction
        if value.is_input:
            return self.axis not in copied_over(instruction, self.mesh)
        if instruction.opcode in ("partition-id", "replica-id", "infeed", "recv"):
            return True
        if op := op_of(instruction):
            return self._after(value, op)
        shape = instruction.shapes[0] if instruction.shapes else None
        if shape and not shape.dims and shape.dtype in ("s32", "u32", "s64", "u64") and not value.path:
            values = device_values(self.program, value)
            return None if values is None else changes_along(self.axis, values, self.mesh)
        return None

    def _after(self, value: TracedValue, op: str) -> bool | None:
        """`_begins` for a collective."""
        if unreadable_groups(value.instruction, self.program.num_devices):
            return True
        groups = groups_of(value.instruction, self.program.num_devices)
        joined = group_axes(groups, self.mesh)
        if joined.axes is None or self.axis not in joined.axes:
            return True if joined.axes is None else None
        return not (op in SAME_ON_ALL and not joined.note)

"""Products that several devices compute alike: a missing constraint that leaves work unshared.

A value differs over a mesh axis if it is computed from an input that is sharded over it, or from the
device's number, and no collective over that axis came between. A product of values that do not
differ over an axis is computed as often as the axis is long.
"""

from collections import deque
from dataclasses import dataclass, field

from meshwright.audit.facts.collectives import groups_of, narrowest_dtype, unreadable_groups
from meshwright.audit.facts.devices import device_values
from meshwright.audit.facts.groups import changes_along, group_axes
from meshwright.audit.facts.kernels import is_attention_kernel
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.prices import Prices
from meshwright.audit.facts.products import Product, products
from meshwright.audit.hlo.dependence import chain_of, sources
from meshwright.audit.hlo.op_names import primitive_of, scope_of
from meshwright.audit.hlo.parse import Program
from meshwright.audit.hlo.shardings import copied_over
from meshwright.audit.hlo.trace import TracedValue
from meshwright.audit.remarks.accident import Accident
from meshwright.notation.mesh import Mesh

# Products alike on several devices are told of where they are more than this of the program's FLOPs:
# a router, or heads of which there are fewer than devices, is meant to be.
_SHARE = 0.05
_SAME_ON_ALL = ("all_gather", "all_reduce")


@dataclass(frozen=True)
class Alike:
    """A product of which `copies` devices, over `axes`, compute the same."""

    product: Product
    axes: tuple[str, ...]
    copies: int

    @property
    def excess_flops(self) -> float:
        return self.product.flops * (1 - 1 / self.copies)


def repeated_products(program: Program, prices: Prices) -> list[Accident]:
    """A warning for each set of axes over which a good part of the program's products is alike."""
    found, total = _alike(program, prices.mesh)
    by_axes: dict[tuple[str, ...], list[Alike]] = {}
    for one in found:
        by_axes.setdefault(one.axes, []).append(one)
    return [
        _warning(alike, program, prices)
        for alike in by_axes.values()
        if sum(one.excess_flops for one in alike) > _SHARE * total
    ]


def _alike(program: Program, mesh: Mesh) -> tuple[list[Alike], float]:
    """The products that devices compute alike, and the FLOPs of all products of one device."""
    axes = tuple(axis for axis, size in mesh.sizes.items() if size > 1)
    differing = [_Differing(program, mesh, axis) for axis in axes]
    found, total = [], 0.0
    for product in products(program):
        if is_attention_kernel(product.value.instruction):
            continue
        value, total = product.value, total + product.flops
        operands = [value.operand(index) for index in range(len(value.instruction.operands))]
        alike = tuple(one.axis for one in differing if not any(map(one.differs, operands)))
        if alike:
            found.append(Alike(product, alike, mesh.size(alike)))
    return found, total


@dataclass
class _Differing:
    """Whether values differ over `axis`; where that cannot be told they do."""

    program: Program
    mesh: Mesh
    axis: str
    _same: set[tuple[object, ...]] = field(default_factory=set)

    def differs(self, value: TracedValue) -> bool:
        seen, left = {_key(value)}, deque([value])
        while left:
            one = left.popleft()
            began = self._begins(one)
            if began:
                return True
            if began is None:
                fresh = [s for s in sources(self.program, one) if _key(s) not in seen | self._same]
                seen |= {_key(source) for source in fresh}
                left += fresh
        self._same |= seen
        return False

    def _begins(self, value: TracedValue) -> bool | None:
        """Whether a value differs whatever it is computed from; None where it depends on that."""
        instruction = value.instruction
        if instruction.opcode == "parameter" and not value.place.frames:
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
        """What `_begins` says of a collective."""
        if unreadable_groups(value.instruction, self.program.num_devices):
            return True
        groups = groups_of(value.instruction, self.program.num_devices)
        joined = group_axes(groups, self.mesh)
        if joined.axes is None or self.axis not in joined.axes:
            return True if joined.axes is None else None
        return not (op in _SAME_ON_ALL and not joined.note)


def _key(value: TracedValue) -> tuple[object, ...]:
    return value.instruction.name, chain_of(value.place), value.path


def _warning(alike: list[Alike], program: Program, prices: Prices) -> Accident:
    largest = max(alike, key=lambda one: one.excess_flops)
    instruction = largest.product.value.instruction
    scope = scope_of(instruction.op_name)
    name = scope[-1] if scope else primitive_of(instruction.op_name) or instruction.name
    over, excess = prices.over(largest.axes, largest.copies), sum(one.excess_flops for one in alike)
    others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    dtype = narrowest_dtype(program, largest.product.value.operand(0))
    return Accident(
        "computed_repeatedly",
        name,
        instruction.name,
        f"the matmul `{name}`{others}: {largest.copies} devices over {over} compute the same values, "
        f"{excess:.3g} FLOPs per device more than if they shared the work",
        instruction.op_name,
        f"shard an operand over {over} too: constrain the activations to keep their batch sharded "
        "(with_sharding_constraint), also after a reshape",
        0,
        prices.product_seconds(excess, dtype),
    )

"""What several devices hold or compute alike: state that is not sharded, products that share no work.

State is the optimizer's moments, and caches of keys and values.

A value differs over a mesh axis if it is computed from an input that is sharded over it, or from the
device's number, and no collective over that axis came between. A product of values that do not
differ over an axis is computed as often as the axis is long.
"""

import re
from collections import deque
from dataclasses import dataclass, field

from meshwright.audit.facts.communication import (
    groups_of,
    is_differentiated,
    narrowest_dtype,
    unreadable_groups,
)
from meshwright.audit.facts.groups import changes_along, copied_over, copies_of, group_axes
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.products import Product, products
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.facts.shards import device_values
from meshwright.audit.facts.work import is_attention_kernel
from meshwright.audit.hlo.op_names import phase_of, primitive_of, scope_of
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program
from meshwright.audit.hlo.trace import CallPath, TracedValue, entered_as, places, readers, sources, value_key
from meshwright.audit.remarks import Remark
from meshwright.notation.mesh import Mesh

_CACHE = re.compile(r"(?i)cache|(?:^|[^a-z])kv(?:$|[^a-z])")
_MOMENT = re.compile(r"opt_state|optimizer|momentum|moments|(?:^|[^a-z])(?:mu|nu)(?:$|[^a-z])")
_WRITES = ("dynamic-update-slice", "scatter", "select")
# Tensors that are less of a state than this are not worth sharding.
_STATE_SHARE = 0.01


def replicated_state(program: Program, prices: Prices) -> list[Remark]:
    """A warning for the optimizer's state, in training, or for the caches, else; none if all are sharded."""
    training = is_differentiated(program)
    chosen = _moments(program) if training else _caches(program)
    total = sum(one.shapes[0].num_bytes for one in chosen)
    found = [
        (one, copies)
        for one in chosen
        if (copies := copies_of(one, program.num_devices)) > 1
        and one.shapes[0].num_bytes >= _STATE_SHARE * total
    ]
    if not found:
        return []
    return [_of_state(found, program, prices, training=training)]


def _moments(program: Program) -> list[Instruction]:
    """Arrays of numbers that nothing but the update reads, or that are named as an optimizer's."""
    return [
        one for one in _arrays(program) if _MOMENT.search(one.op_name) or _read_by_update_alone(program, one)
    ]


def _read_by_update_alone(program: Program, parameter: Instruction) -> bool:
    uses = [user for user, at in readers(program, TracedValue(parameter, CallPath(program.main))) if at >= 0]
    names = [user.instruction.op_name for user in uses if user.instruction.op_name]
    return bool(names) and all(phase_of(name, differentiated=True) == "update" for name in names)


def _caches(program: Program) -> list[Instruction]:
    """Arrays that the program writes a part of, or that are named as caches."""
    written = set()
    for place in places(program):
        for instruction in place.computation.instructions.values():
            if instruction.opcode in _WRITES:
                at = 2 if instruction.opcode == "select" else 0
                origin = entered_as(program, TracedValue(instruction, place).operand(at)).instruction
                is_whole = instruction.opcode != "select" or origin.shapes == instruction.shapes
                written |= {origin.name} if origin.opcode == "parameter" and is_whole else set()
    return [one for one in _arrays(program) if one.name in written or _CACHE.search(one.op_name)]


def _arrays(program: Program) -> list[Instruction]:
    """Inputs of two dimensions or more, and vectors; counters and positions are neither."""
    found = [one for one in program.main.parameters if isinstance(one.shape, ArrayShape)]
    return [
        one for one in found if one.shapes[0].dims and not re.match(r"[su](32|64)|pred", one.shapes[0].dtype)
    ]


def _of_state(
    found: list[tuple[Instruction, int]], program: Program, prices: Prices, *, training: bool
) -> Remark:
    largest, copies = max(found, key=lambda pair: pair[0].shapes[0].num_bytes)
    name = largest.op_name or largest.name
    excess = round(sum(one.shapes[0].num_bytes * (1 - 1 / count) for one, count in found))
    over = prices.over(copied_over(largest, prices.mesh), copies)
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    what = f"`{name}`{others}: replicated on {copies} devices over {over}, {excess:,} B a device more"
    if training:
        kind, change = "replicated_optimizer_state", f"shard the optimizer state over {over} too (ZeRO-1)"
    else:
        kind, change = "replicated_cache", f"shard the cache over {over} too: by sequence, head or position"
    seconds = prices.read_seconds(excess)
    return Remark(kind, name, what, "", change, excess, seconds, instruction=largest.name)


# Products alike on several devices are told of where they are more than this of the program's FLOPs:
# a router, or heads of which there are fewer than devices, is meant to be.
_PRODUCT_SHARE = 0.05
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


def repeated_products(program: Program, prices: Prices) -> list[Remark]:
    """A warning for each set of axes over which a good part of the program's products is alike."""
    found, total = _alike(program, prices.mesh)
    by_axes: dict[tuple[str, ...], list[Alike]] = {}
    for one in found:
        by_axes.setdefault(one.axes, []).append(one)
    return [
        _of_products(alike, program, prices)
        for alike in by_axes.values()
        if sum(one.excess_flops for one in alike) > _PRODUCT_SHARE * total
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
        seen, left = {value_key(value)}, deque([value])
        while left:
            one = left.popleft()
            began = self._begins(one)
            if began:
                return True
            if began is None:
                fresh = [s for s in sources(self.program, one) if value_key(s) not in seen | self._same]
                seen |= {value_key(source) for source in fresh}
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


def _of_products(alike: list[Alike], program: Program, prices: Prices) -> Remark:
    largest = max(alike, key=lambda one: one.excess_flops)
    instruction = largest.product.value.instruction
    scope = scope_of(instruction.op_name)
    name = scope[-1] if scope else primitive_of(instruction.op_name) or instruction.name
    over, excess = prices.over(largest.axes, largest.copies), sum(one.excess_flops for one in alike)
    others = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
    dtype = narrowest_dtype(program, largest.product.value.operand(0))
    return Remark(
        "computed_repeatedly",
        name,
        f"the matmul `{name}`{others}: {largest.copies} devices over {over} compute the same values, "
        f"{excess:.3g} FLOPs per device more than if they shared the work",
        instruction.op_name,
        f"shard an operand over {over} too: constrain the activations to keep their batch sharded "
        "(with_sharding_constraint), also after a reshape",
        0,
        prices.product_seconds(excess, dtype),
        instruction=instruction.name,
    )

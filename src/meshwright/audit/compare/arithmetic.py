"""Findings on the types of a step's elementwise work, on conditions, and on its host.

A tiny twin in float32 (audit/numerics) shows which numbers a step computes. The types of the real step's
numbers are in the compiled text: losses, norms, routers and updates need 32 bits, since 16 bits stop
counting at 256.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from meshwright.audit.compile.planned_program import PlannedStep
from meshwright.audit.facts.narrow_arithmetic import NARROW, HostTransfer, NarrowResult
from meshwright.audit.hlo.op_names import GRADIENTS, phase_of, scope_of
from meshwright.audit.hlo.read import Program
from meshwright.audit.hlo.trace import known_runs, places
from meshwright.audit.remarks import Remark
from meshwright.dtypes import number_type
from meshwright.layout import Layout
from meshwright.units import and_more, format_bytes

# Scopes whose whole forward pass is in float32: the loss of logits, and the choice of experts.
_WIDE_SCOPES = ("loss", "top_k", "router_losses")
# More rounded elements of the update than arrays of the state, by this factor.
_MORE_CASTS = 1.25


def type_findings(
    narrow: Iterable[NarrowResult],
    statistics: Mapping[str, int],
    planned: PlannedStep,
    state_elements: int,
    *,
    adds_wide: bool,
) -> list[Remark]:
    """A finding for each operation that computes in 16 bits, and needs 32.

    statistics: elements of norms' means, by scope. state_elements: of one device's weights and moments that
    are kept in at most 16 bits, which the update rounds once each. adds_wide: gradients of microbatches are
    planned to be added in 32 bits.
    """
    rounded = Counter(statistics)
    names = dict.fromkeys(statistics, "")
    update = Counter[str]()
    for instruction in narrow:
        if adds_wide and GRADIENTS in scope_of(instruction.op_name):
            rounded[GRADIENTS] += instruction.elements
            names.setdefault(GRADIENTS, instruction.op_name)
            continue
        if instruction.direction == "update":
            update[instruction.opcode] += instruction.elements
            names.setdefault("update", instruction.op_name)
        elif instruction.direction == "forward" and (operation := _needs_wide(instruction)):
            rounded[operation] += instruction.elements
            names.setdefault(operation, instruction.op_name)
    computed = update.total() - update["convert"]
    if planned.update and state_elements >= 0:
        limit = 0.01 * planned.update.computed
        excess = update["convert"] - _MORE_CASTS * state_elements
        if computed > limit or excess > limit:
            rounded["update"] = round(computed + max(0.0, excess))
    return [
        Remark(
            "dtype",
            name,
            f"{name}: {elements:,} elements are computed or rounded in 16 bits, where 32 are needed",
            names[name],
            "cast its input to float32 first",
            0,
        )
        for name, elements in rounded.most_common()
    ]


def _needs_wide(result: NarrowResult) -> str | None:
    """The operation that a rounded result is part of, if it must be in float32."""
    for scope in scope_of(result.op_name):
        if scope in _WIDE_SCOPES:
            return scope
    return None


def rounding_findings(rounded: tuple[int, str], layout: Layout) -> list[Remark]:
    """One finding if numbers have fewer than 16 bits and no type of the plan has.

    rounded: the result of `narrowest_elements`.
    """
    elements, name = rounded
    precision = layout.precision
    words = (getattr(precision, one.name) for one in fields(precision) if one.name.endswith("dtype"))
    is_planned = any(number_type(word).bits < NARROW for word in words if word)
    if not elements or is_planned:
        return []
    what = f"{elements:,} elements are rounded to 8 bits or fewer, and no type of the plan is so narrow"
    return [
        Remark("dtype", scope_of(name)[-1] if scope_of(name) else name, what, name, "leave out the cast", 0)
    ]


def condition_findings(program: Program) -> list[Remark]:
    """One finding for conditions on data in the update, which no optimizer has."""
    names = [
        each.op_name
        for place in places(program)
        if known_runs(program, place)
        for each in place.computation.instructions.values()
        if each.opcode == "conditional" and phase_of(each.op_name, differentiated=True) == "update"
    ]
    if not names:
        return []
    what = f"{len(names)} conditions on data in the update: it is left out or replaced in some steps"
    return [Remark("update", "update", what, names[0], "update in every step", 0)]


def host_findings(transfers: Iterable[HostTransfer], layout: Layout) -> list[Remark]:
    """One finding for callbacks, and one for arrays that go by the host's memory without a plan for it."""
    transfers = list(transfers)
    schedule = layout.schedule
    is_planned = schedule.offload or schedule.offload_optimizer
    moves = [] if is_planned else [one for one in transfers if not one.is_call]
    return [*host_calls(transfers), *_of_host(moves)]


def host_calls(transfers: Iterable[HostTransfer]) -> list[Remark]:
    """One finding for a program's callbacks and feeds."""
    return _of_host([one for one in transfers if one.is_call])


def _of_host(transfers: Sequence[HostTransfer]) -> list[Remark]:
    if not transfers:
        return []
    largest = max(transfers, key=lambda one: one.num_bytes)
    size = sum(transfer.num_bytes for transfer in transfers)
    name = largest.instruction.label
    others = and_more(len(transfers) - 1)
    what = f"`{name}`{others} {largest.what}: {format_bytes(size)} a step, and the device waits"
    change = _RETURN_IT if largest.is_call else "keep it on the device"
    return [Remark("host", name, what, largest.instruction.where, change, size)]


_RETURN_IT = (
    "call no Python in the step: return the values (a loop returns them stacked), and print or log them "
    "after the step; replace a callback that computes a value by jax.numpy, or call it before the step"
)

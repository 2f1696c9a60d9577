"""Common mistakes in sharded programs, recognised in the compiled program.

Each rule checks one collective in its program and reports a fault or nothing. Only the first matching rule is
reported. Tensors have JAX's names of the program's inputs and named scopes.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from math import prod
from typing import NamedTuple

from meshwright.audit.facts.communication import is_differentiated
from meshwright.audit.facts.compiled_schedule import ProgramSchedule
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES, Emitted
from meshwright.audit.facts.groups import first_split_over, split_over, tiles_of
from meshwright.audit.facts.opcodes import op_of
from meshwright.audit.facts.seconds import Prices
from meshwright.audit.hlo.read import ArrayShape, Instruction, Program
from meshwright.audit.hlo.trace import (
    MOVES_OR_REPEATS,
    WRITES,
    TracedValue,
    entered_as,
    places,
    resolve,
)
from meshwright.audit.remarks import Remark
from meshwright.audit.remarks.activations import UNCONSTRAINED
from meshwright.audit.remarks.fault_rule import Fault, ProgramContext, is_integer
from meshwright.audit.remarks.necessity import NEED_RULES
from meshwright.audit.remarks.origins import ORIGIN_RULES
from meshwright.audit.remarks.patterns import FAULT_RULES, exposed
from meshwright.audit.remarks.sums import REPLICATED_STATE, SUMMED_WHOLE
from meshwright.audit.remarks.whole_dimension import SCAN, WHOLE_DIMENSION
from meshwright.audit.remarks.widened import widened_send
from meshwright.cost.reshard_seconds import sent_bytes
from meshwright.notation.mesh import Mesh
from meshwright.units import and_more


class ProgramBatch(NamedTuple):
    """The batch of a program without a plan.

    fsdp_axes: mesh axes that shard both the batch's rows and weights. axes: mesh axes that shard the batch.
    elements: numbers of the batch on one device. names: its inputs of floating-point numbers.
    """

    fsdp_axes: frozenset[str]
    axes: frozenset[str]
    elements: int
    names: frozenset[str]


def batch_of(program: Program, mesh: Mesh) -> ProgramBatch:
    """The batch among a program's inputs: integer arrays, which are tokens or labels.

    Other inputs belong to the batch too if their first dimension has the size and shards of such an array,
    and no result has their shape. In a step with gradients and without integer inputs, the batch is the
    inputs whose shape no result has, except frozen weights. Trained weights are returned, updated or as
    gradients (whose sharding may differ). Neither batch nor weights are inputs that training writes in part,
    such as queues of negatives, and in inference inputs with the shape of a result, such as caches.
    """
    arrays = [
        each for each in program.main.parameters if isinstance(each.shape, ArrayShape) and each.shapes[0].dims
    ]
    tokens = [one for one in arrays if is_integer(one)]
    weights = [one for one in arrays if one not in tokens and len(one.shapes[0].dims) > 1]
    returned = {shape.dims for shape in program.main.result.shapes}
    if is_differentiated(program):
        kept = written_in_part(program)
        weights = [one for one in weights if one.name not in kept]
    else:
        weights = [one for one in weights if one.shapes[0].dims not in returned]
    rows: list[Instruction] = []
    with_tokens: list[Instruction] = []
    if tokens:
        first = {(one.shapes[0].dims[0], _first_tiles(one)) for one in tokens}
        with_tokens = [
            weight
            for weight in weights
            if (weight.shapes[0].dims[0], _first_tiles(weight)) in first
            and weight.shapes[0].dims not in returned
        ]
        weights = [one for one in weights if one not in with_tokens]
    elif is_differentiated(program):
        rows = [one for one in weights if one.shapes[0].dims not in returned]
        most_dims = max((len(one.shapes[0].dims) for one in rows), default=0)
        by_rows = any(_first_tiles(one) > 1 for one in rows)
        rows = [one for one in rows if not _is_frozen(one, most_dims, by_rows=by_rows)]
        others = Counter(shape.dims for shape in program.main.result.shapes)
        others -= Counter(one.shapes[0].dims for one in weights)
        for dims in others.elements():
            parts = {one.name: _parts_of(one, dims, program.num_devices) for one in rows}
            of_weight = min(filter(parts.get, parts), key=lambda name: parts[name] or 0, default=None)
            rows = [one for one in rows if one.name != of_weight]
        weights = [one for one in weights if one not in rows]
    batch = tokens or rows
    axes, of_rows = (
        frozenset().union(*(over(one, mesh) for one in batch)) for over in (split_over, first_split_over)
    )
    of_weights = frozenset().union(*(split_over(one, mesh) for one in weights))
    elements = max((one.shapes[0].num_elements for one in tokens), default=0)
    names = frozenset(one.label for one in (*rows, *with_tokens))
    return ProgramBatch(of_rows & of_weights, axes, elements, names)


def written_in_part(program: Program) -> set[str]:
    """Names of the inputs that are written in part, such as caches and queues of negatives."""
    written = set[str]()
    for place in places(program):
        for instruction in place.computation.instructions.values():
            if instruction.opcode in (*WRITES, "select"):
                write, is_select = TracedValue(instruction, place), instruction.opcode == "select"
                if is_select and _chooses_whole(program, write):
                    continue
                value = entered_as(program, write.operand(2 if is_select else 0))  # select(mask, new, old)
                while op_of(value.instruction) == "all_gather":
                    value = entered_as(program, value.operand(0))
                origin = value.instruction
                is_whole = not is_select or origin.shapes == instruction.shapes
                written |= {origin.name} if origin.opcode == "parameter" and is_whole else set()
    return written


def _chooses_whole(program: Program, select: TracedValue) -> bool:
    """Whether a select takes one of its arrays whole, by a single condition."""
    condition = resolve(program, select.operand(0), MOVES_OR_REPEATS)
    return not condition.instruction.shapes[0].dims


def _first_tiles(parameter: Instruction) -> int:
    """Shards of an input's first dimension; 1 if the form of its sharding is unknown."""
    sharding = parameter.attributes.get("sharding", "")
    tiles = re.search(r"devices=\[(\d+)", sharding)
    if tiles:
        return int(tiles[1])
    named = re.match(r"(\{mesh\[[^\]]*\], \[\{[^}]*\})", sharding)
    return tiles_of(f"{named[1]}]}}") if named else 1


def _is_frozen(parameter: Instruction, most_dims: int, *, by_rows: bool) -> bool:
    """Whether an input that is not returned is a frozen weight, and not a part of the batch.

    Frozen weights are sharded, but not along their first dimension, and either have fewer dimensions than the
    batch, or other inputs are sharded by rows. most_dims: the most dimensions of such an input. by_rows:
    whether one is sharded along its first dimension.
    """
    parts = tiles_of(parameter.attributes.get("sharding", ""))
    is_other = by_rows or len(parameter.shapes[0].dims) < most_dims
    return parts > 1 and _first_tiles(parameter) == 1 and is_other


def _parts_of(parameter: Instruction, dims: tuple[int, ...], num_devices: int) -> int | None:
    """Number of shards of an input's array if shards have the shape `dims`; None if they cannot."""
    shard = parameter.shapes[0].dims
    if len(shard) != len(dims) or any(
        max(pair) % min(pair) for pair in zip(shard, dims, strict=True) if min(pair)
    ):
        return None
    whole, part = prod(shard) * tiles_of(parameter.attributes.get("sharding", "")), prod(dims)
    parts = whole // part if part and whole % part == 0 else 0
    return parts if parts and num_devices % parts == 0 else None


def _saved_by_gathers(
    program: Program,
    batch: ProgramBatch,
    sent: Iterable[Emitted],
    prices: Prices,
    multiplied: Collection[int],
) -> float:
    """The share of the bytes sent over `fsdp_axes` that FSDP would save: gathered weights, not activations.

    FSDP gathers each weight once in each pass and reduce-scatters its gradient. With few tokens and large
    weights this sends more, and the share is negative.
    """
    sent_now = sum(prices.sent(one) for one in sent if batch.fsdp_axes & set(one.axes))
    if not sent_now:
        return 1.0
    times = 3 if is_differentiated(program) else 1  # two gathers and a reduce-scatter, or a gather
    by_fsdp = 0.0
    for parameter in program.main.parameters:
        is_weight = id(parameter) in multiplied and parameter.label not in batch.names
        axes = tuple(split_over(parameter, prices.mesh) & batch.fsdp_axes)
        if is_weight and axes and not is_integer(parameter):
            size = prices.mesh.size(axes)
            by_fsdp += times * sent_bytes("all_gather", parameter.shapes[0].num_bytes * size, size)
    return 1 - by_fsdp / sent_now


# Collectives with a smaller share of the program's sent bytes are not reported.
_SHARE = 0.001


def accidents(
    schedule: ProgramSchedule, sent: Iterable[Emitted], prices: Prices, multiplied: Collection[int]
) -> list[Remark]:
    """A warning for each tensor and kind of accident, in the program's order.

    multiplied: identities of the inputs that products read (`multiplied_inputs`).
    """
    collectives, program = tuple(sent), schedule.program
    batch = batch_of(program, prices.mesh)
    saved = _saved_by_gathers(program, batch, collectives, prices, multiplied)
    if saved <= 0:
        batch = batch._replace(fsdp_axes=frozenset())
    context = ProgramContext(
        program, collectives, prices, is_differentiated(program), schedule, *batch, saved
    )
    least = _SHARE * sum(prices.sent(one) for one in collectives)
    warnings: dict[tuple[str, str], Remark] = {}
    # Keys of the warnings of operations along one dimension, by its axes and the size of their arrays.
    along: dict[tuple[object, ...], list[tuple[str, str]]] = {}
    for collective in collectives:
        num_sent = prices.sent(collective)
        if collective.collective.gathered_bytes <= NEGLIGIBLE_BYTES or num_sent < least or not num_sent:
            continue
        for fault, share in _faults(collective, context):
            warning = _warning(fault, share, collective, prices)
            key = warning.kind, _subject(warning)
            if warning.kind == WHOLE_DIMENSION and not collective.is_written:
                keys = along.setdefault((collective.axes, collective.elements_of_all), [])
                keys += [] if key in keys else [key]
            warnings[key] = _joined(warnings[key], warning) if key in warnings else warning
    for keys in along.values():
        if len(keys) > 1:
            first, *others = sorted((warnings.pop(key) for key in keys), key=lambda one: -(one.bytes or 0))
            warnings[keys[0]] = _of_one_dimension(first, others)
    return list(warnings.values())


def _subject(warning: Remark) -> str:
    """The tensor of a warning; for the steps of one scan, which have other tensors, the scan."""
    return warning.what if SCAN in warning.what else warning.tensor


def _of_one_dimension(first: Remark, others: Iterable[Remark]) -> Remark:
    """One warning of several operations along a split dimension of arrays of one size."""
    others = list(others)
    for other in others:
        first = _joined(first, other)
    tensors = ", ".join(dict.fromkeys(f"`{one.tensor}`" for one in others))
    return replace(
        first,
        what=f"{first.what}; so {'is' if len(others) == 1 else 'are'} {tensors}, of the same size",
        change="constrain the array once, before the first of these operations: as its product yields it, "
        "then to be split along another dimension, such as the batch (one all-to-all); all of them then read "
        "whole lines. Or: "
        f"{first.change}",
    )


def joined_alike(remarks: Iterable[Remark]) -> list[Remark]:
    """One warning for all arrays with the same kind of accident and the same remedy, such as all weights."""
    alike: dict[tuple[str, str], list[Remark]] = {}
    for remark in remarks:
        alike.setdefault((remark.kind, remark.change), []).append(remark)
    return [_of_several(several) for several in alike.values()]


# Tensors to name in a warning of several.
_MOST_NAMES = 3


def _of_several(alike: list[Remark]) -> Remark:
    first, *others = sorted(alike, key=lambda one: (-(one.seconds or 0.0), -(one.bytes or 0)))
    for other in others:
        first = _joined(first, other)
    names = list(dict.fromkeys(f"`{one.tensor}`" for one in others if one.tensor != first.tensor))
    if not names:
        return first
    text = ", ".join(names[:_MOST_NAMES]) + and_more(len(names) - _MOST_NAMES)
    return replace(first, what=f"{first.what}; so {'is' if len(names) == 1 else 'are'} {text}")


# Consequences of activations that are not constrained to the batch's axes.
_FOLLOWING = ("contraction_gathered", "activation_gathered", "activation_resharded", SUMMED_WHOLE,
              "computed_repeatedly", "moved_there_and_back")  # fmt: skip


def at_the_root(remarks: Iterable[Remark]) -> list[Remark]:
    """The warnings without those that follow from unconstrained activations.

    Warnings of unconstrained activations are merged into one.
    """
    remarks = _of_one_state(list(remarks))
    roots = [one for one in remarks if one.kind == UNCONSTRAINED]
    if not roots:
        return remarks
    first, *others = sorted(roots, key=lambda remark: -(remark.bytes or 0))
    for other in others:
        first = _joined(first, other)
    return [first, *(one for one in remarks if one not in roots and one.kind not in _FOLLOWING)]


def _of_one_state(remarks: list[Remark]) -> list[Remark]:
    """The warnings, with the sums that only whole state needs merged into the warning of that state."""
    of_state = [one for one in remarks if one.kind == REPLICATED_STATE]
    if len(of_state) <= 1:
        return remarks
    # The sums come first, and the last one is the warning of all state.
    *sums, state = of_state
    merged = state
    for remark in sums:
        merged = _joined(merged, remark)
    what = f"{state.what}; {sums[0].what}"
    merged = replace(merged, what=what, where=sums[0].where, change=sums[0].change)
    return [merged, *(one for one in remarks if one not in of_state)]


# In order of precedence.
_RULES = (*ORIGIN_RULES, *FAULT_RULES, *NEED_RULES, exposed)


def _faults(emitted: Emitted, context: ProgramContext) -> list[tuple[Fault, float]]:
    """The faults of a collective, each with the share of its bytes that is unnecessary."""
    first = next((fault for rule in _RULES if (fault := rule(emitted, context))), None)
    share = context.saved_by_gathers if first and first[0] == UNCONSTRAINED else 1.0
    faults = [(first, share)] if first else []
    widened = widened_send(emitted, context)
    return [*faults, widened] if widened else faults


def _warning(fault: Fault, share: float, emitted: Emitted, prices: Prices) -> Remark:
    kind, what, change = fault
    seconds = prices.seconds(emitted)
    return Remark(
        kind,
        emitted.tensor,
        what,
        emitted.where,
        change,
        round(share * prices.sent(emitted)),
        None if seconds is None else share * seconds,
        instruction=emitted.collective.name,
    )


def _joined(first: Remark, other: Remark) -> Remark:
    known = first.seconds is not None and other.seconds is not None
    seconds = (first.seconds or 0.0) + (other.seconds or 0.0) if known else None
    return replace(first, bytes=(first.bytes or 0) + (other.bytes or 0), seconds=seconds)

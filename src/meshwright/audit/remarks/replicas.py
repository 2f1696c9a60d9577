"""State that every device holds whole: moments of the optimizer, caches of keys and values."""

import re

from meshwright.audit.facts.collectives import is_differentiated
from meshwright.audit.facts.prices import Prices
from meshwright.audit.hlo.dependence import entered_as
from meshwright.audit.hlo.op_names import phase_of
from meshwright.audit.hlo.parse import ArrayShape, Instruction, Program
from meshwright.audit.hlo.shardings import copied_over, copies_of
from meshwright.audit.hlo.trace import CallPath, TracedValue, places, readers
from meshwright.audit.remarks.accident import Accident

_CACHE = re.compile(r"(?i)cache|(?:^|[^a-z])kv(?:$|[^a-z])")
_MOMENT = re.compile(r"opt_state|optimizer|momentum|moments|(?:^|[^a-z])(?:mu|nu)(?:$|[^a-z])")
_WRITES = ("dynamic-update-slice", "scatter", "select")
# Tensors that are less of a state than this are not worth sharding.
_SHARE = 0.01


def replicated_state(program: Program, prices: Prices) -> list[Accident]:
    """A warning for the optimizer's state, in training, or for the caches, else; none if all are sharded."""
    training = is_differentiated(program)
    chosen = _moments(program) if training else _caches(program)
    total = sum(one.shapes[0].num_bytes for one in chosen)
    found = [
        (one, copies)
        for one in chosen
        if (copies := copies_of(one, program.num_devices)) > 1 and one.shapes[0].num_bytes >= _SHARE * total
    ]
    if not found:
        return []
    return [_warning(found, program, prices, training=training)]


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


def _warning(
    found: list[tuple[Instruction, int]], program: Program, prices: Prices, *, training: bool
) -> Accident:
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
    return Accident(kind, name, largest.name, what, "", change, excess, prices.read_seconds(excess))

"""The usual accidents of a sharded program, recognised in what the compiler made of it.

Each rule looks at one collective in its program and reports a fault or nothing; the first rule that applies
is reported. Tensors are named as JAX names the program's inputs and its named scopes.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshwright.audit.facts.collectives import is_differentiated
from meshwright.audit.facts.emitted import NEGLIGIBLE_BYTES
from meshwright.audit.facts.overlap import ProductSchedule
from meshwright.audit.facts.prices import Prices
from meshwright.audit.facts.sent import Sent
from meshwright.audit.remarks import activations, transfers, weights
from meshwright.audit.remarks.accident import Accident
from meshwright.audit.remarks.batch import batch_of
from meshwright.audit.remarks.rules import Fault, ProgramContext, Rule

# In order of precedence.
_RULES: tuple[Rule, ...] = (
    weights.table,
    activations.over_the_batch,
    weights.repeated,
    activations.two_sides,
    activations.sliced_again,
    weights.moved_weight,
    weights.for_few_tokens,
    activations.batch_gathered,
    activations.resharded,
    transfers.summed_whole,
    transfers.exposed,
)
# A collective that sends less than this of what the program sends is not worth a word.
_SHARE = 0.001


def accidents(schedule: ProductSchedule, sent: Iterable[Sent], prices: Prices) -> list[Accident]:
    """A warning for each tensor and kind of accident, in the program's order."""
    everyone, program = tuple(sent), schedule.program
    batch = batch_of(program, prices.mesh)
    context = ProgramContext(program, everyone, prices, is_differentiated(program), schedule, *batch)
    least = _SHARE * sum(prices.sent(one.emitted) for one in everyone)
    found: dict[tuple[str, str], Accident] = {}
    for one in everyone:
        num_sent = prices.sent(one.emitted)
        if one.collective.gathered_bytes <= NEGLIGIBLE_BYTES or num_sent < least or not num_sent:
            continue
        for fault in _faults(one, context):
            warning = _warning(fault, one, prices)
            key = warning.kind, warning.tensor
            found[key] = _joined(found[key], warning) if key in found else warning
    return list(found.values())


# What follows where activations are not constrained to the batch's axes.
_FOLLOWING = ("contraction_gathered", "activation_gathered", "activation_resharded", "summed_whole",
              "computed_repeatedly")  # fmt: skip


def at_the_root(found: Iterable[Accident]) -> list[Accident]:
    """The accidents without those that follow from activations that no constraint holds; these as one."""
    found = list(found)
    roots = [one for one in found if one.kind == activations.UNCONSTRAINED]
    if not roots:
        return found
    first, *others = sorted(roots, key=lambda one: -one.bytes)
    for other in others:
        first = _joined(first, other)
    return [first, *(one for one in found if one not in roots and one.kind not in _FOLLOWING)]


def _faults(one: Sent, context: ProgramContext) -> list[Fault]:
    found = next((fault for rule in _RULES if (fault := rule(one, context))), None)
    return [fault for fault in (found, transfers.widened(one, context)) if fault]


def _warning(fault: Fault, one: Sent, prices: Prices) -> Accident:
    kind, what, change = fault
    bytes_sent, seconds = prices.sent(one.emitted), prices.seconds(one.emitted)
    return Accident(kind, one.tensor, one.collective.name, what, one.where, change, bytes_sent, seconds)


def _joined(first: Accident, other: Accident) -> Accident:
    known = first.seconds is not None and other.seconds is not None
    seconds = (first.seconds or 0.0) + (other.seconds or 0.0) if known else None
    return replace(first, bytes=first.bytes + other.bytes, seconds=seconds)

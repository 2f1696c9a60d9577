"""The usual accidents of a sharded program, recognised in what the compiler made of it.

Each rule looks at one collective where it stands and says what is wrong, or nothing; the most telling
rule speaks. Tensors are named as JAX names the program's inputs and its named scopes.
"""

from collections.abc import Iterable
from dataclasses import replace

from meshwright.audit import activation_rules, transfer_rules, weight_rules
from meshwright.audit.accident import Accident
from meshwright.audit.collectives import is_differentiated
from meshwright.audit.compare import NEGLIGIBLE_BYTES
from meshwright.audit.overlap import Schedule
from meshwright.audit.prices import Prices
from meshwright.audit.rules import Context, Fault, Rule
from meshwright.audit.sent import Sent

# The most telling first.
_RULES: tuple[Rule, ...] = (
    weight_rules.table,
    weight_rules.repeated,
    activation_rules.two_sides,
    activation_rules.sliced_again,
    weight_rules.moved_weight,
    weight_rules.for_few_tokens,
    activation_rules.batch_gathered,
    activation_rules.resharded,
    transfer_rules.summed_whole,
    transfer_rules.exposed,
)
# A collective that sends less than this of what the program sends is not worth a word.
_SHARE = 0.001


def accidents(schedule: Schedule, sent: Iterable[Sent], prices: Prices) -> list[Accident]:
    """A warning for each tensor and kind of accident, in the program's order."""
    everyone, program = tuple(sent), schedule.program
    context = Context(program, everyone, prices, is_differentiated(program), schedule)
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


def _faults(one: Sent, context: Context) -> list[Fault]:
    found = next((fault for rule in _RULES if (fault := rule(one, context))), None)
    return [fault for fault in (found, transfer_rules.widened(one, context)) if fault]


def _warning(fault: Fault, one: Sent, prices: Prices) -> Accident:
    kind, what, change = fault
    bytes_sent, seconds = prices.sent(one.emitted), prices.seconds(one.emitted)
    return Accident(kind, one.tensor, one.collective.name, what, one.where, change, bytes_sent, seconds)


def _joined(first: Accident, other: Accident) -> Accident:
    known = first.seconds is not None and other.seconds is not None
    seconds = (first.seconds or 0.0) + (other.seconds or 0.0) if known else None
    return replace(first, bytes=first.bytes + other.bytes, seconds=seconds)

"""What rules are given beside one collective, and what they answer."""

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.audit.facts.overlap import ProductSchedule
from meshwright.audit.facts.prices import Prices
from meshwright.audit.facts.sent import Sent
from meshwright.audit.hlo.parse import Program

Fault = tuple[str, str, str]  # kind, what, change


@dataclass(frozen=True)
class ProgramContext:
    """What rules look at beside one collective.

    fsdp_axes: mesh axes over which both the batch and weights are sharded. batch_elements: numbers of the
    batch on one device, such as its tokens.
    """

    program: Program
    sent: tuple[Sent, ...]
    prices: Prices
    differentiated: bool
    schedule: ProductSchedule
    fsdp_axes: frozenset[str] = frozenset()
    batch_elements: int = 0

    def over(self, one: Sent) -> str:
        """The devices that a collective joins, in words."""
        return self.prices.over(one.emitted.axes, one.collective.groups.size)


Rule = Callable[[Sent, ProgramContext], Fault | None]

"""The parts of a step: work, exposed transfers, hidden transfers.

    step = compute + memory-bound work + waiting for activations + exposed weights and gradients
       + pipeline bubble + rest

The rest is time without compute and without traffic, such as launches.
"""

from dataclasses import dataclass

from meshwright.plan.candidate import Candidate

LINK_BOUNDS = ("ici", "dcn")
_OF_WEIGHTS = ("weights", "gradients", "updated weights")


@dataclass(frozen=True)
class StepSplit:
    """Seconds of one step by part. The hidden seconds overlap with compute and are not part of the step.

    waiting: transfers of activations, tokens, keys and values, which compute waits for. exposed: transfers of
    weights and gradients that do not overlap with compute.
    """

    compute_seconds: float
    memory_seconds: float
    waiting_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    rest_seconds: float
    hidden_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values()) - self.hidden_seconds

    @property
    def work_seconds(self) -> float:
        """Seconds of work on the chip, bound by compute or by HBM."""
        return self.compute_seconds + self.memory_seconds

    @property
    def communication_seconds(self) -> float:
        """Seconds of all collectives, hidden or exposed."""
        return self.waiting_seconds + self.exposed_seconds + self.hidden_seconds


def split_step(candidate: Candidate) -> StepSplit:
    """The parts of the step of `candidate`, which add up to its step time."""
    by_bound: dict[str, float] = {}
    for term in candidate.cost.terms:
        by_bound[term.bound] = by_bound.get(term.bound, 0.0) + term.seconds
    links = sum(by_bound.pop(bound, 0.0) for bound in LINK_BOUNDS)
    compute, memory, bubble = (by_bound.pop(bound, 0.0) for bound in ("compute", "hbm", "bubble"))
    collectives = candidate.cost.collectives
    exposed = sum(planned.exposed_seconds for planned in collectives if planned.what in _OF_WEIGHTS)
    hidden = sum(planned.hidden_seconds for planned in collectives)
    rest = sum(by_bound.values())
    return StepSplit(compute, memory, links - exposed, exposed, bubble, rest, hidden)

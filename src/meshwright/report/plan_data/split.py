"""The parts of a step that a picture shows: work, exposed transfers and hidden ones.

    step = compute + memory-bound work + waiting for activations + weights and gradients that do not hide
       + pipeline bubble + rest

The rest is what neither computes nor moves bytes, as launches.
"""

from dataclasses import dataclass

from meshwright.plan.candidate import Candidate

LINK_BOUNDS = ("ici", "dcn")
OF_WEIGHTS = ("weights", "gradients", "updated weights")


@dataclass(frozen=True)
class StepSplit:
    """Seconds of one step by part; hidden_seconds run under the others and are no part of the step.

    waiting: for activations, tokens, keys and values and the like. exposed: of weights gathered ahead and
    gradients reduced behind, what finds no compute to hide under.
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
        """The step."""
        return (
            self.compute_seconds
            + self.memory_seconds
            + self.waiting_seconds
            + self.exposed_seconds
            + self.bubble_seconds
            + self.rest_seconds
        )

    @property
    def work_seconds(self) -> float:
        """What a chip does by itself, bound by compute or by HBM."""
        return self.compute_seconds + self.memory_seconds

    @property
    def communication_seconds(self) -> float:
        """All collectives, hidden or not: what the links are busy for."""
        return self.waiting_seconds + self.exposed_seconds + self.hidden_seconds


def split_step(candidate: Candidate) -> StepSplit:
    """The parts of the step of `candidate`; they add up to its step time."""
    by_bound: dict[str, float] = {}
    for term in candidate.cost.terms:
        by_bound[term.bound] = by_bound.get(term.bound, 0.0) + term.seconds
    links = sum(by_bound.pop(bound, 0.0) for bound in LINK_BOUNDS)
    compute, memory, bubble = (by_bound.pop(bound, 0.0) for bound in ("compute", "hbm", "bubble"))
    found = candidate.cost.collectives
    exposed = sum(planned.exposed_seconds for planned in found if planned.what in OF_WEIGHTS)
    hidden = sum(planned.hidden_seconds for planned in found)
    rest = sum(by_bound.values())
    return StepSplit(compute, memory, links - exposed, exposed, bubble, rest, hidden)

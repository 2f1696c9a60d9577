"""A collective of a step with its price, for breakdowns, explanations, audits and reports."""

from dataclasses import dataclass

from meshwright.cost.collectives import Op
from meshwright.cost.graph import Cargo, Direction
from meshwright.notation.array import Axes


@dataclass(frozen=True)
class PricedCollective:
    """A collective on one tensor, in one direction of a step, on the busiest chip.

    what: the kind of array. gathered_bytes: V of one run, in `dtype`. count: runs per step. seconds: of one
    run. exposed_seconds: of all runs, not hidden under compute. bound: "ici" inside a slice or NVLink domain,
    "dcn" between them.
    """

    what: Cargo
    direction: Direction
    op: Op
    axes: Axes
    tensor: str
    gathered_bytes: int
    dtype: str
    count: float
    seconds: float
    exposed_seconds: float
    bound: str

    @property
    def name(self) -> str:
        """The kind of array and the axes: `gradients over data·fsdp`."""
        return f"{self.what} over {'·'.join(self.axes)}"

    @property
    def step_seconds(self) -> float:
        """Seconds of all runs in a step, hidden or exposed."""
        return self.seconds * self.count

    @property
    def hidden_seconds(self) -> float:
        return self.step_seconds - self.exposed_seconds

    @property
    def step_bytes(self) -> float:
        """V of all runs."""
        return self.gathered_bytes * self.count

    @property
    def exposed(self) -> float:
        """The share of its time that is not hidden."""
        return self.exposed_seconds / self.step_seconds if self.step_seconds else 0.0

    def to_dict(self) -> dict:
        """The keys of `planned[]` in `mw audit`; bytes and seconds of one run."""
        return {
            "op": self.op,
            "axes": list(self.axes),
            "tensor": self.tensor,
            "what": self.what,
            "direction": self.direction,
            "bytes": self.gathered_bytes,
            "count": self.count,
            "seconds": self.seconds,
            "exposed": self.exposed,
            "exposed_seconds": self.exposed_seconds,
        }

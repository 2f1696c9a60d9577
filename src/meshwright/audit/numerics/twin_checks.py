"""A comparison of the twin with the formulas."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TwinCheck:
    """One comparison: its name, the largest difference, its tolerance, and the tensor that differs most."""

    what: str
    difference: float | None
    tolerance: float
    worst: str = ""

    @property
    def agrees(self) -> bool:
        return self.difference is not None and self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "difference": self.difference,
            "tolerance": self.tolerance,
            "agrees": self.agrees,
            "worst": self.worst,
        }

"""The published run nearest to a plan, and how far the plan is from it.

A difference is a number of doublings, |log2(plan / run)|, of a size: parameters, chips, tokens of a sequence
and of a step, and the degrees of tensor, pipe, context and expert. A plan is near a run on chips of the same
design, with experts or without as the run, if no size differs by more than MOST_DOUBLINGS and all together by
no more than TOTAL_DOUBLINGS. The table is written by benchmarks/published_runs.py.
"""

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import expm1, log2

from meshwright.models.config import ModelConfig
from meshwright.models.count import count_params
from meshwright.plan.candidate import Candidate
from meshwright.plan.spread import generation, outside_rows

MOST_DOUBLINGS, TOTAL_DOUBLINGS = 2.0, 6.0
# Doublings that another design of chip, another software, and experts or none count.
_CHIP, _SOFTWARE, _EXPERTS = 4.0, 1.0, 6.0
_DEGREES = ("tensor", "pipe", "context", "expert")
_SIZES = {
    "parameters": "parameters",
    "chips": "chips",
    "seq_len": "tokens per sequence",
    "batch_tokens": "tokens per step",
    **{name: name for name in _DEGREES},
}
COLUMNS = (
    "id", "source", "year", "model", "parameters", "chip", "chips", "seq_len", "batch_tokens", *_DEGREES,
    "experts", "software",
)  # fmt: skip


@dataclass(frozen=True)
class PublishedRun:
    """A run whose step time is published. sizes: by the names of `_SIZES`."""

    id: str
    source: str
    year: str
    model: str
    chip: str
    software: str
    experts: bool
    sizes: dict[str, float]


@dataclass(frozen=True)
class Evidence:
    """The nearest published run.

    distance: doublings in total. factors: plan / run of each size that differs. is_near: as this module
    defines it. log_error: log(predicted / measured) of the run, priced without its source; None if unknown.
    """

    run: PublishedRun
    distance: float
    factors: dict[str, float]
    same_chip: bool
    is_near: bool
    log_error: float | None

    def __str__(self) -> str:
        run = self.run
        if self.factors:
            differs = ", ".join(f"{_SIZES[name]} x {factor:.3g}" for name, factor in self.factors.items())
            differs = f"differs by {differs}"
        else:
            differs = "is of the same sizes"
        error = "" if self.log_error is None else f"; without it, its price was {_off(self.log_error)}"
        near = "The nearest published run" if self.is_near else "No published run is near; the nearest"
        chip = "" if self.same_chip else f" ({run.chip} is another design)"
        return (
            f"{near}, {run.model} on {run.sizes['chips']:,.0f} {run.chip}{chip} ({run.source}, {run.id}), "
            f"{differs}{error}"
        )

    def to_dict(self) -> dict[str, object]:
        """The key `evidence` of docs/reference/json.md."""
        return {
            "id": self.run.id,
            "source": self.run.source,
            "model": self.run.model,
            "chip": self.run.chip,
            "chips": int(self.run.sizes["chips"]),
            "distance_doublings": self.distance,
            "factors": self.factors,
            "is_near": self.is_near,
            "error_without_source": None if self.log_error is None else expm1(self.log_error),
        }


def _off(log_error: float) -> str:
    error = expm1(log_error)
    return f"{abs(error):.0%} {'above' if error > 0 else 'below'} the measured step"


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All published runs with a step time."""
    text = (resources.files("meshwright.plan") / "published_runs.csv").read_text(encoding="utf-8")
    return tuple(
        PublishedRun(
            **{name: row[name] for name in ("id", "source", "year", "model", "chip", "software")},
            experts=row["experts"] == "1",
            sizes={name: float(row[name]) for name in _SIZES},
        )
        for row in csv.DictReader(text.splitlines())
    )


@cache
def _errors() -> dict[str, float]:
    return {row.id: row.log_error for row in outside_rows() if row.figure == "time"}


def evidence_of(config: ModelConfig, candidate: Candidate, seq_len: int) -> Evidence:
    """The published run nearest to a candidate, and the differences between them."""
    hardware, layout = candidate.hardware, candidate.layout
    sizes = {
        "parameters": float(count_params(config).total),
        "chips": float(hardware.num_chips),
        "seq_len": float(seq_len),
        "batch_tokens": float(candidate.num_tokens),
        **{name: float(layout.degree(name)) for name in _DEGREES},
    }
    chip, software = generation(hardware.chip.name), hardware.software.fitted_on

    def doublings(run: PublishedRun) -> dict[str, float]:
        return {name: abs(log2(size / run.sizes[name])) for name, size in sizes.items() if run.sizes[name]}

    def distance(run: PublishedRun) -> float:
        return (
            sum(doublings(run).values())
            + _CHIP * (generation(run.chip) != chip)
            + _SOFTWARE * (run.software != software)
            + _EXPERTS * (run.experts != (config.moe is not None))
        )

    nearest = min(published_runs(), key=distance)
    differences = doublings(nearest)
    same_chip = generation(nearest.chip) == chip
    is_near = (
        same_chip
        and nearest.experts == (config.moe is not None)
        and max(differences.values()) <= MOST_DOUBLINGS
        and sum(differences.values()) <= TOTAL_DOUBLINGS
    )
    factors = {name: sizes[name] / nearest.sizes[name] for name, value in differences.items() if value > 0.15}
    total = distance(nearest)
    return Evidence(nearest, total, factors, same_chip, is_near, _errors().get(nearest.id))

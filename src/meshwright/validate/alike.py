"""The share of one measured run's error that another run of the same source has.

Rows of one source share a part of their errors, and similar rows a larger part. Their correlation is

    trust * exp(-|x - y|^2 / (2 REACH^2) - number of words that differ)

    x, y: logarithms of the model's parameters, chips, sequence lengths, batch per chip and degrees of axes
    words: chip, dtype, experts or none, recomputation, ZeRO stage

and the expected error of a row is linear in the errors of some anchors (kriging; Cressie, 1993).
benchmarks/anchoring.py has the errors of all sources before and after.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log2

from meshwright.validate.published import PublishedRow

_REACH = 0.5
# The share of a run's log error that a run just like it has.
TRUST = 0.75


@dataclass(frozen=True)
class Traits:
    """A run as a point: numbers, in units over which errors change, and words."""

    numbers: tuple[float, ...]
    words: tuple[object, ...]

    @classmethod
    def of(cls, row: PublishedRow) -> "Traits":
        scaled = (
            (row.params_active or row.params_total or 1e9, 3),
            (row.chips, 4),
            (row.seq_len, 2),
            (row.tensor, 2),
            (row.pipe, 2),
            (row.context, 2),
            (row.expert, 2),
            (row.interleave, 2),
            (row.micro_batch, 2),
            (row.global_batch_sequences / row.chips, 3),
        )
        numbers = tuple(log2(value or 1.0) / octaves for value, octaves in scaled)
        return cls(numbers, (row.chip, row.dtype, row.experts is None, row.remat, row.zero))

    def alike(self, other: "Traits") -> float:
        """1 for the same run, towards 0 for runs that have little in common."""
        apart = sum((a - b) ** 2 for a, b in zip(self.numbers, other.numbers, strict=True))
        differ = sum(a != b for a, b in zip(self.words, other.words, strict=True))
        return exp(-apart / (2 * _REACH**2) - differ)


def expected_error(anchors: Sequence[tuple[Traits, float]], wanted: Traits, trust: float = TRUST) -> float:
    """The log error that a run has in expectation, given the log errors of one or two others.

    >>> same = Traits((1.0,), ("h100",))
    >>> expected_error([(same, 0.2)], same, trust=0.5)
    0.1
    """
    shares = [trust * wanted.alike(traits) for traits, _ in anchors]
    errors = [error for _, error in anchors]
    if len(anchors) == 1:
        return shares[0] * errors[0]
    between = trust * anchors[0][0].alike(anchors[1][0])
    first, second = shares
    weights = first - between * second, second - between * first
    return sum(w * e for w, e in zip(weights, errors, strict=True)) / (1 - between**2)

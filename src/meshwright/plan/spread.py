"""Errors of prices out of sample: published rows, with constants fitted without their source.

The file is written by benchmarks/fit_published.py, with the constants of the catalog.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import expm1, log2

# The spread holds the share INSIDE of the most similar rows, up to this number of rows.
_SIMILAR = 40
INSIDE = 0.8


@dataclass(frozen=True)
class Outside:
    """A row predicted without its source. log_error: log(predicted / measured step time)."""

    id: str
    value: float
    kind: str
    software: str
    chips: int
    tensor: int
    pipe: int
    log_error: float


@cache
def outside_rows() -> tuple[Outside, ...]:
    """All rows of the fit of the constants."""
    text = (resources.files("meshwright.plan") / "out_of_sample.csv").read_text(encoding="utf-8")
    return tuple(
        Outside(
            cells["id"],
            float(cells["value"]),
            cells["kind"],
            cells["software"],
            int(cells["chips"]),
            int(cells["tensor"]),
            int(cells["pipe"]),
            float(cells["log_error"]),
        )
        for cells in csv.DictReader(text.splitlines())
    )


@dataclass(frozen=True)
class Spread:
    """The errors of similar rows: the share INSIDE of `num_rows` rows is off by at most `within`."""

    within: float
    num_rows: int

    def __str__(self) -> str:
        """
        >>> str(Spread(0.123, 40))
        'at most 12% in 80% of the 40 most similar published cases'
        """
        return (
            f"at most {self.within:.0%} in {INSIDE:.0%} of the {self.num_rows} most similar published cases"
        )


def spread(kind: str, software: str, chips: int, tensor: int, pipe: int) -> Spread | None:
    """The spread of the rows most similar to a layout; None if no row has this kind of chip.

    Similar rows have the same kind of chip, the same software if there are enough, and the fewest doublings
    between their chips, tensor ranks and stages.
    """
    alike = [row for row in outside_rows() if row.kind == kind]
    same_software = [row for row in alike if row.software == software]
    if len(same_software) >= _SIMILAR:
        alike = same_software

    def distance(row: Outside) -> float:
        pairs = ((chips, row.chips), (tensor, row.tensor), (pipe, row.pipe))
        return sum(abs(log2(one / other)) for one, other in pairs) + 2 * (row.software != software)

    return _spread(sorted(alike, key=distance)[:_SIMILAR])


def _spread(rows: Iterable[Outside]) -> Spread | None:
    errors = sorted(expm1(abs(row.log_error)) for row in rows)
    within = quantile(errors, INSIDE)
    return None if within is None else Spread(within, len(errors))


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The quantile at `share` of ordered values, interpolated; None without values.

    >>> quantile([1.0, 2.0, 4.0], 0.5), quantile([1.0, 2.0], 0.9)
    (2.0, 1.9)
    """
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])

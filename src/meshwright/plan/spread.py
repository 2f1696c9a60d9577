"""Ranges of predictions: errors of published rows without their source, conformal over sources.

A user's run is a new source, so sources count and not rows: each has weight 1, divided over its rows, and the
new one has weight 1 beyond all errors. The range of a step time is

    [predicted / (1 + w), predicted (1 + w)],  1 + w = exp(q)

    q: the smallest |log(predicted / measured)| with a weight of INSIDE (S + 1) of S sources below it

over the sources with the same kind of chip, training program, and experts or none, or a wider group with
LEAST_SOURCES. The range is STRETCH times as wide (in logarithms) for a chip or a network without rows.
Vovk et al. (2005), Algorithmic Learning in a Random World. Written by benchmarks/fit_published.py.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import exp

INSIDE = 0.8
LEAST_SOURCES = 6
STRETCH = 1.5
# The first chip of a design, by the others of it.
# Networks between nodes that rows have.
_NETWORKS = ("infiniband", "infiniband-a100", "infiniband-b200", "infiniband-h100", "efa", "tcpx")
_GENERATION = {
    "a800": "a100",
    "h200": "h100",
    "h800": "h100",
    "b300": "b200",
    "gb200": "b200",
    "gb300": "b200",
}


@dataclass(frozen=True)
class Outside:
    """A row predicted without its source.

    figure: time or memory. software: the program that has the constants. network: between nodes, if given.
    experts: whether the model has some. panel: rows of a model, machine and batch have the same.
    log_error: log(predicted / measured) of the step time, or of the memory of a chip.
    """

    id: str
    value: float
    source: str
    figure: str
    kind: str
    software: str
    chip: str
    experts: bool
    panel: int
    log_error: float


@cache
def outside_rows() -> tuple[Outside, ...]:
    """All rows that ranges are made of."""
    text = (resources.files("meshwright.plan") / "out_of_sample.csv").read_text(encoding="utf-8")
    return tuple(
        Outside(
            **{
                **cells,
                "value": float(cells["value"]),
                "experts": cells["experts"] == "1",
                "panel": int(cells["panel"]),
                "log_error": float(cells["log_error"]),
            }
        )
        for cells in csv.DictReader(text.splitlines())
    )


@dataclass(frozen=True)
class Spread:
    """The errors of a group of published sources.

    group, unknown: its traits, and traits that no source has, in words.
    """

    within: float
    num_sources: int
    group: str
    unknown: str = ""

    def __str__(self) -> str:
        """
        >>> str(Spread(0.123, 9, "megatron-te on gpu"))
        'at most 12% for 8 of 10 new sources (by 9 published ones: megatron-te on gpu)'
        """
        wide = f"; {self.unknown}, so this is wide" if self.unknown else ""
        return (
            f"at most {self.within:.0%} for {10 * INSIDE:.0f} of 10 new sources (by {self.num_sources} "
            f"published ones: {self.group}{wide})"
        )

    def interval(self, predicted: float) -> tuple[float, float]:
        """The range of a figure with this prediction."""
        return predicted / (1 + self.within), predicted * (1 + self.within)


@cache
def spread(
    kind: str,
    software: str,
    chip: str,
    experts: bool,
    network: str | None = None,
    figure: str = "time",
    without: str | None = None,
) -> Spread | None:
    """The spread for a layout of a model, or None if no row has this kind of chip.

    network: between nodes, None on a single node. without: a source to leave out.
    """
    known = [row for row in outside_rows() if row.figure == figure and row.source != without]
    known = [row for row in known if row.kind == kind]
    lacks = [f"none has {network}"] if network and network not in _NETWORKS else []
    return _spread_of(known, kind, software, chip, lacks, experts=experts)


def _spread_of(
    known: Sequence[Outside],
    kind: str,
    software: str,
    chip: str,
    lacks: list[str],
    *,
    experts: bool,
    rows_count: bool = False,
) -> Spread | None:
    """The spread by the narrowest group of rows with enough sources; None without rows."""
    groups = {
        f"{software} on {kind}, {'experts' if experts else 'dense'}": [
            row for row in known if row.software == software and row.experts == experts
        ],
        f"{kind}, {'experts' if experts else 'dense'}": [row for row in known if row.experts == experts],
        f"{software} on {kind}": [row for row in known if row.software == software],
        kind: known,
    }
    if not known:
        return None
    group, rows = next(
        ((name, rows) for name, rows in groups.items() if num_sources(rows) >= LEAST_SOURCES), (kind, known)
    )
    if not any(generation(row.chip) == generation(chip) for row in known):
        lacks = [f"none has {chip}", *lacks]
    reach = _reach(rows, rows_count=rows_count) * STRETCH ** len(lacks)
    return Spread(exp(reach) - 1, num_sources(rows), group, " and ".join(lacks))


# Pools of load tests.
ONE_POOL, POOLS_APART = "one pool", "pools apart"


@cache
def serving_rows() -> tuple[Outside, ...]:
    """Errors of load tests. Their sources are pairs of an engine and a model on a machine."""
    text = (resources.files("meshwright.plan") / "load_test_errors.csv").read_text(encoding="utf-8")
    rows = []
    for cells in csv.DictReader(text.splitlines()):
        for figure in ("tpot_seconds", "ttft_seconds", "e2e_seconds"):
            place = {key: cells[key] for key in ("id", "source", "kind", "software", "chip")}
            rows.append(
                Outside(
                    value=0.0,
                    figure=figure,
                    experts=cells["experts"] == "1",
                    panel=0,
                    log_error=float(cells[figure]),
                    **place,
                )
            )
    return tuple(rows)


@cache
def serving_spread(
    figure: str, pools: str, engine: str, chip: str, experts: bool, without: str | None = None
) -> Spread:
    """The spread of a mean of requests under load.

    figure: tpot_seconds, ttft_seconds or e2e_seconds. pools: ONE_POOL or POOLS_APART. engine: the generic
    record. without: a source to leave out. Rows count and not sources, since the smallest sources are the
    broken ones (a queue of minutes).
    """
    known = [row for row in serving_rows() if row.figure == figure and row.source != without]
    known = [row for row in known if row.kind == pools]
    spread = _spread_of(known, pools, engine, chip, [], experts=experts, rows_count=True)
    assert spread is not None, "both kinds of pools have rows"
    return spread


def num_sources(rows: Sequence[Outside]) -> int:
    """The number of sources of rows."""
    return len({row.source for row in rows})


def generation(chip: str) -> str:
    """The chips of one design, by the name of the first.

    >>> generation("h200"), generation("gb300-nvl72"), generation("v5e")
    ('h100', 'b200', 'v5e')
    """
    first = chip.partition("-")[0]
    return _GENERATION.get(first, first)


def _reach(rows: Sequence[Outside], *, rows_count: bool = False) -> float:
    """The |log error| that holds the share INSIDE of a new source's rows.

    rows_count: a row has weight 1, and the new source has the mean source's number of rows.
    """
    counts = Counter(row.source for row in rows)
    all_of = len(rows) if rows_count else len(counts)
    wanted = min(INSIDE * all_of * (1 + 1 / len(counts)), 0.999 * all_of)
    total = 0.0
    for size, weight in sorted((abs(row.log_error), 1 / counts[row.source]) for row in rows):
        total += 1 if rows_count else weight
        if total >= wanted:
            return size
    return max(abs(row.log_error) for row in rows)


@cache
def between_layouts() -> float:
    """The factor by which two layouts must differ for their order to hold in most sources (INSIDE).

    Layouts of one model on one machine share a part of their errors, which does not affect their order.
    """
    panels: dict[int, list[Outside]] = {}
    for row in outside_rows():
        if row.figure == "time":
            panels.setdefault(row.panel, []).append(row)
    pairs = [
        Outside(**{**vars(row), "log_error": row.log_error - other.log_error})
        for rows in panels.values()
        for place, row in enumerate(rows)
        for other in rows[place + 1 :]
    ]
    return exp(_reach(pairs)) if pairs else 1.0


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

"""The plan as the page shows it: ranked candidates, their stacked bars, the memory of the chosen one."""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.report.figures import bytes_text, percent_text, seconds_text
from meshwright.report.run_files import JsonDocument, bound_text, bytes_total, layout_text, winner
from meshwright.units import format_bytes, format_seconds

MAX_CANDIDATES = 12
NUM_COLOURS = 8


@dataclass(frozen=True)
class BarSegment:
    """One piece of a stacked bar: its width in percent of the bar's track and its colour's number."""

    name: str
    text: str
    percent: float
    colour: int


@dataclass(frozen=True)
class CandidateRow:
    rank: int
    layout: str
    step: str
    mfu: str
    memory: str
    fits: bool
    bound: str
    chosen: bool
    tie: bool
    segments: tuple[BarSegment, ...]
    numbers: tuple[float, float, float]  # step time, MFU and bytes, by which a reader may sort


def candidate_rows(plan: JsonDocument) -> list[CandidateRow]:
    """The ranked candidates, the chosen one marked, bars to one scale: the slowest shown fills its track."""
    shown = list(plan.get("candidates") or [])[:MAX_CANDIDATES]
    # By its whole entry: two candidates may differ in a dtype that their layout's text leaves out.
    chosen = shown.index(winner(plan)) if winner(plan) in shown else None
    slowest = max((c.get("step_seconds") or 0 for c in shown), default=0) or 1
    colours = breakdown_colours(plan)
    return [
        CandidateRow(
            rank=rank,
            layout=layout_text(c.get("layout", "")),
            step=seconds_text(c.get("step_seconds")),
            mfu=percent_text(c.get("mfu")),
            memory=bytes_text(bytes_total(c)),
            fits=bool(c.get("fits", True)),
            bound=bound_text(c),
            chosen=rank - 1 == chosen,
            tie=bool(c.get("tie")),
            segments=_breakdown(c, colours, 100 * (c.get("step_seconds") or 0) / slowest),
            numbers=(c.get("step_seconds") or 0, c.get("mfu") or 0, bytes_total(c) or 0),
        )
        for rank, c in enumerate(shown, start=1)
    ]


def breakdown_colours(plan: JsonDocument) -> dict[str, int]:
    """A colour number for each name in the breakdowns: the largest have their own, the rest share one."""
    totals: dict[str, float] = {}
    for c in list(plan.get("candidates") or [])[:MAX_CANDIDATES]:
        for item in c.get("breakdown") or []:
            totals[item["name"]] = totals.get(item["name"], 0) + item["seconds"]
    names = sorted((name for name in totals if totals[name] > 0), key=lambda name: -totals[name])
    return {name: min(number, NUM_COLOURS - 1) for number, name in enumerate(names)}


def breakdown_legend(colours: Mapping[str, int]) -> list[tuple[str, int]]:
    """Names with their colours; the names that share the last one are gathered as "other"."""
    own = [(name, colour) for name, colour in colours.items() if colour < NUM_COLOURS - 1]
    rest = [name for name, colour in colours.items() if colour == NUM_COLOURS - 1]
    return own + ([(rest[0] if len(rest) == 1 else f"other ({len(rest)})", NUM_COLOURS - 1)] if rest else [])


def memory_segments(plan: JsonDocument) -> list[BarSegment]:
    """Bytes per chip of the chosen layout, in percent of its memory (of their sum if that is unknown)."""
    best = winner(plan) or {}
    parts = best.get("bytes_per_chip")
    if not isinstance(parts, Mapping):
        return []
    items = [(name, value) for name, value in parts.items() if name != "total" and value]
    whole = max(memory_capacity(plan) or 0, sum(value for _, value in items)) or 1
    return [
        BarSegment(name, format_bytes(value), 100 * value / whole, number % NUM_COLOURS)
        for number, (name, value) in enumerate(items)
    ]


def chosen_memory(plan: JsonDocument) -> str:
    """Bytes per chip of the chosen layout, as text."""
    return bytes_text(bytes_total(winner(plan) or {}))


def memory_capacity(plan: JsonDocument) -> int | None:
    """Bytes of memory of one chip, if the plan says."""
    return (plan.get("hardware") or {}).get("hbm_bytes")


def _breakdown(candidate: JsonDocument, colours: Mapping[str, int], percent: float) -> tuple[BarSegment, ...]:
    """One piece a colour, in their order. Priced operations may overlap, so the pieces are shares."""
    seconds: dict[int, float] = {}
    for item in candidate.get("breakdown") or []:
        if item["seconds"] > 0:
            colour = colours[item["name"]]
            seconds[colour] = seconds.get(colour, 0) + item["seconds"]
    names, total = {colour: name for name, colour in breakdown_legend(colours)}, sum(seconds.values())
    return tuple(
        BarSegment(names[colour], format_seconds(seconds[colour]), percent * seconds[colour] / total, colour)
        for colour in sorted(seconds)
    )


def explanation(plan: JsonDocument) -> list[tuple[str, list[str]]]:
    """Headings and their points, as `mw plan train --explain` prints them; [] where the plan has none."""
    sections = []
    for block in str(plan.get("explanation") or "").split("\n\n"):
        title, *points = block.splitlines() or [""]
        if points:
            sections.append((title, [point.removeprefix("- ") for point in points]))
    return sections

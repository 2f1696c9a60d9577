"""Both passes of a chain or a strategy as numbered steps with what each costs: lines of text."""

from collections.abc import Iterator, Mapping

from meshwright.cost.derivation import PricedLine, PricedSteps
from meshwright.report.board import aligned
from meshwright.units import format_bytes, format_count, format_seconds


def chain_lines(passes: Mapping[str, PricedSteps], given: str) -> Iterator[str]:
    """What is given, and every pass."""
    yield f"  {given}"
    for title, one in passes.items():
        yield ""
        yield from pass_lines(title, one)


def pass_lines(title: str, one: PricedSteps) -> Iterator[str]:
    """The steps of a pass with bytes or FLOPs and seconds, and its time."""
    yield f"  {title}"
    steps = enumerate(one.lines, 1)
    yield from aligned([("", f"{number}.", str(line.step), *_figures(line)) for number, line in steps])
    yield ""
    yield f"     t = {_sum(one)}"


def _figures(line: PricedLine) -> tuple[str, str]:
    if not line.seconds:
        return "", ""
    amount = f"{format_count(line.flops)} FLOPs" if line.flops else format_bytes(line.num_bytes)
    return amount, format_seconds(line.seconds)


def _sum(one: PricedSteps) -> str:
    """`local 21.8 us + critical 93 us = 115 us; 93 us if all but the critical path overlaps`."""
    parts = [("local", one.seconds_compute)]
    parts += [(timing, one.seconds_comms(timing)) for timing in ("critical", "ahead", "deferred")]
    text = " + ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds) or "0"
    if text.count(" + "):
        text += f" = {format_seconds(one.seconds)}"
    if one.seconds_overlapped < one.seconds:
        text += f"; {format_seconds(one.seconds_overlapped)} if all but the critical path overlaps"
    return text

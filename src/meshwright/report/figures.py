"""Figures as text where one may be absent: an unknown figure is a dash, never a zero."""

from meshwright.units import format_bytes, format_seconds

ABSENT = "–"


def seconds_text(value: float | None) -> str:
    return ABSENT if value is None else format_seconds(value)


def bytes_text(value: float | None) -> str:
    return ABSENT if value is None else format_bytes(value)


def percent_text(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.1f}%"

"""Figures as text. An unknown figure is a dash, never a zero."""

from meshwright.units import format_bytes, format_seconds

ABSENT, UNAVAILABLE = "–", "unavailable"


def seconds_text(value: float | None, absent: str = ABSENT) -> str:
    """Seconds with a unit."""
    return absent if value is None else format_seconds(value)


def bytes_text(value: float | None) -> str:
    """Bytes with a unit."""
    return ABSENT if value is None else format_bytes(value)


def percent_text(share: float | None) -> str:
    """A share in percent."""
    return ABSENT if share is None else f"{100 * share:.1f}%"

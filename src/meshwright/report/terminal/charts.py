"""Charts of characters for the terminal: points, and histograms."""

from collections.abc import Iterable, Sequence
from math import log

from meshwright.units import format_seconds

_BAR, _BINS = 60, 16  # characters of the longest bar; bars of a histogram


def text_plot(
    points: Iterable[tuple[float, float, str]],
    width: int,
    height: int,
    across: tuple[float, float],
    up: tuple[float, float],
    *,
    log_y: bool = True,
) -> list[str]:
    """Lines of text with a letter at each (x, y, letter); x is logarithmic. Later points win."""
    rows = [[" "] * width for _ in range(height)]
    for x, y, letter in points:
        column = round(_share(x, across) * (width - 1))
        share = _share(y, up) if log_y else (y - up[0]) / (up[1] - up[0])
        rows[height - 1 - round(share * (height - 1))][column] = letter
    return ["".join(row) for row in rows]


def _share(value: float, ends: tuple[float, float]) -> float:
    low, high = ends
    return log(value / low) / (log(high / low) or 1.0)


def histogram(title: str, values: Sequence[float]) -> str:
    """A bar of `#` for the number of values in each of equal ranges of seconds; empty without values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    width = (high - low) / _BINS or 1.0
    counts = [0] * (_BINS if high > low else 1)
    for value in values:
        counts[min(int((value - low) / width), len(counts) - 1)] += 1
    lines = [
        f"{format_seconds(low + number * width):>10} |{'#' * round(count / max(counts) * _BAR)} {count}"
        for number, count in enumerate(counts)
    ]
    return "\n".join([f"{title}, {len(values)} answers", *lines])

"""The parts of a chart as SVG text: scales, axes, marks, and labels that keep clear of each other.

Every mark carries its light colour as an attribute, so that a lone file looks the same in every viewer,
and a class by which the page's style sheet recolours it in the dark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup

# One palette for every figure. Work is blue, waiting red to orange, what hides or idles is pale.
COLOURS = {
    "ink": "#141824",
    "muted": "#5b6475",
    "line": "#dfe3ea",
    "page": "#ffffff",
    "band": "#eef1f6",
    "compute": "#3f63a3",
    "gradients": "#6b8cc4",
    "memory": "#a9c0e2",
    "buffers": "#9cc9c6",
    "waiting": "#c4512d",
    "exposed": "#e9a15b",
    "bubble": "#8b93a3",
    "rest": "#5b6475",
    "hidden": "#c9cfda",
    "dp": "#96670b",
    "fsdp": "#0f7f8c",
    "tp": "#b13a72",
    "fsdp_tp": "#4b52c9",
    "best": "#141824",
    "best_band": "#dcdff0",
}
FONT = "Inter, system-ui, sans-serif"
TEXT_SIZE, SMALL = 12, 11
_GLYPH, _BOLD = 0.57, 1.1  # mean width of a character in text sizes; how much wider bold is
_FEWEST_TICKS = 3


@dataclass(frozen=True)
class Scale:
    """Places on an axis from `start` to `end` (pixels) for values from `low` to `high`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        if self.logarithmic:
            share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values within the axis: decades (or 1, 2, 5 of few decades), or even steps."""
        if self.logarithmic:
            found = _log_ticks(self.low, self.high, most)
            # An axis of a fraction of a decade has hardly a round value of its own.
            return found if len(found) >= _FEWEST_TICKS else self._even_ticks(most)
        return self._even_ticks(most)

    def _even_ticks(self, most: int) -> list[float]:
        step = next(s for s in _steps((self.high - self.low) / most) if (self.high - self.low) / s <= most)
        first = ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, floor(self.high / step + 1e-9) + 1)]


def _steps(least: float) -> list[float]:
    decade = 10 ** floor(log10(least))
    return [factor * decade for factor in (1, 2, 2.5, 5, 10, 20)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**d for d in decades for f in factors]
        found = [value for value in found if low * 0.999 <= value <= high * 1.001]
        if len(found) <= most:
            return found
    return found[:: ceil(len(found) / most)]


def padded_ends(values: Sequence[float], share: float = 0.08) -> tuple[float, float]:
    """The ends of a logarithmic axis that holds `values` with some room on either side."""
    low, high = log10(min(values)), log10(max(values))
    room = max((high - low) * share, 0.05)
    return 10 ** (low - room), 10 ** (high + room)


def text_width(words: str, size: float = TEXT_SIZE, *, bold: bool = False) -> float:
    """About how many pixels `words` take."""
    return len(words) * size * _GLYPH * (_BOLD if bold else 1)


def kept_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """`places`, moved as little as keeps them `gap` apart and within [low, high] if they fit."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for rank, index in enumerate(order):
        least = moved[order[rank - 1]] + gap if rank else low
        moved[index] = max(moved[index], least)
    most = high
    for index in reversed(order):
        moved[index] = min(moved[index], most)
        most = moved[index] - gap
    return moved


def label(
    words: str,
    x: float,
    y: float,
    colour: str = "ink",
    *,
    anchor: str = "start",
    size: float = TEXT_SIZE,
    weight: int = 400,
    halo: bool = False,
) -> Markup:
    """Text; anchor: start, middle or end. halo: keeps lines behind the text off its letters."""
    behind = Markup(' stroke="{}" stroke-width="4" paint-order="stroke"').format(COLOURS["page"])
    name = f"f-{colour} s-page" if halo else f"f-{colour}"
    return Markup(
        '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" font-size="{}" font-weight="{}" fill="{}" '
        'class="{}"{}>{}</text>'
    ).format(x, y, anchor, size, weight, COLOURS[colour], name, behind if halo else Markup(), words)


def line(
    points: Sequence[tuple[float, float]],
    colour: str,
    *,
    width: float = 1.0,
    dashes: str = "",
    title: str = "",
) -> Markup:
    """A line through the points; dashes: SVG's stroke-dasharray."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = Markup(' stroke-dasharray="{}"').format(dashes) if dashes else Markup()
    return Markup(
        '<path d="{}" fill="none" stroke="{}" class="s-{}" stroke-width="{}" stroke-linejoin="round"{}>'
        "{}</path>"
    ).format(path, COLOURS[colour], colour, width, dashed, _title(title))


def bar(x: float, y: float, width: float, height: float, colour: str, *, title: str = "") -> Markup:
    """A filled rectangle."""
    return Markup('<rect x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{:.1f}" {}>{}</rect>').format(
        x, y, max(width, 0), height, _fill(colour), _title(title)
    )


def dot(x: float, y: float, radius: float, colour: str, *, hollow: bool = False, title: str = "") -> Markup:
    """A disc, or a ring that shows the page within."""
    inside = "page" if hollow else colour
    return Markup(
        '<circle cx="{:.1f}" cy="{:.1f}" r="{:.1f}" fill="{}" stroke="{}" class="f-{} s-{}" '
        'stroke-width="1.4">{}</circle>'
    ).format(x, y, radius, COLOURS[inside], COLOURS[colour], inside, colour, _title(title))


def _fill(colour: str) -> Markup:
    return Markup('fill="{}" class="f-{}"').format(COLOURS[colour], colour)


def _title(words: str) -> Markup:
    return Markup("<title>{}</title>").format(words) if words else Markup()


@dataclass(frozen=True)
class ChartAxes:
    """A frame with ticks: x along the bottom, y at the left, titles with units at their ends."""

    x: Scale
    y: Scale
    x_title: str
    y_title: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]

    def svg(self) -> Markup:
        """Thin lines at the ticks of y, short strokes at those of x, and the words."""
        x, y = self.x, self.y
        parts: list[Markup] = []
        for value in y.ticks():
            place = y.place(value)
            parts.append(line([(x.start, place), (x.end, place)], "line"))
            parts.append(label(self.y_text(value), x.start - 7, place + 4, "muted", anchor="end", size=SMALL))
        parts.append(line([(x.start, y.start), (x.end, y.start)], "muted"))
        for value in x.ticks(_most(x)):
            place = x.place(value)
            parts.append(line([(place, y.start), (place, y.start + 4)], "muted"))
            parts.append(label(self.x_text(value), place, y.start + 17, "muted", anchor="middle", size=SMALL))
        parts.append(label(self.x_title, x.end, y.start + 34, "muted", anchor="end", size=SMALL))
        parts.append(label(self.y_title, 0, y.end - 14, "muted", size=SMALL))
        return Markup().join(parts)


def _most(x: Scale) -> int:
    """Ticks whose labels of about six characters stay apart."""
    return max(2, int((x.end - x.start) / 62))

"""The marks of a drawing as SVG: words, lines, bars, dots, and keys of colours.

Every mark has its light colour as an attribute, so that a file looks the same in every viewer, and a class by
which a page recolours it on a dark screen. `Markup.format` escapes all words.
"""

import re
from collections.abc import Sequence

from markupsafe import Markup

from meshwright.report.palette import COLOURS

PixelPlace = tuple[float, float]
FONT = "Inter, system-ui, sans-serif"
SIZE = 12  # pixels of all words but headings
_GLYPH, _BOLD = 0.57, 1.1  # mean width of a character over its size; bold over regular
_SUBSCRIPT = re.compile(r"(_(?:\{[^}]*\}|[A-Za-z0-9]+))")


def label(
    words: str,
    x: float,
    y: float,
    colour: str = "ink",
    *,
    anchor: str = "start",
    size: float = SIZE,
    weight: int = 400,
    halo: bool = False,
    turned: float = 0,
) -> Markup:
    """Text. anchor: start, middle or end. halo: keeps lines off the letters. turned: degrees."""
    outline = Markup(' stroke-width="4" paint-order="stroke"') if halo else ""
    turn = Markup(' transform="rotate({:.2f} {:.1f} {:.1f})"').format(turned, x, y) if turned else ""
    return Markup(
        '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" font-size="{:g}" font-weight="{}" {}{}{}>{}</text>'
    ).format(x, y, anchor, size, weight, _paint(colour, "card" if halo else ""), outline, turn, words)


def subscripted(written: str) -> Markup:
    """`A[I_X, J]` for a label, with its mesh axes as subscripts."""
    parts, lowered = [], False
    for piece in filter(None, _SUBSCRIPT.split(written)):
        below = piece.startswith("_")
        shift = "0.28em" if below else "-0.22em" if lowered else "0"
        style = Markup(' font-size="0.8em"') if below else ""
        body = piece[1:].strip("{}") if below else piece
        parts.append(Markup('<tspan dy="{}"{}>{}</tspan>').format(shift, style, body))
        lowered = below
    return Markup().join(parts)


def line(
    points: Sequence[PixelPlace], colour: str, *, width: float = 1, dashes: str = "", title: str = ""
) -> Markup:
    """A line through the points. dashes: SVG's stroke-dasharray."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashed = Markup(' stroke-dasharray="{}"').format(dashes) if dashes else ""
    mark = Markup('d="{}" {} stroke-width="{}" stroke-linejoin="round"{}')
    return _mark("path", mark.format(path, _paint("none", colour), width, dashed), title)


def arrow(start: PixelPlace, end: PixelPlace) -> Markup:
    """A level line with a head at its end."""
    (x, y), back = end, -6 if end[0] > start[0] else 6
    return line([start, end], "muted", width=1.4) + line(
        [(x + back, y - 4), end, (x + back, y + 4)], "muted", width=1.4
    )


def bar(
    x: float,
    y: float,
    width: float,
    height: float,
    colour: str,
    *,
    edge: str = "",
    radius: float = 0,
    title: str = "",
) -> Markup:
    """A rectangle. colour, edge: of the palette, or any SVG paint. radius: of its corners."""
    round_ = Markup(' rx="{:.1f}"').format(radius) if radius else ""
    mark = Markup('x="{:.2f}" y="{:.1f}" width="{:.2f}" height="{:.1f}" {}{}')
    return _mark("rect", mark.format(x, y, max(width, 0), height, _paint(colour, edge), round_), title)


def disc(x: float, y: float, radius: float, colour: str, *, hollow: bool = False, title: str = "") -> Markup:
    """A disc, or a ring."""
    mark = Markup('cx="{:.1f}" cy="{:.1f}" r="{:.1f}" {} stroke-width="1.4"')
    return _mark("circle", mark.format(x, y, radius, _paint("card" if hollow else colour, colour)), title)


def key(entries: Sequence[tuple[str | Sequence[str], str]], width: float, y: float) -> tuple[Markup, float]:
    """Colours (one or several) and their words in lines of at most `width` from `y`; and the y after them."""
    x, parts = 0.0, []
    for colours, words in entries:
        shown = [colours] if isinstance(colours, str) else colours
        needed = 12 * len(shown) + 3 + text_width(words)
        if x and x + needed > width:
            x, y = 0.0, y + 17
        parts += [bar(x + 12 * n, y - 9, 10, 10, colour) for n, colour in enumerate(shown)]
        parts.append(label(words, x + 12 * len(shown) + 3, y, "muted"))
        x += needed + 14
    return Markup().join(parts), y + 17


def text_width(words: str, size: float = SIZE, *, bold: bool = False) -> float:
    """Roughly the pixels that `words` take."""
    return len(words) * size * _GLYPH * (_BOLD if bold else 1)


def fitted(words: str, width: float) -> str:
    """The words, cut if they are wider than `width`."""
    most = int(width / text_width("x"))
    return words if len(words) <= most else words[: most - 1] + "…"


def kept_apart(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """`places` moved as little as keeps them `gap` apart and, if they fit, within [low, high]."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for rank, index in enumerate(order):
        moved[index] = max(moved[index], moved[order[rank - 1]] + gap if rank else low)
    for index in reversed(order):
        moved[index] = min(moved[index], high)
        high = moved[index] - gap
    return moved


def _paint(fill: str, stroke: str = "") -> Markup:
    """The attributes of a fill and a stroke, with a class for each colour of the palette."""
    used = [(kind, colour) for kind, colour in (("fill", fill), ("stroke", stroke)) if colour]
    paints = [
        Markup('{}="{}"').format(kind, COLOURS[colour][0] if colour in COLOURS else colour)
        for kind, colour in used
    ]
    names = " ".join(f"{kind[0]}-{colour}" for kind, colour in used if colour in COLOURS)
    return Markup(" ").join([*paints, *([Markup('class="{}"').format(names)] if names else [])])


def _mark(tag: str, attributes: Markup, title: str) -> Markup:
    """An element, with its words if it has any."""
    if not title:
        return Markup("<{} {}/>").format(tag, attributes)
    return Markup("<{} {}><title>{}</title></{}>").format(tag, attributes, title, tag)

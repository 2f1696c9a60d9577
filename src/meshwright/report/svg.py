"""Pieces of an SVG drawing. All text is escaped by `Markup.format`."""

import re

from markupsafe import Markup

_SUBSCRIPT = re.compile(r"(_(?:\{[^}]*\}|[A-Za-z0-9]+))")


def square(x: float, y: float, side: float, attributes: str) -> Markup:
    """A square; attributes: ours, as they are written."""
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{}" height="{}" {}/>').format(
        x, y, side, side, Markup(attributes)
    )


def arrow(centre: float, y: float, half: float) -> Markup:
    """An arrow to the right, `half` its length on either side of `centre`."""
    return Markup('<path class="arrow" d="M{:.1f} {y:.1f}H{:.1f}m-6-5 6 5-6 5"/>').format(
        centre - half, centre + half, y=y
    )


def text(words: str, x: float, y: float, name: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(name, x, y, words)


def notation(written: str, x: float, y: float, name: str) -> Markup:
    """`A[I_X, J]` with its mesh axes as true subscripts."""
    parts, lowered = [], False
    for piece in _pieces(written):
        subscript = piece.startswith("_")
        shift = 'dy="{}"'.format("0.28em" if subscript else "-0.22em" if lowered else "0")
        body = piece.lstrip("_").strip("{}") if subscript else piece
        size = ' class="sub"' if subscript else ""
        parts.append(Markup("<tspan {}{}>{}</tspan>").format(Markup(shift), Markup(size), body))
        lowered = subscript
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(name, x, y, Markup().join(parts))


def _pieces(written: str) -> list[str]:
    return [piece for piece in _SUBSCRIPT.split(written) if piece]

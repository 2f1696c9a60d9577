"""A figure: a title, a caption, and panels of SVG. A slider chooses among its frames if it has several.

A page shows the title and the caption as HTML, and each panel at the width that fits the screen. As a file, a
figure is one SVG, or one HTML page if it has a slider.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import wrap

from markupsafe import Markup

from meshwright.files import write_whole
from meshwright.report.draw.marks import FONT, bar, label
from meshwright.report.templating import render

# Pixels: across a page, half of it, a tablet, a phone.
WIDE, HALF, TABLET, PHONE = 1060, 506, 660, 326
_MARGIN, _GAP, _LINE = 28, 24, 17


@dataclass(frozen=True)
class Panel:
    """One drawing, in pixels. narrower: the same drawing for smaller screens, the widest first."""

    width: float
    height: float
    body: Markup
    narrower: tuple["Panel", ...] = ()

    def svg(self, words: str) -> Markup:
        """The drawing as elements of a page, one for each screen. words: a description for screen readers."""
        screens = [("",), ("large", "small"), ("large", "medium", "small")][len(self.narrower)]
        return Markup("\n").join(
            Markup(
                '<svg class="{screen}" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}" '
                'role="img" aria-label="{words}" font-family="{font}">{body}</svg>'
            ).format(screen=screen, w=panel.width, h=panel.height, words=words, font=FONT, body=panel.body)
            for screen, panel in zip(screens, (self, *self.narrower), strict=True)
        )


def at_widths(draw: Callable[[float], Panel], *widths: float) -> Panel:
    """The drawing at each of up to three widths, the widest first."""
    first, *others = map(draw, widths)
    return replace(first, narrower=tuple(others))


@dataclass(frozen=True)
class Frame:
    """The panels at one position of the slider, and the name of that position."""

    label: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Figure:
    """A figure. name: its file's. first: the first frame's number. slider: its name, such as `chips`."""

    name: str
    title: str
    caption: str
    frames: tuple[Frame, ...]
    first: int = 0
    slider: str = ""

    @classmethod
    def of(cls, name: str, title: str, caption: str, *panels: Panel) -> "Figure":
        """A figure without a slider."""
        return cls(name, title, caption, (Frame("", panels),))

    @cached_property
    def is_interactive(self) -> bool:
        """Whether it has a slider."""
        return len(self.frames) > 1

    def first_frame(self) -> "Figure":
        """The figure at the slider's first position, without the slider."""
        return replace(self, frames=(self.frames[self.first],), first=0, slider="")

    @property
    def is_half(self) -> bool:
        """Whether it takes half the width of a page."""
        return sum(panel.width for panel in self.frames[self.first].panels) <= HALF

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.name}.{'html' if self.is_interactive else 'svg'}"

    def page(self) -> str:
        """The text of an HTML file, whose panels wrap on narrow screens."""
        return render("figure.html.jinja", figure=self)

    def standalone(self) -> str:
        """The text of its file."""
        if self.is_interactive:
            return self.page()
        panels = self.frames[self.first].panels
        width = 2 * _MARGIN + sum(panel.width for panel in panels) + _GAP * (len(panels) - 1)
        lines = wrap(self.caption, int((width - 2 * _MARGIN) / 6.1))
        top = _MARGIN + 30 + _LINE * len(lines) + 8
        parts = [label(self.title, _MARGIN, _MARGIN + 14, size=17, weight=600)]
        parts += [label(words, _MARGIN, _MARGIN + 38 + _LINE * n, "muted") for n, words in enumerate(lines)]
        x = _MARGIN
        for panel in panels:
            parts.append(Markup('<g transform="translate({} {})">{}</g>').format(x, top, panel.body))
            x += panel.width + _GAP
        height = top + max(panel.height for panel in panels) + _MARGIN
        return svg_file(self.title, width, height, Markup().join(parts))


def svg_file(title: str, width: float, height: float, body: Markup) -> str:
    """A drawing on a white page as the text of an SVG file."""
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" '
            'height="{h:.0f}" role="img" aria-label="{title}" font-family="{font}">{page}{body}</svg>\n'
        ).format(w=width, h=height, title=title, font=FONT, page=bar(0, 0, width, height, "card"), body=body)
    )


def write_figures(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """Write each figure to a file and return the paths. Raises OutputError if the folder cannot be made."""
    return [write_whole(folder / figure.file_name, figure.standalone()) for figure in figures]

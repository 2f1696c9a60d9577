"""A figure: a name, words, and panels of SVG; a slider chooses between its frames if it has several.

The page sets title and caption as HTML and lets panels wrap; a file of its own holds everything: one SVG,
or, where there is a slider, one HTML page.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import wrap

from markupsafe import Markup

from meshwright.files import write_whole
from meshwright.report import templating
from meshwright.report.chart import COLOURS, FONT, label

HALF_WIDTH = 506  # of two figures side by side on a page, in pixels
_MARGIN, _GAP = 28, 24
_LINE = 17  # pixels between lines of a caption


@dataclass(frozen=True)
class Panel:
    """One drawing of so many pixels."""

    width: float
    height: float
    body: Markup

    def svg(self, words: str) -> Markup:
        """The drawing as an element of a page; words: what it shows, for who cannot see it."""
        return Markup(
            '<svg viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" height="{h:.0f}" role="img" '
            'aria-label="{words}" font-family="{font}">{body}</svg>'
        ).format(w=self.width, h=self.height, words=words, font=FONT, body=self.body)


@dataclass(frozen=True)
class Frame:
    """The panels of one position of the slider, and the position's name."""

    label: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Figure:
    """name: of its file. first: the frame shown at first. slider: what the slider sets, as `chips`."""

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
        return len(self.frames) > 1

    @property
    def is_half(self) -> bool:
        """Whether it takes half the width of a page."""
        return sum(panel.width for panel in self.frames[self.first].panels) <= HALF_WIDTH

    @property
    def file_name(self) -> str:
        return f"{self.name}.{'html' if self.is_interactive else 'svg'}"

    def standalone(self) -> str:
        """The text of its file."""
        return self._html() if self.is_interactive else self._svg()

    def _svg(self) -> str:
        panels = self.frames[self.first].panels
        width = 2 * _MARGIN + sum(panel.width for panel in panels) + _GAP * (len(panels) - 1)
        lines = wrap(self.caption, int((width - 2 * _MARGIN) / 6.1))
        top = _MARGIN + 30 + _LINE * len(lines) + 8
        height = top + max(panel.height for panel in panels) + _MARGIN
        body = [label(self.title, _MARGIN, _MARGIN + 14, size=17, weight=600)]
        body += [
            label(words, _MARGIN, _MARGIN + 38 + _LINE * number, "muted")
            for number, words in enumerate(lines)
        ]
        x = _MARGIN
        for panel in panels:
            body.append(Markup('<g transform="translate({} {})">{}</g>').format(x, top, panel.body))
            x += panel.width + _GAP
        return str(
            Markup(
                '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w:.0f} {h:.0f}" width="{w:.0f}" '
                'height="{h:.0f}" role="img" aria-label="{title}" font-family="{font}">'
                '<rect width="100%" height="100%" fill="{page}"/>{body}</svg>\n'
            ).format(
                w=width, h=height, title=self.title, font=FONT, page=COLOURS["page"], body=Markup().join(body)
            )
        )

    def _html(self) -> str:
        return templating.environment().get_template("figure.html.jinja").render(figure=self)


def write_figures(figures: Iterable[Figure], folder: Path) -> list[Path]:
    """The paths of the figures' files, each written whole. Raises OutputError where the folder cannot be."""
    return [write_whole(folder / figure.file_name, figure.standalone()) for figure in figures]

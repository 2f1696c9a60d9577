"""Tables that fit a terminal: prose wraps, and no name or number is cut."""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PLENTY = 100_000  # columns, wider than any table
_SHORT = 9  # columns of a cell that should not wrap: "810 GB/s"


class AtCommas:
    """Text that wraps at spaces, and after commas if a layout is longer than a line."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, _pieces(self.text)), default=0), max(map(len, self.text.split("\n"))))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = (line for one in self.text.split("\n") for line in _wrapped(one, options.max_width))
        yield Text("\n".join(lines), overflow="fold")


def _pieces(text: str) -> list[str]:
    """The words of a text, cut after their commas."""
    return re.findall(r"[^\s,]+,*|,+", text)


def _wrapped(text: str, width: int) -> Iterator[str]:
    """The lines of a text, each as full as `width` allows.

    >>> list(_wrapped("use data=2,fsdp=4,tensor=8 here", 16))
    ['use data=2,', 'fsdp=4,tensor=8', 'here']
    """
    line, gap = "", ""
    for word in text.split(" "):
        fits_alone = len(word) <= width
        if line and len(line + gap + (word if fits_alone else _pieces(word)[0])) > width:
            yield line
            line, gap = "", ""
        line, gap = line + gap, " "
        for piece in [word] if fits_alone else _pieces(word):
            if line and len(line + piece) > width:
                yield line.rstrip()
                line = ""
            line += piece
    yield line


def fitted(renderable: RenderableType, width: int) -> RenderableType:
    """Fit a table to `width` columns: its prose wraps, or each row becomes lines of heading and cell.

    Words are never broken, so that names and numbers can be read and typed again.
    """
    if isinstance(renderable, str):
        return AtCommas(renderable) if any(len(word) > width for word in renderable.split()) else renderable
    if isinstance(renderable, Group):
        return Group(*(fitted(inner, width) for inner in renderable.renderables))
    if not isinstance(renderable, Table) or not renderable.columns or not renderable.row_count:
        return renderable
    for padding in (None, (0, 1, 0, 0)):
        if padding is not None:
            renderable.padding = padding
        if _fits(renderable, width):
            return renderable
    return _records(renderable)


def _fits(table: Table, width: int) -> bool:
    """Whether the table fits. If only its prose is too wide, set the widths of its columns."""
    console = Console(width=_PLENTY)
    natural = Measurement.get(console, console.options, table).maximum
    if natural <= width:
        return True
    ranges = [_range(console, [column.header, *column.cells]) for column in table.columns]
    room = width - (natural - sum(longest for _, longest in ranges))
    if sum(least for least, _ in ranges) > room:
        return False
    for column, (_, longest), size in zip(table.columns, ranges, _shared(ranges, room), strict=True):
        column.no_wrap, column.overflow = size >= longest, "fold"
        column.max_width = None if size >= longest else size
    return True


def _range(console: Console, cells: Sequence[RenderableType]) -> tuple[int, int]:
    """The least and the natural width of one column: its longest word (or a short line), its longest line."""
    sizes = [Measurement.get(console, console.options, cell) for cell in cells]
    longest = max(size.maximum for size in sizes)
    return (longest if longest <= _SHORT else max(size.minimum for size in sizes)), longest


def _shared(ranges: Sequence[tuple[int, int]], width: int) -> list[int]:
    """Widths that add up to `width`: the longest word of each column, and the rest to long lines.

    >>> _shared([(4, 4), (6, 50), (5, 20)], 40)
    [4, 18, 18]
    """
    widths = [least for least, _ in ranges]
    for _ in range(width - sum(widths)):
        wanting = [n for n, (_, longest) in enumerate(ranges) if widths[n] < longest]
        widths[min(wanting, key=lambda n: widths[n])] += 1
    return widths


def _records(table: Table) -> Group:
    """Each row as lines of `heading  cell`, under the table's title."""
    headings = [column.header for column in table.columns]
    parts: list[RenderableType] = [Text(str(table.title), style="bold")] if table.title else []
    for cells in zip_longest(*(column.cells for column in table.columns), fillvalue=""):
        lines = Table.grid(padding=(0, 2, 0, 0))
        for heading, cell in zip(headings, cells, strict=True):
            if not isinstance(cell, str) or cell.strip():
                lines.add_row(heading, cell)
        parts += [lines, Text()]
    if table.caption:
        parts.append(Text(str(table.caption)))
    return Group(*parts)

"""A table of text, shown the same by the terminal and the pages."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """Text with a tone: good, fine, warn, bad, strong, faint.

    value: the number by which a reader may sort, if it differs from the text. badge: a word after the text.
    """

    text: str
    tone: str = ""
    value: float | None = None
    badge: str = ""


@dataclass(frozen=True)
class Row:
    """The cells of a row, and its tone: chosen, unfit."""

    cells: Sequence[Cell]
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """columns: heading and kind (number, code, layout, notation, words) of each. caption: a remark below."""

    title: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Row]
    caption: str = ""

    @classmethod
    def of(
        cls, title: str, columns: Sequence[str], rows: Sequence[Row | Sequence[str | Cell]], caption: str = ""
    ) -> "Table":
        """A table with columns written as `bytes|number`; cells may be plain text.

        >>> Table.of("Totals", ["", "planned|number"], [["bytes", "5 GB"]]).columns
        [('', ''), ('planned', 'number')]
        """
        parts = [column.partition("|") for column in columns]
        filled = [
            row if isinstance(row, Row) else Row([one if isinstance(one, Cell) else Cell(one) for one in row])
            for row in rows
        ]
        return cls(title, [(heading, kind) for heading, _, kind in parts], filled, caption)

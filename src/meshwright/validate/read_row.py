"""A row of any table of measurements, with its place in the file."""

from dataclasses import Field, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class ReadRow:
    """A row of a table. where: its file, line and id, in words; empty if the row is not from a file."""

    where: str = field(default="", kw_only=True, compare=False, metadata={"column": False})

    def why_skipped(self, error: object) -> str:
        """`error`, after the row's place, for a message."""
        return f"{self.where}: {error}" if self.where else str(error)


def column_fields(kind: type[ReadRow]) -> list[Field[Any]]:
    """The fields of a kind of row that are columns of its table; `where` is none."""
    return [each for each in fields(kind) if each.metadata.get("column", True)]

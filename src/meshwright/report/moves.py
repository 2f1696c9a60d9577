"""Tables and sentences on weights that move between two layouts (`mw reshard`, `mw plan rl`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.report.table import Table
from meshwright.units import format_bytes, format_seconds

_COLUMNS = ("parameter", "before|code", "after|code", "steps", "time|number", "sent|number")
_STAYS = "stays"


def collectives_of(moved: Mapping[str, Any]) -> str:
    """The collectives of a parameter's move, without their arrays.

    >>> collectives_of({"steps": ["AllToAll_Y [D_XY] -> [D_X]", "AllGather_X [D_X] -> [D]"]})
    'AllToAll_Y; AllGather_X'
    """
    return "; ".join(step.partition(" ")[0] for step in moved["steps"]) or _STAYS


def moves_table(title: str, moves: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each parameter: its shardings, collectives, time, and bytes that a chip sends."""
    rows = []
    for moved in moves:
        collectives = collectives_of(moved)
        figures = format_seconds(moved["seconds"]), format_bytes(moved["sent_bytes"])
        name = moved["parameter"].rpartition("/")[2]
        cells = (name, moved["before"], moved["after"], collectives)
        rows.append((*cells, *(figures if collectives != _STAYS else ("", ""))))
    return Table.of(title, _COLUMNS, rows)


def move_words(move: Mapping[str, Any]) -> str:
    """A sentence on the weights that a step of post-training moves: collectives, bytes and memory."""
    kinds = list(dict.fromkeys(collectives_of(moved) for moved in move["moves"] if moved["steps"]))
    return (
        f"weights move by {' or '.join(kinds) or 'no collective'}: each chip sends "
        f"{format_bytes(move['sent_bytes'])}, and layer by layer has at most "
        f"{format_bytes(move['in_place_bytes'])} of weights in place, "
        f"{format_bytes(move['buffer_bytes'])} with both copies"
    )

"""Pieces of a command line that give the same option, joined into one."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod

from meshwright.cli.line_pieces import Piece
from meshwright.cli.other_values import LISTS, SLICE
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import GPUS_OF_A_HOST, chip_of, usual


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with repeated options joined, and with --given as a part of --layout if there is one.

    An inferred value gives way to a typed one. Options whose values cannot be joined stay, and the command
    refuses them.
    """
    has_layout = any(piece.option == "--layout" for piece in pieces)
    given = {piece.option for piece in pieces if not piece.is_example}
    pieces = [piece for piece in pieces if not (piece.is_example and piece.option in given)]
    typed = {piece.option for piece in pieces if not piece.is_other} - {"", "--hardware", *LISTS}
    pieces = [piece for piece in pieces if not (piece.is_other and piece.option in typed)]
    made: list[Piece] = []
    for piece in pieces:
        if has_layout and piece.option == "--given":
            piece = replace(piece, option="--layout")
        at = next((at for at, each in enumerate(made) if piece.option and each.option == piece.option), None)
        joined = None if at is None else _both(made[at], piece)
        if at is None or joined is None:
            made.append(piece)
        else:
            made[at] = joined
    return made


def _both(first: Piece, second: Piece) -> Piece | None:
    """One piece for two pieces of the same option; None if their values exclude each other."""
    are_other = first.is_other and second.is_other
    if first.option == "--tensor" and are_other:  # a server's tensor and pipeline parallelism
        degrees = first.value, second.value
        is_known = all(map(str.isdecimal, degrees))
        return replace(first, value=str(prod(map(int, degrees)))) if is_known else None
    if first.option == "--url" and are_other:  # --host and --port
        return replace(first, value=_url_of(first.value, second.value))
    if first.value == second.value:
        return first
    if first.option == "--hardware" and (first.is_other or second.is_other):
        typed, other = (first, second) if second.is_other else (second, first)
        return replace(second, value=_machine_of(typed.value, other.value))
    if first.option not in LISTS:
        return None
    words: dict[str, str] = {}
    for word in (*first.value.split(","), *second.value.split(",")):
        name = word.partition("=")[0] if re.fullmatch(r"\w+=[^=]*", word) else word
        if words.setdefault(name, word) != word:
            return None
    return replace(first, value=",".join(words.values()))


def _url_of(first: str, second: str) -> str:
    """The address of a host and of a port at localhost, in either order.

    >>> _url_of("10.0.0.1", "http://localhost:8000"), _url_of("http://localhost:80", "localhost")
    ('http://10.0.0.1:8000', 'http://localhost:80')
    """
    port = next((match[1] for each in (first, second) if (match := re.search(r":(\d+)$", each))), "8000")
    host = next((each for each in (first, second) if not each.endswith(f":{port}")), "localhost")
    return f"{host if '//' in host else f'http://{host}'}:{port}"


def _machine_of(first: str, second: str) -> str:
    """One machine of two: the hosts of one and the chips per host of the other.

    first: the typed one. h100 counts as no name, since options of other programs that count chips become
    `h100:N`.

    >>> _machine_of("h100:4x8", "a100:4"), _machine_of("h200", "h100:16"), _machine_of("h100:4x8", "h100x8")
    ('a100:4x4', 'h200:16', 'h100:4x8')
    >>> _machine_of("h100:32", "h100:4x8"), _machine_of("h100:1x8", "h100:2x8")
    ('h100:4x8', 'h100:2x8')
    >>> _machine_of("v5e:16x16", "2*v5p:4x4x4"), _machine_of("4*v5p:128", "4*v5p:4x4x4")
    ('2*v5e:16x16', '4*v5p:128')
    """
    first, second = usual(first), usual(second)
    for machine, other in ((first, second), (second, first)):
        slices, star, example = machine.partition("*")
        if star and example == SLICE:
            return f"{slices}*{other.rpartition('*')[2]}"
    (name, _, sizes), (other, _, others) = first.partition(":"), second.partition(":")
    for machine, chip_name, other_name in ((first, name, other), (second, other, name)):
        # The number of hosts, here as `h100:NxM`, follows from the chips of a torus.
        if other_name == "h100" and ":" in machine and _is_of_torus(chip_name):
            return machine
    chip = other if name == "h100" else name
    if "x" in others and sizes:
        # The number of the typed machine counts the chips of one host, a larger one all chips.
        hosts, each = int(others.partition("x")[0]), sizes.rpartition("x")[2]
        is_of_all = "x" not in sizes and int(each) > GPUS_OF_A_HOST and int(each) % hosts == 0
        return f"{chip}:{hosts}x{int(each) // hosts if is_of_all else each}"
    by_host = next((each for each in (sizes, others) if "x" in each), "")
    plain = next((each for each in (others, sizes) if each and "x" not in each), "")
    return (
        f"{chip}:{by_host.partition('x')[0]}x{plain}" if by_host and plain else f"{chip}:{plain or by_host}"
    )


def _is_of_torus(name: str) -> bool:
    from meshwright.hardware.chip import Torus

    with suppress(MeshwrightError, OSError):
        return isinstance(chip_of(name).network, Torus)
    return False

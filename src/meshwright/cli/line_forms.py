"""Changes to the pieces of a command line as a whole: join, convert to tokens, complete."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod

from meshwright.cli.line_pieces import Command, Piece
from meshwright.errors import MeshwrightError

_LISTS = "--given", "--layout", "--set"  # options whose values are words joined by commas


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with repeated options joined, and with --given as a part of --layout if there is one."""
    has_layout = any(piece.option == "--layout" for piece in pieces)
    pieces = [
        replace(piece, option="--layout") if has_layout and piece.option == "--given" else piece
        for piece in pieces
    ]
    merged: dict[str, Piece] = {}
    for at, piece in enumerate(pieces):
        if piece.option in _LISTS and piece.option in merged:
            before = merged[piece.option]
            new = [word for word in piece.value.split(",") if word not in before.value.split(",")]
            merged[piece.option] = replace(before, value=",".join([before.value, *new]))
        elif before := next((key for key, each in merged.items() if each.option == piece.option), ""):
            if piece.option == "--hardware" and (piece.is_other or merged[before].is_other):
                merged[before] = replace(piece, value=_machine_of(merged[before].value, piece.value))
            elif not piece.option or not piece.is_other:
                merged[str(at)] = piece
        else:
            merged[piece.option if piece.option in _LISTS else str(at)] = piece
    return list(dict.fromkeys(merged.values()))


def _machine_of(first: str, second: str) -> str:
    """One machine of two: the hosts of one and the chips per host of the other.

    h100 counts as no name, since options of other programs that count chips become `h100:N`.

    >>> _machine_of("h100:4x8", "a100:4"), _machine_of("h200", "h100:16")
    ('a100:4x4', 'h200:16')
    """
    (one, _, sizes), (other, _, others) = first.partition(":"), second.partition(":")
    by_host = next((each for each in (sizes, others) if "x" in each), "")
    plain = next((each for each in (others, sizes) if each and "x" not in each), "")
    chip = other if one == "h100" else one
    return (
        f"{chip}:{by_host.partition('x')[0]}x{plain}" if by_host and plain else f"{chip}:{plain or by_host}"
    )


def in_tokens(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with a batch of sequences converted to tokens; without it if their length is not given."""
    from meshwright.hardware.catalog import load
    from meshwright.units import parse_length

    given = {piece.option: piece.value for piece in pieces}
    accumulated = re.search(r"microbatches=(\d+)", given.get("--given", ""))
    made = []
    for piece in pieces:
        if piece.is_sequences and "--seq-len" in given:
            with suppress(MeshwrightError):
                factor = int(piece.value) * parse_length(given["--seq-len"])
                if piece.of_a_device:
                    factor *= load(given.get("--hardware", "")).num_chips
                    factor *= int(accumulated[1]) if accumulated else 1
                made.append(Piece(piece.option, str(factor)))
        elif not piece.is_sequences:
            made.append(piece)
    return made


def launched(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw launch. If they have a plan in place of a command, the command is mw train."""
    command = [piece for piece in pieces if not piece.option]
    plan = command[:1] if command and command[0].value.endswith(".toml") else []
    before = [Piece("", word) for word in ("--", "mw", "train")] if plan else []
    return [*(piece for piece in pieces if piece.option), *before, *command]


def on_all_chips(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with a machine as large as their mesh, and a layout with replicas (data) on all chips."""
    from meshwright.errors import HardwareError, LayoutError
    from meshwright.hardware.catalog import load
    from meshwright.layout.short import DEGREES, read_words

    machine = next((piece.value for piece in pieces if piece.option == "--hardware"), "")
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    if machine and mesh and ":" not in machine:
        sized = f"{machine}:{_num_devices(mesh)}"
        pieces = [replace(each, value=sized) if each.option == "--hardware" else each for each in pieces]
    made = []
    for piece in pieces:
        if piece.option == "--layout":
            with suppress(HardwareError, LayoutError, ValueError):  # the last: a degree that is no number
                words, num_chips = read_words(piece.value), load(machine).num_chips
                num_devices = prod(int(str(words.get(axis, 1))) for axis in DEGREES if axis != "expert")
                left = num_chips // num_devices
                if left > 1 and left * num_devices == num_chips and not {"data", "fsdp"} & set(words):
                    piece = replace(piece, value=f"data={left},{piece.value}")
        made.append(piece)
    return made


def _num_devices(mesh: str) -> int:
    return prod(int(size) for size in re.findall("=([0-9]+)", mesh))


def of_its_command(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces without options of another program that the rest of the line excludes.

    In mw plan serve, --ttft-p95 and --tpot-p95 need --rate, and --context and --batch need --phase. In
    mw plan train, --smallest is added to --days and --tokens, which it needs.
    """
    given = {piece.option for piece in pieces}
    if {"--prompt-tokens", "--output-tokens"} <= given:  # a plan of requests, not of one step
        pieces = [piece for piece in pieces if not (piece.is_other and piece.option == "--phase")]
        given = {piece.option for piece in pieces}
    if command.path == ("plan", "serve") and "--phase" not in given:
        pieces = [
            piece for piece in pieces if not (piece.is_other and piece.option in ("--context", "--batch"))
        ]
    if command.path == ("plan", "serve") and "--rate" not in given:
        means = {"--ttft-p95": "--ttft", "--tpot-p95": "--tpot"}
        pieces = [replace(piece, option=means.get(piece.option, piece.option)) for piece in pieces]
    if {"--days", "--tokens"} <= given and "--smallest" not in given and "--smallest" in command.options:
        pieces = [*pieces, Piece("--smallest")]
    return list(pieces)


def _example(name: str, pieces: Sequence[Piece], command: Command) -> str:
    """A value for an option that a line lacks: a machine for its mesh, or an example from the help."""
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    if name == "--hardware" and mesh:
        return f"h100:{_num_devices(mesh)}"
    return command.example_of(name)


def completed(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces, with examples of the required options and arguments that the line lacks."""
    given = {piece.option for piece in pieces}
    made = list(pieces)
    for param in command.command.params:
        if not param.required or given & set(getattr(param, "opts", ())):
            continue
        name = param.opts[-1] if param.param_type_name == "option" else ""
        if not name and pieces and command.path[0] in ("generate", "serve"):
            continue  # the user's text cannot be guessed
        if name not in given and (value := _example(name, made, command)):
            made.insert(0 if not name else len(made), Piece(name, value))
    return made

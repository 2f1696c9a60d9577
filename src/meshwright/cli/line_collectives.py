"""Lines of mw collective and mw shard for arrays of a number of bytes, and for matmuls of given sizes."""

import re
import shlex
from collections.abc import Collection, Sequence

from meshwright.cli.line_commands import command_at
from meshwright.cli.line_intents import FILLERS
from meshwright.cli.line_pieces import Command, Piece, pieces_of
from meshwright.cli.other_notation import (
    AXES,
    array_of_bytes,
    array_of_dims,
    is_collective,
    matmul_here,
    sizes_here,
)
from meshwright.cli.other_subjects import words_of
from meshwright.cli.other_values import dtype_here
from meshwright.cli.value_kinds import is_machine
from meshwright.dtypes import KNOWN
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import load as load_hardware
from meshwright.hardware.catalog import usual

_FIRST_WORDS = 3  # of a line, within which a collective is named: time an allgather
_BYTES = r"[\d.]+ ?[kmgt]i?b"  # an array's size


def from_collective(words: Sequence[str], commands: Collection[str]) -> list[str]:
    """The words from the name of a collective on, without fillers; unchanged if a command is named first.

    >>> from_collective("time an allgather of 2GB on v5p 4x4x4".split(), ["bench"])
    ['allgather', '2GB', 'v5p:4x4x4']
    """
    at = next((at for at, word in enumerate(words[:_FIRST_WORDS]) if is_collective(word)), 0)
    is_named = any(word in commands for word in words[:_FIRST_WORDS])
    if is_named or not (at or is_collective(words[0])):
        return list(words)
    if any(word.startswith("-") for word in words):
        return list(words[at:])
    made = [word for word in words[at:] if word.lower() not in FILLERS]
    if len(made) > _FIRST_WORDS and is_machine(both := usual(" ".join(made[-2:]))):
        made[-2:] = [both]
    return made


def matmul_line(words: Sequence[str]) -> str:
    """The line of mw shard for a matmul of given sizes on one chip, such as `roofline 512x4096x4096 v5e`."""
    machines = [word for word in words if not word.startswith("-") and is_machine(word)]
    named = (word.lower() for word in words if re.match("[a-z]", word, re.I))
    dtype = next(filter(None, (word if word in KNOWN else dtype_here(word) for word in named)), "")
    sharding = command_at(("shard",))
    line = matmul_here(words, machines, dtype)
    parses = bool(line) and sharding is not None and sharding.parses(line[1:])
    return shlex.join(["mw", *line]) if parses else ""


def of_bytes(words: Sequence[str], command: Command) -> Sequence[str]:
    """The words of mw collective with an array of a number of bytes, such as `all-gather --size 1GB`."""
    pieces = pieces_of(words, command)
    size = next((piece for piece in pieces if re.search("size|bytes", piece.option)), None)
    bare = [piece for piece in pieces if not piece.option]
    size = size or next((piece for piece in bare[1:] if re.fullmatch(_BYTES, piece.value, re.I)), None)
    number = next((piece for piece in pieces if _is_number_of_chips(piece, bare)), None)
    text = bare[0].value if bare else ""
    axis = next((piece for piece in pieces if piece.option in ("--axis", "--axes", "--over")), None)
    name, _, inner = text.partition("(")
    machine = next((piece.value for piece in pieces if piece.option == "--hardware"), "")
    machine = machine or next((piece.value for piece in bare[1:] if is_machine(piece.value)), "")
    if machine and number is not None and ":" not in machine:
        machine = f"{machine}:{number.value}"
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    number_of_chips = int(number.value) if number else 0
    topology = machine.partition(":")[2]
    if axis and not mesh and "x" in topology:  # an axis of the machine's torus
        mesh = sizes_here(topology, AXES)
    try:
        chips = load_hardware(machine).num_chips if machine and not mesh else number_of_chips
        made = array_of_bytes(
            name, size.value if size else inner.rstrip(")"), mesh or f"X={chips}", axis.value if axis else ""
        )
    except MeshwrightError:
        return words
    dims = next((piece.value for piece in pieces if piece.option == "--dims"), "")
    is_named = not any("[" in piece.value for piece in bare)
    if not made and mesh and is_named and (letters := re.findall("([A-Z])[=:]", dims)):
        over = axis.value if axis else re.findall("[A-Z]", mesh)[0]
        made = [array_of_dims(name, letters, over), "--mesh", mesh, "--dims", dims]
    if not made or not (mesh or chips):
        return words
    others = (piece.option for piece in (size, axis, number) if piece)
    replaced_here = {"", "--mesh", "--dims", "--hardware", *others}
    kept = [piece for piece in pieces if piece.option not in replaced_here]
    dtype = next((piece.value for piece in bare[1:] if piece.value in KNOWN), "")
    of_machine = [*(["--hardware", machine] if machine else []), *(["--dtype", dtype] if dtype else [])]
    return [*made, *of_machine, *(word for piece in kept for word in piece.words)]


def _is_number_of_chips(piece: Piece, bare: Sequence[Piece]) -> bool:
    """Whether a piece is the number of chips of a collective: `--gpus 16`, or 16 after its name."""
    is_named = {"gpus", "chips", "devices", "ranks", "tpus", "gpu"} & set(words_of(piece.option))
    return bool(is_named or piece in bare[1:]) and piece.value.isdecimal()

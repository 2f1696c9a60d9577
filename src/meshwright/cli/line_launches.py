"""Lines of mw launch: its own options, and the command that it starts."""

import shlex
from collections.abc import Sequence

from meshwright.cli.commands import command_in
from meshwright.cli.line_commands import command_at
from meshwright.cli.line_pieces import LAUNCHED, Command, Piece, pieces_of
from meshwright.cli.other_subjects import HOSTS, words_of
from meshwright.errors import MeshwrightError
from meshwright.launch.cluster_job import cluster_job


def launch_line(words: Sequence[str]) -> str:
    """The line of mw launch for `launch -n 4 -- COMMAND` or `launch local -n 4 -- train plan.toml`.

    The first lacks the way to launch, the second the `mw` before the command. Empty for other lines.
    """
    if words[0] != "launch":
        return ""
    at = words.index("--") + 1
    if words[at : at + 1] and words[at] in LAUNCHED and (command := command_at(tuple(words[:2]))):
        words = [*words[:at], "mw", *words[at:]]
        return shlex.join(["mw", *words]) if command.parses(words[2:]) else ""
    if not words[1].startswith("-") or words[1] == "--":
        return ""
    ways = command_in("launch")
    lines = ([words[0], way, *words[1:]] for way in ways.commands)
    parsed = (line for line in lines if (command := command_at(tuple(line[:2]))) and command.parses(line[2:]))
    return next((shlex.join(["mw", *line]) for line in parsed), "")


def parts_of_launch(words: Sequence[str], command: Command) -> tuple[list[str], list[str]]:
    """The options of mw launch, and the words of the command that it starts.

    That command begins at `mw`, at `train`, or at a plan's file.
    """
    begins = (at for at, word in enumerate(words) if word in ("train", "mw") or word.endswith(".toml"))
    at = next(begins, len(words))
    options, inner = list(words[:at]), list[str]()
    started = command_at(("train",))
    for piece in pieces_of(words[at:], command):
        if piece.option in command.options:
            options += piece.words
        elif not piece.option or (started is not None and piece.option in started.options):
            inner += piece.words
    return options, inner


def is_for_its_hosts(words: Sequence[str], command: Command) -> bool:
    """Whether a line of mw launch names no number of hosts, or the number of its plan.

    The plan decides, so a line for another number is not offered.
    """
    named = [piece.value for piece in pieces_of(words, command) if set(words_of(piece.option)) & HOSTS]
    if not named or command.path == ("launch", "local"):
        return not named
    try:
        job = cluster_job(words, None, 0)
    except MeshwrightError:
        return False
    return set(named) == {str(job.num_nodes)}


def launched(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw launch. If they have a plan in place of a command, the command is mw train."""
    command = [piece for piece in pieces if not piece.option]
    first = command[0].value if command else ""
    words = ("--", "mw", "train") if first.endswith(".toml") else ("--", "mw") if first == "train" else ()
    before = [Piece("", word) for word in words]
    return [*(piece for piece in pieces if piece.option), *before, *command]

"""Notes to an offered line: the options of the typed line that it leaves out, each with the reason."""

import re
import shlex
from collections.abc import Mapping, Sequence

from meshwright.cli.line_forms import SHOWN_DEFERRED
from meshwright.cli.line_options import replaced
from meshwright.cli.line_pieces import Command, Piece, pieces_of
from meshwright.cli.other_subjects import subject
from meshwright.cli.other_words import answer_here, option_here
from meshwright.cli.spoken_names import environment

_RENAMED = re.compile(r"--?[\w.-]+ is (--[a-z-]+)\b.* here")
_UNKNOWN = re.compile(
    r"(?P<command>mw [a-z ]+) has no (?P<option>--?[^;]+); (?:leave it out, or take an option that [^;]*"
    r"|it is an option of [^;]*)(?:; |$)"
)
# The texts by which an offered line shows an option: any one is enough.
_SHOWN = {
    "--given": ("--given ", "--layout "),
    "--prompt-tokens": ("--prompt-tokens ", "--context "),
    "--output-tokens": ("--output-tokens ", "--context "),
    **{option: (text,) for option, text in SHOWN_DEFERRED.items()},
}


def left_out(typed: Sequence[str], line: str, commands: Sequence[Command]) -> dict[str, str]:
    """The typed options that neither stay in the offered line nor become part of it, each with the reason.

    typed: the words after `mw`. commands: the commands of the offered line, in order.
    """
    *_, last = commands
    path = " ".join(("mw", *last.path))
    reasons = {}
    for piece in pieces_of(typed, last):
        is_kept = any(_is_kept(piece, line, command) for command in commands)
        if piece.option and not is_kept and not (piece.value and f" {piece.value} " in f"{line} "):
            reasons[piece.option] = _reason(piece, path, last)
    return reasons


def _reason(piece: Piece, path: str, command: Command) -> str:
    """Why a command's line lacks a typed option: the known answer, or that there is no counterpart."""
    named = answer_here(piece.option, path) or subject(piece.option, path, piece.value)
    ours = option_here(piece.option, list(command.options), piece.value)
    if not named and ours and f"{ours} " != f"{piece.option} ":
        return f"{' '.join(piece.words)} is {ours.rstrip(',')} here"
    return named or f"{' '.join(piece.words)} has no counterpart in {path}"


def _is_kept(piece: Piece, line: str, command: Command) -> bool:
    """Whether an offered line has a typed option, or all options that replace it."""
    ours = [piece] if piece.option in command.options else replaced(piece, command)
    words = f"{line} "
    if (setting := environment(piece.option, piece.value)) and setting in words:
        return True
    if not ours:
        return False
    return all(
        any(shown in words for shown in _SHOWN.get(each.option, (f"{each.option} ",)))
        if each.option
        else shlex.quote(each.value) in words
        for each in ours
    )


def without_kept(answer: str, notes: Mapping[str, str]) -> str:
    """An answer to a wrong line without advice to leave out options that the offered line keeps.

    notes: of `left_out`.
    """
    unknown = [match for match in _UNKNOWN.finditer(answer) if match["option"] not in notes]
    if not unknown:
        return answer
    for match in unknown[::-1]:
        answer = answer[: match.start()] + answer[match.end() :]
    names = ", ".join(match["option"] for match in unknown)
    return "; ".join(filter(None, (f"{unknown[0]['command']} has no {names}", answer.removesuffix("; "))))


def without_contradictions(parts: Sequence[str], line: str) -> list[str]:
    """The parts of an answer, without renamed options that an offered line of two commands does not use."""
    if " && " not in line:
        return list(parts)
    return [part for part in parts if not (match := _RENAMED.fullmatch(part)) or f"{match[1]} " in f"{line} "]

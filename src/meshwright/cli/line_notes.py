"""Notes to an offered line: the options of the typed line that it leaves out, each with the reason."""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise

from meshwright.cli.line_conversions import SHOWN_DEFERRED
from meshwright.cli.line_options import replaced
from meshwright.cli.line_pieces import Command, Piece, pieces_of
from meshwright.cli.other_subjects import subject
from meshwright.cli.other_words import answer_here, option_here
from meshwright.cli.spoken_names import environment

# Parts of an answer that name our options with example values, which an offered line may have otherwise.
_NAMED = re.compile(r" is (--|the machine is --)|: the machine is --|^write --layout ")
_RENAMED = re.compile(r"--?[\w.-]+ is (--[a-z-]+)\b.* here")
_UNKNOWN = re.compile(
    r"(?P<command>mw [a-z ]+) has no (?P<option>--?[^;]+); (?:leave it out, or take an option that [^;]*"
    r"|it is an option of [^;]*)(?:; |$)"
)
_HOSTS = re.compile(r", \d+ hosts of \d+\b")
# An option of ours with a value: one with a figure, or a setting such as remat=full.
_WITH_VALUE = re.compile(r"(?<= )(--[a-z][a-z-]+) (\S*\d\S*[^\s,]|\d|\w+=\w+)(?=[, ]|$)")
# The texts by which an offered line shows an option: any one is enough.
_SHOWN = {
    **dict.fromkeys(("--given", "--layout"), ("--given ", "--layout ")),
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
    named = answer_here(piece.option, path, piece.value) or subject(piece.option, path, piece.value)
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


def _with_values_of(part: str, values: Mapping[str, str]) -> str:
    """The part of an answer that renames an option, with the values that an offered line has for it.

    values: of the line, by option.
    """
    # The line has the two lengths in place of their sum.
    if part.endswith(" is --context here") and "--context" not in values and "--output-tokens" in values:
        lengths = (f"{name} {values.get(name, '')}" for name in ("--prompt-tokens", "--output-tokens"))
        return part.replace("--context", " and ".join(lengths))

    # In a plan of requests the batch of a step follows from the load.
    if " is --phase generate --batch " in part and "--phase" not in values:
        return f"{part.partition(' is ')[0]}: the batch follows from the load; leave it out"

    # `with_types_parted` made --dtype the type of the computation.
    if part.startswith("--dtype is --weights-dtype") and "--compute-dtype" in values:
        return part.replace("--weights-dtype", "--compute-dtype")

    if "--layout" not in values and "--given" in values:
        part = part.replace("--layout", "--given")

    def with_lines_value(match: re.Match[str]) -> str:
        option, value = match.groups()
        ours = values.get(option, value)
        if ours.startswith(value.strip("'")):  # the first word of the line's value, which may have more
            return match[0]
        if option in ("--given", "--layout"):
            listed = f"{values.get('--given', '')},{values.get('--layout', '')}".split(",")
            by_name = {word.partition("=")[0]: word for word in listed if word}
            ours = ",".join(by_name.get(word.partition("=")[0], word) for word in value.split(","))
        return f"{option} {ours}"

    renamed = _WITH_VALUE.sub(with_lines_value, part)
    hosts = re.search(r":(\d+)x(\d+)$", values.get("--hardware", ""))
    of_hosts = f", {hosts[1]} hosts of {hosts[2]}" if hosts and "--hardware" in renamed else ""
    return _HOSTS.sub(of_hosts, renamed)


def without_contradictions(parts: Sequence[str], line: str) -> list[str]:
    """The parts of an answer with the values of the offered line.

    Of a line of two commands, renamed options that it does not use are left out.

    >>> without_contradictions(["--gpus is --hardware h100:2 here"], "mw fit gpt2 --hardware rtx4090:2")
    ['--gpus is --hardware rtx4090:2 here']
    >>> without_contradictions(["--tp is --given tensor=8 here"], "mw plan train --given pipe=2,tensor=4")
    ['--tp is --given tensor=4 here']
    """
    if " && " not in line:
        words = shlex.split(line)
        values = {option: value for option, value in pairwise(words) if option.startswith("--")}
        return [_with_values_of(part, values) if _NAMED.search(part) else part for part in parts]
    return [part for part in parts if not (match := _RENAMED.fullmatch(part)) or f"{match[1]} " in f"{line} "]

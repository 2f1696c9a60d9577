"""The right command line for a wrong one: every wrong option, value and word is replaced.

A line is offered only if the command's own parser accepts it.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.cli.glossary import term_asked
from meshwright.cli.line_audits import of_audit
from meshwright.cli.line_checks import run_fault
from meshwright.cli.line_collectives import from_collective, matmul_line, of_bytes
from meshwright.cli.line_commands import candidates, command_at, every_command, of_typed
from meshwright.cli.line_conversions import converted
from meshwright.cli.line_examples import completed, with_numbers
from meshwright.cli.line_forms import of_its_command, on_all_chips
from meshwright.cli.line_intents import without_fillers
from meshwright.cli.line_launches import is_for_its_hosts, launch_line, launched, parts_of_launch
from meshwright.cli.line_merging import merged
from meshwright.cli.line_notes import left_out
from meshwright.cli.line_options import asks_for_price, joined_words, placed, replaced, with_types_parted
from meshwright.cli.line_pieces import Command, Piece, pieces_of
from meshwright.cli.line_steps import downloaded, parted
from meshwright.cli.line_values import RANGE, is_no_value, is_unknown_name, with_a_right_value
from meshwright.cli.other_notation import AXES, expression_here, sizes_here
from meshwright.cli.other_subjects import HOSTS, words_of
from meshwright.cli.other_values import LISTS, in_words, plain_words
from meshwright.cli.other_words import command_here
from meshwright.cli.pasted_words import unpasted
from meshwright.cli.sentences import MEANS_PLANS, notes_of_sentence
from meshwright.cli.sentences import line_of as sentence_line
from meshwright.cli.spoken_names import (
    SIZE,
    in_one_word,
    matching_files,
    of_this_size,
    preset_of_size,
    size_note,
    with_environment,
)
from meshwright.cli.unlisted_chips import with_its_file, with_nearest
from meshwright.cli.value_kinds import is_machine

# Words in torchrun's options, for values that mw launch sets itself.
_OF_STARTS = {"nproc", "rdzv", "master", "rank", "node", "standalone", "processes"}
_LONGEST_WORD = 200  # characters; comparing longer ones takes long
_PAGES = {"--html", "--report", "--page", "--report-html"}  # options for the page of a plan (mw report)


def corrected_line(args: Sequence[str], commands: Collection[str]) -> str:
    """The line to type in place of `mw ARGS`; empty if it has no known fault, or no line is accepted.

    commands: the modules of cli/ that are commands.

    >>> from meshwright.cli.main import COMMANDS
    >>> corrected_line(["hardwares", "h100", "--jsn"], COMMANDS)
    'mw hardware h100 --json'
    """
    typed = plain_words(args)
    if not typed or not all(0 < len(word) <= _LONGEST_WORD for word in typed):
        return ""
    words = unpasted(typed)
    if "--" in words:  # the words after it are another command's
        return launch_line(words)
    if term := term_asked(words):
        return f"mw help {term}"
    if words and command_here(words[0], commands) == "mw help":
        return "mw help"
    if matmul := matmul_line(words):
        return matmul
    words, machine = with_nearest(from_collective(words, commands))
    # A line that differs only by blanks around words is not offered.
    as_typed = ["mw", *(word if word.lstrip().startswith("-") else word.strip() for word in typed)]
    spoken = sentence_line(words, commands)
    words = in_one_word(matching_files(words))
    tried = [without_fillers(words), words]
    is_command = bool(words) and words[0] in commands and words[0] not in MEANS_PLANS
    tried = [*tried, spoken] if is_command else [spoken, *tried]
    lines = (_line_of(each, commands) for each in dict.fromkeys(map(tuple, tried)) if each)
    line = next((line for line in lines if line and shlex.split(line) != as_typed), "")
    line = with_environment(line, words) if line else ""
    return with_its_file(line, machine) if line and machine else line


def notes_of(args: Sequence[str], line: str) -> dict[str, str]:
    """Notes on an offered `line`: what it leaves out, each with the reason, and models that it assumes."""
    if line.startswith("mw help"):
        return {}
    line = line.rpartition(", then type ")[2]  # as `with_its_file` writes it
    typed = (of_typed(shlex.split(words)) for words in re.findall(r"mw ([^&]+)", line))
    commands = [command for command, _ in filter(None, typed)]
    if not commands:
        return {}
    words = unpasted(plain_words(args))
    if matmul_line(words) or (
        commands[-1].path == ("collective",) and not any("-" in word for word in words)
    ):
        return {}
    if not any(word.startswith("-") for word in words):
        return dict(notes_of_sentence(words, commands[-1].path))
    sizes = [match[1] for word in words if (match := SIZE.fullmatch(word))]
    taken = [model for size in sizes if (model := of_this_size(size)) and model in line.split()]
    taken += [model for word in words if (model := preset_of_size(word)) and model in line.split()]
    notes = {model: size_note(model) for model in taken if model not in words}
    given = line.split()
    # A line with both ends of a pair of lengths, such as 1000:200, has no mean of them.
    ranges = [word for word in words if (ends := RANGE.fullmatch(word)) and not {word, ends[1]} & {*given}]
    notes |= {word: f"{word} is its mean" for word in ranges if commands[-1].path == ("plan", "serve")}
    return notes | left_out(_rewritten(args), line, commands)


def unknown_names(args: Sequence[str], commands: Collection[str]) -> str:
    """The message about the first unknown model or machine of a line; empty if all are known."""
    for command, rest in candidates(_rewritten(args), commands):
        pieces = pieces_of(rest, command)
        named = [piece for piece in pieces if piece.option in ("--model", "--hardware")]
        if _finds_size(pieces, command):
            named = [piece for each in named for piece in _of_one_chip(each)]
        valued = (piece for piece in named if piece.value and command.takes_value(piece.option))
        faults = (command.fault(*piece.words) for piece in valued)
        return next(filter(None, faults), "")
    return ""


def _finds_size(pieces: Iterable[Piece], command: Command) -> bool:
    """Whether the command finds the size of a machine, so that --hardware may be a chip."""
    if command.path != ("plan", "train"):
        return False
    return any(piece.option in ("--smallest", "--max-price-per-hour") for piece in pieces)


def _of_one_chip(piece: Piece) -> list[Piece]:
    """A piece for each chip that --hardware names, as a machine of one; any other piece as it is."""
    if piece.option != "--hardware":
        return [piece]
    return [replace(piece, value=f"{name.partition(':')[0]}:1") for name in piece.value.split(",")]


def _rewritten(args: Sequence[str]) -> list[str]:
    """The words of a line after the same replacements as in `corrected_line`."""
    return in_one_word(matching_files(with_nearest(unpasted(plain_words(args)))[0]))


def _line_of(words: Sequence[str], commands: Collection[str]) -> str:
    """The line in place of these words; empty if none is accepted."""
    possible = list(candidates(words, commands))
    fine_tunes = any("--from" in rest for _, rest in possible)

    for command, rest in possible:
        if (
            command.path == ("train",)
            and not fine_tunes
            and (line := _planned_first(command, rest) or _on_hosts(command, rest))
        ):
            return line
        if command.path[0] == "plan" and (line := _with_page(command, rest)):
            return line
        if command.path == ("launch", "slurm") and (line := _planned_for_hosts(command, rest)):
            return line

    def first(*, drops: bool, completes: bool) -> str:
        lines = (_repaired(command, rest, drops=drops, completes=completes) for command, rest in possible)
        return next(filter(None, lines), "")

    line = first(drops=False, completes=True) or _elsewhere(words, commands)
    line = line or first(drops=True, completes=False) or first(drops=True, completes=True)
    # A command without options is no answer to a line that gave values.
    path = tuple(line.split()[1:])
    is_bare = bool(path) and path[0] in commands and command_at(path) is not None
    has_values = any(not word.startswith("-") for word in words if word not in line.split())
    return "" if is_bare and has_values and words[0] in commands else line


def _planned_first(training: Command, rest: Sequence[str]) -> str:
    """`mw plan train ... && mw train ...` for a line of mw train that names a preset; empty for others."""
    planning = command_at(("plan", "train"))
    assert planning is not None
    of_plan, of_run = parted(pieces_of(rest, training), training, planning)
    if not of_plan:
        return ""
    run = [each for piece in of_run for each in _in_our_words(piece, training) or []]
    lines = _finished(of_plan, planning, drops=True), _finished(run, training, drops=True)
    return " && ".join(lines) if all(lines) else ""


def _on_hosts(training: Command, rest: Sequence[str]) -> str:
    """`mw launch slurm -- mw train ...` for a line of mw train with a number of hosts; empty for others.

    Also empty without a plan, or if the plan is for another number of hosts.
    """
    pieces = pieces_of(rest, training)
    of_hosts = {piece.option for piece in pieces if set(words_of(piece.option)) & (HOSTS | _OF_STARTS)}
    slurm = command_at(("launch", "slurm"))
    if not any(set(words_of(option)) & HOSTS for option in of_hosts) or slurm is None:
        return ""
    hosts = [word for piece in pieces if set(words_of(piece.option)) & HOSTS for word in piece.words]
    run = [word for piece in pieces if piece.option not in of_hosts for word in piece.words]
    plan = [word for word in run if word.endswith(".toml")]
    line = _repaired(training, run)
    is_right = line and plan and is_for_its_hosts([*hosts, *plan], slurm)
    return f"mw launch slurm -- {line}" if is_right else ""


def _planned_for_hosts(launching: Command, rest: Sequence[str]) -> str:
    """`mw plan train ... && mw launch slurm ...` for a number of hosts and a plan that does not exist.

    Empty for other lines, since an existing plan decides on its hosts.
    """
    pieces = pieces_of(rest, launching)
    hosts = next((piece.value for piece in pieces if set(words_of(piece.option)) & HOSTS), "")
    plan = next((word for word in rest if word.endswith(".toml")), "plan.toml")
    planning = command_at(("plan", "train"))
    if not hosts.isdecimal() or Path(plan).exists() or planning is None:
        return ""
    line = _finished([Piece("--hardware", f"h100:{hosts}x8"), Piece("-o", plan)], planning)
    planned, _, examples = line.partition(" (--")
    kept = [word for piece in pieces if piece.option in launching.options for word in piece.words]
    started = shlex.join(["mw", *launching.path, *kept, "--", "mw", "train", plan])
    return f"{planned} && {started}{' (--' + examples if examples else ''}" if line else ""


def _with_page(planning: Command, rest: Sequence[str]) -> str:
    """`mw plan ... && mw report ...` for a line of mw plan with --html or the like; empty for others."""
    pieces = pieces_of(rest, planning)
    page = next((piece for piece in pieces if piece.option in _PAGES), None)
    if page is None:
        return ""
    kept = [word for piece in pieces if piece != page for word in piece.words]
    plan = next((piece.value for piece in pieces if piece.option in ("-o", "--output")), "")
    line = _repaired(planning, [*kept, *([] if plan else ["-o", "plan.toml"])])
    path = page.value if page.value.endswith(".html") else "report.html"
    planned, _, examples = line.partition(" (--")  # as `_finished` names the options that are examples
    report = shlex.join(["mw", "report", plan or "plan.toml", "-o", path])
    return f"{planned} && {report}{' (--' + examples if examples else ''}" if line else ""


def line_of_settings(path: tuple[str, ...], words: Sequence[str]) -> str:
    """The line of a command with another program's options, as far as the command has counterparts."""
    command = command_at(path)
    if command is None:
        return ""
    groups = (
        [piece] if command.takes_value(piece.option) else replaced(piece, command) or []
        for piece in pieces_of(words, command)
        if piece.option
    )
    pieces = [replace(piece, is_other=True) for group in groups for piece in group]
    return _finished(pieces, command, drops=True)


def _elsewhere(words: Sequence[str], commands: Collection[str]) -> str:
    """The line of the command that has the most of the given options, at least two; empty if several have."""
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    whole = command_at(tuple(words[:2])) if words[0] in commands and len(words) > 1 else None
    if whole is not None and any(option in whole.options for option in given):
        return ""
    typed = command_at(tuple(words[:1])) if words[0] in commands else None
    if typed is not None and all(option in typed.options for option in given):
        return ""
    counts = {
        command: sum(option in command.options for option in given) - (command.path[0] not in words) / 2
        for command in every_command(tuple(commands))
    }
    most = max(counts.values(), default=0)
    best = [command for command, count in counts.items() if count == most]
    best = [command for command in best if set(command.required) <= set(given)] if len(best) > 1 else best
    if len(best) != 1 or most < 2:
        return ""
    [command] = best
    begun = 0
    while begun < len(words) and (words[begun] in commands or words[begun] in command.path):
        begun += 1
    return _repaired(command, list(words[begun:]))


def _repaired(command: Command, rest: Sequence[str], *, drops: bool = False, completes: bool = True) -> str:
    """The line of a command with every fault replaced; empty if a fault has no replacement.

    drops: leave out options without a replacement. completes: as in `_finished`.
    """
    pieces: list[Piece] = []
    if command.path == ("collective",):
        rest = of_bytes(rest, command)
    if command.path[0] == "launch" and not is_for_its_hosts(rest, command):
        return ""
    inner: list[str] = []
    if command.path[0] == "launch":
        rest, inner = parts_of_launch(rest, command)
    typed = with_types_parted(joined_words(pieces_of(rest, command), command), command)
    for piece in _listed(typed, command):
        ours = _in_our_words(piece, command)
        if ours is None and not drops:
            return ""
        pieces += ours or []
    pieces += [Piece("", word) for word in inner]
    every = placed(pieces, command)
    return "" if every is None else _finished(every, command, completes=completes)


def _in_our_words(piece: Piece, command: Command) -> list[Piece] | None:
    """The pieces that replace a typed one; [] to leave it out, None if no replacement is known."""
    known = command.takes_value(piece.option) if piece.value else piece.option in command.options
    if asks_for_price(piece, command.options):
        return []
    if command.takes_value(piece.option) and not piece.value:
        piece = replace(piece, value=command.example_of(piece.option))
    if _is_count_of_output(piece, command):
        return [Piece("--output-tokens", piece.value)]
    if piece.option in ("-o", "--output") and piece.value == "json" and "--json" in command.options:
        return [Piece("--json", "")]
    if known or not piece.option:
        return [piece]
    ours = replaced(piece, command)
    return None if ours is None else [replace(each, is_other=True) for each in ours]


def _listed(pieces: Sequence[Piece], command: Command) -> Iterator[Piece]:
    """The pieces, with other forms of arguments in the command's own form.

    `a.toml,b.toml` is two files; MODEL@HARDWARE of mw fit is an argument and an option.
    """
    for piece in of_audit(pieces) if command.path == ("audit",) else pieces:
        files = piece.value.split(",")
        model, _, machine = piece.value.partition("@")
        if piece.option:
            yield piece
        elif command.path == ("fit",) and machine and is_machine(machine):
            yield from (Piece("", model), Piece("--hardware", machine))
        elif all(Path(file).is_file() or "@" in file for file in files):
            yield from (Piece("", file) for file in files)
        else:
            yield piece


def _is_count_of_output(piece: Piece, command: Command) -> bool:
    """Whether the value of --output, a path, is meant as the tokens of an answer."""
    is_output = piece.option in ("-o", "--output") and piece.value[:1].isdigit() and "." not in piece.value
    return is_output and "--output-tokens" in command.options


def _with_right_values(pieces: Sequence[Piece], command: Command, option: str) -> list[Piece]:
    """The pieces with right values of one option."""
    return [with_a_right_value(piece, command) if piece.option == option else piece for piece in pieces]


def _finished(
    pieces: Sequence[Piece], command: Command, *, drops: bool = False, completes: bool = True
) -> str:
    """The line of these pieces with right values, and without gaps; empty if the parser refuses it.

    drops: leave out pieces whose values stay wrong. completes: add examples of missing options, unless they
    would be at least four more than the given pieces.
    """
    pieces = merged(pieces)
    sized = _finds_size(pieces, command)
    # Conversions of other options, such as a batch of each chip, need the number of chips and the model.
    pieces = _with_right_values(pieces, command, "--model")
    if command.path in (("plan", "train"), ("plan", "serve")) and not sized:
        pieces = with_numbers(pieces, command)
    if not sized:
        pieces = _with_right_values(pieces, command, "--hardware")
    pieces = of_its_command(converted(pieces), command)
    pieces = [piece for piece in pieces if not is_no_value(piece, command)]
    sized = _finds_size(pieces, command)
    pieces = [
        piece if sized and piece.option == "--hardware" else with_a_right_value(piece, command)
        for piece in pieces
    ]
    if command.path[0] in ("shard", "collective"):
        named = next((piece.value for piece in pieces if piece.option == "--mesh"), AXES)
        axes = re.sub("[^A-Z]", "", named)
        pieces = [
            piece if piece.option else replace(piece, value=expression_here(piece.value, axes))
            for piece in pieces
        ]
        letters = {"--dims": "IJK", "--mesh": AXES}
        pieces = [
            replace(piece, value=sizes_here(piece.value, letters[piece.option]))
            if piece.option in letters
            else piece
            for piece in pieces
        ]
    if drops:
        pieces = [piece for piece in pieces if len(piece.words) < 2 or not command.fault(*piece.words)]
    given = {piece.option for piece in pieces}
    every = on_all_chips(completed(pieces, command), command)
    if not drops and len(every) - len(pieces) > (len(pieces) + 3 if completes else 0):
        return ""
    pieces = every
    is_notation = command.path in (("shard",), ("collective",))
    if is_notation and "--dims" not in {piece.option for piece in pieces}:
        text = next((piece.value for piece in pieces if not piece.option), "")
        dims = dict.fromkeys(re.findall(r"[\[ ,]([A-Z])(?=[_,\]])", text))
        pieces.append(Piece("--dims", ",".join(f"{letter}=512" for letter in dims)))
    if run_fault(command, pieces):
        return ""
    if command.path[0] == "launch":
        pieces = launched(pieces)
    pieces, downloads = downloaded(pieces, given)
    words = [word for piece in pieces for word in piece.words]
    is_right = all(
        not piece.option
        or not piece.value
        or (sized and piece.option == "--hardware")
        or not command.fault(*piece.words)
        for piece in pieces
    )
    if not is_right or not command.parses(words) or any(is_unknown_name(each, command) for each in pieces):
        return ""
    examples = [
        piece.option
        for piece in pieces
        if piece.option not in given and piece.option.startswith("--") and piece.option not in LISTS
    ]
    named = f" ({in_words(examples)} for example)" if examples else ""
    return " && ".join([*downloads, shlex.join(["mw", *command.path, *words])]) + named

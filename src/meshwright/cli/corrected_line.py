"""The right command line for a wrong one: every wrong option, value and word is replaced.

A line is offered only if the command's own parser accepts it.
"""

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from typer.main import get_command as to_command

from meshwright.cli.line_forms import completed, in_tokens, launched, merged, of_its_command, on_all_chips
from meshwright.cli.line_intents import meant_lines, without_fillers
from meshwright.cli.line_options import PLACEHOLDER, joined_words, placed, replaced
from meshwright.cli.line_pieces import Command, Piece, pieces_of
from meshwright.cli.line_values import is_no_value, with_a_right_value
from meshwright.cli.other_notation import array_of_bytes, expression_here, sizes_here
from meshwright.cli.other_subjects import HOSTS, words_of
from meshwright.cli.other_values import plain_words
from meshwright.cli.other_words import ALIKE, command_here, command_of_words, subcommand_here
from meshwright.cli.pasted_words import unpasted
from meshwright.cli.value_kinds import is_corpus, is_machine, is_model
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import load as load_hardware
from meshwright.launch.cluster_job import cluster_job

_LONGEST_WORD = 200  # characters; comparing longer ones takes long
_STARTING = {"start", "up", "now", "launch"}  # verbs after a command: server start
_FUNCTIONS = {"--fn", "--function", "--func", "--entry", "--entrypoint"}  # of a script
# The usual command of a group, for a line that names none.
_USUAL = {"plan": "train", "bench": "serve"}


def _check_expression(command: Command, pieces: Sequence[Piece]) -> None:
    """Raise MeshwrightError for an expression of mw shard or mw collective that does not parse."""
    text = next((piece.value for piece in pieces if not piece.option), "")
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    if command.path == ("shard",):
        from meshwright.cli.shard import parse_shard
        from meshwright.notation.written import is_chain

        if not is_chain(text):
            parse_shard(text)
    elif command.path == ("collective",):
        from meshwright.cli.collective import parse_collective
        from meshwright.notation.parse import parse_mesh

        parse_collective(text, parse_mesh(mesh))


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
        return _launching(words)
    # A line that differs only by blanks around words is not offered.
    as_typed = ["mw", *(word if word.lstrip().startswith("-") else word.strip() for word in typed)]
    tried = dict.fromkeys(map(tuple, (without_fillers(words), words)))
    lines = (_line_of(each, commands) for each in tried if each)
    return next((line for line in lines if line and shlex.split(line) != as_typed), "")


def unknown_names(args: Sequence[str], commands: Collection[str]) -> str:
    """The message about the first unknown model or machine of a line; empty if all are known."""
    for command, rest in _candidates(unpasted(plain_words(args)), commands):
        named = [piece for piece in pieces_of(rest, command) if piece.option in ("--model", "--hardware")]
        valued = (piece for piece in named if piece.value and command.takes_value(piece.option))
        faults = (command.fault(*piece.words) for piece in valued)
        return next(filter(None, faults), "")
    return ""


def _line_of(words: Sequence[str], commands: Collection[str]) -> str:
    """The line in place of these words; empty if none is accepted."""
    candidates = list(_candidates(words, commands))

    def first(*, drops: bool) -> str:
        lines = (_repaired(command, rest, drops=drops) for command, rest in candidates)
        return next(filter(None, lines), "")

    return first(drops=False) or _elsewhere(words, commands) or first(drops=True)


def _launching(words: Sequence[str]) -> str:
    """The line of mw launch for a line without a way to launch, such as `launch -n 4 -- COMMAND`."""
    if words[0] != "launch" or not words[1].startswith("-") or words[1] == "--":
        return ""
    ways: Any = to_command(import_module("meshwright.cli.launch").app)
    lines = ([words[0], way, *words[1:]] for way in ways.commands)
    parsed = (line for line in lines if (command := command_at(tuple(line[:2]))) and command.parses(line[2:]))
    return next((shlex.join(["mw", *line]) for line in parsed), "")


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


@cache
def command_at(path: tuple[str, ...]) -> Command | None:
    """The command with this path, such as ("plan", "train"); None if there is none."""
    if not path[0].isidentifier():
        return None
    command = to_command(import_module(f"meshwright.cli.{path[0]}").app)
    inner = getattr(command, "commands", None)
    if inner:
        command = inner.get(path[1]) if len(path) == 2 else None
    elif len(path) != 1:
        return None
    return None if command is None else Command(path, command)


@cache
def _every(commands: tuple[str, ...]) -> tuple[Command, ...]:
    """The commands of these modules, and of their groups."""
    paths = []
    for name in commands:
        inner = getattr(to_command(import_module(f"meshwright.cli.{name}").app), "commands", None) or {}
        paths += [(name, each) for each in inner] or [(name,)]
    return tuple(command for path in paths if (command := command_at(path)))


def _candidates(words: Sequence[str], commands: Collection[str]) -> Iterator[tuple[Command, list[str]]]:
    """The commands that the first words name or mean, the likeliest first, each with the other words."""
    named = [word for word in words[:3] if not word.startswith("-")]
    if (compared := _of_machines(words)) and (command := command_at(("plan", "train"))):
        yield command, compared
    for path in (tuple(named[1::-1]), tuple(named[:1]), tuple(named[:2])):
        if path and path[0] in commands and (command := command_at(path)):
            rest = list(words)
            for word in path:
                rest.remove(word)
            yield command, rest
    if named and named[0] in commands and command_at(tuple(named[:1])) is None:
        group: Any = to_command(import_module(f"meshwright.cli.{named[0]}").app)
        inner = list(group.commands)
        for word in words[1:]:
            if command := command_at((named[0], subcommand_here(word, inner) or word)):
                at = words.index(word)
                begins = at - 1 if words[at - 1].startswith("--") and "=" not in words[at - 1] else at
                yield command, [*words[1:begins], *words[at + 1 :]]
        usual = _USUAL.get(named[0], "")
        if named[0] == "launch":
            usual = "local" if {"-n", "-np", "--processes"} & set(words) else "slurm"
        if command := command_at((named[0], usual)):
            yield command, [word for word in words if word != named[0]]
    elif named and named[0] not in commands:
        yield from _of_programs(words)
        yield from filter(None, (_of_typed(line) for line in meant_lines(words)))
        ours = (command_here(named[0], commands) or command_of_words(named[0], commands)).split()[1:]
        typo = get_close_matches(named[0], list(commands), n=1, cutoff=ALIKE)
        rest = [word for word in words if word != named[0]]
        if ours:  # list models, show hardware
            rest = [
                word for word in rest if word not in ours and command_here(word, commands).split()[1:] != ours
            ]
        yield from filter(None, (_of_another_name(line, rest) for line in (ours, typo) if line))


def _of_typed(line: Sequence[str]) -> tuple[Command, list[str]] | None:
    """The command that a line begins with, and its other words."""
    for length in (2, 1):
        if command := command_at(tuple(line[:length])):
            return command, list(line[length:])
    return None


def _of_programs(words: Sequence[str]) -> Iterator[tuple[Command, list[str]]]:
    """The commands that do the same as another program's line: vllm serve, torchrun script.py, ..."""
    first, *rest = words
    if first in ("python", "python3") and "-m" in rest[:-1]:
        first, rest = rest[rest.index("-m") + 1], rest[rest.index("-m") + 2 :]
    scripts = [word for word in rest if word.endswith(".py")]
    if first in ("torchrun", "deepspeed", "accelerate", "srun", "mpirun", "python", "python3") and scripts:
        after = rest[rest.index(scripts[0]) + 1 :]
        if after and (command := command_at(("plan", "train"))):
            yield command, [*(word for word in rest[: rest.index(scripts[0])] if word != "launch"), *after]
    if any(name in first for name in ("vllm", "sglang", "trtllm")) and (command := command_at(("serve",))):
        yield command, [word for word in rest if word != "serve"]


def _of_another_name(line: Sequence[str], rest: Sequence[str]) -> tuple[Command, list[str]] | None:
    """The command of an example line, and its other words: the given ones (`rest`), then the example's.

    The first given word takes the place of DIR or RUN in the example if it is a folder; otherwise the
    example's words are left out. None if the example cannot be completed.
    """
    if line[0].startswith("-") or not line[0].islower():  # mw --install-completion, mw CMD --help
        return None
    path = tuple(line[:2]) if line[0] in ("plan", "bench", "launch", "plot") else tuple(line[:1])
    command = command_at(path)
    if command is None and rest:  # bench serve, for benchmark serve
        inner = getattr(to_command(import_module(f"meshwright.cli.{path[0]}").app), "commands", {})
        meant = subcommand_here(rest[0], list(inner))
        named = [meant] if meant else get_close_matches(rest[0], list(inner), n=1, cutoff=ALIKE)
        command, rest = command_at((path[0], *named)), rest[1:]
    extra = [word for word in line[len(path) :] if not (is_corpus(word) and any(map(is_corpus, rest)))]
    rest = [word for word in rest if word not in _STARTING]
    if command is None or "--" in extra:  # the words after -- are another command's
        return None
    if PLACEHOLDER.search(" ".join(extra)):
        if not rest:
            return None
        if not Path(rest[0]).is_dir():
            return command, list(rest)
        extra, rest = [rest[0] if PLACEHOLDER.fullmatch(word) else word for word in extra], rest[1:]
    return command, [*rest, *extra]


def _of_machines(words: Sequence[str]) -> list[str]:
    """The words of mw plan train for `mw compare` of machines, which compares plans; [] for other words."""
    if words[0] != "compare":
        return []
    machines = [word for word in words[1:] if is_machine(word) and not word.endswith(".toml")]
    rest = [word for word in words[1:] if word not in (*machines, "--hardware")]
    models = [] if "--model" in rest else [word for word in rest if is_model(word)]
    if not machines or not (models or "--model" in rest):
        return []
    model = ["--model", models[0]] if models else []
    return ["--hardware", ",".join(machines), *model, *(word for word in rest if word not in models)]


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
        for command in _every(tuple(commands))
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


def _repaired(command: Command, rest: Sequence[str], *, drops: bool = False) -> str:
    """The line of a command with every fault replaced; empty if a fault has no replacement.

    drops: leave out options without a replacement.
    """
    pieces: list[Piece] = []
    if command.path == ("collective",):
        rest = _of_bytes(rest, command)
    if command.path[0] == "launch" and not _is_for_its_hosts(rest, command):
        return ""
    for piece in _listed(joined_words(pieces_of(rest, command), command), command):
        known = command.takes_value(piece.option) if piece.value else piece.option in command.options
        if command.takes_value(piece.option) and not piece.value:
            piece = replace(piece, value=command.example_of(piece.option))
        if _is_count_of_output(piece, command):
            pieces.append(Piece("--output-tokens", piece.value))
        elif known or not piece.option:
            pieces.append(piece)
        elif (ours := replaced(piece, command)) is not None:
            pieces += [replace(each, is_other=True) for each in ours]
        elif not drops:
            return ""
    every = placed(pieces, command)
    return "" if every is None else _finished(every, command, completes=not drops)


def _is_for_its_hosts(words: Sequence[str], command: Command) -> bool:
    """Whether a line of mw launch names no number of hosts, or the number of its plan.

    The plan decides; a line for another number would not do what was asked.
    """
    named = [piece.value for piece in pieces_of(words, command) if set(words_of(piece.option)) & HOSTS]
    if not named or command.path == ("launch", "local"):
        return not named
    try:
        job = cluster_job(words, None, 0)
    except MeshwrightError:
        return False
    return set(named) == {str(job.num_nodes)}


def _of_bytes(words: Sequence[str], command: Command) -> Sequence[str]:
    """The words of mw collective with an array of a number of bytes, such as `all-gather --size 1GB`."""
    pieces = pieces_of(words, command)
    size = next((piece for piece in pieces if re.search("size|bytes", piece.option)), None)
    text = next((piece.value for piece in pieces if not piece.option), "")
    name, _, inner = text.partition("(")
    machine = next((piece.value for piece in pieces if piece.option == "--hardware"), "")
    mesh = next((piece.value for piece in pieces if piece.option == "--mesh"), "")
    try:
        chips = load_hardware(machine).num_chips if machine and not mesh else 0
        made = array_of_bytes(name, size.value if size else inner.rstrip(")"), mesh or f"X={chips}")
    except MeshwrightError:
        return words
    if not made or not (mesh or chips):
        return words
    kept = [
        piece for piece in pieces if piece.option not in ("", size.option if size else "", "--mesh", "--dims")
    ]
    return [*made, *(word for piece in kept for word in piece.words)]


def _listed(pieces: Sequence[Piece], command: Command) -> Iterator[Piece]:
    """The pieces, with other forms of arguments in the command's own form.

    `a.toml,b.toml` is two files; MODEL@HARDWARE of mw fit is an argument and an option.
    """
    for piece in _of_audit(pieces) if command.path == ("audit",) else pieces:
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


def _of_audit(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces of mw audit, with `train.py step` and `train.py --function step` as train.py:step."""
    made: list[Piece] = []
    for piece in pieces:
        script = next((at for at, each in enumerate(made) if each.value.endswith(".py")), None)
        is_function = piece.option in _FUNCTIONS or not piece.option
        if script is not None and is_function and piece.value.isidentifier():
            made[script] = Piece("", f"{made[script].value}:{piece.value}")
        else:
            made.append(piece if piece.option else _program(piece.value))
    return made


def _program(name: str) -> Piece:
    """The argument of mw audit for `train.step`, a function of train.py, and for a file of HLO."""
    module, _, function = name.rpartition(".")
    if Path(name).suffix in (".txt", ".hlo") and Path(name).is_file():
        return Piece("--hlo", name)
    is_script = function != "py" and function.isidentifier() and Path(f"{module}.py").is_file()
    return Piece("", f"{module}.py:{function}" if is_script else name)


def _is_count_of_output(piece: Piece, command: Command) -> bool:
    """Whether the value of --output, a path, is meant as the tokens of an answer."""
    is_output = piece.option in ("-o", "--output") and piece.value[:1].isdigit() and "." not in piece.value
    return is_output and "--output-tokens" in command.options


def _finished(
    pieces: Sequence[Piece], command: Command, *, drops: bool = False, completes: bool = True
) -> str:
    """The line of these pieces with right values, and without gaps; empty if the parser refuses it.

    drops: leave out pieces whose values stay wrong. completes: add examples of missing options, unless the
    line would have more examples than given pieces.
    """
    pieces = of_its_command(in_tokens(merged(pieces)), command)
    pieces = [piece for piece in pieces if not is_no_value(piece, command)]
    sized = any(piece.option == "--smallest" for piece in pieces)
    pieces = [
        piece if sized and piece.option == "--hardware" else with_a_right_value(piece, command)
        for piece in pieces
    ]
    if command.path[0] in ("shard", "collective"):
        named = next((piece.value for piece in pieces if piece.option == "--mesh"), "XYZ")
        axes = re.sub("[^A-Z]", "", named)
        pieces = [
            piece if piece.option else replace(piece, value=expression_here(piece.value, axes))
            for piece in pieces
        ]
        letters = {"--dims": "IJK", "--mesh": "XYZ"}
        pieces = [
            replace(piece, value=sizes_here(piece.value, letters[piece.option]))
            if piece.option in letters
            else piece
            for piece in pieces
        ]
    if drops:
        pieces = [piece for piece in pieces if not piece.value or not command.fault(*piece.words)]
    given = {piece.option for piece in pieces}
    every = on_all_chips(completed(pieces, command))
    if not drops and len(every) - len(pieces) > (len(pieces) + 1 if completes else 0):
        return ""
    pieces = every
    is_notation = command.path in (("shard",), ("collective",))
    if is_notation and "--dims" not in {piece.option for piece in pieces}:
        text = next((piece.value for piece in pieces if not piece.option), "")
        dims = dict.fromkeys(re.findall(r"[\[ ,]([A-Z])(?=[_,\]])", text))
        pieces.append(Piece("--dims", ",".join(f"{letter}=512" for letter in dims)))
    try:
        _check_expression(command, pieces)
    except MeshwrightError:
        return ""
    if command.path[0] == "launch":
        pieces = launched(pieces)
    words = [word for piece in pieces for word in piece.words]
    is_right = all(
        not piece.option
        or not piece.value
        or (sized and piece.option == "--hardware")
        or not command.fault(*piece.words)
        for piece in pieces
    )
    if not is_right or not command.parses(words):
        return ""
    examples = [
        piece.option for piece in pieces if piece.option not in given and piece.option.startswith("--")
    ]
    named = f" ({' and '.join(examples)} for example)" if examples else ""
    return shlex.join(["mw", *command.path, *words]) + named

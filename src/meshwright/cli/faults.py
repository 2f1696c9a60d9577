"""Faults of a command line: each is answered with the words to type instead."""

import logging
import os
import re
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import typer

from meshwright.cli.commands import command_in
from meshwright.cli.other_subjects import HOSTS, meaning_with_value, subject, words_of
from meshwright.cli.other_values import KINDS_OF_CHIPS, VERBS, in_words, plain_words, strategy
from meshwright.cli.other_words import (
    ALIKE,
    TYPO,
    answer_here,
    command_here,
    command_of_words,
    no_command,
    option_here,
    subcommand_here,
)
from meshwright.cli.value_kinds import (
    ARGUMENTS,
    KINDS,
    OF_PLANS,
    RESHARD_WORDS,
    filled,
    is_machine,
    is_model,
    options_for,
)
from meshwright.errors import nearest

logger = logging.getLogger(__name__)

# The parser's message for a group without a command, such as `mw plan`.
_NO_COMMAND = "Missing command."
_MOST_CHARACTERS = 470  # of a message: four lines of a terminal
_MOST_NAMED = 6  # options of a command in a message
_MOST_ANSWERS = 6  # unknown options that are answered together
# The answer to a command that resembles none.
_QUESTIONS = (
    "which layout: mw plan train; to size a service: mw plan serve; does it fit: mw fit; to train or "
    "fine-tune: mw train; all commands: mw help"
)
_LONGEST_NAME = 255  # bytes of a file's name
_LONGEST_VAGUE = 6  # characters, with dashes, of an option that its value explains: --on rtx4090
_LEAST_BEGUN = 4  # characters, with dashes, of the beginning of an option
_EXTRA = re.compile(r"Got unexpected extra arguments? ?(?:\(s\) )?\((.+)\)")
_NO_VALUE = re.compile(r"Option '(.+?)' requires an argument")


def usage_fault(
    error: typer.TyperException, args: Sequence[str], commands: Sequence[str], *, offers_line: bool = True
) -> str:
    """The answer to a refused command line, with the right line if it is known.

    args: the words after `mw`. commands: the modules of cli/ whose options may be meant. offers_line: whether
    the reader can type a line.
    """
    from meshwright.cli.other_files import program_file  # here, since most command lines are right

    if answer := program_file(args):
        return answer
    answer = _usage_answer(error, args, commands)
    return with_line(answer, args, commands) if offers_line else answer


def with_line(answer: str, args: Sequence[str], commands: Sequence[str]) -> str:
    """The message `answer` about a command line, with the whole line to type if one is known."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME for word in args for part in word.split("/")):
        return answer  # the system refuses to look for a file with so long a name
    # Imported here, since most command lines are right.
    from meshwright.cli.corrected_line import corrected_line, notes_of, unknown_names
    from meshwright.cli.line_notes import without_contradictions, without_kept

    try:
        line = corrected_line(args, commands)
        other = "" if line else unknown_names(args, commands)
        notes = notes_of(args, line) if line else {}
    except Exception:
        # The answer is complete without a line. Tests of generated lines read this log.
        logger.debug("the search for a line to type failed", exc_info=True)
        return answer
    if not line:
        return answer if not other or other in answer else f"{answer}; {other}"
    before, _, last = answer.rpartition("type mw ")
    begins = f"mw {last.partition(' -')[0].partition(' DIR')[0]}"
    # If the message ends with the beginning of the line, the line takes its place.
    if before and line.startswith(begins) and not re.search(r"[;,(]", last):
        if not before.endswith("; "):
            return f"{before}type {line}"
        answer = before.removesuffix("; ")
    if answer.startswith("command ") and "did you mean" not in answer:  # the line says which is meant
        answer = answer.partition("; ")[0]
    answer = without_kept(answer, notes)
    plain = answer if answer.endswith("...") else answer.rstrip(".")
    parts = without_contradictions(plain.split("; "), line)
    unsaid = [note for option, note in notes.items() if not any(option in part for part in parts)]
    # A long message keeps its first part and the parts about options left out; the line shows the others.
    while len(parts) > 1 and len("; ".join([*parts, *unsaid])) + len(line) > _MOST_CHARACTERS:
        shown = [part for part in parts[1:] if not any(option in part for option in notes)]
        if not shown:
            break
        parts.remove(shown[-1])
    return "; ".join([*filter(None, parts), *unsaid, f"type {line}"])


def _usage_answer(error: typer.TyperException, args: Sequence[str], commands: Sequence[str]) -> str:
    context, given = getattr(error, "ctx", None), getattr(error, "option_name", "")
    if match := _NO_VALUE.match(error.message):
        if match[1] == "--price":
            return "--price takes the price of a chip-hour, such as 2.5; without it the list price is used"
        return f"{match[1]} is last and has no value; write it after the option"
    if context is None:
        return _of_parser(error)
    names = getattr(context.command, "commands", None)
    message = error.message
    if names and message == _NO_COMMAND:
        return f"name a command of {context.command_path}: {', '.join(names)}"
    # Typer does not export its classes of errors.
    kind = type(error).__name__
    if kind == "NoSuchOption":
        return _unknown_options(given, context, args, commands)
    if names and (match := re.match(r"No such command '(.+?)'", message)):
        if ours := subcommand_here(match[1], list(names)):
            return f"{context.command_path} has no command {match[1]!r}; type {context.command_path} {ours}"
        if "Did you mean" not in message:
            return f"{context.command_path} has no command {match[1]!r}; {nearest(match[1], list(names))}"
    if kind == "MissingParameter":
        return _without_dashes(context, args) or _missing(context, args)
    if match := _EXTRA.match(message):
        return _extra(match[1].split(), context, args)
    return _of_parser(error)


def _of_parser(error: typer.TyperException) -> str:
    # The parser of choices puts the kind of error before a validator's message.
    return getattr(error, "format_message", error.__str__)().replace("Value error, ", "")


_OTHER_WORD = re.compile(r"layout: '([\w.]+)' is not supported")
_OTHER_VALUE = re.compile(r"layout: (\w+) = '([^']+)'; ")


def value_fault(message: str, args: Sequence[str]) -> str:
    """A command's fault, with the words to type if a value is another option's or another program's."""
    for option, value in pairwise(plain_words(args)):
        is_wrong = option in OF_PLANS and repr(value) in message and not KINDS[option](value)
        if is_wrong and (ours := next((name for name in OF_PLANS if KINDS[name](value)), "")):
            return f"{option} {value}: this is a value of {ours}; write {ours} {value}"
    if match := _OTHER_WORD.search(message):
        from meshwright.layout.short import WORDS  # here, since most command lines are right

        given = f"--{match[1]}"
        settings = (re.search(rf"{match[1]}=([^,\s]+)", arg) for arg in args)
        value = next((setting[1] for setting in settings if setting), "")
        options = ["--given"], ["--batch-tokens", "--seq-len", "--set", "--hardware"]
        ours = next(filter(None, (option_here(given, each, value) for each in options)), "")
        ours = ours or meaning_with_value(given, ["--given"], value)
        ours = "" if get_close_matches(match[1], WORDS, cutoff=TYPO) else ours
        return f"layout: {match[1]} is {ours.removeprefix('--given ')} here" if ours else message
    if match := _OTHER_VALUE.search(message):
        from meshwright.layout.short import value_here

        ours = value_here(match[1], match[2])
        listed = set(re.findall(r"[\w-]+", message.partition("fits: ")[2]))
        fits = ours.partition(",")[0].partition("=")[2] in listed if listed else bool(ours)
        return f"{message}; write {ours}" if fits and ours != f"{match[1]}={match[2]}" else message
    return message


def unknown_command(words: Sequence[str], commands: Sequence[str]) -> str:
    """What to type in place of an unknown command, the first of `words`, as the end of a sentence."""
    name = words[0]
    if name in ("python", "python3") and "-m" in words[:-1]:
        name = words[list(words).index("-m") + 1]  # python -m vllm.entrypoints...
        if ours := command_of_words(name, commands):
            return f"type {ours}"
    ours = command_here(name, commands)
    if ours == "mw doctor" and any(word.startswith("http") for word in words):
        return filled(no_command("health"), words[1:])
    if ours:
        return f"type {ours}"
    if answer := no_command(name):
        is_of_server = "metrics.jsonl" in answer and any(word.startswith("http") for word in words)
        return filled(no_command("metrics") if is_of_server else answer, words[1:])
    if close := get_close_matches(name, [*commands, "help", "version"], n=2, cutoff=ALIKE):
        return f"did you mean {' or '.join(close)}?"
    first = next((word for word in words[1:] if word in commands), "")
    if is_model(name) or is_machine(name):
        return f"type mw {first or ('fit' if is_model(name) else 'hardware')} {name}"
    if owners := _with_option(f"--{name.lstrip('-')}", commands):
        return f"--{name} is an option of {in_words(owners, most=3)}"
    if ours := command_of_words(name, commands):
        return f"type {ours}"
    if script := next((word for word in words[1:] if word.endswith(".py")), ""):
        return f"to audit a function of a script type mw audit {script}:step"
    return _QUESTIONS


def _unknown_options(first: str, context: Any, args: Sequence[str], commands: Sequence[str]) -> str:
    """The answers to all unknown options of a command, the parser's `first` before the others."""
    ours = args[: args.index("--")] if "--" in args else args  # the rest is another command's
    known = {name for param in context.command.params for name in (*param.opts, *param.secondary_opts)}
    written = (word.partition("=")[0] for word in ours if word.startswith("--"))
    others = [name for name in dict.fromkeys(written) if name not in known and name != first]
    if getattr(context.command, "commands", None) is not None:
        others = []
    answers = [
        _unknown_option(name, context, args, commands) for name in (first, *others[: _MOST_ANSWERS - 1])
    ]
    return "; ".join(dict.fromkeys(answers))


def _unknown_option(given: str, context: Any, args: Sequence[str], commands: Sequence[str]) -> str:
    if answer := _too_early(given, context, args, commands):
        return answer
    return _agreeing(_named_option(given, context, args, commands), given, _value_of(given, args), context)


def _agreeing(answer: str, given: str, value: str, context: Any) -> str:
    """An answer to an unknown option that agrees with the line to type.

    answer: of `_named_option`. If it names none of the options that the line has in place of `given`, the
    result names those instead.
    """
    from meshwright.cli.line_commands import command_at
    from meshwright.cli.line_options import replaced
    from meshwright.cli.line_pieces import Piece

    path = tuple(context.command_path.split()[1:])
    command = command_at(path) if path else None
    pieces = command and replaced(Piece(given, value), command)
    if not command or not pieces or not all(piece.option in command.options for piece in pieces):
        return answer
    words = shlex.join(word for piece in pieces for word in piece.words)
    # `--x: ...` explains a subject, and may name our options with values of another case than the line's.
    of_subject = answer.startswith(f"{given}: ")
    is_said = any(piece.option in answer and (not of_subject or piece.value in answer) for piece in pieces)
    return answer if is_said or "=all" in words else f"{f'{given} {value}'.rstrip()} is {words} here"


def _named_option(given: str, context: Any, args: Sequence[str], commands: Sequence[str]) -> str:
    """The answer to an unknown option by its name, its value, its owners or similar names."""
    path = context.command_path
    options = [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)]
    value = _value_of(given, args)
    if answer := _short_option(given, context, args) or _renamed(given, path, options, value):
        return answer
    if argument := _argument(given, context):
        return f"{given} has no dashes here: {path} {argument}"
    if ours := meaning_with_value(given, options, value):
        return f"{given} is {ours} here"
    if len(given) <= _LONGEST_VAGUE and (answer := _by_value(value, options, given)):
        return answer
    owners = _with_option(given, commands)
    typo = get_close_matches(given, options, n=2, cutoff=TYPO)
    if typo and not owners:
        return f"{path} has no {given}; did you mean {' or '.join(typo)}?"
    if answer := subject(given, path, value) or subject(given, ""):
        return answer
    if not owners and given.lstrip("-") in commands:
        return f"{given}: this is a command; type mw {given.lstrip('-')}"
    return _unexplained(given, value, path, options, owners)


def _unexplained(given: str, value: str, path: str, options: Sequence[str], owners: Sequence[str]) -> str:
    """The answer to an option that no table explains, by its value, its owners and similar names."""
    if path == "mw train" and "mw plan train" in owners:
        return f"{given}: the plan sets it: mw plan train {given} {value}".rstrip()
    if owners:
        return f"{path} has no {given}; it is an option of {in_words(owners, most=3)}"
    if answer := _by_value(value, options, given):
        return answer
    begun = [option for option in options if len(given) >= _LEAST_BEGUN and option.startswith(given)]
    near = get_close_matches(given, options, n=2, cutoff=ALIKE) if len(given) > _LEAST_BEGUN else []
    if alike := begun[:2] or near:
        return f"{path} has no {given}; did you mean {' or '.join(alike)}?"
    taken = [each for each in options if each.startswith("--") and each not in ("--json", "--help")]
    names = ", ".join(taken[:_MOST_NAMED]) + (", ..." if len(taken) > _MOST_NAMED else "")
    return f"{path} has no {given}; leave it out, or take an option that {path} --help lists: {names}"


def _too_early(given: str, context: Any, args: Sequence[str], commands: Sequence[str]) -> str:
    """The answer to an option that is written before its command; empty for others."""
    path = context.command_path
    if names := getattr(context.command, "commands", None):
        if HOSTS & set(words_of(given)) and (answer := subject(given, path, _value_of(given, args))):
            return answer
        return f"name a command of {path} before {given}: {', '.join(f'{path} {name}' for name in names)}"
    if path == "mw" and (later := next((word for word in args if word in commands), "")):
        words = [later, *args[args.index(later) + 1 :][:1]]
        return f"options follow the command: mw {' '.join(words)} ... {given}"
    return ""


def _argument(given: str, context: Any) -> str:
    """The arguments of a command, if an option has the name of one, or of a word for one; otherwise empty."""
    arguments = [param for param in context.command.params if param.param_type_name == "argument"]
    words = {word for each in arguments for word in (each.name, *re.findall(r"[a-z]+", _shown(each).lower()))}
    plain = given.lstrip("-")
    if plain in words or RESHARD_WORDS.get(plain.partition("-")[0]) in words:
        return " ".join(map(_shown, arguments))
    return ""


def _by_value(value: str, options: Sequence[str], given: str) -> str:
    """The option that takes a value, for an option whose name explains nothing; empty if none does."""
    if not value or (value.lower() in KINDS_OF_CHIPS and "--target" not in options):
        return ""
    from meshwright.dtypes import KNOWN, named  # here, since most command lines are right

    if ours := next(options_for(value, given, options), ""):
        return f"{given} is {ours} here; write {ours} {value}"
    dtypes = [name for name in options if name.endswith("-dtype")]
    if dtypes and named(value) in KNOWN:
        alike = get_close_matches(given, dtypes, n=1)
        hint = f"; write {alike[0]} {value}" if alike else ""
        return f"{given}: number types are {' and '.join(dtypes)}{hint}"
    return ""


def _renamed(given: str, path: str, options: Sequence[str], value: str) -> str:
    """The answer to an option that is in a table of other programs' options; empty for others."""
    if ours := strategy(given, options, value):
        return f"{given} {value} is {ours} here"
    if answer := answer_here(given, path, value):
        return answer
    ours = option_here(given, options, value)
    return f"{given} is {ours} here" if ours else ""


def _short_option(given: str, context: Any, args: Sequence[str]) -> str:
    """The answer to `-model`, which the parser reads as `-m`, and to an argument's letter; else empty."""
    if len(given) != 2 or given == "-h":
        return ""
    begun = [
        _shown(param)
        for param in context.command.params
        if param.param_type_name == "argument" and param.name.startswith(given[1])
    ]
    no_dashes = f"{given} has no dashes here: {context.command_path} {begun[0]}" if begun else ""
    return _without_dashes(context, args) or _of_one_dash(given, context, args) or no_dashes


def _of_one_dash(given: str, context: Any, args: Sequence[str]) -> str:
    """The answer to another program's option with one dash, such as `-tp 8`; empty for others."""
    options = [name for param in context.command.params for name in param.opts]
    for word in args:
        if re.fullmatch(r"-[A-Za-z][A-Za-z-]+", word) and word.startswith(given):
            value = _value_of(word, args)
            ours = option_here(f"-{word}", options, value) or meaning_with_value(word, options, value)
            return f"{word} is {ours} here" if ours else ""
    return ""


def _without_dashes(context: Any, args: Sequence[str]) -> str:
    """The answer to options with too few dashes, `model=llama-3-8b` or `-model`; empty if there are none."""
    options = {name for param in context.command.params for name in param.opts}
    named = []
    for arg, after in pairwise([*args, ""]):
        match = re.fullmatch(r"-?([A-Za-z][\w-]+)(?:=(.*))?", arg)
        name = f"--{match[1].replace('_', '-').lower()}" if match else ""
        if match and name in options and (arg[0] == "-" or match[2]):
            named.append(f"{name} {match[2] or ('' if after.startswith('-') else after)}".rstrip())
    return f"options have two dashes; write {' '.join(named)}" if named else ""


def _value_of(option: str, args: Sequence[str]) -> str:
    """The word that was given as an unknown option's value; empty without one."""
    for at, arg in enumerate(args):
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
        if arg == option and at + 1 < len(args):
            return "" if args[at + 1].startswith("-") else args[at + 1]
    return ""


def _with_option(option: str, commands: Sequence[str]) -> list[str]:
    """The commands that have an option."""
    owners = []
    for name in commands:
        command = command_in(name)
        inner = getattr(command, "commands", None)
        paths = (
            {f"mw {name} {each}": part for each, part in inner.items()} if inner else {f"mw {name}": command}
        )
        owners += [path for path, each in paths.items() if any(option in param.opts for param in each.params)]
    return owners


def _extra(words: Sequence[str], context: Any, args: Sequence[str]) -> str:
    """The answer to words that belong to no option.

    It is about the first that is a model, a machine or a layout, otherwise about the first word.
    """
    path, params = context.command_path, context.command.params
    options = {name: param for param in params if param.param_type_name == "option" for name in param.opts}
    for word in words:
        if option := next((name for name, known in KINDS.items() if name in options and known(word)), ""):
            return f"{word!r} belongs to no option; write {option} {word}"
    word = words[0]
    before = list(args[: args.index(word)]) if word in args else []
    joined = "" if before and before[-1] in VERBS else _joined(word, context, args)
    if joined:
        return f"write {context.command_path} {joined}"
    if word == "=" and len(before) >= 2:
        return f"write {before[-2]} {before[-1]}={''.join(words[1:2])} without spaces"
    if before and before[-1] in VERBS:
        return f"leave out {before[-1]!r}: {path} {word}"
    if len(before) >= 2 and "," in (getattr(options.get(before[-2]), "metavar", None) or ""):
        joint = "," if "=" in before[-1] or "=" not in getattr(options[before[-2]], "metavar", "") else "="
        return f"{word!r} belongs to no option; write {before[-2]} {before[-1]}{joint}{word}"
    if len(before) >= 2 and before[-2] in options and not options[before[-2]].is_flag:
        return f"{word!r} belongs to no option; quote '{before[-1]} {word}', or leave it out"
    if path == "mw generate":
        return "write the prompt in quotes"
    if before and before[-1] in options:
        return f"{before[-1]} takes no value; leave out {word!r}"
    arguments = [_shown(param) for param in params if param.param_type_name == "argument"]
    takes = f"takes {' '.join(arguments)}" if arguments else "takes only options"
    return f"{path} {takes}; leave out {word!r}{_such_as(context)}"


def _joined(word: str, context: Any, args: Sequence[str]) -> str:
    """The argument before a surplus word, joined with it, if both together are a value: `rtx 4090`."""
    from meshwright.cli.spoken_names import preset_alike  # here, since most command lines are right

    before = args[args.index(word) - 1] if word in args[1:] else ""
    arguments = {param.name for param in context.command.params if param.param_type_name == "argument"}
    kinds = [known for name, known in KINDS.items() if arguments & {name.lstrip("-"), ARGUMENTS.get(name)}]
    if before.endswith(".py") and word.isidentifier():
        return f"{before}:{word}"
    for joint in ("", "-"):
        both = preset_alike(f"{before}{joint}{word}")
        if before and any(known(both) for known in kinds):
            return both
    return ""


def _shown(argument: Any) -> str:
    return (argument.metavar or argument.name or "").upper()


def _missing(context: Any, args: Sequence[str]) -> str:
    """The missing options and arguments, in one line with the command's first example."""
    lacking = [
        param.opts[-1] if param.param_type_name == "option" else _shown(param)
        for param in context.command.params
        if param.required and context.params.get(param.name) is None
    ]
    valued = {
        name
        for param in context.command.params
        if not getattr(param, "is_flag", False)
        for name in param.opts
    }
    words = [word for before, word in pairwise(["", *args]) if before not in valued and word[:1] != "-"]
    typed = {name: next(filter(KINDS[name], words), "") for name in lacking if name in OF_PLANS}
    if written := " ".join(f"{name} {word}" for name, word in typed.items() if word):
        return f"{context.command_path} needs {', '.join(lacking)}; write {written}"
    return f"{context.command_path} needs {', '.join(lacking)}{_such_as(context)}"


def _such_as(context: Any) -> str:
    """The first example in a command's help, as the end of a sentence; empty without one."""
    lines = (context.command.help or "").splitlines()
    example = next((line.strip() for line in lines if line.strip().startswith("mw ")), "")
    return f"; such as {example}" if example else ""

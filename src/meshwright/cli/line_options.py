"""The command's own options in place of unknown options and surplus words of a line."""

import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from meshwright.cli.amounts import amounts_of
from meshwright.cli.line_conversions import deferred_option
from meshwright.cli.line_examples import lacking
from meshwright.cli.line_pieces import Command, Piece, pieces_of
from meshwright.cli.line_values import layout_here, with_a_right_value
from meshwright.cli.other_notation import AXES
from meshwright.cli.other_subjects import is_of_users, meaning, meaning_with_value, subject, words_of
from meshwright.cli.other_values import (
    BATCH_TOKENS,
    KINDS_OF_CHIPS,
    LISTS,
    in_unit_of,
    per_period,
    strategy,
)
from meshwright.cli.other_words import ALIKE, TYPO, answer_here, option_here
from meshwright.cli.sentences import option_of
from meshwright.cli.value_kinds import KINDS, OF_PLANS, RESHARD_WORDS, is_checkpoint, options_for
from meshwright.hardware.catalog import usual

# Options of other programs for the model, which some commands take as an argument.
_MODEL_NAMES = ("name", "model-name", "model-id", "model", "preset", "config", "config-file", "path")
_BEGINNING = 5  # characters, with dashes, that a misspelt option has in common with the right one
_NONSENSE = "?!"  # refused except by options that take any text
_SETTING = re.compile(r"\w+\s*[<>=!]")  # a word of --given or --layout
_LETTER = 2  # characters, with its dash, of an option of one letter
_LEAST_OF_PROMPT = 2  # words of a prompt without quotes
# Commands whose --hardware may list several machines.
_SEVERAL_MACHINES = ("plan", "serve"), ("plan", "train"), ("fit",)
_MOST_JOINED = 4  # words of one value
# Words in messages that the reader has to replace: NAME, N, C.
PLACEHOLDER = re.compile(r"(?<![\w.])[A-Z]+(?![\w.=])")
# Options of other programs for the input, which some commands take as an argument.
_INPUTS = {"model", "model-path", "input", "checkpoint", "path", "dir", "folder", "run", "source", "file"}
# Options of other programs for a mesh, NAME=SIZE,...
_MESHES = {"mesh", "mesh-shape", "mesh-axes", "axes", "parallelism", "sharding", "strategy"}
_PRICE = {"cost", "costs", "price", "pricing"}  # parts of the names of options that ask for a price
_OF_EPOCHS = {"epoch", "epochs"}
# Words of options whose value names a way to train.
_OF_RECIPES = {
    *("method", "technique", "mode", "type", "algorithm", "adapter", "peft", "stage", "recipe"),
    *("training", "tuning", "finetune", "finetuning"),
}
_OF_EXCLUSION = {"exclude", "avoid", "without", "no", "disable", "forbid", "skip"}
_CURRENCIES = {"eur", "euro", "euros", "usd", "dollars"}
# Roles of amounts whose unit tells the option, so that the typed option's name does not matter.
_WITH_UNITS = {"days", "budget", "price", "hourly", "rate", "tokens"}
_LEAST_BATCH_TOKENS = 100_000  # of a batch; smaller numbers count sequences
_OF_A_DEVICE = {"device", "chip", "gpu", "per", "micro", "local"}


def replaced(piece: Piece, command: Command) -> list[Piece] | None:
    """The pieces in place of an unknown option; [] to leave it out, None if it has no replacement.

    The first of `_READERS` that knows the option decides.
    """
    return next((pieces for read in _READERS if (pieces := read(piece, command)) is not None), None)


def _as_flag(piece: Piece, command: Command) -> list[Piece] | None:
    return _flag(piece.option, piece.value) if piece.value and piece.option in command.options else None


def _as_argument(piece: Piece, command: Command) -> list[Piece] | None:
    given, value = piece.option, piece.value
    is_input = bool(command.arguments) and given.lstrip("-").replace("_", "-") in _INPUTS
    is_given = value and (_is_of_argument(given, value, command) or _is_plan_of(value, command))
    return [Piece("", value)] if is_given or (is_input and value and Path(value).exists()) else None


def _as_run(piece: Piece, command: Command) -> list[Piece] | None:
    """`--resume DIR` as the run that continues."""
    is_run = piece.value and {"--run", "--resume"} <= set(command.options) and "resume" in piece.option
    folder = piece.value.rstrip("/").partition("/checkpoints")[0]
    return [Piece("--run", folder), Piece("--resume")] if is_run else None


def _as_strategy(piece: Piece, command: Command) -> list[Piece] | None:
    words = strategy(piece.option, list(command.options), piece.value)
    # `all` becomes the number of chips when the machine is known.
    alike = re.sub(r"\b(data|fsdp)=8$", r"\1=all", words)
    return pieces_of(shlex.split(alike), command) if words else None


def _left_out(piece: Piece, command: Command) -> list[Piece] | None:
    return [] if _has_no_place(piece, " ".join(("mw", *command.path)), list(command.options)) else None


def _as_flag_of_value(piece: Piece, command: Command) -> list[Piece] | None:
    """An option whose value is a flag's name: --method qlora as --qlora, --exclude pipe as --no-pipe."""
    words, options = set(words_of(piece.option)), list(command.options)
    if not piece.value.isalpha():
        return None
    if words <= _OF_RECIPES and option_here(f"--{piece.value}", options):
        return replaced(Piece(f"--{piece.value}"), command)
    without = meaning(f"--no-{piece.value}", options) if words <= _OF_EXCLUSION else ""
    return pieces_of(without.split(), command) if without else None


def _as_named(piece: Piece, command: Command) -> list[Piece] | None:
    """An option that a table lists under the words of its name, with its value."""
    given, value, options = piece.option, piece.value, list(command.options)
    value = per_period(given, value)
    words = option_here(given, options, value) or meaning_with_value(given, options, value)
    return _bounded(given, _in_other_words(replace(piece, value=value), words, command)) if words else None


def _as_misspelt(piece: Piece, command: Command) -> list[Piece] | None:
    for name in get_close_matches(piece.option.lower(), list(command.options), n=1, cutoff=TYPO):
        if command.takes_value(name) or not piece.value:
            return [Piece(name, piece.value)]
    return None


def _as_layout(piece: Piece, command: Command) -> list[Piece] | None:
    """An option whose value is a layout, a machine or a model, as the option of plans for such a value."""
    if piece.value.lower() in KINDS_OF_CHIPS:  # --offload cpu names no machine
        return None
    known = (name for name in OF_PLANS if name in command.options)
    named = (name for name in known if piece.value and KINDS[name](piece.value))
    return next(([Piece(name, piece.value)] for name in named), None)


def _as_currency(piece: Piece, command: Command) -> list[Piece] | None:
    """A currency with a number, such as --eur 2.1, which is a price of a chip-hour or a budget."""
    return _as_amount(piece, command) if set(words_of(piece.option)) <= _CURRENCIES else None


def _as_amount(piece: Piece, command: Command) -> list[Piece] | None:
    """An option whose value has a unit: --finish-by '2 weeks' as --smallest --days 14."""
    unit = next((word for word in words_of(piece.option) if word in _CURRENCIES), "")
    amounts, others = amounts_of(f"{piece.value} {unit}")
    if others or len(amounts) != 1 or amounts[0].role not in _WITH_UNITS:
        return None
    amount = amounts[0]
    # Money below 100 that names no period is the price of a chip-hour; no budget is that small.
    if amount.role == "budget" and re.fullmatch(r"\d\d?(\.\d+)?", amount.value):
        euros = f"{amount.value} EUR" if unit.startswith("eur") else amount.value
        return [Piece("--price", euros)] if "--price" in command.options else None
    return pieces_of(option_of(amount, command.path), command) or None


def _as_subject(piece: Piece, command: Command) -> list[Piece] | None:
    """An option with an answer of its own, which is left out, or users, who send a request a minute each."""
    given, path = piece.option, " ".join(("mw", *command.path))
    if not (subject(given, path) or subject(given, "")):
        return None
    is_load = is_of_users(given) and piece.value.isdecimal() and "--rate" in command.options
    return [Piece("--rate", f"{piece.value}/min")] if is_load else []


def _bounded(given: str, pieces: list[Piece] | None) -> list[Piece] | None:
    """The pieces, with a degree as a bound if the option's name has max or min: `--max-tp 8`."""
    words = set(re.split(r"[-_.]", given))
    sign = "<=" if "max" in words else ">=" if "min" in words else ""
    if pieces is None or not sign:
        return pieces
    return [
        replace(each, value=each.value.replace("=", sign))
        if each.option == "--given" and re.fullmatch(r"[a-z]+=\d+", each.value)
        else each
        for each in pieces
    ]


def _has_no_place(piece: Piece, path: str, options: Collection[str]) -> bool:
    """Whether to leave an option out: it asks for figures that are shown anyway, or the command lacks it."""
    # A command without --rate sends all requests at once, which other programs call an infinite rate.
    is_infinite = piece.value.lower() in ("inf", "infinity")
    is_boundless = is_infinite and "--rate" in option_here(piece.option, options)
    is_of_epochs = "--epochs" not in options and _OF_EPOCHS & _parts_of_name(piece)
    return bool(
        is_boundless
        or is_of_epochs
        or asks_for_price(piece, options)
        or answer_here(piece.option, path, piece.value)
    )


def _parts_of_name(piece: Piece) -> set[str]:
    """The words of an option's name, each as it is written."""
    return set(re.split(r"\W|_", piece.option.lower()))


def asks_for_price(piece: Piece, options: Collection[str]) -> bool:
    """Whether an option without a value, such as --cost, asks for the price that every plan shows."""
    names_price = bool(_PRICE & _parts_of_name(piece))
    return names_price and not piece.value and "--price" in options


def _as_deferred(piece: Piece, command: Command) -> list[Piece] | None:
    """A deferred option, a mesh as --layout, or `--B 4096` as --dims or --mesh; None for other options."""
    given, value = piece.option, piece.value
    is_mesh = given.lstrip("-").replace("_", "-") in _MESHES and "--layout" in command.options
    value = re.sub(r",\s+", ",", value) if is_mesh else value
    if is_mesh and KINDS["--layout"](layout_here(value)):
        return [Piece("--layout", layout_here(value))]
    if name := deferred_option(given, command):
        return [Piece(name, value)]
    if ours := _of_letter(given, value, command) or _of_number_type(given, value, command):
        return [Piece(*ours, is_sequences=ours[0] == "--batch-tokens")]
    if not value or "--dims" not in command.options or not re.fullmatch("--?[A-Z]", given):
        return None
    return [Piece("--mesh" if given[-1] in AXES else "--dims", f"{given[-1]}={value}")]


# The options for a dimension's letter; the first that the command has is taken. SET is --set with the field.
_LETTERS = {
    "B": ("--batch", "--batch-tokens"), "T": ("--seq-len",), "S": ("--context", "--seq-len"),
    "D": ("SET d_model",), "F": ("SET d_ff",), "L": ("SET num_layers",), "N": ("SET num_heads",),
    "K": ("SET num_kv_heads",), "V": ("SET vocab_size",),
}  # fmt: skip


def _of_letter(given: str, value: str, command: Command) -> tuple[str, str] | None:
    """The option and value for a dimension's letter, such as --B 32; None for other options."""
    letter = given.lstrip("-")
    if not value or "--dims" in command.options or letter not in _LETTERS:
        return None
    for name in _LETTERS[letter]:
        if name in command.options:
            return name, value
        if name.startswith("SET ") and "--set" in command.options:
            return "--set", f"{name.removeprefix('SET ')}={value}"
    return None


def _of_number_type(given: str, value: str, command: Command) -> tuple[str, str] | None:
    """The option of a number type that an option's name begins like, such as --kv int8; None for others."""
    from meshwright.dtypes import KNOWN, named

    if not value or given in command.options or named(value) not in KNOWN:
        return None
    first = given.lstrip("-").replace("_", "-").partition("-")[0]
    ours = next((name for name in command.options if name == f"--{first}-dtype"), "")
    return (ours, value) if ours else None


def _flag(flag: str, value: str) -> list[Piece]:
    """The pieces of a flag that was given a value."""
    if value.lower() in ("true", "yes", "on", "false", "no", "off"):
        return [Piece(flag)] if value.lower() in ("true", "yes", "on") else []
    return [Piece(flag), Piece("", value)]


def _by_likeness(piece: Piece, command: Command) -> list[Piece] | None:
    """An unknown option as one that takes its value or has a similar name; None if there is none."""
    given, value = piece.option, piece.value
    options = list(command.options)
    near = get_close_matches(given.lower(), options, n=1, cutoff=ALIKE)
    is_kind = value.lower() in KINDS_OF_CHIPS and "--target" not in options
    ours = next(options_for(value, given, options), "") if value and not is_kind else ""
    ours = ours or next(
        (each for each in near if _begins_alike(given, each) and command.takes_value(each)), ""
    )
    return [Piece(ours, value)] if ours else None


_READERS = (
    _as_flag, _as_deferred, _as_argument, _as_run, _as_strategy, _left_out, _as_flag_of_value, _as_currency,
    _as_named, _as_misspelt, _as_layout, _as_amount, _as_subject, _by_likeness,
)  # fmt: skip


def _begins_alike(option: str, other: str) -> bool:
    return option[:_BEGINNING] == other[:_BEGINNING]


def _is_plan_of(value: str, command: Command) -> bool:
    """Whether the value is a plan.toml, which the command takes as an argument: --config plan.toml."""
    takes = {name for param in command.arguments for name in (param.name, param.metavar or "")}
    is_taken = any("plan" in name.lower() or name.lower() == "run" for name in takes)
    return is_taken and value.endswith(".toml") and Path(value).is_file()


def _is_of_argument(option: str, value: str, command: Command) -> bool:
    """Whether an unknown option gives an argument of the command, by the option's name or by the value."""
    plain = option.lstrip("-").replace("_", "-")
    names = {param.name for param in command.arguments}
    if "prompt" in names and plain in ("text", "message", "query", "question", "input"):
        return not Path(value).is_file()
    letters = {name[0] for name in names} if len(option) == _LETTER and not value.isdigit() else set()
    is_moved = RESHARD_WORDS.get(plain.partition("-")[0]) in names
    if names & {"name", "chip"} and KINDS["--hardware"](value):  # of mw hardware and mw plot
        return True
    if "model" in names and plain in _MODEL_NAMES and KINDS["--model"](value):
        return True
    return is_moved or plain in names | letters


def _in_other_words(piece: Piece, words: str, command: Command) -> list[Piece] | None:
    """The pieces of the words to type for an option; [] if the reader has to complete them."""
    if words == BATCH_TOKENS:
        of_a_device = bool(_OF_A_DEVICE & _parts_of_name(piece))
        is_number = re.fullmatch(r"\d*\.?\d+", piece.value) is not None
        is_count = is_number and float(piece.value) < _LEAST_BATCH_TOKENS
        return [Piece("--batch-tokens", piece.value, is_sequences=is_count, of_a_device=of_a_device)]
    plain = words.partition(", ")[0].rstrip(",")
    if words.startswith("--hardware") and piece.value.lower() in KINDS_OF_CHIPS:
        return [Piece("--target", piece.value.lower())] if "--target" in command.options else []
    if piece.value == "-1" and (axis := re.fullmatch(r"(--given|--layout) (\w+)=\d+", plain)):
        return [Piece(axis[1], f"{axis[2]}=all")]  # MaxText and torchtitan write the remaining chips as -1
    if piece.value and (replicas := re.fullmatch(r"(--given|--layout) (data=\d+),fsdp=\d+", plain)):
        # Each replica is split over the chips that are left.
        return [Piece(replicas[1], f"{replicas[2]},fsdp=all")]
    value = piece.value if piece.value in plain else in_unit_of(plain, piece.value)
    # Numbers in names of options, as in --ttft-p95, are no values.
    given, offered = (set(re.findall(r"\d+", re.sub(r"--[\w-]+", "", text))) for text in (value, plain))
    if (
        given
        and offered
        and not given & offered
        and not plain.startswith(("--headroom", "--prefix-hit", "--smallest", "--time"))
    ):
        return []  # the example's number is not the one that was typed
    if PLACEHOLDER.search(plain.replace(value, "") if value else plain) or " and " in plain:
        return []
    pieces = pieces_of(shlex.split(plain), command)
    last = pieces[-1]
    if not last.value and command.takes_value(last.option):
        pieces[-1] = replace(last, value=value or command.example_of(last.option))

    # The first option has the typed value, if any, except a --phase, which follows from the option's name.
    def is_example(at: int, each: Piece) -> bool:
        is_untyped = at > 0 or each.option == "--phase" or (not value and each.option not in LISTS)
        return is_untyped and each.value not in (value, "")

    return [replace(each, is_example=is_example(at, each)) for at, each in enumerate(pieces)]


def with_types_parted(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces with --dtype as --compute-dtype if another option names the type of the weights.

    MaxText has both: --dtype bfloat16 --weight_dtype float32.
    """
    weights = any({"weight", "weights", "param"} & set(words_of(piece.option)) for piece in pieces)
    is_parted = weights and "--compute-dtype" in command.options and "--dtype" not in command.options
    return [
        replace(piece, option="--compute-dtype") if is_parted and piece.option == "--dtype" else piece
        for piece in pieces
    ]


def joined_words(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces, with words joined to the value before them if they are a part of it: `8 x h100`."""
    joined: list[Piece] = []
    for piece in _with_machines(pieces, command):
        before = joined[-1] if joined else None
        if before and before.option not in ("", *command.options) and _are_numbers(before, piece):
            joined[-1] = replace(before, value=f"{before.value} {piece.value}")
            continue
        if piece.option or before is None or not command.takes_value(before.option):
            joined.append(piece)
            continue
        is_machine = before.option == "--hardware" and command.path in _SEVERAL_MACHINES
        refused = command.fault(before.option, before.value)
        if is_machine and not refused and not command.fault(before.option, piece.value):
            joined[-1] = replace(before, value=f"{before.value},{piece.value}")
            continue
        if before.option in (*LISTS, "--price") and before.value and _SETTING.match(piece.value):
            joined[-1] = replace(before, value=f"{before.value.rstrip(',')},{piece.value}")
            continue
        both = f"{before.value} {piece.value}"
        is_unit = re.fullmatch(r"[A-Za-z/]{1,12}", piece.value) and before.value[-1:].isdigit()
        if (is_unit or refused) and not command.fault(before.option, both):
            joined[-1] = replace(before, value=both)
        elif refused and len(both.split()) <= _MOST_JOINED:
            joined[-1] = replace(before, value=both)  # more words may follow
        else:
            joined.append(piece)
    return joined


def _are_numbers(before: Piece, piece: Piece) -> bool:
    """Whether a bare number follows one of another program's option: --rampup-batch-size 32 32 2000000."""
    is_bare = not piece.option and piece.value.isdecimal()
    return is_bare and before.value.rpartition(" ")[2].isdecimal()


def _with_machines(pieces: Sequence[Piece], command: Command) -> list[Piece]:
    """The pieces, with a machine of several words, such as H100 x 8, as one value."""
    made, at = [], 0
    while at < len(pieces):
        piece, at = pieces[at], at + 1
        is_bare = not piece.option and re.fullmatch(r"\d+|[a-z]+\d+\w*", piece.value, re.I)
        if piece.option == "--hardware" or (is_bare and "--hardware" in command.options):
            follow = [each.value for each in pieces[at : at + _MOST_JOINED]]
            bare = next(
                (n for n, each in enumerate(pieces[at : at + _MOST_JOINED]) if each.option), len(follow)
            )
            for count in range(bare, 0, -1):
                both = " ".join([piece.value, *follow[:count]])
                if ":" in usual(both) and not command.fault("--hardware", both):
                    piece, at = Piece("--hardware", usual(both)), at + count
                    break
        made.append(piece)
    return made


def placed(pieces: Sequence[Piece], command: Command) -> list[Piece] | None:
    """The pieces, with each surplus argument as the value of an option; None if one fits no option."""
    if command.path in (("shard",), ("collective",)):
        pieces = _with_one_expression(pieces)
    if command.path == ("generate",):
        pieces = _with_one_prompt(pieces)
    given = {piece.option for piece in pieces}
    required = [name for name, param in command.options.items() if param.required and name not in given]
    if command.path == ("plan", "serve"):
        required += lacking(pieces, command)
    surplus = sum(not piece.option for piece in pieces) - command.most_arguments
    words = [piece.value for piece in pieces if not piece.option]
    owners = _owners(words, required, surplus, command)
    placed: list[Piece] = []
    for piece in pieces:
        ours = "" if piece.option else owners.pop(piece.value, "")
        if not (piece.option or ours) and "--resume" in given and "--run" not in given:
            ours = "--run" if Path(piece.value).is_dir() else ""
        if not (piece.option or ours) and surplus > 0:
            ours = _owner_of_surplus(piece.value, command, given, required)
        if ours:
            piece, surplus = Piece(ours, piece.value), surplus - 1
            given.add(ours)
        placed.append(piece)
    return None if sum(not piece.option for piece in placed) > command.most_arguments else placed


def _owners(
    words: Sequence[str], required: Sequence[str], surplus: float, command: Command
) -> dict[str, str]:
    """The required option of each word that has none: by the word's form, or the only option left."""
    owners: dict[str, str] = {}
    for name in (name for name in KINDS if name in required):
        word = next((word for word in words if word not in owners and KINDS[name](word)), "")
        if word:
            owners[word] = name
    for name in (name for name in required if name not in KINDS and surplus > len(owners)):
        word = next((word for word in words if word not in owners and _fits(word, name, command)), "")
        if word:
            owners[word] = name
    left = [name for name in required if name not in {*owners.values(), *KINDS}]
    if surplus == len(owners) + 1 and len(left) == 1 and words[-1] not in owners:
        owners[words[-1]] = left[0]  # mw export RUN DIR
    return owners


def _owner_of_surplus(value: str, command: Command, given: Collection[str], required: Sequence[str]) -> str:
    """The option of a surplus word: by the word's form, or a required option that takes it; "" if none."""
    kinds = [name for name in KINDS if name in command.options and name not in given]
    if ours := next((name for name in kinds if KINDS[name](value)), ""):
        return ours
    left = [name for name in required if name not in given and name not in KINDS]
    return next((name for name in left if _fits(value, name, command)), "")


def _fits(value: str, option: str, command: Command) -> bool:
    """Whether the option takes the value, perhaps under another name. False for options of any text."""
    if not command.fault(option, _NONSENSE):
        return False
    right = with_a_right_value(Piece(option, value), command)
    return not command.fault(right.option, right.value)


def _with_one_prompt(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with the words of a prompt without quotes joined; a checkpoint before them is not joined."""
    words = [piece.value for piece in pieces if not piece.option]
    first = int(bool(words) and is_checkpoint(words[0]))
    if len(words) - first < _LEAST_OF_PROMPT or any(map(is_checkpoint, words[1:])):
        return list(pieces)
    bare = [Piece("", word) for word in (*words[:first], " ".join(words[first:]))]
    return [*bare, *(piece for piece in pieces if piece.option)]


def _with_one_expression(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces with all arguments joined: an expression without quotes, whose end `> ...` a shell took."""
    parts = [piece.value for piece in pieces if not piece.option]
    options = [piece for piece in pieces if piece.option]
    return [Piece("", " ".join(parts).rstrip(" -")), *options] if parts else options

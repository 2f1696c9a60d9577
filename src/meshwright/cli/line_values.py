"""The values to type in place of wrong ones, from the messages about them."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

from meshwright.cli.line_pieces import Command, Piece, check_value
from meshwright.cli.other_notation import AXES, sizes_here
from meshwright.cli.other_values import dtype_here
from meshwright.cli.other_words import ALIKE
from meshwright.cli.spoken_names import preset_alike, preset_of_size
from meshwright.errors import MeshwrightError
from meshwright.hardware.catalog import everyday, specs
from meshwright.hardware.prices import price_of_an_hour

# Arguments with the values of an option, by the command and the argument.
_ARGUMENTS = {("model", "model"), ("fit", "model"), ("support", "model"), ("hardware", "name")}
_LENGTHS = {"--prompt-tokens", "--output-tokens"}
# A range of lengths, which becomes its mean: 1k..4k, 200-400.
RANGE = re.compile(r"(\d+[kK]?)\s*(?:\.\.\.?|-|\bto\b|:)\s*(\d+[kK]?)")
_SIGNS = r"[=<>!]+"  # of a comparison
# A number with the sign of a bound before it, perhaps after a percentile: p95<1s.
_BOUND = re.compile(r"(?:p\d\d\s*)?(?:[<>=~\u2264\u2265\u2248:]+|under|below|about)\s*(\d[\w.,/]*)", re.I)
# Signs and words between the words of a layout: data=4 x tensor=4.
_BETWEEN = re.compile(r"\s*(?:[x*+&/|;]|\band\b|\bby\b|\bwith\b)\s*(?=[a-z_]+\s*[=<>])")
# Values of choices, each with other words for it.
_MEANS = {
    "generate": ("decode", "decoding", "generation"),
    "prefill": ("prompt", "prompts", "encode"),
    "fcfs": ("fifo", "default"),
    "http": ("sse", "streamable-http", "tcp"),
    "stdio": ("pipe", "std"),
}
# Our axes by their names in other programs and in the book's chapter on training, where X splits the batch
# and Y the model.
_AXES = {
    "x": "fsdp", "y": "tensor", "model": "tensor", "mdl": "tensor", "batch": "data", "replica": "data",
    "stage": "pipe", "stages": "pipe", "seq": "context", "sequence": "context", "experts": "expert",
}  # fmt: skip
_MOST_ROUNDS = 8  # corrections of one value
_RENAMED = re.compile(r"([\w.]+) is [\w-]+ here; write ([^\s;]+)")
# The words of a message before a value to type, and the value. A comma within the value joins its words.
_HINT = re.compile(r"(?:write|did you mean|fits:) (?:--[\w-]+ )?('[^']+'|[^\s;?']+)")


def with_a_right_value(piece: Piece, command: Command) -> Piece:
    """The piece with the value that messages about the wrong one name, if the option takes it."""
    if not piece.option:
        return _with_a_right_name(piece, command)
    if not piece.value or piece.option not in command.options:
        return piece
    value = piece.value
    hourly = price_of_an_hour(value) if piece.option == "--budget" else ""
    if hourly and "--max-price-per-hour" in command.options:
        return Piece("--max-price-per-hour", hourly)
    is_several = piece.option == "--hardware" and re.search(r",\s*[A-Za-z]", value)
    if is_several and len(machines := [replace(piece, value=each) for each in specs(value)]) > 1:
        every = ",".join(with_a_right_value(each, command).value for each in machines)
        return replace(piece, value=every)
    for _ in range(_MOST_ROUNDS):
        message = command.fault(piece.option, value)
        if not message:
            return replace(piece, value=value)
        if (form := _other_form(piece.option, value, message)) not in ("", value):
            value = form
            continue
        choices = _choices(message)
        better = [
            each
            for each in _better(piece.option, value, message)
            if each in choices
            or each.lower() == piece.value.lower()
            or _has_digits_of(piece.value, each, piece.option)
        ]
        right = [each for each in better if not command.fault(piece.option, each)]
        value = next(iter([*right, *(each for each in better if each != value)]), "")
        if not value:
            break
    return piece


def is_unknown_name(piece: Piece, command: Command) -> bool:
    """Whether a command takes a model or a chip as its argument, and this piece names none."""
    option = "" if piece.option else _named_by(command)
    try:
        check_value(option, piece.value, needs_number=False)
    except (MeshwrightError, OSError, ValueError):
        return True
    return False


def _named_by(command: Command) -> str:
    """The option, --model or --hardware, whose values are a command's argument; "" for other arguments."""
    taken = next((f"--{name}" for path, name in _ARGUMENTS if command.path == (path,)), "")
    return taken.replace("--name", "--hardware")


def _with_a_right_name(argument: Piece, command: Command) -> Piece:
    """The argument as the name of a model or of a chip, if the command takes one."""
    option = _named_by(command)
    if command.path == ("audit",):
        return replace(argument, value=_script(argument.value))
    if not option:
        return argument
    value = argument.value
    for _ in range(_MOST_ROUNDS):
        try:
            check_value(option, value, needs_number=False)
        except (MeshwrightError, OSError, ValueError) as error:
            message = str(error)
            better = (_other_form(option, value, message), *_better(option, value, message))
            value = next((each for each in better if each not in ("", value)), "")
            if not value:
                break
            continue
        return replace(argument, value=value)
    return argument


def _script(name: str) -> str:
    """The function of a script as mw audit takes it; the name itself if there is no such script."""
    function = re.fullmatch(r"([\w./-]+?)(?:\.py)?:+(\w+)(?:\(.*\))?", name)
    is_file = function is not None and Path(f"{function[1]}.py").is_file()
    return f"{function[1]}.py:{function[2]}" if function and is_file else name


def _better(option: str, value: str, message: str) -> Iterator[str]:
    """Values in place of a wrong one that the message about it names."""
    choices = _choices(message)
    yield from (ours for ours in choices if value.lower() in _MEANS.get(ours, ()))
    yield from get_close_matches(value.lower().replace("_", "-"), choices, n=1, cutoff=0.5)
    if option in ("--layout", "--given") and " " in value.strip():
        yield re.sub(r"(?<=[\w])\s+(?=[A-Za-z])", ",", value.strip())
    if option not in ("--layout", "--given"):
        message = message.partition("fits:")[0]  # a list of values is no hint
    chip, colon, sizes = value.partition(":")
    if renamed := _RENAMED.search(message):
        written = rf"(?<![\w.]){re.escape(renamed[1])}\s*[=<>!]+\s*[^,\s]+"
        yield re.sub(written, lambda _: renamed[2], value, count=1)
    for hint in (each.strip("'").rstrip(",.:") for each in _HINT.findall(message)):
        if option in ("--model", "--hardware") and _is_example(hint, value, message, option):
            continue
        for item in (*re.split(r"[,;]\s*", value), *value.split()):
            if re.match(r"\w+[<>=!]", hint) and item:
                yield value.replace(item, hint, 1)
        if colon and chip:
            name, _, each = hint.partition(":")
            is_machine = each and name.lower() != chip.lower()  # dgx-h100:4
            yield f"{name}:{sizes}x{each}" if is_machine else f"{name}:{sizes}"
        yield hint


def _other_form(option: str, value: str, message: str) -> str:
    """A value in the form that its option takes; empty if its form is right or unknown."""
    if option in ("--mesh", "--dims"):
        return sizes_here(value, AXES if option == "--mesh" else "IJK")
    if option in ("--engine", "--for", "--software"):
        return value.lower() if value != value.lower() else ""
    if option in _LENGTHS and (ends := RANGE.fullmatch(value.strip())):
        return _mean(ends[1], ends[2])
    if bare := _BOUND.fullmatch(value.strip()):
        return bare[1]
    if option in ("--layout", "--given") and len(words := _BETWEEN.split(value)) > 1:
        return ",".join(words)
    if option in ("--layout", "--given") and (ours := layout_here(value)) != value:
        return ours
    if option == "--model" and (preset := _preset_of(value) or preset_of_size(value)):
        return preset
    chip, _, counts = value.partition(":")
    is_everyday = re.match(r"i?mac|apple|laptop|\d+ ?x ?\d+ ?gi?b", value, re.I)
    if option == "--hardware" and is_everyday and (chips := everyday(value)):
        return chips[0]
    if option == "--hardware" and re.fullmatch(r"\d+(,\d+)+", counts):
        return _sizes(chip, counts.split(","))
    if re.fullmatch(r"\d{1,3}(\.\d{3}){2,}", value.strip()):
        return value.strip().replace(".", "")  # 4.000.000
    if re.fullmatch(r"0,\d+", value.strip()):
        return value.strip().replace(",", ".")
    is_type = option.endswith("dtype") or option == "--to"
    return ours if is_type and (ours := dtype_here(value)) in _choices(message) else ""


def _mean(first: str, last: str) -> str:
    """The mean of two lengths; "" if one is none.

    >>> _mean("1k", "4k"), _mean("200", "400")
    ('2560', '300')
    """
    from meshwright.units import parse_length

    with suppress(MeshwrightError):
        return str((parse_length(first) + parse_length(last)) // 2)
    return ""


def layout_here(text: str) -> str:
    """A layout with our names for the axes of other programs; all other words are unchanged.

    >>> layout_here("X=256,Y=16"), layout_here("DATA=4,TP=8"), layout_here("data=64,model=64")
    ('fsdp=256,tensor=16', 'data=4,tensor=8', 'data=64,tensor=64')
    >>> layout_here("FSDP 1792, TP 4")
    'fsdp=1792,tensor=4'
    """
    from meshwright.layout.short import WORDS, word_here

    if re.fullmatch(r"\s*[A-Za-z_]+ \d+(\s*,\s*[A-Za-z_]+ \d+)*\s*", text):  # FSDP 1792, TP 4
        text = re.sub(r"([A-Za-z_]) (\d)", r"\1=\2", text)
    words = []
    for word in re.split(r",\s*|(?<=\d)\s+(?=[A-Za-z_]\w*=)", text):
        name, sign, value = word.partition("=")
        plain = name.strip().lower()
        ours = _AXES.get(plain, "") if value.strip().isdecimal() else ""
        ours = ours or (word_here(plain) if word_here(plain) in WORDS else name)
        words.append(f"{ours}{sign}{value}")
    return ",".join(words)


def _preset_of(path: str) -> str:
    """The preset that a missing file, such as llama3_8b.toml, is named after; "" if there is none."""
    from meshwright.models.presets import PRESETS

    name = Path(path)
    if name.suffix not in (".toml", ".json", ".yaml", ".yml") or name.exists():
        return ""
    named = preset_alike(name.stem)
    return named if named in PRESETS else ""


def _sizes(chip: str, counts: list[str]) -> str:
    """A slice of these sizes if the chip has that number of dimensions; otherwise several machines."""
    from meshwright.hardware.catalog import chip_of
    from meshwright.hardware.chip import Torus

    with suppress(MeshwrightError):
        network = chip_of(chip).network
        if isinstance(network, Torus) and len(counts) == len(network.pod):
            return f"{chip}:{'x'.join(counts)}"
    return ",".join(f"{chip}:{count}" for count in counts)


def _choices(message: str) -> list[str]:
    """The values that a message lists as the possible ones."""
    names = re.findall(r"'([^']+)'", message.partition("not one of")[2])
    _, _, listed = message.partition("fits: " if "fits: " in message else "; known: ")
    return names or re.findall(r"[\w-]+", listed)


def _is_near(hint: str, value: str) -> bool:
    """Whether all parts of an offered name are in `value`, or both have a similar spelling."""
    name, offered = value.lower().partition(":")[0], hint.lower().partition(":")[0]
    is_within = all(part in name for part in re.split(r"[-.]", offered))
    return is_within or SequenceMatcher(None, name, offered).ratio() > ALIKE


def _is_example(hint: str, value: str, message: str, option: str) -> bool:
    """Whether a message's name is not surely meant: one of several, of another number, or an example."""
    if message.endswith(f"is unknown; write {hint}"):  # the machine of a cloud or a shop
        return False
    if _variants(hint) != _variants(value) or (option == "--hardware" and not _is_near(hint, value)):
        return True
    if _is_only_of_size(hint, value, message):
        return False
    if f"did you mean {hint}" in message:
        return f"did you mean {hint}?" not in message or not _has_numbers_of(value, hint)
    return f"write {hint} or" in message or "does not parse" in message


def _is_only_of_size(hint: str, value: str, message: str) -> bool:
    """Whether `hint` is the only model in the message of the size that the typed name has, such as 405b."""
    size = re.search(r"(?<![\d.])\d+(\.\d+)?[bm]\b", value.lower())
    named = re.findall(r"[\w.-]+", message.partition("did you mean ")[2].partition("?")[0])
    return size is not None and [name for name in named if size[0] in name.split("-")] == [hint]


def _variants(name: str) -> set[str]:
    """The words of a chip's name that tell it from other chips of its number."""
    return {"ti", "super", "pro", "max", "ultra", "nano"} & set(re.split(r"[-\s:]", name.lower()))


def _has_digits_of(value: str, other: str, option: str) -> bool:
    """Whether a value from a message (`other`) has no numbers that the wrong value lacks.

    With other numbers it is an example, and not the meant value. Layouts and conditions need as many
    comparisons instead; names may have any numbers.
    """
    given = re.findall(r"\d+", value)
    if option in _LENGTHS and RANGE.fullmatch(value.strip()):
        return True
    if other.endswith("%") and re.search(r"[A-Za-z]$", value):
        return False  # a size, and not a share
    offered, sizes = re.findall(r"\d+", other), re.search(r"\d+([x,*]\d+)+", value)
    if option == "--layout" and given and len(offered) > 1 and not set(offered) <= set(given):
        return False  # the example of a message
    if option == "--hardware" and sizes and re.search(r":\d", other):
        return set(re.findall(r"\d+", sizes[0])) <= set(offered)
    if option in ("--layout", "--given"):
        return len(re.findall(_SIGNS, value)) <= len(re.findall(_SIGNS, other))
    if option in ("--model", "--hardware", "--to", "--engine", "--for") or option.endswith("dtype"):
        return True
    return bool(given) and (all(number in given for number in offered) or "".join(offered) == "".join(given))


def _has_numbers_of(name: str, hint: str) -> bool:
    """Whether a name that is offered has the first number of the name that it replaces.

    >>> _has_numbers_of("llama-70b", "llama-3-70b"), _has_numbers_of("4060ti", "rtx4090")
    (True, False)
    """
    first = re.search(r"\d+", name.partition(":")[0])
    return first is None or first[0] in re.findall(r"\d+", hint)


def is_no_value(piece: Piece, command: Command) -> bool:
    """Whether the value asks for the default, such as --layout auto: the option is left out."""
    fault = command.fault(piece.option, piece.value) if piece.option and piece.value else ""
    if piece.option == "--layout":
        return "leave it out" in fault
    return bool(fault) and piece.value.lower() in ("auto", "default")

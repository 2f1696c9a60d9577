"""Words as people type them, replaced by one word or option each.

Models, machines and amounts in several words, everyday names of machines, settings without dashes, quoted
patterns of files, and options that choose devices.
"""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from meshwright.cli.amounts import FACTORS
from meshwright.cli.other_notation import AXES, is_collective
from meshwright.cli.other_values import LISTS
from meshwright.cli.value_kinds import is_machine
from meshwright.errors import plain_name
from meshwright.hardware.catalog import everyday
from meshwright.layout.short import WORDS, word_here
from meshwright.platforms import PLATFORMS

_VENDORS = {"nvidia", "google", "amd", "intel", "apple", "aws", "amazon", "tpu", "gpu", "geforce", "cloud"}
# First words after which `gpu`, `local` and the like are not replaced by a machine: `audit plan.toml tpu`.
_WITHOUT_MACHINES = {
    "audit", "tune", "launch", "train", "serve", "generate", "export", "report", "bench", "run",
    "which", "what", "how", "can", "does", "will", "do", "is", "help",
}  # fmt: skip
# Commands after which `name=value` is an option without its dashes.
_WITH_SETTINGS = {"plan", "serve", "train", "fit", "generate"}
_MEMORY = re.compile(r"^--?(gpu-?|total-)*(v?ram|mem|memory|hbm)(-gb|-size)?$")
_MOST_WORDS = 5  # in a model's name
# Units after a number, each with the option for the number.
_UNITS = {
    **dict.fromkeys(("token", "tokens", "tok"), "--tokens"),
    **dict.fromkeys(("day", "days", "week", "weeks", "hour", "hours"), "--days"),
    **dict.fromkeys(("seqs", "seq", "sequences", "samples"), ""),
}
_PATTERN = re.compile(r"[*?]")
_MOST_FILES = 16  # that match a pattern
_MOST_DEVICES = 16  # of one host
_NUMBER = re.compile(r"\d+(\.\d+)?([eE]\d+|[kKMGBT]i?)?")


def in_one_word(words: Sequence[str]) -> list[str]:
    """The words, with each model, machine or amount of several words as one word or option.

    >>> in_one_word(["plan", "train", "llama", "3", "70b", "1T", "tokens", "30", "days"])
    ['plan', 'train', 'llama-3-70b', '--tokens', '1T', '--days', '30']
    >>> in_one_word(["hardware", "tpu", "v5e"]), in_one_word(["fit", "llama3", "8b", "macbook", "pro"])
    (['hardware', 'v5e'], ['fit', 'llama-3-8b', 'm4-max'])
    >>> in_one_word(["plan", "train", "--batch", "4e6", "tokens", "--tokens", "2", "trillion"])
    ['plan', 'train', '--batch', '4e6', '--tokens', '2T']
    """
    made = _with_sizes(_with_dashes(_with_models(words)))
    if made and made[0] not in _WITHOUT_MACHINES and not is_collective(made[0]):  # 1GB is its array
        made = _with_machines(_with_memory(made))
    return _with_amounts(made)


def _with_models(words: Sequence[str]) -> list[str]:
    """The words with presets whose names are written in several words: `llama 3 70b`."""
    from meshwright.models.presets import PRESETS

    made, at = [], 0
    while at < len(words):
        for count in range(_MOST_WORDS, 1, -1):
            name = preset_alike("-".join(words[at : at + count]).lower())
            if len(words) >= at + count and name in PRESETS and preset_alike(words[at]) not in PRESETS:
                made.append(name)
                at += count
                break
        else:
            is_named = at > 0 and (words[at - 1] in ("--model", "-m") or (at == 1 and words[0] in _OF_MODELS))
            size = SIZE.fullmatch(words[at]) if is_named else None
            made.append(
                (of_this_size(size[1]) if size else "")
                or (preset_alike(words[at]) if ":" in words[at] else words[at])
            )
            at += 1
    return made


# A model's size in place of its name: 13b.
SIZE = re.compile(r"(\d+(?:\.\d+)?)-?b(?:illion)?(?:-(?:params?|parameters?|model))?", re.I)
_OF_MODELS = {"fit", "model", "support"}  # commands whose argument is a model


def of_this_size(billions: str, family: str = "") -> str:
    """The preset of the latest version with that number of billions of parameters; "" if none has it.

    family: the beginning of the preset's name; without presets of the family, a LLaMA is preferred.

    >>> of_this_size("13"), of_this_size("72", "qwen"), of_this_size("999")
    ('llama-2-13b', 'qwen2.5-72b', '')
    """
    from meshwright.models.presets import PRESETS

    def version(name: str) -> float:
        match = re.search(r"[a-z]-?(\d+(?:\.\d+)?)(?=-)", name)
        return float(match[1]) if match else 0.0

    alike = [name for name in PRESETS if re.fullmatch(rf"[a-z-]*[\d.]*-{re.escape(billions)}b", name)]
    for begin in filter(None, (family.lower(), "llama")):
        if named := [name for name in alike if re.match(rf"{re.escape(begin)}(?![a-z])", name)]:
            return max(named, key=version)
    return max(alike, key=version, default="")


# A family, perhaps a version, and billions of parameters.
_OF_SIZE = re.compile(r"([a-z]+)[-_ ]?(\d(?:\.\d)?)?[-_ ](\d+(?:\.\d+)?)b(?:[-_ ](?:instruct|chat|base|it))?")


def preset_of_size(name: str) -> str:
    """The latest preset of a family and size, for a name that is none, such as llama-70b; "" for others.

    >>> preset_of_size("llama-70b"), preset_of_size("llama-3-405b"), preset_of_size("qwen-7b")
    ('llama-3.3-70b', 'llama-3.1-405b', '')
    >>> preset_of_size("llama-9-70b"), preset_of_size("gpt2"), preset_of_size("70b")
    ('', '', '')
    """
    from meshwright.models.presets import PRESETS

    match = _OF_SIZE.fullmatch(name.lower())
    if match is None or preset_alike(name) in PRESETS:
        return ""
    family, version, billions = match.groups()
    latest = "" if version else of_this_size(billions, family)
    if latest.startswith(family):
        return latest
    begins = f"{family}-{version}." if version else family
    alike = (each for each in PRESETS if each.startswith(begins) and each.endswith(f"-{billions}b"))
    return max(alike, default="")


def size_note(model: str) -> str:
    """The note to a line that has `model` in place of a size such as 13b."""
    return f"{model} is a model of that size; mw model lists others"


def preset_alike(name: str) -> str:
    """The preset with the same letters and digits, as for llama3.1:8b; other words are returned unchanged."""
    return _presets_by_plain_name().get(plain_name(name), name)


@cache
def _presets_by_plain_name() -> dict[str, str]:
    from meshwright.models.presets import PRESETS

    return {plain_name(preset): preset for preset in reversed(list(PRESETS))}  # the first of equal names


def _with_dashes(words: Sequence[str]) -> list[str]:
    """The words with settings in the form of Hydra and MaxText, `max_target_length=4096`, as options."""
    if not words or words[0] not in _WITH_SETTINGS:
        return list(words)
    made: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        follows = any(before in LISTS for before in made[-2:])
        is_setting = equals and value and re.fullmatch(r"[a-z][a-z0-9_.]{4,}", name) and not follows
        made.append(f"--{name}={value}" if is_setting and word_here(name) not in WORDS else word)
    return made


def _with_sizes(words: Sequence[str]) -> list[str]:
    """The words of mw shard and mw collective with bare sizes as options: X=8, B=1024, 1GB."""
    if not words or words[0] not in ("shard", "collective"):
        return list(words)
    made: list[str] = []
    for word in words:
        is_bare = not made[-1:] or not made[-1].startswith("-")
        if is_bare and re.fullmatch(r"[A-Z]=\d\w*(,[A-Z]=\d\w*)*", word):
            made += ["--mesh" if word[0] in AXES else "--dims", word]
        elif is_bare and words[0] == "collective" and re.fullmatch(r"\d+(\.\d+)?[kmgt]i?b", word, re.I):
            made += ["--size", word]
        elif is_bare and ":" in word and "[" not in word and is_machine(word):
            made += ["--hardware", word]
        else:
            made.append(word)
    return made


def _with_memory(words: Sequence[str]) -> list[str]:
    """The words of mw fit with --hardware and the chip of the nearest memory in place of `--vram 48GB`.

    Words that name a machine are returned unchanged.
    """
    if words[0] != "fit" or any(word == "--hardware" or is_machine(word) for word in words[1:]):
        return list(words)
    made: list[str] = []
    for word in words:
        number, _, of_a_card = word.lower().rpartition("x")  # 2x24GB
        size = re.fullmatch(r"(\d+) ?(g|gi?b)?", of_a_card)
        is_after = bool(made and _MEMORY.search(made[-1]))
        is_alone = bool(size and size[2] and made and not made[-1].startswith("-"))
        chips = everyday(f"{size[1]}GB") if size and (is_after or is_alone) else ()
        if chips and is_after:
            made[-1] = "--hardware"
        elif chips:
            made.append("--hardware")
        made.append((f"{chips[0]}:{number}" if number else chips[0]) if chips else word)
    return made


def _with_machines(words: Sequence[str]) -> list[str]:
    """The words without vendors before chips, and with a chip for an everyday name of a machine."""
    made: list[str] = []
    at = 0
    while at < len(words):
        word, rest = words[at], words[at + 1 :]
        before, at = (words[at - 1] if at else ""), at + 1
        if not made or word.startswith("-") or before.startswith("-"):
            made.append(word)
        elif (counted := re.fullmatch(r"(\S+) +x? *(\d+)", word)) and is_machine(counted[1]):
            made.append(f"{counted[1].lower()}:{counted[2]}")  # "H100 8" in quotes
        elif re.fullmatch(r"\d+x", word.lower()) and rest and is_machine(rest[0]):
            made.append(f"{word.lower()}{rest[0]}")  # 2x 4090
            at += 1
        elif word.lower() in _VENDORS and rest and is_machine(rest[0]):
            continue
        elif rest and everyday(word) and not everyday(rest[0]) and everyday(f"{word} {rest[0]}"):
            made.append(everyday(f"{word} {rest[0]}")[0])  # macbook pro
            at += 1
        else:
            spoken = () if is_machine(word) or _exists(word) else everyday(word)
            made.append(spoken[0] if spoken else word)
    return made


def _with_amounts(words: Sequence[str]) -> list[str]:
    """The words with `30 days` as --days 30. After an option, the unit joins the number or is left out."""
    made: list[str] = []
    for word in words:
        if (factor := FACTORS.get(word.lower())) and made and re.fullmatch(r"\d+(\.\d+)?", made[-1]):
            made[-1] += factor  # 4 million
            continue
        option = _UNITS.get(word.lower())
        if option is None or not made or not _NUMBER.fullmatch(made[-1]):
            made.append(word)
        elif len(made) > 1 and made[-2].startswith("-"):  # --deadline 2 weeks, --batch 4e6 tokens
            made[-1] += word if option == "--days" else ""
        elif option and option not in made:
            made[-1:] = [option, f"{made[-1]}{word}" if word.rstrip("s") in ("week", "hour") else made[-1]]
    return made


# Options of other programs that choose devices. For JAX, variables of the environment choose them.
_VISIBLE = re.compile(r"^--?(num-?)?(gpu|cuda|device)s?(-ids?)?$")
_WITH_DEVICES = ("train", "serve", "generate")
# Values of JAX_PLATFORMS. It takes cuda; gpu would also ask for rocm, and fail without it (jax 0.10.2).
_JAX_PLATFORMS = {platform.compiler.lowering for platform in PLATFORMS.values()}


def environment(option: str, value: str) -> str:
    """The environment variable, with its value, for an option that chooses devices; "" for other options.

    >>> environment("--gpus", "2"), environment("--gpu", "cuda:1"), environment("--device", "cpu")
    ('CUDA_VISIBLE_DEVICES=0,1', 'CUDA_VISIBLE_DEVICES=1', 'JAX_PLATFORMS=cpu')
    >>> environment("--device", "cuda"), environment("--device", "gpu")
    ('JAX_PLATFORMS=cuda', '')
    """
    name, plain = option.lower().replace("_", "-"), value.lower().removeprefix("cuda:").removeprefix("gpu:")
    if not _VISIBLE.fullmatch(name):
        return ""
    if plain in _JAX_PLATFORMS:
        return f"JAX_PLATFORMS={plain}"
    is_count = ("num" in name or name.endswith("s")) and not name.endswith("ids") and plain.isdecimal()
    devices = ",".join(map(str, range(int(plain)))) if is_count and 0 < int(plain) <= _MOST_DEVICES else plain
    # A longer number is a card's name: 4090.
    return f"CUDA_VISIBLE_DEVICES={devices}" if re.fullmatch(r"\d{1,2}(,\d{1,2})*", devices) else ""


def with_environment(line: str, words: Sequence[str]) -> str:
    """An offered line with the environment variables that the typed options mean.

    A line of two commands is returned unchanged, since one would run without them.
    """
    command = line.split()[1] if line.count("mw ") == 1 else ""
    pairs = zip(words, (*words[1:], ""), strict=True)
    settings = (
        environment(*word.split("=", 1)) if "=" in word else environment(word, value) for word, value in pairs
    )
    wanted = " ".join(dict.fromkeys(filter(None, settings)))
    return f"{wanted} {line}" if wanted and command in _WITH_DEVICES else line


def matching_files(words: Sequence[str]) -> list[str]:
    """The words with a quoted pattern replaced by its files, each after the pattern's option if it has one.

    A pattern that matches no file is returned unchanged.
    """
    made: list[str] = []
    for word in words:
        files = _files(word)[:_MOST_FILES] if _PATTERN.search(word) else []
        option = made[-1] if files and made and made[-1].startswith("--") else ""
        if not files:
            made.append(word)
        elif option:
            made += [each for file in files for each in (option, file)][1:]
        else:
            made += files
    return made


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # not a file name: too long
        return False


def _files(pattern: str) -> list[str]:
    path = Path(pattern)
    folder = Path(path.anchor or ".")
    try:
        return sorted(str(file) for file in folder.glob(str(path.relative_to(path.anchor))))
    except (OSError, ValueError):  # a long name, or `**` within one
        return []

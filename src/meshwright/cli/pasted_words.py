"""The words of a command line without prompts, line ends and quotes that were copied with them."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

# Words before a command: prompts of shells, and the name of this program.
_BEFORE = {"$", "%", ">", ">>>", "#", "!", "sudo", "please", "mw", "meshwright"}
_MODULE = ("python", "-m", "meshwright")
_COMMAND_WORDS = 2  # most words of a command: plan train
# An option in capitals, longer than the sizes of notation such as --T; and --option:value.
_CAPITALS = re.compile(r"--[A-Z][A-Z_-]{3,}")
_COLON = re.compile(r"^(--[a-z][a-z_-]+):(?=.)")
# Options of other programs whose value is a JSON object with the options.
_OF_OBJECTS = {"--spec", "--config", "--args", "--params", "--request", "--input", "--options"}
_LINE_ENDS = {"\\", "^", "`", ";", "&", "&&"}
# An option after other words: several words in one pair of quotes.
_OPTION_WITHIN = re.compile(r"\s--?[a-z]")
# An option in the form of Windows programs: /hardware.
_SLASH = re.compile(r"/([a-z][a-z_-]+)")
# A path in the form of Windows: C:\runs\1, data\a.txt.
_WINDOWS = re.compile(r"(?:[A-Za-z]:|[\w.-]+)(?:\\[^\\/:|\"<>\n]+)+")


def unpasted(words: Sequence[str]) -> list[str]:
    """The words without copied marks, with options in our form.

    >>> unpasted(["$", "mw", "fit", "llama-3-8b", " --hardware", "rtx4090,", "#", "my card"])
    ['fit', 'llama-3-8b', '--hardware', 'rtx4090']
    >>> unpasted(["plan train --model llama-3-8b", "/hardware", "h100:8", "--seq-len", "=", "8k"])
    ['plan', 'train', '--model', 'llama-3-8b', '--hardware', 'h100:8', '--seq-len', '8k']
    >>> unpasted(["FIT", "llama-3-8b", "--HARDWARE", "rtx4090", "--seq-len:8k"])
    ['fit', 'llama-3-8b', '--hardware', 'rtx4090', '--seq-len=8k']
    """
    made = [_in_our_case(word, at) for at, word in enumerate(_separate(words))]
    while made and made[0] in _BEFORE:
        del made[0]
    if tuple(made[:3]) == _MODULE or tuple(made[:3]) == ("python3", *_MODULE[1:]):
        del made[:3]
    if "#" in made:
        del made[made.index("#") :]
    kept = [word for word, after in pairwise([*made, ""]) if not (word in _OF_OBJECTS and after[:1] == "{")]
    return [each for word in kept for each in _of_object(word)]


def _of_object(word: str) -> list[str]:
    """The options of a JSON object, such as '{"seq_len": 4096}'; another word alone.

    >>> _of_object('{"model": "gpt2", "seq_len": 1024, "explain": true}'), _of_object("{U_X}")
    (['--model', 'gpt2', '--seq-len', '1024', '--explain'], ['{U_X}'])
    """
    if not word.startswith("{"):
        return [word]
    try:
        values = json.loads(word)
    except ValueError:
        return [word]
    made: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            made += [f"--{name.replace('_', '-')}", *([] if value is True else [f"{value}"])]
    return made


def _in_our_case(word: str, at: int) -> str:
    """A word in the case that we use, with `--option:value` as `--option=value` and `-gpu` as `--gpu`.

    at: the word's place in the line. Single letters such as --T, which are sizes, keep their case.
    """
    if (at < _COMMAND_WORDS and word.isupper() and word.isalpha()) or _CAPITALS.fullmatch(word):
        return word.lower()
    if re.fullmatch(r"-[a-z]{3,}", word):  # -gpu
        word = f"-{word}"
    return _COLON.sub(r"\1=", word)


def _separate(words: Sequence[str]) -> Iterator[str]:
    before = ""
    for word in (part for typed in words for part in re.split(r",(?=--[a-z])", typed)):
        plain = _unquoted(word.strip())
        plain = _posix(plain.rstrip(",;") or plain)
        is_equals = plain == "=" and before.startswith("--")
        if plain in _LINE_ENDS or is_equals:
            continue
        if _OPTION_WITHIN.search(plain) and "\n" not in plain:
            yield from _split(plain)
        # After an option it is a value: a shell makes `--price /hr` of `--price $2/hr`.
        elif (match := _SLASH.fullmatch(plain)) and not before.startswith("-") and not Path(plain).exists():
            yield f"--{match[1]}"
        else:
            yield plain
        before = plain


def _unquoted(word: str) -> str:
    """A word without quotes around it; other words unchanged."""
    quotes = "'\""
    is_quoted = len(word) > 1 and word[0] in quotes and " " not in word
    return word.strip(quotes) if is_quoted else word


def _posix(word: str) -> str:
    r"""A path of Windows as the Windows subsystem for Linux (WSL) mounts it; other words unchanged.

    >>> _posix(r".\data\a.txt"), _posix(r"C:\runs\1"), _posix("a/b")
    ('data/a.txt', '/mnt/c/runs/1', 'a/b')
    """
    if not _WINDOWS.fullmatch(word):
        return word
    drive, colon, rest = word.rpartition(":")
    path = rest.replace("\\", "/")
    return f"/mnt/{drive.lower()}{path}" if colon else path.removeprefix("./")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # a quote without its end
        return text.split()

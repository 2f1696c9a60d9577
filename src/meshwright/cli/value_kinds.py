"""Values whose option is recognised by their form: machines, models, layouts, addresses, texts."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from meshwright.cli.other_values import is_chip
from meshwright.errors import HardwareError, MeshwrightError, ModelError

_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # OWNER/NAME on the Hugging Face hub
# First parts of paths that are folders, and no owners on the Hugging Face hub.
_FOLDERS = {"runs", "run", "ckpt", "checkpoints", "models", "model", "data", "out", "output", "weights"}


def may_be_on_the_hub(word: str) -> bool:
    """Whether a word has the form OWNER/NAME, as repositories on the Hugging Face hub and some paths have."""
    return _HUB.fullmatch(word) is not None


def is_in_usual_folder(word: str) -> bool:
    """Whether a path begins with a usual name of a folder: runs/demo, and not meta-llama/Llama-3.1-8B."""
    return "/" in word and word.partition("/")[0].lower() in _FOLDERS


def is_machine(word: str) -> bool:
    from meshwright.hardware.catalog import load

    try:
        load(word)
    except (OSError, ValueError):  # not a file name: too long, or with a NUL
        return False
    except HardwareError:
        return ":" not in word and is_chip(word)
    return True


def is_model(word: str) -> bool:
    from meshwright.models.presets import load_model

    try:
        load_model(word)
    except (ModelError, OSError):
        return False
    return True


def is_layout(word: str) -> bool:
    from meshwright.layout.short import WORDS, read_words, word_here

    try:
        words = read_words(word)
    except MeshwrightError:
        return False
    return bool(words) and all(word_here(key).partition("=")[0] in WORDS for key in words)


def is_engine(word: str) -> bool:
    from meshwright.engines.serving_engine import ENGINES

    return word.lower() in ENGINES


def is_launcher(word: str) -> bool:
    from meshwright.programs.launcher import LAUNCHERS

    return word.lower() in LAUNCHERS


def is_address(word: str) -> bool:
    return re.fullmatch(r"(https?://\S+|(localhost|[\d.]{7,15}|[\w.-]+):\d{2,5}(/\S*)?)", word) is not None


def is_target(word: str) -> bool:
    from meshwright.platforms import PLATFORMS

    return word.lower() in PLATFORMS


def is_port(word: str) -> bool:
    return word.isdecimal() and len(word) <= 5 and 80 <= int(word) <= 65535


def is_corpus(word: str) -> bool:
    return word in ("stdlib", "stories") or word.endswith((".txt", ".jsonl", ".parquet"))


def is_checkpoint(word: str) -> bool:
    is_path = may_be_on_the_hub(word) or re.fullmatch(r"(~|\.{1,2})?/[\w./-]+", word) is not None
    return Path(word).is_dir() or is_model(word) or (is_path and not is_corpus(word))


def filled(answer: str, words: Sequence[str]) -> str:
    """An answer with the folder, address and chip of the typed words in place of its examples.

    A run that does not exist is named by the first plain word.

    >>> filled("type tail -f RUN/metrics.jsonl; mw hardware h100", ["a100", "/"])
    'type tail -f /metrics.jsonl; mw hardware a100'
    """
    plain = next((word for word in words if re.fullmatch(r"[A-Za-z][\w./-]*", word)), "RUN")
    folder = next((word.rstrip("/") for word in words if Path(word).is_dir()), plain.rstrip("/"))
    address = next((word.rstrip("/") for word in words if word.startswith("http")), "http://localhost:8000")
    chip = next((word for word in words if is_machine(word)), "h100")
    answer = re.sub(r"\bRUN\b", folder, answer).replace("http://localhost:8000", address)
    return re.sub(r"\bhardware h100\b", f"hardware {chip}", answer)


ARGUMENTS = {"--hardware": "name"}  # names of arguments that take the values of an option
# Options, each with the test of its values; the first match counts.
KINDS = {
    "--layout": is_layout,
    "--hardware": is_machine,
    "--model": is_model,
    "--url": is_address,
    "--engine": is_engine,
    "--for": is_launcher,
    "--data": is_corpus,
    "--checkpoint": is_checkpoint,
    "--port": is_port,
    "--target": is_target,
}
OF_PLANS = ("--layout", "--hardware", "--model")  # whose values are mistaken for each other
# Other words for the arguments of mw reshard.
RESHARD_WORDS = {"from": "before", "src": "before", "source": "before", "to": "after", "dst": "after"}


def options_for(value: str, given: str, options: Collection[str]) -> Iterator[str]:
    """The options of a command that take a value, for the unknown option `given` that was typed with it.

    Any number may be a port, so --port counts only if `given` names a port.

    >>> list(options_for("8080", "--listen-port", KINDS)), list(options_for("8080", "--top-k", KINDS))
    (['--port'], [])
    """
    names = (name for name, is_of_kind in KINDS.items() if name in options and is_of_kind(value))
    return (name for name in names if name != "--port" or "port" in given)

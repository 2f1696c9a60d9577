"""Model families, one file each: found in this folder, and imported when they are asked for."""

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from meshwright.models.families.family import Family

# Most software loads these, so a model that one of them computes is written as it.
PLAINEST = ("llama", "mistral", "qwen2")


def families() -> Iterator[Family]:
    """Every family, the plainest first."""
    names = [*PLAINEST, *(name for name in _sources() if name not in PLAINEST)]
    return map(load_family, names)


def load_family(name: str) -> Family:
    """The family in the file of this name."""
    return import_module(f"{__name__}.{name}").FAMILY


def naming(word: str) -> Iterator[Family]:
    """The families whose files have `word` in quotes, such as a preset, a model type or a class.

    Reading a hundred files takes 3 ms, importing them 60 ms.
    """
    return map(load_family, _names_with(word))


@lru_cache(maxsize=1024)
def _names_with(word: str) -> tuple[str, ...]:
    return tuple(name for name, source in _sources().items() if f'"{word}"' in source)


@lru_cache(maxsize=1)
def _sources() -> dict[str, str]:
    """The text of every family's files, by name."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))}
    releases = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.toml")}
    return {
        path.stem: text + releases.get(path.stem, "") for path, text in texts.items() if "\nFAMILY = " in text
    }

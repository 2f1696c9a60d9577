"""Terms of the field: their entries in glossary.md, which `mw help TERM` prints."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources

from meshwright.errors import plain_name

# Words of questions about a term, such as `explain mfu`, and the first words of such questions.
_ASKS = {
    "what", "whats", "what's", "is", "are", "does", "mean", "means", "explain", "define", "definition", "by",
    "meaning", "of", "a", "an", "the", "help", "glossary", "term", "about", "do", "you",
}  # fmt: skip
_FIRST = {"what", "whats", "what's", "explain", "define", "help", "glossary", "meaning", "definition"}


def entries() -> str:
    """The entries in Markdown, without the heading, for the docs."""
    text = resources.files("meshwright.cli").joinpath("glossary.md").read_text(encoding="utf-8")
    return text.partition("\n\n")[2]


def definition(term: str) -> str:
    """The entry of a term as plain text; empty for an unknown one.

    >>> definition("ridge"), definition("HBM"), definition("tensor-parallel")[:18]
    ('', 'HBM: The memory of a chip.', 'Tensor parallelism')
    """
    known = dict(_by_name())
    plain = plain_name(term)
    return known.get(plain) or known.get(plain.removesuffix("s")) or known.get(f"{plain}ism", "")


def term_asked(words: Sequence[str]) -> str:
    """The term that a question such as `what is fsdp` asks about; empty for other words.

    >>> term_asked("what does FSDP mean?".split()), term_asked("what fits on h100".split())
    ('fsdp', '')
    """
    plain = [word.lower().strip("?.!,\"'") for word in words]
    if not plain or plain[0] not in _FIRST:
        return ""
    term = "-".join(word for word in plain if word not in _ASKS)
    return term if term and definition(term) else ""


@cache
def _by_name() -> tuple[tuple[str, str], ...]:
    return tuple(_named())


def _named() -> Iterator[tuple[str, str]]:
    """Every name of every term without punctuation, each with the entry as plain text."""
    for paragraph in entries().split("\n\n"):
        if match := re.match(r"\*\*(.+?)\.\*\*\s+(.*)", paragraph.strip(), re.S):
            text = re.sub(r"\s*\(\[[^)]*\)\)|[*`]", "", match[2])  # links to pages
            entry = " ".join(f"{match[1]}: {text}".split())
            for name in re.split(r",\s*|\s*[()]\s*", match[1]):
                if name:
                    yield plain_name(name), entry

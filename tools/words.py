"""Count constructions that make sentences hard to read, by room: `make words`.

    python tools/words.py                 # the table of indices; exits 1 if a text got worse
    python tools/words.py --list serve    # the sentences of a room (or of `docs`)
    python tools/words.py --write         # record today's table in tools/words.json

An index is the number of such constructions in 10,000 words. CONTRIBUTING.md (*Style*) gives the plain
form of each. An index may be 22, the largest of equinox, diffrax and starlette, which leaves room
for an honest "where"; in a text above that the number of constructions may not exceed the recorded one.
"""

import argparse
import ast
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parent.parent
RECORD = Path(__file__).with_name("words.json")
ALLOWED = 22
KINDS = "docstrings", "comments", "messages", "output", "pages"
# A string constant of this number of words is a sentence to print, unless it is an address or a pattern.
_LEAST_OUTPUT = 4
_NO_SENTENCE = re.compile(r"https?:|[\\\[\]()|*]{2}|\(\?")
# The least number of words in a list of words: a sentence of this length has a comma or a full stop.
_LIST_OF_WORDS = 40
# A shorter text has no index: one word in it would decide.
LEAST_WORDS = 100

_AFTER_WHAT = (
    "is are was has have had a an the it they each one does do lies stands takes makes follows comes goes "
    "runs fits no its their there all of every only such this that these those must can may would will other "
    "others nothing"
).replace(" ", "|")
_BEFORE_WHICH = "of in to for with by from on at over under".replace(" ", "|")
_AFTER_WHERE = "it they there that this none one no not nothing a an the each".replace(" ", "|")
CONSTRUCTIONS = {
    "a noun clause with what": rf"\bwhat (?:{_AFTER_WHAT})\b",
    "of which": rf"\b(?:{_BEFORE_WHICH}) (?:which|whom|whose|these|those)\b|\bwhere(?:of|by|upon|in)\b",
    "those that": r"\b(?:those|that|these) (?:that|of|who|which|in|on|with|whose)\b",
    "where for if": rf"(?:^|[.:;,(] ?)where (?:{_AFTER_WHERE})\b|\bnone where\b",
    "beside, behind": r"\b(?:besides?|behind)\b",
    "lie, stand": r"\b(?:lies?|lay|stands?)\b",
    "alone, else": r"\b(?:alone|alike|anew|else)\b",
    "so many": r"\b(?:so|as) (?:many|much|few|long|often)\b",
    "nobody": r"\b(?:nobody|somebody|whoever|whatever)\b",
    "told, said": r"\b(?:told|said)\b",
}
_PATTERNS = [re.compile(pattern, re.IGNORECASE | re.MULTILINE) for pattern in CONSTRUCTIONS.values()]
# room, kind of text, file and line, text
Text = tuple[str, str, str, str]
# By room and kind: constructions, words.
Table = dict[str, dict[str, tuple[int, int]]]


def hits(text: str) -> int:
    """Constructions in a text."""
    return sum(len(pattern.findall(text)) for pattern in _PATTERNS)


def python_texts(room: str, path: Path, name: str) -> Iterator[Text]:
    """Docstrings, comments, the texts of raised errors and other sentences in a Python file."""
    tree, counted = ast.parse(path.read_text()), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if docstring := ast.get_docstring(node):
                counted.add(id(cast(ast.Expr, node.body[0]).value))
                yield room, "docstrings", f"{name}:{getattr(node, 'lineno', 1)}", docstring
        elif isinstance(node, ast.Raise) and node.exc:
            words = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            message = " ".join(word for word in words if isinstance(word, str))
            counted |= {id(part) for part in ast.walk(node)}
            yield room, "messages", f"{name}:{node.lineno}", message
    for node in ast.walk(tree):
        if id(node) in counted or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        counted |= {id(part) for part in ast.walk(node)}
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = [part.value if isinstance(part, ast.Constant) else "N" for part in parts]
        sentence = " ".join(word for word in words if isinstance(word, str))
        num_words = len(sentence.split())
        is_list = num_words >= _LIST_OF_WORDS and not re.search(r"[.,:;?!]", sentence)
        if num_words >= _LEAST_OUTPUT and not is_list and not _NO_SENTENCE.search(sentence):
            yield room, "output", f"{name}:{node.lineno}", sentence
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield room, "comments", f"{name}:{token.start[0]}", token.string.lstrip("# ")


def page_texts(path: Path, name: str) -> Iterator[Text]:
    """The prose and the tables of a Markdown page, without code."""
    inside_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside_code = not inside_code
        elif not inside_code:
            yield "docs", "pages", f"{name}:{number}", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)


def texts(root: Path = ROOT) -> Iterator[Text]:
    """Every text of the package and of its pages."""
    base = root / "src" / "meshwright"
    for path in sorted(base.rglob("*.py")):
        yield from python_texts(path.relative_to(base).parts[0], path, str(path.relative_to(root)))
    for path in [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]:
        yield from page_texts(path, str(path.relative_to(root)))


def table(some: Iterator[Text]) -> Table:
    """Constructions and words by room and kind of text."""
    words: dict[str, Counter[str]] = defaultdict(Counter)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for room, kind, _, text in some:
        words[room][kind] += len(re.findall(r"[A-Za-z']+", text))
        counts[room][kind] += hits(text)
    return {
        room: {
            kind: (counts[room][kind], number)
            for kind, number in sorted(kinds.items())
            if number >= LEAST_WORDS
        }
        for room, kinds in sorted(words.items())
    }


def index(count: int, num_words: int) -> int:
    """Constructions in 10,000 words."""
    return round(1e4 * count / num_words)


def risen(now: Table, recorded: dict[str, dict[str, int]]) -> list[str]:
    """A line for each text with more constructions than recorded, if its index is above ALLOWED.

    One construction is always allowed: in a short text it would decide the index.
    """
    return [
        f"{room}: {kind} have {count}, allowed: {most}; list them: python tools/words.py --list {room}"
        for room, kinds in now.items()
        for kind, (count, num_words) in kinds.items()
        if count > (most := max(recorded.get(room, {}).get(kind, 0), ALLOWED * num_words // 10_000, 1))
    ]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 if a text has more constructions than it may."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", metavar="ROOM", help="print the sentences that count")
    parser.add_argument("--write", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args(arguments)
    if asked.list:
        for room, kind, place, text in texts():
            for sentence in re.split(r"(?<=[.:;])\s+", text):
                if room == asked.list and hits(sentence):
                    print(f"{hits(sentence)}  {place}  {kind}: {' '.join(sentence.split())[:160]}")
        return 0
    now = table(texts())
    if asked.write:
        counts = {room: {kind: count for kind, (count, _) in kinds.items()} for room, kinds in now.items()}
        RECORD.write_text(json.dumps(counts, indent=1) + "\n")
    print(f"{'room':16}" + "".join(f"{kind:>12}" for kind in KINDS))
    indices = {
        room: {kind: index(*one) for kind, one in kinds.items()} for room, kinds in now.items() if kinds
    }
    for room in sorted(indices, key=lambda room: -max(indices[room].values())):
        print(f"{room:16}" + "".join(f"{indices[room].get(kind, ''):>12}" for kind in KINDS))
    lines = risen(now, json.loads(RECORD.read_text()))
    print("".join(f"\nwords: {line}" for line in lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

"""Documents of a corpus: from the standard library, a folder, text, JSONL or parquet; and their split.

A document is one file (or one JSONL or parquet record). The whole text is held in memory.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import DataError

STDLIB = "stdlib"
_KINDS = "'stdlib', a folder, or a .txt, .py, .jsonl or .parquet file"

# Installed packages, tests, and folders that are mostly tables or copies of other text.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    | {"encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
)

# No unit of the split is longer than this fraction of the corpus, so that the validation split,
# filled unit by unit up to the same fraction, ends between one and two times it.
_VALIDATION_FRACTION = 0.05


@dataclass(frozen=True)
class Document:
    """One text and the name it is split and reported by."""

    name: str
    text: str


def read_documents(source: str) -> list[Document]:
    """The documents of `source` in a fixed order, blank ones left out.

    source: "stdlib" (the running interpreter's own *.py files), a folder (every UTF-8 file in it,
    hidden ones excepted), one text file, a .jsonl (field "text" of each line) or a .parquet
    (column "text"; needs pyarrow).
    Raises DataError where there is no text to be had.
    """
    path = Path(source)
    if source == STDLIB:
        documents = _read_stdlib()
    elif path.is_dir():
        documents = _read_folder(path)
    elif path.is_file():
        documents = list(_read_file(path, path.name))
    else:
        raise DataError(f"corpus {source}: no such file or folder; give {_KINDS}")
    documents = [document for document in documents if document.text.strip()]
    if not documents:
        raise DataError(f"corpus {source}: holds no text; give {_KINDS}")
    return documents


def check_source(source: str) -> None:
    """Raises DataError where `source` names nothing to read; no text is read."""
    path = Path(source)
    if source != STDLIB and not path.exists():
        raise DataError(f"corpus {source}: no such file or folder; give {_KINDS}")
    if path.is_dir() and not any(_walk(path, frozenset({"__pycache__"}))):
        raise DataError(
            f"corpus {source}: the folder is empty; put UTF-8 text, .jsonl or .parquet files in it"
        )


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, validation) documents: 5 to 10% of the characters are validation.

    Documents are ranked by the SHA-256 of their names, so neither the order of reading nor a
    change of text moves one; the first ones up to 5% are validation. A document longer than 5% of
    the corpus is first cut at line ends into pieces below that, which are then ranked one by one.
    """
    num_characters = sum(len(document.text) for document in documents)
    target = max(1, int(num_characters * _VALIDATION_FRACTION))
    pieces = [piece for document in documents for piece in _cut(document, target)]
    validation_names: set[str] = set()
    num_taken = 0
    for piece in sorted(pieces, key=lambda piece: hashlib.sha256(piece.name.encode()).digest()):
        if num_taken >= target:
            break
        validation_names.add(piece.name)
        num_taken += len(piece.text)
    training = [piece for piece in pieces if piece.name not in validation_names]
    return training, [piece for piece in pieces if piece.name in validation_names]


def _cut(document: Document, limit: int) -> Iterator[Document]:
    """The document, or its pieces of at most `limit` characters, cut at line ends where there are any."""
    text, start, index = document.text, 0, 0
    if len(text) <= limit:
        yield document
        return
    while start < len(text):
        end = start + limit
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield Document(f"{document.name}#{index}", text[start:end])
        start, index = end, index + 1


def _read_stdlib() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in _walk(root, _STDLIB_SKIPPED):
        # _sysconfigdata holds the flags and paths of one build, not source that anyone wrote.
        if path.suffix != ".py" or path.name.startswith("_sysconfigdata"):
            continue
        text = _decode(path.read_bytes())
        if text is not None:
            documents.append(Document(path.relative_to(root).as_posix(), text))
    if not documents:
        raise DataError(f"corpus stdlib: {root} holds no .py source; give a folder of text instead")
    return documents


def _read_folder(root: Path) -> list[Document]:
    paths = list(_walk(root, frozenset({"__pycache__"})))
    if not paths:
        raise DataError(f"corpus {root}: the folder is empty; put UTF-8 text, .jsonl or .parquet files in it")
    documents = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        if path.suffix in (".jsonl", ".parquet") or _decode(path.read_bytes()) is not None:
            documents.extend(_read_file(path, name))
    if not documents:
        raise DataError(
            f"corpus {root}: none of its {len(paths)} files is text; put UTF-8 text, .jsonl or .parquet in it"
        )
    return documents


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Files below `root` in sorted order, without hidden ones and the skipped folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read_file(path: Path, name: str) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _read_jsonl(path, name)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path, name)
    else:
        text = _decode(path.read_bytes())
        if text is None:
            raise DataError(f"corpus {path}: is not UTF-8 text; give {_KINDS}")
        yield Document(name, text)


def _decode(content: bytes) -> str | None:
    """The text, or None for what is not UTF-8 or has NUL bytes (binary files that happen to decode)."""
    try:
        return None if b"\0" in content else content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield Document(f"{name}:{number}", _text_field(line, f"corpus {path} line {number}"))


def _text_field(line: bytes, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON ({error}); give an object with a 'text' field") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f"{where}: has no 'text' string; give an object with a 'text' field")
    return record["text"]


def _read_parquet(path: Path, name: str) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"corpus {path}: parquet needs pyarrow; run: pip install pyarrow") from None
    try:
        column = parquet.read_table(path, columns=["text"]).column("text")
    except Exception as error:  # pyarrow's errors have no common base
        raise DataError(f"corpus {path}: no column 'text' can be read ({_first_line(error)})") from None
    for number, text in enumerate(column.to_pylist()):
        if isinstance(text, str):
            yield Document(f"{name}:{number}", text)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

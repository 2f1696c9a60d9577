"""Documents of a corpus, from the standard library, a folder, text, JSONL or parquet; and their split.

A document is a file, a JSONL or parquet record, or a piece of a long one. Documents are read one at a time,
and again for each pass, so that a corpus need not fit in memory.
"""

import codecs
import hashlib
import os
import sysconfig
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import BinaryIO, Literal

from meshwright.errors import DataError
from meshwright.files import half_of_a_pair, parse_json, read_text
from meshwright.models.chat import ChatTemplate
from meshwright.train.conversations import format_of, training_text, unread_keys
from meshwright.train.stories import stories

STDLIB, STORIES = "stdlib", "stories"
_KINDS = "'stdlib', 'stories', a folder, or a .txt, .py, .jsonl or .parquet file"

# For a file or line that is not text: the run does not start, or the file or line is left out.
BadData = Literal["skip", "stop"]

# Keys of data sets that say nothing about a text.
_OF_DATA_SETS = frozenset(
    ["id", "uuid", "prompt_id", "source", "dataset", "split", "meta", "metadata", "url", "date", "title"]
)

# A longer text is cut at line ends into documents of at most this number of characters.
_LONGEST = 1 << 18
_PART_BYTES = 1 << 20
# The longest line of a .jsonl in bytes, and the keys that are remembered for a warning.
_LONGEST_LINE, _MOST_UNREAD = 1 << 26, 1000

# Installed packages, tests, and folders that are mostly tables or copies of other text.
_STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    | {"encodings", "idlelib", "lib2to3", "pydoc_data", "turtledemo"}
)

# No unit of the split is longer than this fraction of the corpus. The validation split is filled unit by unit
# to at least this fraction, so it has less than twice this fraction.
_VALIDATION_FRACTION = 0.05


@dataclass(frozen=True)
class Document:
    """A text and its name, which decides its split and is used in reports.

    answers: for a conversation, the spans of the assistant's text; a conversation is never cut. source: the
    number of the document's source.
    """

    name: str
    text: str
    answers: tuple[tuple[int, int], ...] | None = None
    source: int = 0


def read_documents(
    source: str, bad_data: BadData = "stop", chat: ChatTemplate | None = None
) -> Iterator[Document]:
    """The documents of `source` in a fixed order, without blank ones.

    source: "stdlib" (the *.py files of the running interpreter), "stories" (train/stories.py), a folder (all
    UTF-8 files in it that are not hidden), a text file, a .jsonl (field "text" of each line, or a
    conversation, written by `chat`) or a .parquet (column "text"; needs pyarrow). bad_data: "skip" leaves out
    a damaged file, or line of a .jsonl, with a warning that names it; "stop" raises DataError for it. Raises
    DataError if there is no text.
    """
    check_source(source)
    path, has_text = Path(source), False
    if source == STDLIB:
        documents = _read_stdlib()
    elif source == STORIES:
        documents = (Document(f"story {number}", text) for number, text in enumerate(stories()))
    elif path.is_dir():
        documents = _read_folder(path, bad_data, chat)
    else:
        documents = _read_file(path, path.name, bad_data, chat)
    for document in documents:
        for piece in document_pieces(document, _LONGEST):
            if piece.text.strip():
                has_text = True
                yield piece
    if not has_text:
        raise DataError(f"corpus {source}: holds no text; give {_KINDS}")


@dataclass(frozen=True)
class Source:
    """A source of a mixture. weight: its share of the examples, relative to the other weights."""

    path: str
    weight: float = 1.0


def parse_sources(written: str | Sequence[str]) -> tuple[Source, ...]:
    """The sources of `PATH` or of several `PATH:WEIGHT`, with weight 1 by default.

    >>> parse_sources(("a.jsonl:3", "b.txt"))
    (Source(path='a.jsonl', weight=3.0), Source(path='b.txt', weight=1.0))
    """
    if isinstance(written, str):
        return (Source(written),)
    return tuple(map(_parse_source, written))


def _parse_source(written: str) -> Source:
    path, colon, weight = written.rpartition(":")
    try:
        share = float(weight)
    except ValueError:
        return Source(written)
    if not colon or Path(written).exists():
        return Source(written)
    if not 0 < share < inf:
        raise DataError(f"corpus {written}: its weight {weight} is not above 0 and finite")
    return Source(path, share)


def read_mixture(
    sources: Sequence[Source], bad_data: BadData = "stop", chat: ChatTemplate | None = None
) -> Iterator[Document]:
    """The documents of all sources, one source after another; see `read_documents`."""
    for number, source in enumerate(sources):
        for document in read_documents(source.path, bad_data, chat):
            # Names must differ; the first source's are the same as without other sources.
            named = f"{number}/{document.name}" if number else document.name
            yield replace(document, name=named, source=number)


def check_source(source: str) -> None:
    """Raise DataError if there is no file to read at `source`; no text is read."""
    path = Path(source)
    if source in (STDLIB, STORIES):
        return
    if not path.exists():
        raise DataError(f"corpus {source}: no such file or folder; give {_KINDS}")
    if not path.is_file() and not path.is_dir():  # a pipe would never end
        raise DataError(f"corpus {source}: is not a regular file; give {_KINDS}")
    if path.is_dir() and not any(_walk(path, frozenset({"__pycache__"}))):
        raise DataError(
            f"corpus {source}: the folder is empty; put UTF-8 text, .jsonl or .parquet files in it"
        )


@dataclass(frozen=True)
class Division:
    """The division of documents into training and validation, 5 to 10% of the characters.

    A document longer than 5% of the corpus is cut at line ends into pieces of at most `longest`
    characters. Pieces are ranked by the SHA-256 of their names, so the rank depends neither on the order of
    reading nor on the text; pieces up to `last_key` are validation.
    """

    longest: int
    last_key: int

    def pieces(self, documents: Iterable[Document]) -> Iterator[tuple[Document, bool]]:
        """Each piece, and whether it is validation."""
        for document in documents:
            for piece in document_pieces(document, self.longest):
                yield piece, _key(piece) <= self.last_key


def divide(read: Callable[[], Iterable[Document]], num_characters: int) -> Division:
    """The division of the documents of `read`, which have `num_characters` in all."""
    target = max(1, int(num_characters * _VALIDATION_FRACTION))
    # 16 bytes per document of any length.
    keys, lengths = array("Q"), array("Q")
    for document in read():
        for piece in document_pieces(document, target):
            keys.append(_key(piece))
            lengths.append(len(piece.text))
    num_taken, last_key = 0, 0
    for key, length in sorted(zip(keys, lengths, strict=True)):
        if num_taken >= target:
            break
        num_taken, last_key = num_taken + length, key
    return Division(target, last_key)


def _key(document: Document) -> int:
    return int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big")


def document_pieces(document: Document, limit: int) -> Iterator[Document]:
    """The document, or its pieces of at most `limit` characters, cut at line ends if it has any."""
    text, start, index = document.text, 0, 0
    if len(text) <= limit or document.answers is not None:
        yield document
        return
    while start < len(text):
        end = start + limit
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield replace(document, name=f"{document.name}#{index}", text=text[start:end])
        start, index = end, index + 1


def _read_stdlib() -> Iterator[Document]:
    root, has_files = Path(sysconfig.get_paths()["stdlib"]), False
    for path in _walk(root, _STDLIB_SKIPPED):
        # _sysconfigdata is generated: it holds the flags and paths of one build.
        if path.suffix != ".py" or path.name.startswith("_sysconfigdata") or not _is_text(path):
            continue
        has_files = True
        yield from _read_text(path, path.relative_to(root).as_posix())
    if not has_files:
        raise DataError(f"corpus stdlib: {root} holds no .py source; give a folder of text instead")


def _read_folder(root: Path, bad_data: BadData, chat: ChatTemplate | None) -> Iterator[Document]:
    num_files, has_text = 0, False
    for path in _walk(root, frozenset({"__pycache__"})):
        num_files += 1
        try:
            is_data = path.suffix in (".jsonl", ".parquet") or _is_text(path)
        except DataError as error:
            _leave_out(error, bad_data)
            continue
        if is_data:
            has_text = True
            yield from _read_file(path, path.relative_to(root).as_posix(), bad_data, chat)
    if not has_text:
        raise DataError(
            f"corpus {root}: none of its {num_files} files is text; put UTF-8 text, .jsonl or .parquet in it"
        )


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Files below `root` in sorted order, without hidden files and skipped folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _read_file(path: Path, name: str, bad_data: BadData, chat: ChatTemplate | None) -> Iterator[Document]:
    if path.suffix == ".jsonl":
        yield from _read_records(_records_of_lines(path), path, name, bad_data, chat or ChatTemplate())
    elif path.suffix == ".json" and _begins_list(path):
        yield from _read_records(_records_of_list(path), path, name, bad_data, chat or ChatTemplate())
    elif path.suffix == ".parquet":
        try:
            yield from _read_parquet(path, name)
        except DataError as error:
            _leave_out(error, bad_data)
    elif _is_text(path):
        yield from _read_text(path, name)
    else:
        raise DataError(f"corpus {path}: is not UTF-8 text; give {_KINDS}")


def _begins_list(path: Path) -> bool:
    """Whether the file is a JSON list, as in Alpaca's and ShareGPT's data sets, and not a text."""
    with path.open("rb") as file:
        return file.read(_PART_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _leave_out(error: DataError, bad_data: BadData) -> None:
    if bad_data == "stop":
        raise error
    warnings.warn(f"{error}; it is left out", stacklevel=2)


def _is_text(path: Path) -> bool:
    """Whether the file is UTF-8 without NUL bytes, since some binary files are valid UTF-8.

    Raises DataError if it cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                if b"\0" in part:
                    return False
                decoder.decode(part)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError as error:  # an error while it is read does not name it
        raise DataError(f"corpus {path}: cannot be read: {error.strerror}") from None
    return True


def _read_text(path: Path, name: str) -> Iterator[Document]:
    """The file, in pieces if it is long: as by `document_pieces`, without holding all of it in memory."""
    with path.open(encoding="utf-8", newline="") as file:
        text, index = file.read(_LONGEST + 1), 0
        if len(text) <= _LONGEST:
            yield Document(name, text)
            return
        while text:
            end = text.rfind("\n", 0, _LONGEST) + 1 or _LONGEST if len(text) > _LONGEST else len(text)
            yield Document(f"{name}#{index}", text[:end])
            text, index = text[end:], index + 1
            text += file.read(_LONGEST + 1 - len(text))


def _read_records(
    records: Iterator[tuple[str, bytes | object]],
    path: Path,
    name: str,
    bad_data: BadData,
    chat: ChatTemplate,
) -> Iterator[Document]:
    """The documents of a file's records. records: (place in the file, its JSON line or its value)."""
    unread: dict[str, None] = {}
    for number, (place, record) in enumerate(records, start=1):
        where = f"corpus {path} {place}"
        try:
            document = _of_record(record, f"{name}:{number}", where, chat, unread)
        except DataError as error:
            _leave_out(error, bad_data)
        else:
            if document:
                yield document
    if named := [key for key in unread if key not in _OF_DATA_SETS]:
        warnings.warn(f"corpus {path}: keys that are not read: {', '.join(named[:8])}", stacklevel=2)


def _records_of_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a JSONL file, with their places."""
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file), start=1):
            yield f"line {number}", line


def _records_of_list(path: Path) -> Iterator[tuple[str, object]]:
    """The values of a JSON list, with their places."""
    try:
        records = parse_json(read_text(path, DataError).removeprefix("\ufeff"))
    except ValueError as error:
        raise DataError(f"corpus {path}: is not JSON ({error}); give a list of objects") from None
    for number, record in enumerate(records, start=1):
        yield f"record {number}", record


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; only the beginning of one that is too long, by a byte or more."""
    while line := file.readline(_LONGEST_LINE + 1):
        yield line
        while len(line) > _LONGEST_LINE and not line.endswith(b"\n"):
            line = file.readline(_LONGEST_LINE + 1)


def _of_record(
    record: object, name: str, where: str, chat: ChatTemplate, unread: dict[str, None]
) -> Document | None:
    """The document of a JSON line or of its value, None for a blank line. unread: takes unread keys."""
    if isinstance(record, bytes):
        if not record.strip():
            return None
        if len(record) > _LONGEST_LINE:
            raise DataError(f"{where}: has more than {_LONGEST_LINE:,} bytes")
        try:
            record = parse_json(record.removeprefix(codecs.BOM_UTF8).decode())
        except ValueError as error:
            raise DataError(f"{where}: is not JSON ({error}); give an object with a 'text' field") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: has no 'text' string; give an object with a 'text' or 'messages' field")
    if format_of(record):
        text, answers = training_text(record, where, chat)
    elif isinstance(text := record.get("text"), str):
        answers = None
    else:
        keys = ", ".join(repr(str(key)[:40]) for key in list(record)[:6])
        raise DataError(
            f"{where}: has no 'text' string; give an object with a 'text' or 'messages' field"
            + (f", or rename one of {keys}" if keys else "")
        )
    if fault := half_of_a_pair(text):
        raise DataError(f"{where}: {fault}")
    for key in unread_keys(record):
        if len(unread) < _MOST_UNREAD:
            unread.setdefault(key, None)
    return Document(name, text, answers)


def _read_parquet(path: Path, name: str) -> Iterator[Document]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(f"corpus {path}: parquet needs pyarrow; pip install 'meshwright[parquet]'") from None
    try:
        with parquet.ParquetFile(path) as file:
            kind = str(file.schema_arrow.field("text").type)
            if "string" not in kind:
                raise TypeError(f"it has the type {kind}")
            batches = file.iter_batches(batch_size=1024, columns=["text"])
            texts = (text for batch in batches for text in batch.column("text").to_pylist())
            for number, text in enumerate(texts):
                if isinstance(text, str):
                    yield Document(f"{name}:{number}", text)
    except Exception as error:  # pyarrow's errors have no common base
        raise DataError(f"corpus {path}: no column 'text' can be read ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

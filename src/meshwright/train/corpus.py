"""A packed corpus on disk: text in, fixed-length rows of token ids out, and batches of them.

data/
  corpus.json        the fields of Corpus
  tokenizer.json     the byte-level BPE of the rows
  train.npy          [num_rows, seq_len + 1] uint16, or uint32 above 65,536 ids or with flags (`row_codes`)
  train.1.npy, ...   the same for the other sources of a mixture
  validation.npy     the same for the held-out documents of all sources
  eval.NAME.npy      the same for another evaluation set
"""

import hashlib
import json
import mmap
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import numpy as np
from tokenizers import Encoding, Tokenizer

from meshwright.errors import DataError
from meshwright.files import file_sha256
from meshwright.models.chat import ChatTemplate, load_chat_template
from meshwright.progress import Progress
from meshwright.train.bpe import end_of_text_id, load_bpe, train_tokenizer
from meshwright.train.documents import (
    BadData,
    Document,
    Source,
    divide,
    parse_sources,
    read_documents,
    read_mixture,
)
from meshwright.train.row_codes import BEGINS, UNCOUNTED, ids, is_counted

_REPACK = "delete that folder, and it is prepared again from its text"
_FORMAT = 2  # part of the fingerprint: increase it if the meaning of the files changes
# Bounds of memory: documents and characters encoded at once, ids counted at once, text for training a BPE.
_ENCODED_AT_ONCE, _CHARACTERS_AT_ONCE = 64, 1 << 18
_COUNTED_AT_ONCE = 1 << 22
_TOKENIZER_CHARACTERS = 20_000_000
_NPY_HEADER_BYTES = 128
_NUM_EXAMPLES = 1 << 50

VALIDATION = "validation"


@dataclass(frozen=True)
class Corpus:
    """A packed corpus.

    num_train_tokens, num_validation_tokens: tokens in the packed rows, without an incomplete last row.
    vocab_size: the tokenizer's. num_bytes: UTF-8 bytes of all documents. sha256: of each split's file.
    unigram_entropy: nats per validation token of a model that knows only the frequencies of tokens in the
    training rows,

        H = -mean_v log((count_train(v) + 1) / (num_train_tokens + vocab_size))

    over the predicted tokens v of the validation rows that count in the loss (all but each row's first).
    masked: whether rows have the flags of `row_codes`. weights: the relative shares of a mixture's sources in
    the examples; empty for a single source. evaluations: the source of each other evaluation set, by name.
    """

    directory: Path
    source: str
    fingerprint: str
    vocab_size: int
    seq_len: int
    end_of_text_id: int
    num_bytes: int
    num_train_documents: int
    num_validation_documents: int
    num_train_tokens: int
    num_validation_tokens: int
    unigram_entropy: float
    sha256: dict[str, str]
    masked: bool = False
    weights: list[float] = field(default_factory=list)
    evaluations: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> "Corpus":
        """The corpus in `directory`. Raises DataError if there is none or its rows have changed."""
        try:
            record = json.loads((directory / "corpus.json").read_text())
            corpus = cls(directory=directory, **record)
            shapes = [sum(corpus.rows(part).size for part in corpus.parts), corpus.rows(VALIDATION).size]
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise DataError(f"corpus {directory}: {missing} is missing; {_REPACK}") from None
        except (ValueError, TypeError, EOFError) as error:
            raise DataError(f"corpus {directory}: is damaged ({error}); {_REPACK}") from None
        if shapes != [corpus.num_train_tokens, corpus.num_validation_tokens]:
            raise DataError(f"corpus {directory}: its rows do not match corpus.json; {_REPACK}")
        for split, expected in corpus.sha256.items():
            if file_sha256(directory / f"{split}.npy") != expected:
                raise DataError(f"corpus {directory}: {split}.npy does not match its checksum; {_REPACK}")
        return corpus

    def rows(self, split: str) -> np.ndarray:
        """The packed rows [num_rows, seq_len + 1] of a split, memory-mapped."""
        return self._rows[split]

    @cached_property
    def _rows(self) -> dict[str, np.ndarray]:
        return {split: np.load(self.directory / f"{split}.npy", mmap_mode="r") for split in self.sha256}

    @property
    def parts(self) -> list[str]:
        """The training splits, one for each source."""
        return [part_of(number) for number in range(max(1, len(self.weights)))]

    @property
    def validations(self) -> list[str]:
        """The splits of a validation: the corpus's own, and one for each other evaluation set."""
        return [VALIDATION, *map(evaluation_split, self.evaluations)]

    def batches(self, batch_sequences: int, seed: int, rows: Sequence[int]) -> "Batches":
        """The training batches of a seed; rows: the numbers of a batch's examples that this process takes."""
        return Batches(self, batch_sequences=batch_sequences, seed=seed, rows=rows)

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / "tokenizer.json"


def part_of(source: int) -> str:
    """The training split of the source with this number."""
    return f"train.{source}" if source else "train"


def evaluation_split(name: str) -> str:
    return f"eval.{name}"


def prepare_corpus(
    source: str | Sequence[str],
    directory: Path,
    *,
    vocab_size: int,
    seq_len: int,
    tokenizer: Path | None = None,
    bad_data: BadData = "stop",
    mask_documents: bool = False,
    evaluations: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The corpus of `source`, packed into `directory` unless the same corpus is already there.

    source, bad_data: see `read_documents` and, for a mixture, `parse_sources`; the text is read several
    times, and never held in memory. evaluations: sources of other evaluation sets by name. vocab_size: ids of
    the model, the maximum for the BPE, which is trained on the first 20M characters of the training split.
    tokenizer: a tokenizer.json to use instead; conversations have the format of the chat template in its
    folder. mask_documents: keep attention within each document, as within conversations in any case.
    Raises DataError for a source without text, a tokenizer with more ids than the model, and text that does
    not fill a row of each split. `directory` is replaced as a whole or not changed.
    """
    report = progress or (lambda what, fraction: None)
    report("reading", 0.0)
    chat = load_chat_template(tokenizer.parent) if tokenizer else ChatTemplate()
    sources, evaluations = parse_sources(source), dict(evaluations or {})
    weights = [part.weight for part in sources] if len(sources) > 1 else []
    ingredients = [vocab_size, seq_len, mask_documents, weights, evaluations]
    _check_lengths(evaluations, bad_data, chat, seq_len)
    survey = _survey(sources, bad_data, tokenizer, ingredients, chat)
    if (existing := _existing(directory)) is not None and existing.fingerprint == survey.fingerprint:
        return existing
    if tokenizer and survey.has_chats and chat.is_plain:
        warnings.warn(
            f"{tokenizer.parent} has no chat template; conversations are written as paragraphs, each "
            "with its role: `user: ...`",
            stacklevel=2,
        )

    def read() -> Iterator[Document]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the survey has already warned
            yield from read_mixture(sources, bad_data, chat)

    division = divide(read, survey.num_characters)
    report("tokenizer", 0.0)
    texts = (piece.text for piece, is_validation in division.pieces(read()) if not is_validation)
    bpe = _tokenizer(tokenizer, texts, vocab_size)
    end_id = end_of_text_id(bpe, tokenizer)
    parts = [part_of(number) for number in range(len(sources))]
    where = ", ".join(part.path for part in sources)
    read_from = dict.fromkeys([*parts, VALIDATION], where)
    read_from |= {evaluation_split(name): path for name, path in evaluations.items()}

    def divided() -> Iterator[tuple[Document, str]]:
        for piece, is_validation in division.pieces(read()):
            yield piece, VALIDATION if is_validation else part_of(piece.source)

    # Evaluation sets come first, so that a set which is too short fails before hours of packing.
    evaluated = _evaluated(evaluations, bad_data, chat)
    pieces = {tuple(map(evaluation_split, evaluations)): evaluated, (*parts, VALIDATION): divided()}
    with _replacing(directory) as partial:
        packed = _pack_splits(partial, pieces, read_from, bpe, end_id, seq_len, survey, report)
        num_documents, num_tokens = packed
        bpe.encode_special_tokens = False  # a server reads special tokens in the text as such
        bpe.save(str(partial / "tokenizer.json"))
        corpus = Corpus(
            directory=directory,
            source=where,
            fingerprint=survey.fingerprint,
            vocab_size=bpe.get_vocab_size(),
            seq_len=seq_len,
            end_of_text_id=end_id,
            num_bytes=survey.num_bytes,
            num_train_documents=sum(num_documents[part] for part in parts),
            num_validation_documents=num_documents[VALIDATION],
            num_train_tokens=sum(num_tokens[part] for part in parts),
            num_validation_tokens=num_tokens[VALIDATION],
            unigram_entropy=_entropy_of(partial, parts, bpe.get_vocab_size()),
            sha256={split: file_sha256(partial / f"{split}.npy") for split in read_from},
            masked=survey.masked,
            weights=weights,
            evaluations=evaluations,
        )
        _write_record(corpus, partial)
    return Corpus.load(directory)


def _check_lengths(
    evaluations: Mapping[str, str], bad_data: BadData, chat: ChatTemplate, seq_len: int
) -> None:
    """Raise DataError for an evaluation set that is too short, before other data is read."""
    for name, path in evaluations.items():
        _check_length(evaluation_split(name), path, read_documents(path, bad_data, chat), seq_len)


def _evaluated(
    evaluations: Mapping[str, str], bad_data: BadData, chat: ChatTemplate
) -> Iterator[tuple[Document, str]]:
    """The documents of evaluation sets, each with its split."""
    for name, path in evaluations.items():
        for document in read_documents(path, bad_data, chat):
            yield document, evaluation_split(name)


def _entropy_of(folder: Path, parts: Sequence[str], vocab_size: int) -> float:
    rows = {split: np.load(folder / f"{split}.npy", mmap_mode="r") for split in (*parts, VALIDATION)}
    return unigram_entropy([rows[part] for part in parts], rows[VALIDATION], vocab_size)


def _write_record(corpus: Corpus, folder: Path) -> None:
    record = asdict(corpus)
    del record["directory"]  # a run folder may be moved
    (folder / "corpus.json").write_text(json.dumps(record, indent=2) + "\n")


def _tokenizer(path: Path | None, texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """The file's tokenizer, or a BPE trained on texts. Raises DataError for more than `vocab_size` ids."""
    bpe = load_bpe(path) if path else train_tokenizer(_sample(texts, _TOKENIZER_CHARACTERS), vocab_size)
    if bpe.get_vocab_size() > vocab_size:
        raise DataError(
            f"tokenizer {path}: {bpe.get_vocab_size():,} ids exceed the model's vocabulary"
            f" V = {vocab_size:,}; fits: V >= {bpe.get_vocab_size():,}"
        )
    return bpe


class Batches:
    """Training batches int32[n, T+1] by the global index of their first example.

    The examples are one endless sequence, shuffled again in each epoch, that depends only on the seed. In a
    mixture each source has its own epochs, and its share of any part of the sequence. The batch at index i
    has examples i to i + B, so the position of a run is one integer for any batch size and number of
    processes. rows: the numbers of the batch's examples that this process takes, n of B; None for all.
    """

    def __init__(
        self, corpus: Corpus, *, batch_sequences: int, seed: int, rows: Sequence[int] | None = None
    ) -> None:
        parts = [_endless(corpus.rows(part), seed + number) for number, part in enumerate(corpus.parts)]
        mixed = len(parts) > 1
        self._examples = grain.MapDataset.mix(parts, weights=corpus.weights) if mixed else parts[0]
        self._rows = range(batch_sequences) if rows is None else rows

    def at(self, example: int) -> np.ndarray:
        """This process's rows of the batch whose first example is `example`."""
        rows = [np.asarray(self._examples[example + row]) for row in self._rows]
        return np.stack(rows).astype(np.int32)


def _endless(rows: np.ndarray, seed: int) -> grain.MapDataset[np.ndarray]:
    """The rows repeated, each time in another order.

    The number of examples is only practically endless, since grain 0.2 overflows on an endless dataset of
    2^63 - 1.
    """
    source: Any = rows
    num_epochs = max(1, _NUM_EXAMPLES // len(rows))
    return grain.MapDataset.source(source).shuffle(seed=seed).repeat(num_epochs)


def unigram_entropy(train_parts: Sequence[np.ndarray], validation_rows: np.ndarray, vocab_size: int) -> float:
    """Nats per validation token under the training frequencies; see Corpus for the formula."""
    train_counts = np.sum([_counts(rows, vocab_size) for rows in train_parts], axis=0)
    validation_counts = _counts(validation_rows[:, 1:], vocab_size, only_counted=True)
    num_tokens = sum(rows.size for rows in train_parts)
    log_probabilities = np.log((train_counts + 1) / (num_tokens + vocab_size))
    return float(-(validation_counts @ log_probabilities) / validation_counts.sum())


def _counts(rows: np.ndarray, vocab_size: int, *, only_counted: bool = False) -> np.ndarray:
    """The number of times that each id occurs, among all tokens or only among tokens in the loss."""
    # In parts, since counting copies rows as int64.
    counts, at_once = np.zeros(vocab_size, np.int64), max(1, _COUNTED_AT_ONCE // max(rows.shape[1], 1))
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once].ravel()
        part = part[is_counted(part)] if only_counted else part
        counts += np.bincount(ids(part), minlength=vocab_size)
        _release(rows)
    return counts


def _release(rows: np.ndarray) -> None:
    """Release the memory of rows that were read from a map, which otherwise stay in memory."""
    mapped = getattr(rows, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class _Survey:
    """The result of a first reading of the documents.

    fingerprint: a hash of all inputs of the packed rows. masked: whether documents are masked, or some are
    conversations (has_chats).
    """

    fingerprint: str
    num_characters: int
    num_bytes: int
    masked: bool
    has_chats: bool


def _survey(
    sources: Sequence[Source],
    bad_data: BadData,
    tokenizer: Path | None,
    ingredients: Sequence[Any],
    chat: ChatTemplate,
) -> _Survey:
    """ingredients: vocab_size, seq_len, mask_documents, and other inputs of the rows."""
    vocab_size, seq_len, mask_documents, *others = ingredients
    given = tokenizer.read_bytes() if tokenizer and tokenizer.is_file() else b""
    digest = hashlib.sha256(repr((_FORMAT, vocab_size, seq_len, hashlib.sha256(given).hexdigest())).encode())
    if mask_documents:
        digest.update(b"documents are masked")
    if any(others):
        digest.update(repr(others).encode())
    num_characters, num_bytes, has_chats = 0, 0, False
    for document in read_mixture(sources, bad_data, chat):
        text = document.text.encode()
        num_characters, num_bytes = num_characters + len(document.text), num_bytes + len(text)
        has_chats = has_chats or document.answers is not None
        spans = [repr(document.answers).encode()] if document.answers is not None else []
        for part in (document.name.encode(), text, *spans):
            digest.update(hashlib.sha256(part).digest())
    masked = mask_documents or has_chats
    return _Survey(digest.hexdigest(), num_characters, num_bytes, masked, has_chats)


def _sample(texts: Iterator[str], num_characters: int) -> Iterator[str]:
    """The first texts, up to at least `num_characters`."""
    taken = 0
    for text in texts:
        if taken >= num_characters:
            return
        taken += len(text)
        yield text


def _check_length(split: str, source: str, documents: Iterator[Document], seq_len: int) -> None:
    """Raise DataError for a text that is too short for a row of tokens.

    A text has at most one token for each byte, and one after each document. A conversation fills a row, with
    padding. `source` names the text in the message.
    """
    most = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # packing reads the text again, and warns then
        for document in documents:
            most += len(document.text.encode()) + 1
            if most > seq_len or document.answers is not None:
                return
    raise DataError(
        f"corpus {source}: its {split} split has at most {most:,} tokens, less than one row of T + 1 = "
        f"{seq_len + 1:,}; give more text or a shorter sequence"
    )


class Packer:
    """A writer of token ids to a .npy of rows [num_rows, seq_len + 1], without holding them.

    num_cut: conversations that were longer than a row, and num_unlearnt: those among them without a token of
    an answer in their first row, which are left out.
    """

    def __init__(self, path: Path, seq_len: int, dtype: type[np.unsignedinteger], end_id: int) -> None:
        self._path, self._seq_len, self._dtype = path, seq_len, np.dtype(dtype)
        self._end_id, self._ends_padded = end_id, False
        self.num_cut = self.num_unlearnt = 0
        self._file = path.open("wb")
        self._file.write(b"\0" * _NPY_HEADER_BYTES)  # until the number of rows is known
        self._num_tokens = 0

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        self._file.write(np.asarray(ids, self._dtype).tobytes())
        self._num_tokens += len(ids)
        self._ends_padded = False

    def add_whole(self, ids: np.ndarray) -> None:
        """Add a conversation within one row: in a new row if it does not fit, cut if longer than a row.

        A row's first token is only context.
        """
        width = self._seq_len + 1
        if not is_counted(ids[1:width]).any():
            self.num_unlearnt += 1
            return
        if self._num_tokens % width + len(ids) > width:
            self._pad()
        self.num_cut += len(ids) > width
        self.add(ids[:width])
        self._ends_padded = True

    def _pad(self) -> None:
        """Fill the current row with end tokens, without attention and loss."""
        missing = -self._num_tokens % (self._seq_len + 1)
        if missing:
            padding = np.full(missing, self._end_id | UNCOUNTED, np.uint32)
            padding[0] |= BEGINS
            self.add(padding)

    def close(self) -> None:
        self._file.close()

    def finish(self, split: str, source: str) -> int:
        """Drop an incomplete last row, and return the number of tokens. Raises DataError without a row."""
        width = self._seq_len + 1
        if self._ends_padded:
            self._pad()
        num_rows = self._num_tokens // width
        with self._file as file:
            if num_rows == 0 and self.num_unlearnt:
                raise DataError(
                    f"corpus {source}: the answers of all {self.num_unlearnt} conversations of its {split} "
                    f"split begin behind a row of T + 1 = {width:,} tokens; give a longer sequence or "
                    "shorter prompts"
                )
            if num_rows == 0:
                raise DataError(
                    f"corpus {source}: its {split} split has {self._num_tokens:,} tokens, less than one row"
                    f" of T + 1 = {width:,}; give more text or a shorter sequence"
                )
            file.truncate(_NPY_HEADER_BYTES + num_rows * width * self._dtype.itemsize)
            file.seek(0)
            shape = {"descr": self._dtype.str, "fortran_order": False, "shape": (num_rows, width)}
            np.lib.format.write_array_header_1_0(file, shape)
            assert file.tell() == _NPY_HEADER_BYTES, "numpy pads the header of a small shape to 128 bytes"
        return num_rows * width


def _pack_splits(
    folder: Path,
    pieces: Mapping[tuple[str, ...], Iterator[tuple[Document, str]]],
    read_from: Mapping[str, str],
    bpe: Tokenizer,
    end_id: int,
    seq_len: int,
    survey: _Survey,
    report: Progress,
) -> tuple[dict[str, int], dict[str, int]]:
    """Pack documents into a file for each split, and return each split's numbers of documents and tokens.

    pieces: documents by their splits, in the order of packing. read_from: the source of each split, for
    messages.
    """
    dtype = np.uint32 if survey.masked or bpe.get_vocab_size() > 1 << 16 else np.uint16
    with ExitStack() as files:
        packers = {
            split: files.enter_context(closing(Packer(folder / f"{split}.npy", seq_len, dtype, end_id)))
            for split in read_from
        }
        num_documents: dict[str, int] = {}
        num_tokens: dict[str, int] = {}
        for splits, documents in pieces.items():
            of_group = {split: packers[split] for split in splits}
            num_documents |= _pack(documents, bpe, end_id, of_group, survey, report)
            num_tokens |= {
                split: packer.finish(split, read_from[split]) for split, packer in of_group.items()
            }
        if num_cut := sum(packer.num_cut for packer in packers.values()):
            warnings.warn(
                f"{num_cut} conversations are longer than a row; their ends are left out", stacklevel=2
            )
        if num_unlearnt := sum(packer.num_unlearnt for packer in packers.values()):
            warnings.warn(
                f"{num_unlearnt} conversations are left out: their answers begin behind a row of tokens",
                stacklevel=2,
            )
        return num_documents, num_tokens


def _pack(
    pieces: Iterator[tuple[Document, str]],
    bpe: Tokenizer,
    end_id: int,
    packers: Mapping[str, Packer],
    survey: _Survey,
    report: Progress,
) -> dict[str, int]:
    """Write the tokens of documents, each with an end token; returns the documents of each split."""
    num_documents, done = dict.fromkeys(packers, 0), 0
    for batch in _batched(pieces):
        report("packing", min(done / max(survey.num_characters, 1), 1.0))
        plain = [pair for pair in batch if pair[0].answers is None]
        bpe.encode_special_tokens = True  # the text of an end token within a document does not end it
        encodings = bpe.encode_batch_fast([piece.text for piece, _ in plain], add_special_tokens=False)
        for (_, split), encoding in zip(plain, encodings, strict=True):
            document = np.asarray([*encoding.ids, end_id], np.uint32)
            document[0] |= BEGINS if survey.masked else 0
            packers[split].add(document)
        chats = [pair for pair in batch if pair[0].answers is not None]
        bpe.encode_special_tokens = False  # their template writes special tokens as text
        # Not `encode_batch_fast`, which has no positions of tokens in the text.
        encodings = bpe.encode_batch([piece.text for piece, _ in chats], add_special_tokens=False)
        for (piece, split), encoding in zip(chats, encodings, strict=True):
            packers[split].add_whole(_of_conversation(encoding, piece, end_id))
        for piece, split in batch:
            num_documents[split] += 1
            done += len(piece.text)
    return num_documents


def _of_conversation(encoding: Encoding, piece: Document, end_id: int) -> np.ndarray:
    """The codes of a conversation's tokens; only tokens of answers count in the loss.

    If its template writes no end token, one is added as a part of the last answer.
    """
    assert piece.answers is not None
    codes = np.asarray(encoding.ids, np.uint32)
    starts = np.asarray([start for start, _ in encoding.offsets])
    answered = np.zeros(len(codes), bool)
    for begin, end in piece.answers:
        answered |= (begin <= starts) & (starts < end)
    if end_id not in encoding.ids:
        codes, answered = np.append(codes, np.uint32(end_id)), np.append(answered, answered[-1:])
    codes[~answered] |= UNCOUNTED
    codes[0] |= BEGINS
    return codes


def _batched(pieces: Iterator[tuple[Document, str]]) -> Iterator[list[tuple[Document, str]]]:
    """Batches to encode, limited in documents and characters."""
    batch: list[tuple[Document, str]] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == _ENCODED_AT_ONCE or sum(len(p.text) for p, _ in batch) > _CHARACTERS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _existing(directory: Path) -> Corpus | None:
    """The corpus already in `directory`, None if there is none or it is damaged.

    Raises DataError for a folder with other files, since the folder will be replaced.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    if not (directory / "corpus.json").is_file():
        raise DataError(f"corpus {directory}: exists and is not a corpus; name a new or an empty folder")
    try:
        return Corpus.load(directory)
    except DataError:
        return None


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A folder that replaces `directory` on success and is removed on failure."""
    partial = directory.parent / f".{directory.name}.partial-{os.getpid()}"
    retired = directory.parent / f".{directory.name}.retired-{os.getpid()}"
    partial.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        if directory.exists():
            directory.rename(retired)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(retired, ignore_errors=True)

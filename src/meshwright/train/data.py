"""A packed corpus on disk: text in, fixed-length rows of token ids out, and batches of them.

data/
  corpus.json        what is in here (the fields of Corpus)
  tokenizer.json     the byte-level BPE the rows were made with
  train.npy          [num_rows, seq_len + 1] uint16, or uint32 above 65,536 ids
  validation.npy     the same for the held-out documents
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from tokenizers import Tokenizer

from meshwright.errors import DataError
from meshwright.files import file_sha256
from meshwright.train.documents import Document, read_documents, split_documents
from meshwright.train.tokenizer import end_of_text_id, load_tokenizer, train_tokenizer

_REPACK = "delete that folder, and it is prepared again from its text"
_FORMAT = 2  # part of the fingerprint: raise it when the files' meaning changes
_ENCODED_AT_ONCE = 64
_NUM_EXAMPLES = 1 << 50

Split = Literal["train", "validation"]
Progress = Callable[[str, float], None]  # (what is being done, fraction done)


@dataclass(frozen=True)
class Corpus:
    """A packed corpus.

    num_train_tokens, num_validation_tokens: tokens in the packed rows; what does not fill the
    last row of a split is left out. vocab_size: the tokenizer's. num_bytes: UTF-8 bytes of all
    documents. sha256: of each split's file. unigram_entropy: nats per validation token of a model
    that knows only how often each token occurs in the training rows,

        H = -mean_v log((count_train(v) + 1) / (num_train_tokens + vocab_size))

    over the predicted tokens v of the validation rows (all but each row's first).
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

    @classmethod
    def load(cls, directory: Path) -> "Corpus":
        """The corpus in `directory`; DataError where there is none or a bit of its rows has changed."""
        try:
            record = json.loads((directory / "corpus.json").read_text())
            corpus = cls(directory=directory, **record)
            shapes = [corpus.rows("train").size, corpus.rows("validation").size]
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

    def rows(self, split: Split) -> np.ndarray:
        """The packed rows [num_rows, seq_len + 1] of a split, mapped from disk, not read."""
        return self._rows[split]

    @cached_property
    def _rows(self) -> dict[str, np.ndarray]:
        splits = ("train", "validation")
        return {split: np.load(self.directory / f"{split}.npy", mmap_mode="r") for split in splits}

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / "tokenizer.json"


def prepare_corpus(
    source: str,
    directory: Path,
    *,
    vocab_size: int,
    seq_len: int,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """The corpus of `source` packed into `directory`; reused where the same one already lies there.

    source: see `read_documents`. vocab_size: ids the model has; the BPE is trained (on the training
    documents alone) to at most as many. tokenizer: a tokenizer.json to use instead.
    Raises DataError for a source without text, a tokenizer with more ids than the model, and text
    that does not fill one row of each split. `directory` is replaced as a whole or not touched.
    """
    report = progress or (lambda what, fraction: None)
    report("reading", 0.0)
    documents = read_documents(source)
    fingerprint = _fingerprint(documents, vocab_size, seq_len, tokenizer)
    existing = _existing(directory)
    if existing is not None and existing.fingerprint == fingerprint:
        return existing
    training, validation = split_documents(documents)
    report("tokenizer", 0.0)
    bpe = load_tokenizer(tokenizer) if tokenizer else train_tokenizer(training, vocab_size)
    if bpe.get_vocab_size() > vocab_size:
        raise DataError(
            f"tokenizer {tokenizer}: {bpe.get_vocab_size():,} ids exceed the model's vocabulary"
            f" V = {vocab_size:,}; fits: V >= {bpe.get_vocab_size():,}"
        )
    end_id = end_of_text_id(bpe, tokenizer)
    rows = {
        "train": _pack("train", training, bpe, end_id, seq_len, source, report),
        "validation": _pack("validation", validation, bpe, end_id, seq_len, source, report),
    }
    corpus = Corpus(
        directory=directory,
        source=source,
        fingerprint=fingerprint,
        vocab_size=bpe.get_vocab_size(),
        seq_len=seq_len,
        end_of_text_id=end_id,
        num_bytes=sum(len(document.text.encode()) for document in documents),
        num_train_documents=len(training),
        num_validation_documents=len(validation),
        num_train_tokens=rows["train"].size,
        num_validation_tokens=rows["validation"].size,
        unigram_entropy=unigram_entropy(rows["train"], rows["validation"], bpe.get_vocab_size()),
        sha256={},  # of the files, once they are written
    )
    _write(corpus, rows, bpe)
    return Corpus.load(directory)


class Batches:
    """Batches int32[B / P, T+1] of one split by the global index of their first example.

    The examples are one sequence without end, shuffled anew each epoch, that depends on the seed alone.
    The batch at index i holds examples i to i + B of it, so the position of a run is one integer,
    whatever the batch size or the number of processes. Process p of P gets the p-th B / P of them.
    Raises DataError where B does not divide over the processes.
    """

    def __init__(
        self,
        corpus: Corpus,
        split: Split,
        *,
        batch_sequences: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        if batch_sequences % process_count:
            raise DataError(
                f"batch: {batch_sequences} sequences (B) do not divide over {process_count} processes"
            )
        rows = corpus.rows(split)
        # As good as without end: grain 0.2 overflows on an endless dataset of 2^63 - 1.
        num_epochs = max(1, _NUM_EXAMPLES // len(rows))
        self._examples = grain.MapDataset.source(rows).shuffle(seed=seed).repeat(num_epochs)  # type: ignore[arg-type]
        self._local = batch_sequences // process_count
        self._offset = process_index * self._local

    def at(self, example: int) -> np.ndarray:
        """This process's rows of the batch whose first example is `example`."""
        first = example + self._offset
        rows = [np.asarray(self._examples[index]) for index in range(first, first + self._local)]
        return np.stack(rows).astype(np.int32)


def unigram_entropy(train_rows: np.ndarray, validation_rows: np.ndarray, vocab_size: int) -> float:
    """Nats per validation token under the training frequencies; the formula stands at Corpus."""
    train_counts = np.bincount(train_rows.ravel(), minlength=vocab_size)
    validation_counts = np.bincount(validation_rows[:, 1:].ravel(), minlength=vocab_size)
    log_probabilities = np.log((train_counts + 1) / (train_rows.size + vocab_size))
    return float(-(validation_counts @ log_probabilities) / validation_counts.sum())


def _pack(
    split: Split,
    documents: list[Document],
    bpe: Tokenizer,
    end_id: int,
    seq_len: int,
    source: str,
    report: Progress,
) -> np.ndarray:
    """Rows [num_rows, seq_len + 1]: the documents' tokens, each document closed by the end token."""
    dtype = np.uint16 if bpe.get_vocab_size() <= 1 << 16 else np.uint32
    bpe.encode_special_tokens = True  # a document that spells out the end token does not end there
    bpe.no_truncation()
    bpe.no_padding()
    parts: list[np.ndarray] = [np.empty(0, dtype)]
    for start in range(0, len(documents), _ENCODED_AT_ONCE):
        report(f"packing {split}", start / len(documents))
        texts = [document.text for document in documents[start : start + _ENCODED_AT_ONCE]]
        for encoding in bpe.encode_batch_fast(texts, add_special_tokens=False):
            parts.append(np.asarray([*encoding.ids, end_id], dtype))
    tokens = np.concatenate(parts)
    num_rows = tokens.size // (seq_len + 1)
    if num_rows == 0:
        raise DataError(
            f"corpus {source}: its {split} split has {tokens.size:,} tokens, less than one row of"
            f" T + 1 = {seq_len + 1:,}; give more text or a shorter sequence"
        )
    return tokens[: num_rows * (seq_len + 1)].reshape(num_rows, seq_len + 1)


def _fingerprint(documents: list[Document], vocab_size: int, seq_len: int, tokenizer: Path | None) -> str:
    """SHA-256 of everything that decides the packed rows."""
    given = tokenizer.read_bytes() if tokenizer and tokenizer.is_file() else b""
    digest = hashlib.sha256(repr((_FORMAT, vocab_size, seq_len, hashlib.sha256(given).hexdigest())).encode())
    for document in documents:
        for part in (document.name, document.text):
            digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def _existing(directory: Path) -> Corpus | None:
    """The corpus already in `directory`, None where there is none or it is damaged and to be remade.

    A folder that holds anything but a corpus is refused, since it would be replaced.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return None
    if not (directory / "corpus.json").is_file():
        raise DataError(f"corpus {directory}: exists and is not a corpus; name a new or an empty folder")
    try:
        return Corpus.load(directory)
    except DataError:
        return None


def _write(corpus: Corpus, rows: dict[str, np.ndarray], bpe: Tokenizer) -> None:
    record = asdict(corpus)
    del record["directory"]  # a run folder may be moved
    with _replacing(corpus.directory) as partial:
        for split, array in rows.items():
            np.save(partial / f"{split}.npy", array)
            record["sha256"][split] = file_sha256(partial / f"{split}.npy")
        bpe.encode_special_tokens = False  # saved as a server wants it: special tokens are special
        bpe.save(str(partial / "tokenizer.json"))
        (partial / "corpus.json").write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` that takes its place on success and vanishes on failure."""
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

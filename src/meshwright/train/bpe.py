"""The tokenizer of a run: a byte-level BPE trained on its corpus, or one given as tokenizer.json."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshwright.errors import DataError
from meshwright.models.chat import json_object, special_tokens
from meshwright.models.tokenizer_file import read_tokenizer

END_OF_TEXT = "<|endoftext|>"

# Names that tokenizers on the hub give the token that ends a document, ours first.
_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_NUM_BYTES = 256
# Other files of a tokenizer in a checkpoint: special tokens, and the format of conversations.
BESIDE_TOKENIZER = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
# Characters of a word; longer ones, as in a text without spaces, are cut: their merges would take minutes.
_LONGEST_WORD = 1000
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{_LONGEST_WORD + 1},}}|(?<!\s)\s{{{_LONGEST_WORD + 1},}}")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE, lossless on any text, since each byte is a token."""
    check_vocab_size(vocab_size)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(chain.from_iterable(map(_with_short_words, texts)), trainer)
    return bpe


def _with_short_words(text: str) -> Iterator[str]:
    """The parts of a text. Words and blanks longer than _LONGEST_WORD characters are cut."""
    start = 0
    for word in _LONG_WORD.finditer(text):
        yield text[start : word.start()]
        yield from (text[at : at + _LONGEST_WORD] for at in range(*word.span(), _LONGEST_WORD))
        start = word.end()
    yield text[start:] if start else text


def check_vocab_size(vocab_size: int) -> None:
    """Raise DataError if the model has fewer ids than a byte-level BPE."""
    if vocab_size <= _NUM_BYTES:
        raise DataError(
            f"tokenizer: a byte-level BPE needs V >= {_NUM_BYTES + 1} ids (256 bytes and {END_OF_TEXT}),"
            f" the model has V = {vocab_size}"
        )


def tokenizer_file(given: str) -> Path:
    """The tokenizer.json of a path to it or to its folder, such as a Hugging Face model's."""
    path = Path(given)
    return path / "tokenizer.json" if path.is_dir() else path


def load_bpe(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. Raises DataError if it is not one."""
    if not path.is_file():
        raise DataError(f"tokenizer {path}: no such file; give a tokenizer.json")
    return read_tokenizer(path, DataError)


def end_of_text_id(bpe: Tokenizer, path: Path | None) -> int:
    """The id of the token that ends a document.

    It is the `eos_token` of the tokenizer_config.json in the folder of `path`, if there is one. Raises
    DataError if the tokenizer has no known end token.
    """
    described = special_tokens(json_object(path.parent / "tokenizer_config.json")) if path else {}
    for token in (described.get("eos_token", ""), *_END_TOKENS):
        token_id = bpe.token_to_id(token)
        if token_id is not None:
            return token_id
    raise DataError(f"tokenizer {path}: has no token that ends a document; known: {', '.join(_END_TOKENS)}")

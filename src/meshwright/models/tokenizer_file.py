"""The one reader of tokenizer.json, for training and serving."""

from pathlib import Path

from tokenizers import Tokenizer

from meshwright.errors import MeshwrightError
from meshwright.files import read_text


def read_tokenizer(path: Path, kind: type[MeshwrightError]) -> Tokenizer:
    """The tokenizer of a tokenizer.json, which neither pads nor cuts a text.

    transformers saves the padding and truncation of its last call with the tokenizer; both are cleared.
    Raises an error of this kind for a missing file, one that is no tokenizer, and one without tokens.
    """
    text = read_text(path, kind)
    try:
        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:  # tokenizers raises plain Exception, and panics of Rust are none
        if not is_of_tokenizers(error):
            raise
        raise kind(f"{path} is not a tokenizer: {in_a_line(error)}") from error
    if not tokenizer.get_vocab_size():
        raise kind(f"{path} has no tokens")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def is_of_tokenizers(error: BaseException) -> bool:
    """Whether it is an error of the library: a plain Exception, or a panic of Rust, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

"""The reader of tokenizer.json, for training and serving."""

from pathlib import Path

from tokenizers import Tokenizer

from meshwright.errors import MeshwrightError, in_a_line
from meshwright.files import read_text

# The library takes 250 bytes for an entry. Vocabularies of 260,000 tokens have 1.4 million with their merges.
_MOST_ENTRIES = 2_000_000


def read_tokenizer(path: Path, kind: type[MeshwrightError]) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without padding and truncation.

    transformers writes the settings of its last call to the file, and they would change other texts. Raises
    an error of `kind` for a missing file, one that is not a tokenizer, one without tokens, and one with too
    many entries to be real.
    """
    text = read_text(path, kind)
    if (num_entries := text.count(",")) > _MOST_ENTRIES:
        raise kind(f"{path} has {num_entries:,} entries in its lists; fits: at most {_MOST_ENTRIES:,}")
    try:
        tokenizer = Tokenizer.from_str(text)
    except BaseException as error:  # the panics of Rust are not an Exception
        if not is_of_tokenizers(error):
            raise
        raise kind(f"{path} is not a tokenizer: {in_a_line(error)}") from error
    if not tokenizer.get_vocab_size():
        raise kind(f"{path} has no tokens")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def is_of_tokenizers(error: BaseException) -> bool:
    """Whether the tokenizers library raised it: a plain Exception, or a panic of Rust, which is not one."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"

"""Files that are written whole or not at all, and their checksums."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from meshwright.errors import OutputError


def write_whole(path: Path, text: str) -> Path:
    """`path`, which now holds `text`; its folder is made.

    A reader finds the old file or the new one, never half of either, whenever the writer is killed.
    Raises OutputError where it cannot be written; then the old file is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return path


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes in hexadecimal; other threads run meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path

from meshwright.errors import DataError


def write_whole(path: Path, text: str) -> Path:
    """`path`, holding `text`; its folder is made. Raises DataError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp makes files that only their owner reads; a report is made to be passed on.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    return path

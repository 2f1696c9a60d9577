"""Files: checked reading of text, atomic writing, and checksums."""

import difflib
import errno
import fcntl
import hashlib
import json
import os
import socket
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError, OutputError, in_a_line

# Maximum size of a text that a command reads: the HLO of a large program has some hundred megabytes.
_MOST_BYTES = 2**30
# Errors of code that is given a value of another type, or one out of range.
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/meshwright, or ~/.cache/meshwright."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright"


def read_text(path: Path, kind: type[MeshwrightError], *, undecoded: str = "strict") -> str:
    """The text of a regular file in UTF-8.

    undecoded: bytes that are not UTF-8 raise an error, or become a sign that replaces them ("replace").
    Raises an error of this kind for other files (a device such as /dev/zero never ends) and other contents.
    """
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise kind(f"{path}: cannot be read: Is a directory")
        if not stat.S_ISREG(info.st_mode):
            raise kind(f"{path}: cannot be read: it is not a regular file")
        if info.st_size > _MOST_BYTES:
            raise kind(f"{path}: cannot be read: it has {info.st_size:,} bytes, more than {_MOST_BYTES:,}")
        return path.read_text(encoding="utf-8", errors=undecoded)
    except OSError as error:
        near = _near(path) if isinstance(error, FileNotFoundError) else ""
        raise kind(f"{path}: cannot be read: {error.strerror}{near}") from error
    except UnicodeDecodeError as error:
        raise kind(f"{path}: not a text file: byte {error.start} is not UTF-8") from error


def _near(path: Path) -> str:
    """The names in a missing file's folder that resemble it, as the end of a sentence; empty without any."""
    with suppress(OSError):
        names = [each.name for each in path.parent.iterdir() if not each.name.startswith(".")]
        close = difflib.get_close_matches(path.name, names, n=2)
        return f"; did you mean {' or '.join(str(path.with_name(name)) for name in close)}?" if close else ""
    return ""


@contextmanager
def well_formed(what: str, kind: type[MeshwrightError]) -> Iterator[None]:
    """Within, values that code does not expect are an error of this kind, in one line.

    For files that others wrote, whose values can have any type. what: the file, and the form it should have.
    Failed assertions, and other errors that no value explains, pass through.
    """
    try:
        yield
    except _OF_VALUES as error:
        if isinstance(error, MeshwrightError):
            raise
        why = f"{type(error).__name__}: {in_a_line(error)[:200]}"
        raise kind(f"{what}: a value has the wrong form ({why})") from error


def half_of_a_pair(text: str) -> str:
    """The message about half a surrogate pair in a text, which UTF-8 cannot store; empty for other texts.

    Python gives bytes of a command line that are not UTF-8 as U+DC80 to U+DCFF.

    >>> half_of_a_pair("a\\ud800"), half_of_a_pair("a\\udcff"), half_of_a_pair("a\\U0001f600")
    ('U+D800 at character 1 is half a surrogate pair', 'the byte 0xFF at character 1 is not UTF-8', '')
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:
            return f"the byte 0x{code - 0xDC00:X} at character {error.start} is not UTF-8"
        return f"U+{code:04X} at character {error.start} is half a surrogate pair"
    return ""


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for other text, or one nested too deeply."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        slip = _slip_in_json(text, error.pos)
        raise json.JSONDecodeError(error.msg + slip, text, error.pos) from None
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def _slip_in_json(text: str, place: int) -> str:
    """The change that a frequent slip needs, as the end of a sentence; empty for other faults.

    >>> _slip_in_json('{"a": 1,}', 8), _slip_in_json("{'a': 1}", 1)
    ('; remove the comma before }', '; write names and texts in double quotes')
    """
    before, after = text[:place].rstrip(), text[place:].lstrip()
    if before.endswith(",") and after[:1] in ("}", "]"):
        return f"; remove the comma before {after[0]}"
    if after.startswith(("//", "#", "/*")):
        return "; JSON has no comments"
    return "; write names and texts in double quotes" if after[:1] == "'" else ""


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises ValueError for other text, or one nested too deeply."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("lists or tables are nested too deeply") from None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for this process until the block ends, by a lock on its file `.lock`.

    The file goes with the block, and so does a folder that was made for it and is still empty. Raises
    OutputError with the process that holds it. A file system without locks holds nothing.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    try:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise _is_held(folder, file.read(200).strip()) from None
            except OSError:
                yield
                return
            # The last holder may have removed the file between our opening and locking it.
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                raise _is_held(folder, "a process that has just ended")
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        if is_new:
            with suppress(OSError):  # it is not empty: it holds a run
                folder.rmdir()


def _is_held(folder: Path, holder: str) -> OutputError:
    holder = holder or "another process"
    return OutputError(f"{folder}: is in use by {holder}; wait for its end, or name another")


def check_writable(path: Path) -> None:
    """Check that a file can be written at `path`, without leaving one.

    For use before long work whose result would otherwise be lost. Raises OutputError.
    """
    if not path.name:
        raise _is_folder(path)
    made: list[Path] = []
    probe = _partial(path)
    try:
        if path.is_dir():
            raise _is_folder(path)
        if _is_special(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        made += (folder for folder in path.parents if not folder.exists())
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            probe.unlink()
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def check_page(path: Path) -> None:
    """`check_writable`, for a page in HTML. Raises OutputError for a file of another form too."""
    if path.suffix in (".pdf", ".png", ".jpg", ".docx", ".md", ".txt"):
        raise OutputError(
            f"-o {path}: a page is HTML; write -o {path.with_suffix('.html')}, which a browser prints to PDF"
        )
    check_writable(path)


def write_whole(path: Path, text: str) -> Path:
    """Write a file atomically, and its folder if there is none; returns `path`.

    A reader sees the old file or the new one and never a part, even if the writer is killed. A device or a
    pipe is written to instead of replaced: root would otherwise put a file in the place of /dev/null.
    Raises OutputError if the file cannot be written; the old file is then unchanged.
    """
    if not path.name:
        raise _is_folder(path)
    partial = _partial(path)
    try:
        if _is_special(path):
            # Without waiting: a pipe that has no reader, or a socket, is an error.
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(descriptor, True)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return path


def _is_special(path: Path) -> bool:
    """Whether a device, a pipe or a socket is at `path`."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _is_folder(path: Path) -> OutputError:
    return OutputError(f"{path}: cannot be written: it is a folder; name a file")


def _partial(path: Path) -> Path:
    """A hidden file of this process in the same folder."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def file_sha256(path: Path) -> str:
    """SHA-256 of the file's bytes in hexadecimal; other threads can run while it is computed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

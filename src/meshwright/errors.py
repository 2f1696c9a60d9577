"""Errors that a user's mistake raises, as a tree.

    MeshwrightError            one line with the conflict and the values that fit
    ├── NotationError          `A[I_X` does not parse; an axis is used twice
    ├── LayoutError            a dimension does not divide over its mesh axes
    ├── HardwareError          an unknown chip, an impossible topology, a bad TOML
    ├── ModelError             an unknown preset, a config with missing keys
    ├── PlanError              no layout fits; a plan file that cannot be read
    ├── DataError              an empty corpus, an unreadable file
    ├── CheckpointError        a checkpoint cut short or of another model
    ├── OutputError            a file that cannot be written
    ├── DeviceError            fewer devices than the plan asks for, a port in use
    ├── AuditError             the compiler refused the program
    │   └── OutOfMemoryError   a chip has less memory than the program takes
    └── RequestError           an HTTP request the server cannot serve (4xx)

The command line prints the message and exits 2; HTTP wraps it in the OpenAI error object.
Our own invariants use `assert`.
"""

import difflib
import re

# Longer lists of names do not help to choose.
_MOST_NAMED, _ALL_NAMED = 5, 10  # names in a hint: of more known ones, and of all
_MOST_CHARS = 1000  # of a message to a client
_MOST_COMPARED = 100  # characters of a name


class MeshwrightError(Exception):
    """A mistake that the user can correct; the message says how."""


def in_a_line(error: BaseException) -> str:
    """The beginning of an error's text, without line breaks."""
    return " ".join(str(error).split())[:300]


def shorten(text: str, at: int = 0, limit: int = 120) -> str:
    """`text`, shortened to the part around position `at` if it exceeds `limit`.

    >>> shorten("A[I_X, J]"), shorten("A" * 1000, at=500, limit=6)
    ('A[I_X, J]', '...AAAAAA...')
    """
    if len(text) <= limit:
        return text
    start = max(0, min(at - limit // 2, len(text) - limit))
    end = start + limit
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


class NotationError(MeshwrightError):
    """Text that is not the notation, or an array that breaks its rules."""


class LayoutError(MeshwrightError):
    """A layout that does not divide or is not supported."""


class HardwareError(MeshwrightError):
    """Hardware that is unknown or described wrongly."""


class ModelError(MeshwrightError):
    """A model that is unknown, incomplete or not supported."""


class PlanError(MeshwrightError):
    """A plan that cannot be made or read."""


class DataError(MeshwrightError):
    """Data that is missing, empty or unreadable."""


class CheckpointError(MeshwrightError):
    """A checkpoint that is missing, cut short or belongs to another model."""


class OutputError(MeshwrightError):
    """A file that cannot be written."""


class DeviceError(MeshwrightError):
    """Devices, ports or extras that this machine does not offer."""


class AuditError(MeshwrightError):
    """A program that the compiler refused."""


class OutOfMemoryError(AuditError):
    """A program that takes more memory than a chip has.

    num_bytes: memory of the program; None if the compiler does not report it. buffers: (bytes, the compiler's
    description) of the largest buffers.
    """

    def __init__(
        self, message: str, num_bytes: int | None, buffers: tuple[tuple[int, str], ...] = ()
    ) -> None:
        super().__init__(message)
        self.num_bytes, self.buffers = num_bytes, buffers


class RequestError(MeshwrightError):
    """An HTTP request that cannot be served.

    message, param: shortened, since they may quote megabytes of the request.
    status: the HTTP status (4xx). param: the request field at fault. code: OpenAI's error code.
    retry_after_seconds: time after which the same request may succeed; None if waiting does not help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(shorten(message, limit=_MOST_CHARS))
        self.status, self.param, self.code = status, param and shorten(param), code
        self.retry_after_seconds = retry_after_seconds


def plain_name(name: str) -> str:
    """The letters and digits of a name in lower case, the same for all spellings of its separators.

    >>> plain_name("ZBV-ZeroBubble"), plain_name("llama3.1:8b")
    ('zbvzerobubble', 'llama318b')
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def nearest(name: str, known: list[str]) -> str:
    """A hint with known words: two that resemble `name`; otherwise all if at most ten, or the nearest five.

    >>> nearest("v5q", ["v5p", "v5e", "h100"])
    'did you mean v5p or v5e?'
    """
    name = name[:_MOST_COMPARED]  # the time grows with the square of the length
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if len(known) <= _ALL_NAMED:
        return f"known: {', '.join(sorted(known))}"
    ordered = sorted(known, key=lambda word: (-difflib.SequenceMatcher(None, name, word).ratio(), word))
    return f"nearest: {', '.join(ordered[:_MOST_NAMED])} ({len(known)} known)"

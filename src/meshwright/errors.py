"""Errors that a user's own mistake raises, as a tree.

    MeshwrightError            one line that says what clashes and what would fit
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

# More names than these are no help to choose from.
_MOST_NAMED = 5


class MeshwrightError(Exception):
    """A mistake the user can mend; the message says how."""


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
    """A program for which the compiler finds no room on a chip.

    num_bytes: what it takes; None where the compiler does not say. buffers: (bytes, what the compiler says of
    them) of the largest.
    """

    def __init__(
        self, message: str, num_bytes: int | None, buffers: tuple[tuple[int, str], ...] = ()
    ) -> None:
        super().__init__(message)
        self.num_bytes, self.buffers = num_bytes, buffers


class RequestError(MeshwrightError):
    """An HTTP request that cannot be served.

    status: the HTTP status (4xx). param: the request field at fault. code: OpenAI's error code.
    retry_after_seconds: when the same request may succeed, if waiting helps.
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
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after_seconds = retry_after_seconds


def nearest(name: str, known: list[str]) -> str:
    """A hint naming the known words closest to `name`: two that are close, else at most five.

    >>> nearest("v5q", ["v5p", "v5e", "h100"])
    'did you mean v5p or v5e?'
    """
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if len(known) <= _MOST_NAMED:
        return f"known: {', '.join(sorted(known))}"
    alike = sorted(known, key=lambda word: (-difflib.SequenceMatcher(None, name, word).ratio(), word))
    return f"nearest: {', '.join(alike[:_MOST_NAMED])} ({len(known)} known)"

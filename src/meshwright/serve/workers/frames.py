"""Messages between a server and its workers: a kind, a length and a pickled value."""

import pickle
import struct
from typing import Any

HEADER = struct.Struct("<cQ")
# LAST: a result after which the worker ends.
CALL, STAGE, RESULT, LAST, ERROR = b"C", b"S", b"R", b"L", b"E"


def frame(kind: bytes, value: Any) -> bytes:
    """The bytes of a message."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(kind, len(content)) + content

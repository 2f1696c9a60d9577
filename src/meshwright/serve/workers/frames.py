"""Messages between a server and its workers: a kind, a length and a pickled value."""

import pickle
import struct

HEADER = struct.Struct("<cQ")
# BEGUN: a worker's first message, with the number of its thread. LAST: a result after which the worker ends.
BEGUN, CALL, STAGE, RESULT, LAST, ERROR = b"B", b"C", b"S", b"R", b"L", b"E"


def frame(kind: bytes, value: object) -> bytes:
    """The bytes of a message."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(kind, len(content)) + content

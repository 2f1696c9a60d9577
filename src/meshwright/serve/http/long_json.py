"""JSON texts of any length, made in turns with other work of the server's loop."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from meshwright.serve.turns import Turns

_FEW = 32  # items, which are made at once
_PIECE_BYTES = 2**16


class Many:
    """A list for JSON, whose items are made as they are written. items: makes them, from the first."""

    def __init__(self, items: Callable[[], Iterable[Any]]) -> None:
        self.items = items


def listed(count: int, items: Callable[[], Iterable[Any]]) -> list[Any] | Many:
    """A list of `count` items for JSON: made now if they are few."""
    return list(items()) if count <= _FEW else Many(items)


async def written(content: Any) -> list[bytes]:
    """The JSON text of `content`, which may hold lists of `Many` items, in pieces."""
    try:
        # A stream has one text per token, and the standard library's encoder is five times slower (6 us).
        return [to_json(content)]
    except PydanticSerializationError:  # it holds some
        pass
    turns, pieces = Turns(), [bytearray()]
    for part in _parts(content):
        pieces[-1] += part
        if len(pieces[-1]) > _PIECE_BYTES:
            pieces.append(bytearray())
        await turns.take()
    return [bytes(piece) for piece in pieces]


def _parts(content: Any) -> Iterator[bytes]:
    if isinstance(content, Many):
        before = b"["
        for item in content.items():
            yield before
            yield from _parts(item)
            before = b","
        yield b"[]" if before == b"[" else b"]"
        return
    try:
        yield to_json(content)
    except PydanticSerializationError:
        if isinstance(content, list):
            yield from _parts(Many(content.__iter__))
            return
        before = b"{"
        for key, value in content.items():
            yield before + to_json(key) + b":"
            yield from _parts(value)
            before = b","
        yield b"}"

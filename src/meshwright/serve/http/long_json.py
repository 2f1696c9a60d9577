"""JSON texts of any length, written while the server's loop also runs other tasks."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from meshwright.serve.turns import Turns

_MOST_AT_ONCE = 32  # items of a list that is not lazy
_ITEMS_A_PART = 8  # of a lazy list: few, since objects take 50 times the memory of their text
_PIECE_BYTES = 2**16


class LazyList:
    """A list for JSON whose items are made when they are written. items: makes all of them, in order."""

    def __init__(self, items: Callable[[], Iterable[Any]]) -> None:
        self.items = items


def lazy_list(count: int, items: Callable[[], Iterable[Any]]) -> list[Any] | LazyList:
    """A list of `count` items for JSON: a plain one if they are few."""
    return list(items()) if count <= _MOST_AT_ONCE else LazyList(items)


async def json_pieces(content: Any) -> list[bytes]:
    """The JSON text of `content`, in pieces. Parts of `content` may be a LazyList."""
    try:
        # A stream has one text per token, and the standard library's encoder is five times slower (6 us).
        return [to_json(content)]
    except PydanticSerializationError:  # it has a LazyList
        pass
    turns, pieces = Turns(), [bytearray()]
    for part in _parts(content):
        pieces[-1] += part
        if len(pieces[-1]) > _PIECE_BYTES:
            pieces.append(bytearray())
        await turns.take()
    return [bytes(piece) for piece in pieces]


def _parts(content: Any) -> Iterator[bytes]:
    """The JSON text of `content`, a few items at a time within a LazyList."""
    if isinstance(content, LazyList):
        items, before = iter(content.items()), b"["
        while some := list(islice(items, _ITEMS_A_PART)):
            try:
                yield before + to_json(some)[1:-1]
            except PydanticSerializationError:  # an item has a LazyList
                for item in some:
                    yield before
                    yield from _parts(item)
                    before = b","
            before = b","
        yield b"[]" if before == b"[" else b"]"
        return
    try:
        yield to_json(content)
    except PydanticSerializationError:
        if isinstance(content, list):
            yield from _parts(LazyList(content.__iter__))
            return
        before = b"{"
        for key, value in content.items():
            yield before + to_json(key) + b":"
            yield from _parts(value)
            before = b","
        yield b"}"

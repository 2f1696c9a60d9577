"""Reads the notation: arrays, meshes and sizes. Every error points at its character."""

import re

from meshwright.errors import NotationError
from meshwright.notation.array import Axes, ShardedArray, split_subscript
from meshwright.notation.mesh import Mesh
from meshwright.units import parse_count

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(?=\[)")


class _Reader:
    """A cursor over the text, which knows how to complain."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def fail(self, message: str) -> NotationError:
        return NotationError(f"{message} at character {self.at + 1} of {self.text!r}")

    def skip(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def take(self, literal: str) -> bool:
        self.skip()
        if self.text.startswith(literal, self.at):
            self.at += len(literal)
            return True
        return False

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            raise self.fail(f"expected {literal!r}")

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        self.skip()
        match = pattern.match(self.text, self.at)
        if not match:
            raise self.fail(f"expected {what}")
        self.at = match.end()
        return match[0]

    def finish(self) -> None:
        self.skip()
        if self.at < len(self.text):
            raise self.fail(f"unexpected {self.text[self.at :]!r}")


def parse_array(text: str) -> ShardedArray:
    """The array that `text` writes.

    >>> parse_array("A[I_X, J_YZ]{U_W}").axes
    (('X',), ('Y', 'Z'))
    >>> print(parse_array("wq[D_fsdp, N_tensor, H]"), parse_array("x[B_{data,fsdp}, T, D]"))
    wq[D_fsdp, N_tensor, H] x[B_{data,fsdp}, T, D]
    """
    reader = _Reader(text)
    array = _array(reader)
    reader.finish()
    return array


def _array(reader: _Reader) -> ShardedArray:
    reader.skip()
    name = reader.match(_NAME, "an array name") if _NAME.match(reader.text, reader.at) else ""
    reader.expect("[")
    dims: list[str] = []
    axes: list[Axes] = []
    while True:
        dims.append(reader.match(_WORD, "a dimension"))
        axes.append(_axes(reader) if reader.take("_") else ())
        if reader.take("]"):
            break
        reader.expect(",")
    unreduced: Axes = ()
    if reader.take("{"):
        reader.expect("U_")
        unreduced = _axes(reader)
        reader.expect("}")
    return ShardedArray(name, tuple(dims), tuple(axes), unreduced)


def _axes(reader: _Reader) -> Axes:
    """Axes of a subscript: `XY` is X then Y, `fsdp` and `Data` are one axis, `{data,fsdp}` is two."""
    if reader.take("{"):
        names = [reader.match(_WORD, "a mesh axis")]
        while reader.take(","):
            names.append(reader.match(_WORD, "a mesh axis"))
        reader.expect("}")
        return tuple(names)
    return split_subscript(reader.match(_WORD, "a mesh axis"))


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes written `I=1024,J=4k`.

    >>> parse_sizes("I=1024, J=4k")
    {'I': 1024, 'J': 4000}
    """
    sizes: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = item.partition("=")
        if not equals or not _WORD.fullmatch(name.strip()):
            raise NotationError(f"{item!r} in {text!r} is not NAME=SIZE; write X=4,Y=2")
        if name.strip() in sizes:
            raise NotationError(f"{name.strip()} is given twice in {text!r}")
        sizes[name.strip()] = parse_count(value)
    return sizes


def parse_mesh(text: str) -> Mesh:
    """The mesh written `X=4,Y=2`."""
    return Mesh(parse_sizes(text))

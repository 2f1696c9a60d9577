"""The parser of the notation: arrays, meshes and sizes.

Arrays are read in ASCII and in Unicode: `A[I₍X₎, Jₜₑₙₛₒᵣ]{U₍YZ₎}`. An error gives the position of its
character in the text, and shows only the text around it if the text is long.
"""

import re
from collections.abc import Callable

from meshwright.errors import MeshwrightError, NotationError, shorten
from meshwright.notation.array import Axes, ShardedArray, split_subscript
from meshwright.notation.mesh import Mesh
from meshwright.units import parse_count

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(?=\[)")
# Unicode has subscripts for the digits and some small letters.
_LETTERS = dict(zip("ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ₀₁₂₃₄₅₆₇₈₉", "aehijklmnoprstuvx0123456789", strict=True))
_SMALL = re.compile(f"[{''.join(_LETTERS)}]+")
_COUNT = re.compile(r"[^,]*")
_LONGEST_COUNT, _MOST_SIZES = 40, 1000  # characters of a size, which is at most 1e18; sizes in one text


class _Reader:
    """A position in a text, with errors that name it."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def fail(self, message: str, at: int | None = None, hint: str = "") -> NotationError:
        at = self.at if at is None else at
        return NotationError(f"{message} at character {at + 1} of {shorten(self.text, at)!r}{hint}")

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
            hint = "; write A[I, J] . B[J, K]" if _NAME.match(self.text, self.at) else ""
            raise self.fail(f"unexpected {shorten(self.text[self.at :], limit=20)!r}", hint=hint)


def parse_array(text: str) -> ShardedArray:
    """The array of a text in the notation.

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
    dims: dict[str, Axes] = {}
    used: set[str] = set()
    while True:
        reader.skip()
        start = reader.at
        dim = reader.match(_WORD, "a dimension")
        if dim in dims:
            raise reader.fail(f"dimension {dim} is named twice", start)
        dims[dim] = _unused(reader, used, _subscript)
        if reader.take("]"):
            break
        reader.expect(",")
    unreduced = _unused(reader, used, _unreduced) if reader.take("{") else ()
    return ShardedArray(name, tuple(dims), tuple(dims.values()), unreduced)


def _unused(reader: _Reader, used: set[str], read: Callable[[_Reader], Axes]) -> Axes:
    """The axes of a subscript, which the array must not have used before."""
    start = reader.at
    axes = read(reader)
    for axis in axes:
        if axis in used:
            at = max(start, reader.text.rfind(axis, start, reader.at))
            raise reader.fail(f"mesh axis {axis} is used twice", at, "; an array may use each axis once")
        used.add(axis)
    return axes


def _subscript(reader: _Reader) -> Axes:
    """The axes of a dimension: `_X`, `_{data,fsdp}`, `ₜₑₙₛₒᵣ`, `₍XY₎` or none."""
    if reader.take("_"):
        return _axes(reader)
    small = _SMALL.match(reader.text, reader.at)
    if small:
        word = "".join(_LETTERS[character] for character in small[0])
        if not _WORD.fullmatch(word):
            raise reader.fail("expected a mesh axis")
        reader.at = small.end()
        return (word,)
    return _in_parentheses(reader) if reader.take("₍") else ()


def _unreduced(reader: _Reader) -> Axes:
    marked = reader.text.startswith("U", reader.at) and not reader.text.startswith("U_", reader.at)
    if marked:
        reader.at += 1
    axes = _subscript(reader) if marked else ()
    if not axes:
        reader.at -= marked
        reader.expect("U_")
        axes = _axes(reader)
    reader.expect("}")
    return axes


def _in_parentheses(reader: _Reader) -> Axes:
    """`XY₎` is X then Y, `data,fsdp₎` is two words, `XY,₎` one."""
    first = reader.match(_WORD, "a mesh axis")
    if reader.take("₎"):
        return split_subscript(first)
    names = [first]
    while reader.take(","):
        if reader.take("₎"):
            return tuple(names)
        names.append(reader.match(_WORD, "a mesh axis"))
    reader.expect("₎")
    return tuple(names)


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
    """The sizes of a text such as `I=1024,J=4k`.

    >>> parse_sizes("I=1024, J=4k")
    {'I': 1024, 'J': 4000}
    """
    reader, sizes = _Reader(text), dict[str, int]()
    reader.skip()
    while reader.at < len(text):
        start = reader.at
        word = _WORD.match(text, start)
        reader.at = word.end() if word else start
        if not word or not reader.take("="):
            item = shorten(text[start:].partition(",")[0].strip(), limit=20)
            raise reader.fail(f"{item!r} is not NAME=SIZE", start, "; write X=4,Y=2")
        if word[0] in sizes:
            raise reader.fail(f"{word[0]} is given twice", start)
        if len(sizes) == _MOST_SIZES:
            raise reader.fail(f"more than {_MOST_SIZES} sizes", start)
        sizes[word[0]] = _count(reader)
        reader.take(",")
        reader.skip()
    return sizes


def _count(reader: _Reader) -> int:
    reader.skip()
    start = reader.at
    value = reader.match(_COUNT, "a size").strip()
    if len(value) > _LONGEST_COUNT:
        raise reader.fail(f"{shorten(value, limit=20)!r} is too long for a size", start)
    try:
        return parse_count(value)
    except MeshwrightError as error:
        raise reader.fail(str(error), start) from None


def parse_mesh(text: str) -> Mesh:
    """The mesh of a text such as `X=4,Y=2`."""
    return Mesh(parse_sizes(text))

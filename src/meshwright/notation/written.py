"""A chain and its layout in one text, with the sharding of each array at its first use.

    x[B_X, D] . w[D_X, F] -> h[B_X, F]; a[B_X, F] = gelu(h); a . v[F, D_X] -> y[B_X, D]

A statement is a product with an arrow, or a line of a chain (chain.py). An intermediate array without a
written sharding keeps the sharding that its statement yields, after its partial sums are added. Any other
array is replicated over the mesh axes that its text does not name. A product `-> h`, without dimensions, sums
over the dimensions that both operands have.
"""

import re
from collections.abc import Iterator

from meshwright.errors import NotationError
from meshwright.notation.array import ShardedArray
from meshwright.notation.chain import Chain
from meshwright.notation.parse import parse_array

_ARRAY = re.compile(r"[A-Za-z]\w*\[[^\]]*\](?:\{[^}]*\})?")
# The sign between two operands, perhaps with the summed dimension: `.`, `@`, `._D`.
_DOT = re.compile(r"(?<=[\w\]}])\s*[.·*@](?:_(?:\{[^}]*\}|\w+))?\s*(?=[A-Za-z])")


def parse_written(text: str) -> tuple[Chain, dict[str, ShardedArray]]:
    """The chain of a text and the shardings of its arrays, by name.

    Raises NotationError for a statement of another form, or an array written with two shardings.

    >>> chain, layout = parse_written("x[B_X, D] . w[D_X, F] -> h[B_X, F]; h . v[F, D_X] -> y[B_X, D]")
    >>> print(*chain.lines, sep="; ")
    h[B, F] = x . w; y[B, D] = h . v
    >>> print(*layout.values())
    x[B_X, D] w[D_X, F] h[B_X, F] v[F, D_X] y[B_X, D]
    """
    written: dict[str, ShardedArray] = {}
    chain = Chain.parse("\n".join(_lines(text, written)))
    inner = set(chain.arrays) - {chain.source, *chain.stored, *chain.results}
    return chain, {
        name: array
        for name, array in written.items()
        if name not in inner or array.sharded_axes or array.unreduced
    }


def is_chain(text: str) -> bool:
    """Whether `text` has several statements or a line of a chain."""
    return bool(re.search(r"[;=\n]", text))


def written_dims(text: str) -> list[str]:
    """The dimensions of all arrays of a text, each once, in order.

    >>> written_dims("x[B_X, D] . w[D, F_Y]")
    ['B', 'D', 'F']
    """
    arrays = (parse_array(match[0]) for match in re.finditer(r"\w*\[[^\]]*\]", text))
    return list(dict.fromkeys(dim for array in arrays for dim in array.dims))


def _lines(text: str, written: dict[str, ShardedArray]) -> Iterator[str]:
    """The statements as lines of a chain; their shardings are added to `written`."""

    def without_sharding(match: re.Match[str]) -> str:
        array = parse_array(match[0])
        if written.setdefault(array.name, array) != array:
            raise NotationError(
                f"{written[array.name]} and {array} are two shardings of one array; write only {array.name}"
            )
        return f"{array.name}[{', '.join(array.dims)}]"

    for statement in re.split(r"[;\n]", text):
        if statement.strip():
            left, arrow, right = _ARRAY.sub(without_sharding, statement).partition("->")
            left, right = _DOT.sub(" . ", left.strip()), right.strip()
            yield f"{_with_dims(right, left, written)} = {left}" if arrow else left


def _with_dims(out: str, product: str, written: dict[str, ShardedArray]) -> str:
    """The result of a product with its dimensions.

    If it is written as a name only, its dimensions are those of the operands that are not in both, and it is
    added to `written`.
    """
    names = [operand.partition("[")[0].strip() for operand in product.split(" . ")]
    if "[" in out or len(names) != 2 or not all(name in written for name in names):
        return out
    left, right = (written[name].dims for name in names)
    dims = [dim for dim in dict.fromkeys(left + right) if (dim in left) != (dim in right)]
    written.setdefault(out, ShardedArray(out, tuple(dims), ((),) * len(dims)))
    return f"{out}[{', '.join(dims)}]"

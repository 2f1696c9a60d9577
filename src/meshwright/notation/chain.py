"""A chain of operations on named arrays, without shardings.

    Tmp[B, F] = In[B, D] . Win[D, F]      a contraction over the dimensions that Tmp lacks
    H[B, F]   = gelu(Tmp)                 any elementwise function; operands are broadcast
    M[B]      = max_F(H)                  a reduction, `sum_` or `max_`
    P[B, F]   = route_F(H)                a function along F, which must be whole
    Q[B, K, G] = split(P[B, N])           a dimension written as two; also `merge` and `rename`

`layout()` reads shardings of the arrays, and derive.py derives the algorithm. The first operand of the first
line is the **source**, which earlier layers yield. Other arrays that no line makes are stored (weights,
caches).
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshwright.errors import NotationError, nearest
from meshwright.notation.array import ShardedArray
from meshwright.notation.parse import parse_array

CONTRACTION = "."
VIEWS = ("split", "merge", "rename")
# The reductions with partial results that combine. A maximum has no gradient, since it only shifts the
# exponents of a softmax, which is the same for any shift.
COMBINED_BY = ("sum", "max")


@dataclass(frozen=True)
class ChainLine:
    """`out = function(operands)`, without shardings. along: letters of a function or reduction along them."""

    function: str
    along: str
    operands: tuple[ShardedArray, ...]
    out: ShardedArray

    @property
    def is_view(self) -> bool:
        return self.function in VIEWS

    @property
    def call(self) -> str:
        """The function as in the text: `.`, `gelu`, `max_S`."""
        return f"{self.function}_{self.along}" if self.along else self.function

    @property
    def has_gradient(self) -> bool:
        return self.function != "max"

    @property
    def whole(self) -> str:
        """The letters that must stay whole: a function runs along them, or they are minor letters of a view.

        Blocks of N are contiguous, so with N = K G a block can only have whole groups of G.
        """
        if self.is_view:
            longer = max(self._differing_dims, key=len)
            return "".join(longer[1:])
        return "" if self.function in COMBINED_BY else self.along

    @property
    def aliases(self) -> dict[str, str]:
        """For a letter of the index space, the letter that a view's operand has for it."""
        if not self.is_view:
            return {}
        old, new = self._differing_dims
        return {new[0]: old[0]}

    @property
    def _differing_dims(self) -> tuple[list[str], list[str]]:
        """A view's dimensions that only the operand has, and that only the result has."""
        (operand,), out = self.operands, self.out
        return [d for d in operand.dims if d not in out.dims], [d for d in out.dims if d not in operand.dims]

    @property
    def _removes_what_it_names(self) -> bool:
        removed = {d for a in self.operands for d in a.dims} - set(self.out.dims)
        return len(self.operands) == 1 and removed == set(self.along) != set()

    def _is_in_place(self, old: list[str], new: list[str]) -> bool:
        at = self.operands[0].dims.index(old[0])
        dims = list(self.operands[0].dims)
        dims[at : at + len(old)] = new
        return tuple(dims) == self.out.dims

    def check(self) -> None:
        """Raise NotationError if the dimensions do not fit the function."""
        contracted = {d for a in self.operands for d in a.dims if d not in self.out.dims}
        if self.is_view:
            old, new = self._differing_dims if len(self.operands) == 1 else ([], [])
            counts = {"split": (1, 2), "merge": (2, 1), "rename": (1, 1)}[self.function]
            if (len(old), len(new)) != counts or not self._is_in_place(old, new):
                raise NotationError(f"{self}: {self.function} writes {counts[0]} as {counts[1]} in place")
        elif self.function in COMBINED_BY and not self._removes_what_it_names:
            raise NotationError(f"{self}: a reduction removes the letters it names")
        elif self.function == CONTRACTION:
            _check_contraction(self)
        elif self.function not in COMBINED_BY and contracted:
            lost = ", ".join(sorted(contracted))
            raise NotationError(f"{self}: {lost} is not in the result; sum or contract it")
        elif not set(self.along) <= {d for a in (*self.operands, self.out) for d in a.dims}:
            raise NotationError(f"{self}: no array has the dimension that {self.call} is along")

    def __str__(self) -> str:
        names = [operand.name for operand in self.operands]
        if self.function == CONTRACTION:
            return f"{self.out} = {' . '.join(names)}"
        return f"{self.out} = {self.call}({', '.join(names)})"


def _check_contraction(line: ChainLine) -> None:
    lhs, rhs = (set(a.dims) for a in line.operands)
    out = set(line.out.dims)
    for dim in sorted(lhs | rhs | out):
        if (dim in lhs) + (dim in rhs) + (dim in out) == 1:
            raise NotationError(f"{line}: {dim} is in only one of the three arrays")


@dataclass(frozen=True)
class Chain:
    """Lines in order. constants: arrays without a gradient, such as tokens, masks and caches."""

    lines: tuple[ChainLine, ...]
    constants: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str, constants: Collection[str] = ()) -> "Chain":
        """The chain of a text with an operation per line; a name used before needs no dimensions.

        >>> mlp = Chain.parse('''
        ...     Tmp[B, F] = In[B, D] . Win[D, F]
        ...     Out[B, D] = Tmp . Wout[F, D]''')
        >>> mlp.source, sorted(mlp.stored), mlp.results
        ('In', ['Win', 'Wout'], ('Out',))
        """
        known: dict[str, ShardedArray] = {}
        lines = tuple(_parse_line(line, known) for line in text.splitlines() if line.strip())
        if not lines:
            raise NotationError("a chain needs a line such as 'C[I, K] = A[I, J] . B[J, K]'")
        for name in known:
            if f"d{name}" in known:
                raise NotationError(f"d{name} is the name of the cotangent of {name}; rename it")
        for name in constants:
            if name not in known:
                raise NotationError(f"constant {name!r} is in no line of the chain; {_nearest(name, known)}")
        return cls(lines, frozenset(constants))

    @cached_property
    def arrays(self) -> dict[str, ShardedArray]:
        """The arrays by name, without shardings."""
        return {a.name: a for line in self.lines for a in (*line.operands, line.out)}

    @property
    def source(self) -> str:
        return self.lines[0].operands[0].name

    @cached_property
    def stored(self) -> frozenset[str]:
        """The arrays that no line makes: weights, caches, masks."""
        return frozenset(self.arrays) - {line.out.name for line in self.lines} - {self.source}

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The arrays that no line reads; the backward pass begins with their cotangents."""
        read = {a.name for line in self.lines for a in line.operands}
        return tuple(line.out.name for line in self.lines if line.out.name not in read)

    @cached_property
    def differentiated(self) -> frozenset[str]:
        """The arrays that have a cotangent."""
        names = {self.source, *self.stored} - self.constants
        for line in self.lines:
            if line.has_gradient and any(a.name in names for a in line.operands):
                names.add(line.out.name)
        return frozenset(names)

    def reader(self, name: str) -> ChainLine | None:
        """The first line that reads `name`."""
        return next((line for line in self.lines if any(a.name == name for a in line.operands)), None)

    def layout(self, text: str) -> dict[str, ShardedArray]:
        """The shardings written in `text`, by the arrays' names; arrays left out have none.

        Raises NotationError for an array or dimensions that the chain does not have.
        """
        rest = _ARRAY.sub("", text).replace(";", "").strip()
        if rest:
            raise NotationError(f"{rest!r} in a layout is not an array; write In[B_X, D] Win[D, F_Y]")
        layout: dict[str, ShardedArray] = {}
        for array in map(parse_array, _ARRAY.findall(text)):
            if array.name not in self.arrays:
                raise NotationError(
                    f"{array} is in no line of the chain; {_nearest(array.name, self.arrays)}"
                )
            if array.dims != self.arrays[array.name].dims:
                raise NotationError(f"{array}: the chain writes {self.arrays[array.name]}")
            if layout.setdefault(array.name, array) != array:
                raise NotationError(f"{array} and {layout[array.name]} are two shardings of one array")
        return layout


_ARRAY = re.compile(r"[A-Za-z]\w*\[[^\]]*\](?:\{[^}]*\})?")
_CALL = re.compile(r"(?P<function>[a-z][a-z0-9]*)(?:_(?P<along>[A-Z]+))?\((?P<operands>.*)\)")
_BETWEEN_OPERANDS = re.compile(r",(?![^\[]*\])")


def _parse_line(text: str, known: dict[str, ShardedArray]) -> ChainLine:
    left, equals, right = (part.strip() for part in text.partition("="))
    if not equals:
        raise NotationError(f"{text.strip()!r} is not a line of a chain; write C[I, K] = A[I, J] . B[J, K]")
    call = _CALL.fullmatch(right)
    if call:
        function, along, operands = call["function"], call["along"] or "", call["operands"]
        parts = _BETWEEN_OPERANDS.split(operands)
    else:
        function, along, parts = CONTRACTION, "", right.split(".")
        if len(parts) != 2:
            raise NotationError(f"{right!r} is neither A[I, J] . B[J, K] nor function(A[I, J], ...)")
    arrays = tuple(_operand(part.strip(), known) for part in parts)
    out = _unsharded(left)
    if out.name in known:
        raise NotationError(f"{out} is made when {known[out.name]} already exists; give it a new name")
    known[out.name] = out
    line = ChainLine(function, along, arrays, out)
    line.check()
    return line


def _operand(text: str, known: dict[str, ShardedArray]) -> ShardedArray:
    if text in known:
        return known[text]
    if not _ARRAY.fullmatch(text):
        raise NotationError(f"{text!r} is not an array; write NAME[I, J], or a name used before")
    array = _unsharded(text)
    if known.setdefault(array.name, array) != array:
        raise NotationError(f"{array} and {known[array.name]} are one array with two shapes")
    return array


def _unsharded(text: str) -> ShardedArray:
    array = parse_array(text)
    if array.sharded_axes or array.unreduced:
        raise NotationError(f"{array}: a chain has no shardings; give them as its layout")
    return array


def _nearest(name: str, known: Mapping[str, ShardedArray]) -> str:
    return nearest(name, list(known))

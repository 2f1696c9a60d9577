"""A chain of operations on named arrays, as one would write it on a board.

    Tmp[B, F] = In[B, D] . Win[D, F]      a contraction over what Tmp lacks
    H[B, F]   = gelu(Tmp)                 any function of an element; operands are broadcast
    M[B]      = max_F(H)                  a reduction, `sum_` or `max_`
    P[B, F]   = route_F(H)                a function along F, which it needs whole
    Q[B, K, G] = split(P[B, N])           a dimension written as two; `merge`, and `rename`, likewise

A chain says nothing of meshes: `layout()` reads the shardings of the arrays that have one, and
derive.py says what follows. An array that no line makes is stored (a weight, a cache) but for
the first operand of the first line, the **source**, which earlier layers yield.
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
# The reductions whose partial results combine; a maximum takes no gradient (softmax is the same
# for any shift of its exponents).
COMBINED_BY = ("sum", "max")


@dataclass(frozen=True)
class ChainLine:
    """`out = function(operands)`, without shardings. along: the letters that the function is along."""

    function: str
    along: str
    operands: tuple[ShardedArray, ...]
    out: ShardedArray

    @property
    def is_view(self) -> bool:
        return self.function in VIEWS

    @property
    def call(self) -> str:
        """The function as it is written: `.`, `gelu`, `max_S`."""
        return f"{self.function}_{self.along}" if self.along else self.function

    @property
    def has_gradient(self) -> bool:
        return self.function != "max"

    @property
    def whole(self) -> str:
        """The letters that must not be split: those of a function along them, a view's minor ones.

        Blocks of N are contiguous, so over N = K G only whole groups of G can be one.
        """
        if self.is_view:
            longer = max(self._written_otherwise, key=len)
            return "".join(longer[1:])
        return "" if self.function in COMBINED_BY else self.along

    @property
    def aliases(self) -> dict[str, str]:
        """The letter of the index space that a view's operand writes otherwise."""
        if not self.is_view:
            return {}
        own, new = self._written_otherwise
        return {new[0]: own[0]}

    @property
    def _written_otherwise(self) -> tuple[list[str], list[str]]:
        """The dimensions of a view that only the operand has, and only the result."""
        (operand,), out = self.operands, self.out
        return [d for d in operand.dims if d not in out.dims], [d for d in out.dims if d not in operand.dims]

    @property
    def _removes_what_it_names(self) -> bool:
        removed = {d for a in self.operands for d in a.dims} - set(self.out.dims)
        return len(self.operands) == 1 and removed == set(self.along) != set()

    def _is_in_place(self, own: list[str], new: list[str]) -> bool:
        at = self.operands[0].dims.index(own[0])
        dims = list(self.operands[0].dims)
        dims[at : at + len(own)] = new
        return tuple(dims) == self.out.dims

    def check(self) -> None:
        """Raises NotationError where the dimensions do not fit the function."""
        contracted = {d for a in self.operands for d in a.dims if d not in self.out.dims}
        if self.is_view:
            own, new = self._written_otherwise if len(self.operands) == 1 else ([], [])
            counts = {"split": (1, 2), "merge": (2, 1), "rename": (1, 1)}[self.function]
            if (len(own), len(new)) != counts or not self._is_in_place(own, new):
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
            raise NotationError(f"{line}: {dim} is in one of the three arrays alone")


@dataclass(frozen=True)
class Chain:
    """Lines in order. constants: arrays without a gradient, such as tokens, masks and caches."""

    lines: tuple[ChainLine, ...]
    constants: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str, constants: Collection[str] = ()) -> "Chain":
        """The chain that `text` writes, a line each; a name once used may stand without its dimensions.

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
                raise NotationError(f"d{name} is what the cotangent of {name} is called; rename it")
        for name in constants:
            if name not in known:
                raise NotationError(f"constant {name!r} is in no line of the chain; {_nearest(name, known)}")
        return cls(lines, frozenset(constants))

    @cached_property
    def arrays(self) -> dict[str, ShardedArray]:
        """Every array by its name, without sharding."""
        return {a.name: a for line in self.lines for a in (*line.operands, line.out)}

    @property
    def source(self) -> str:
        return self.lines[0].operands[0].name

    @cached_property
    def stored(self) -> frozenset[str]:
        """What no line makes: weights, caches, masks."""
        return frozenset(self.arrays) - {line.out.name for line in self.lines} - {self.source}

    @cached_property
    def results(self) -> tuple[str, ...]:
        """What no line reads: where the cotangents come from."""
        read = {a.name for line in self.lines for a in line.operands}
        return tuple(line.out.name for line in self.lines if line.out.name not in read)

    @cached_property
    def differentiated(self) -> frozenset[str]:
        """The arrays that have a cotangent."""
        found = {self.source, *self.stored} - self.constants
        for line in self.lines:
            if line.has_gradient and any(a.name in found for a in line.operands):
                found.add(line.out.name)
        return frozenset(found)

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

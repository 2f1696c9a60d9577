"""What each optimizer keeps of a weight from one update to the next, and computes in one."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple

from meshwright.models.parameters import OF_STACKS, Param, of_a_layer
from meshwright.notation.array import Axes, ShardedArray
from meshwright.notation.mesh import Degrees

OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")
# Elements of state an element of a weight has at least; what a weight has, `state_elements` says.
LEAST_STATE = {"adamw": 2, "adafactor": 0, "lion": 1, "muon": 1}
# Adafactor keeps a row and a column of an array whose two largest dimensions reach this (optax's default).
FACTORED_FROM = 128
# Elementwise operations an element of one update, of which every optimizer has the clipping's three (a square
# for the norm, the quotient and the choice) and four of decay, rate and weight:
#     adamw  m 3, v 4, both over 1 - b^t 2, square root, + eps, quotient
#     lion   b1 m + (1 - b1) g 3, its sign, m 3
# The others are taken to have as many as AdamW.
ARITHMETIC = {"adamw": 19, "lion": 14}
NEWTON_SCHULZ_STEPS = 5
# The most numbers of a row of a moment in 8 bits that share a scale.
BLOCK = 128
# The dimensions that count matrices: layers, experts.
_STACKED = OF_STACKS + "E"
# Sums over all numbers of a weight in one update, one after another: of every optimizer the gradients' norm.
# Adafactor has the size of its update and that of the weight.
_SUMS = {"adafactor": 3}


def num_sums(optimizer: str) -> int:
    """How often in an update a number is summed over the axes that split the weights."""
    return _SUMS.get(optimizer, 1)


def num_blocks(numbers: Any) -> Any:
    """Into how many blocks a device splits its share of a row of a moment in 8 bits, each with a scale.

    >>> num_blocks(128), num_blocks(192)
    (1, 2)
    """
    return -(-numbers // BLOCK)


def is_orthogonalised(path: str, param: Param) -> bool:
    """Whether Muon takes the weight: the matrices of layers; embeddings, head and vectors are AdamW's.

    >>> is_orthogonalised("layers/wq", Param("LDNH")), is_orthogonalised("embed", Param("VD"))
    (True, False)
    """
    matrix = len(of_a_layer(param.letters)) > 1 and "bias" not in path and "norm" not in path
    return "/" in path and matrix


def is_of_matrix(param: Param, dim: int) -> bool:
    """Whether a dimension is a matrix's, as Muon takes one; else it counts layers or experts.

    >>> [is_of_matrix(Param("LEDF"), dim) for dim in range(4)]
    [False, False, True, True]
    """
    return param.letters[dim] not in _STACKED


def factored(shape: Mapping[str, int]) -> tuple[str, str] | None:
    """The letters that Adafactor averages over, for its rows and for its columns; None where it has neither.

    >>> factored({"L": 2, "D": 256, "F": 512}), factored({"D": 64, "F": 512})
    (('D', 'F'), None)
    """
    if len(shape) < 2:
        return None
    second, largest = sorted(shape, key=lambda letter: shape[letter])[-2:]
    return (second, largest) if shape[second] >= FACTORED_FROM else None


class Exchange(NamedTuple):
    """A collective of an update: of what, over which axes, elements of a device's operand, times in a row."""

    what: Literal["momentum", "mean squares"]
    op: Literal["all_to_all", "all_reduce"]
    axes: Axes
    elements: Any
    times: int = 1


@dataclass(frozen=True)
class WeightUpdate:
    """The update of one weight, on one of the devices that have a shard of it.

    array: the weight as it is updated. sizes: of dimensions. Figures are those of the largest shard, and
    arrays of figures where `mesh` is of many layouts.
    """

    optimizer: str
    path: str
    param: Param
    array: ShardedArray
    sizes: Mapping[str, Any]
    mesh: Degrees

    @property
    def elements(self) -> Any:
        return prod(self._shard)

    @property
    def state_elements(self) -> Any:
        """Elements of the optimizer's state.

        adamw  2 (m and v)   lion  1 (m)   muon  1 of a matrix (m), else as adamw
        adafactor  a row and a column in place of v: n / d1 + n / d2, or n where it is not factored
        """
        if self.optimizer == "adafactor":
            averaged = [self.elements // self._shard_of(letter) for letter in self._averaged]
            return sum(averaged) if averaged else self.elements
        return self._num_moments * self.elements

    @property
    def state_blocks(self) -> Any:
        """Blocks of the state where it is in 8 bits, each with a scale; Adafactor's is not."""
        *rows, row = self._shard
        return self._num_moments * prod(rows) * num_blocks(row)

    @property
    def _num_moments(self) -> int:
        """How many arrays of the weight's shape the state has."""
        if self.optimizer == "muon" and not self._is_orthogonalised:
            return LEAST_STATE["adamw"]
        return LEAST_STATE[self.optimizer]

    @property
    def flops(self) -> Any:
        """FLOPs of the update, those of its products among them."""
        elementwise = ARITHMETIC.get(self.optimizer, ARITHMETIC["adamw"]) * self.elements
        return elementwise + self.product_flops

    @property
    def product_flops(self) -> Any:
        """FLOPs of the update's products, which Muon's iterations alone have.

        Each iteration multiplies X[m, n], m <= n, as X X^T, its square and that with X: 4 m^2 n + 2 m^3. A
        device has whole matrices, of its share of the layers.
        """
        if not self._is_orthogonalised:
            return 0
        rows, columns = (
            prod(
                self.sizes[letter]
                for dim, letter in enumerate(self.param.letters)
                if is_of_matrix(self.param, dim) and (letter in self.param.fan_in) == of_rows
            )
            for of_rows in (True, False)
        )
        few, many = min(rows, columns), max(rows, columns)
        stacked = [n for dim, n in enumerate(self._shard) if dim and not is_of_matrix(self.param, dim)]
        num_matrices = self._num_layers * prod(stacked)
        return NEWTON_SCHULZ_STEPS * num_matrices * (4 * few * few * many + 2 * few**3)

    @property
    def exchanges(self) -> list[Exchange]:
        """Muon's all-to-alls of the momentum, and Adafactor's sums of mean squares.

        muon       one for each dimension that is split. It hands the devices of its axes different layers,
                   padded to a multiple, of which each then has whole matrices. What is made of them goes back
        adafactor  one for each mean over a dimension that is split: the row's, the column's, and that of the
                   row, by which it is divided
        """
        if self._is_orthogonalised:
            padded = self._num_layers * self.mesh.size(self._dealt_over) * prod(self._shard[1:])
            return [Exchange("momentum", "all_to_all", axes, padded, times=2) for axes in self._split]
        means = [(letter, self.elements // self._shard_of(letter)) for letter in self._averaged]
        if means:
            (second, _), (_, row) = means
            means.append((second, row // self._shard_of(second)))
        split = ((self.array.axes_of(letter), elements) for letter, elements in means)
        return [Exchange("mean squares", "all_reduce", axes, elements) for axes, elements in split if axes]

    @property
    def _averaged(self) -> tuple[str, ...]:
        """The letters that Adafactor averages over: for its column, and for its row."""
        if self.optimizer != "adafactor":
            return ()
        return factored({letter: self.sizes[letter] for letter in self.param.letters}) or ()

    def _shard_of(self, letter: str) -> Any:
        return self._shard[self.param.letters.index(letter)]

    @property
    def _is_orthogonalised(self) -> bool:
        return self.optimizer == "muon" and is_orthogonalised(self.path, self.param)

    @property
    def _shard(self) -> list[Any]:
        """The sizes of the largest shard."""
        letters = zip(self.param.letters, self.array.axes, strict=True)
        return [-(-self.sizes[letter] // self.mesh.size(axes)) for letter, axes in letters]

    @property
    def _split(self) -> list[Axes]:
        """The axes of each dimension of the matrices that is split."""
        return [axes for dim, axes in enumerate(self.array.axes) if axes and is_of_matrix(self.param, dim)]

    @property
    def _dealt_over(self) -> Axes:
        """The axes over which layers are dealt: all that split the matrices."""
        return tuple(chain.from_iterable(self._split))

    @property
    def _num_layers(self) -> Any:
        """The layers of which a device has whole matrices while Muon iterates."""
        return -(-self._shard[0] // self.mesh.size(self._dealt_over))

"""Adafactor: means of squares by row and by column. Source: Shazeer & Stern, arXiv:1804.04235."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.models.parameters import Param
from meshwright.optimizers.optimizer import Exchange, Optimizer, WeightShard

# An array whose two largest dimensions reach this is kept as a row and a column (optax's default).
FACTORED_FROM = 128


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """A row and a column in place of v; v itself of weights with a dimension below 128."""

    def averaged(self, param: Param, sizes: Mapping[str, Any]) -> Sequence[str]:
        """The second largest and the largest dimension, which the column and the row are means over.

        >>> ADAFACTOR.averaged(Param("LDF"), {"L": 2, "D": 256, "F": 512})
        ['D', 'F']
        >>> ADAFACTOR.averaged(Param("DF"), {"D": 64, "F": 512})
        ()
        """
        largest = sorted(param.letters, key=sizes.__getitem__)[-2:]
        return largest if len(largest) == 2 and sizes[largest[0]] >= FACTORED_FROM else ()

    def state(self, path: str, param: Param, sizes: Mapping[str, Any]) -> dict[str, str]:
        if not (averaged := self.averaged(param, sizes)):
            return {"v": param.letters}
        column, row = (param.letters.replace(letter, "") for letter in averaged)
        return {"v_row": row, "v_column": column}

    def exchanges(self, weight: WeightShard) -> list[Exchange]:
        """Sums of mean squares over split dimensions: the row's, the column's, and the mean of the row."""
        if not (averaged := self.averaged(weight.param, weight.sizes)):
            return []
        shape = weight.shape
        second, largest = averaged
        row = weight.elements // shape[largest]
        means = ((second, weight.elements // shape[second]), (largest, row), (second, row // shape[second]))
        split = ((weight.array.axes_of(letter), elements) for letter, elements in means)
        return [Exchange("mean squares", "all_reduce", axes, elements) for axes, elements in split if axes]


ADAFACTOR = Adafactor(
    "adafactor",
    "a row and a column of each matrix in place of moments",
    (),
    num_sums=3,  # the gradients' norm, and the sizes of an update and of its weight
    by_whole_sizes=True,
    unpacked="which keeps a row and a column in place of moments",
)

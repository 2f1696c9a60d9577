"""Muon: the momentum of layers' matrices, made orthogonal.

Sources: Jordan et al. (2024); Liu et al., arXiv:2502.16982.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from meshwright.models.parameters import OF_STACKS, Param, of_a_layer
from meshwright.notation.array import Axes
from meshwright.optimizers.adamw import ADAMW
from meshwright.optimizers.optimizer import Exchange, Optimizer, WeightShard

NEWTON_SCHULZ_STEPS = 5
# The dimensions that count matrices: layers, experts.
_STACKED = OF_STACKS + "E"


def is_orthogonalised(path: str, param: Param) -> bool:
    """Whether Muon takes the weight: the matrices of layers; embeddings, head and vectors are AdamW's.

    >>> is_orthogonalised("layers/wq", Param("LDNH")), is_orthogonalised("embed", Param("VD"))
    (True, False)
    """
    matrix = len(of_a_layer(param.letters)) > 1 and "bias" not in path and "norm" not in path
    return "/" in path and matrix


def is_of_matrix(param: Param, dim: int) -> bool:
    """Whether a dimension is a matrix's; others count layers or experts.

    >>> [is_of_matrix(Param("LEDF"), dim) for dim in range(4)]
    [False, False, True, True]
    """
    return param.letters[dim] not in _STACKED


@dataclass(frozen=True)
class Muon(Optimizer):
    """Newton and Schulz's iterations on whole matrices: the devices that split them take different layers."""

    def state(self, path: str, param: Param, sizes: Mapping[str, Any]) -> dict[str, str]:
        if is_orthogonalised(path, param):
            return super().state(path, param, sizes)
        return ADAMW.state(path, param, sizes)

    def product_flops(self, weight: WeightShard) -> Any:
        """FLOPs of the iterations on a device's share of the layers.

        Each iteration makes A = X X^T of X[m, n], m <= n, then A A, then A X: 4 m^2 n + 2 m^3.
        """
        param, shape = weight.param, weight.shape
        if not is_orthogonalised(weight.path, param):
            return 0
        rows, columns = (
            prod(
                weight.sizes[letter]
                for dim, letter in enumerate(param.letters)
                if is_of_matrix(param, dim) and (letter in param.fan_in) == of_rows
            )
            for of_rows in (True, False)
        )
        few, many = min(rows, columns), max(rows, columns)
        stacked = [shape[x] for dim, x in enumerate(param.letters) if dim and not is_of_matrix(param, dim)]
        num_matrices = _layers_of_device(weight) * prod(stacked)
        return NEWTON_SCHULZ_STEPS * num_matrices * (4 * few * few * many + 2 * few**3)

    def exchanges(self, weight: WeightShard) -> list[Exchange]:
        """All-to-alls of the momentum, one for each split dimension of the matrices, and those back.

        Each hands the devices of its axes different layers, padded to a multiple of them.
        """
        if not is_orthogonalised(weight.path, weight.param):
            return []
        _, *rest = weight.shape.values()
        padded = _layers_of_device(weight) * weight.mesh.size(_dealt_over(weight)) * prod(rest)
        return [Exchange("momentum", "all_to_all", axes, padded, times=2) for axes in _split(weight)]


def _split(weight: WeightShard) -> list[Axes]:
    """The axes of each dimension of the matrices that is split."""
    return [axes for dim, axes in enumerate(weight.array.axes) if axes and is_of_matrix(weight.param, dim)]


def _dealt_over(weight: WeightShard) -> Axes:
    """The axes that split the matrices, which layers are dealt over instead."""
    return tuple(chain.from_iterable(_split(weight)))


def _layers_of_device(weight: WeightShard) -> Any:
    """The layers whose whole matrices a device has during its iterations."""
    layers = weight.shape[weight.param.letters[0]]
    return -(-layers // weight.mesh.size(_dealt_over(weight)))


MUON = Muon("muon", "one moment of the layers' matrices, made orthogonal; AdamW for the rest", ("m",))

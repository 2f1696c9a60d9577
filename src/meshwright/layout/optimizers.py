"""What each optimizer keeps of a weight from one update to the next, and computes in one."""

from collections.abc import Mapping
from math import prod
from typing import Any

from meshwright.models.parameters import Param
from meshwright.notation.array import ShardedArray
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
# Sums over all numbers of a weight in one update, one after another: of every optimizer the gradients' norm.
# Adafactor has the size of its update and that of the weight, which optax takes twice (it guards the root).
_SUMS = {"adafactor": 4}


def num_sums(optimizer: str) -> int:
    """How often in an update a number is summed over the axes that split the weights."""
    return _SUMS.get(optimizer, 1)


def is_orthogonalised(path: str, param: Param) -> bool:
    """Whether Muon takes the weight: the matrices of layers; embeddings, head and vectors are AdamW's.

    >>> is_orthogonalised("layers/wq", Param("LDNH")), is_orthogonalised("embed", Param("VD"))
    (True, False)
    """
    matrix = len(param.letters.lstrip("LP")) > 1 and "bias" not in path and "norm" not in path
    return "/" in path and matrix


def factored(shape: Mapping[str, int]) -> tuple[str, str] | None:
    """The letters that Adafactor averages over, for its rows and for its columns; None where it has neither.

    >>> factored({"L": 2, "D": 256, "F": 512}), factored({"D": 64, "F": 512})
    (('D', 'F'), None)
    """
    if len(shape) < 2:
        return None
    second, largest = sorted(shape, key=lambda letter: shape[letter])[-2:]
    return (second, largest) if shape[second] >= FACTORED_FROM else None


def state_elements(
    optimizer: str, path: str, param: Param, array: ShardedArray, sizes: Mapping[str, Any], mesh: Degrees
) -> Any:
    """Elements of the optimizer's state that one device has of a weight, whose shards are `array`'s.

    adamw  2 (m and v)   lion  1 (m)   muon  1 of a matrix (m), else as adamw
    adafactor  a row and a column in place of v: n / d1 + n / d2, or n where it is not factored
    """
    block = {
        letter: -(-sizes[letter] // mesh.size(axes))
        for letter, axes in zip(param.letters, array.axes, strict=True)
    }
    whole = prod(block.values())
    if optimizer == "adafactor":
        pair = factored({letter: sizes[letter] for letter in param.letters})
        return sum(whole // block[letter] for letter in pair) if pair else whole
    if optimizer == "muon":
        return whole if is_orthogonalised(path, param) else 2 * whole
    return LEAST_STATE[optimizer] * whole


def update_flops(optimizer: str, path: str, param: Param, sizes: Mapping[str, Any]) -> Any:
    """FLOPs of an update an element of the weight, those of products among them."""
    return ARITHMETIC.get(optimizer, ARITHMETIC["adamw"]) + update_products(optimizer, path, param, sizes)


def update_products(optimizer: str, path: str, param: Param, sizes: Mapping[str, Any]) -> Any:
    """FLOPs of an update's products an element of the weight: of Muon's iterations.

    Each multiplies X[m, n], m <= n, as X X^T, its square and that with X: 4m + 2m^2 / n an element. It is
    taken to split over the devices as the weight does.
    """
    if optimizer != "muon" or not is_orthogonalised(path, param):
        return 0
    rows = prod(sizes[letter] for letter in param.fan_in)
    columns = prod(sizes[letter] for letter in param.letters if letter not in param.fan_in + "LPE")
    few, many = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * few + 2 * few * few / many)

"""Experts by grouped products: the rows of tokens that a device has, and the blocks that it multiplies.

The rows of d[E, C, D] are sorted by expert, and each expert's are filled up to whole blocks, each of which is
one product with that expert's weights. How many blocks there are depends on the tokens' choices: so many as
`even` where all experts get as much, which plans count, and never more than `most`, for which there is room.
"""

from typing import Any, NamedTuple

from meshwright.models.config import MoE

# Rows that a block may have.
_SIZES = (8, 16, 32, 64, 128, 256, 512)


class Blocks(NamedTuple):
    """The blocks of one device. rows: of a block. most, even: how many there are at most, and by even load.

    Numbers, or arrays of one number for each of many layouts.
    """

    rows: Any
    most: Any
    even: Any


def blocks_of(num_tokens: Any, moe: MoE, own_experts: Any) -> Blocks:
    """The blocks of a device that has `own_experts` and meets so many tokens.

    A block has between an eighth and a quarter of an expert's even share, k tokens / E, from 8 rows to 512:
    so that the rows that fill up the last block of each expert are few, and a product large. Each token
    has a row for k of the experts at most.

    >>> blocks_of(4096, MoE(8, 2, 64), own_experts=8)
    Blocks(rows=256, most=39, even=32.0)
    """
    share = moe.experts_per_token * num_tokens / moe.num_experts
    doublings = sum(share >= 8 * rows for rows in _SIZES[:-1])
    rows = _SIZES[0] * 2**doublings
    most = (num_tokens * _least(moe.experts_per_token, own_experts) + own_experts * (rows - 1)) // rows
    return Blocks(rows, most, _least(own_experts * -(-share // rows), most))


def _least(one: Any, other: Any) -> Any:
    return one - (one > other) * (one - other)

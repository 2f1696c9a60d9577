"""Experts without a capacity: how the rows of tokens reach them, and the blocks that a device multiplies.

A device has a row for each of its tokens and each of the k experts that the token chose. Rows travel to their
experts' devices and back (AllToAll); or, grouped, every device of a group of experts reads all of the group's
tokens (AllGather) and makes the rows of its own experts there.

The rows of d[E, C, D] are sorted by expert, and each expert's are filled up to whole blocks, each of which is
one product with that expert's weights. How many blocks there are depends on the tokens' choices: so many as
`even` where all experts get as much, which plans count, and never more than `most`. They are multiplied in
rounds, each with room for twice `even`: one round does unless a device gets more than twice its share. Where
all stages of a pipeline run one program (lanes), one round has room for all: JAX cannot take the gradient of
a further round over stages (jax 0.10.2: a loop whose end depends on the load, under vmap over a mesh axis).
"""

from typing import Any, NamedTuple

from meshwright.models.config import MoE

# Rows that a block may have.
_SIZES = (8, 16, 32, 64, 128, 256, 512)
# Blocks of an even share, at most, where they have more than the fewest rows and fewer than the most. A block
# reads its expert's weights: from memory on accelerators, which compute as fast as they read with 160 rows
# (v5p) to 560 (v6e), so that blocks are as large as may be; CPUs with 26, and rows that fill up cost more.
_BLOCKS_OF_SHARE = {"cpu": 8, "gpu": 2, "tpu": 2}
# A round has room for so many times the blocks of an even load.
_ROOM = 2
# Blocks of one expert of which the gradient of its weight is one product, at most: what a product adds to the
# float32 sum, which is read and written, takes four times the memory traffic of its weights.
_SUMMED = 4
# The mesh axis between nodes.
_NODES = "expert_nodes"


class Blocks(NamedTuple):
    """The blocks of one device.

    rows: of a block. most, even: how many there are at most, and by even load. room: of one round. together:
    blocks of an expert of which the gradient of its weight is one product. sums: of those products by even
    load. Numbers, or arrays of one number for each of many layouts.
    """

    rows: Any
    most: Any
    even: Any
    room: Any
    together: Any
    sums: Any

    @property
    def rounds(self) -> int:
        """Rounds of the worst load."""
        return -(-self.most // self.room)


def blocks_of(
    num_tokens: Any, moe: MoE, own_experts: Any, platform: str, *, one_round: bool = False
) -> Blocks:
    """The blocks of a device that has `own_experts` and meets so many tokens.

    A block has 8 rows to 512: on accelerators between half of an expert's even share, k tokens / E, and all
    of it, so that weights are read once or twice; on CPUs between an eighth and a quarter, so that few rows
    fill up the last block of each expert. Each token has a row for k of the experts at most. one_round: that
    has room for all rows.

    >>> blocks_of(4096, MoE(8, 2, 64), own_experts=8, platform="tpu")
    Blocks(rows=512, most=23, even=16.0, room=23.0, together=2.0, sums=8.0)
    >>> blocks_of(4096, MoE(64, 2, 64), own_experts=1, platform="cpu")
    Blocks(rows=32, most=128, even=4.0, room=8.0, together=4.0, sums=1.0)
    """
    share = moe.experts_per_token * num_tokens / moe.num_experts
    doublings = sum(share >= _BLOCKS_OF_SHARE[platform] * rows for rows in _SIZES[:-1])
    rows = _SIZES[0] * 2**doublings
    num_rows = num_tokens * _least(moe.experts_per_token, own_experts)
    # No expert has part of a block more, and none that has no row.
    most = (num_rows + _least(own_experts, num_rows) * (rows - 1)) // rows
    of_expert = -(-share // rows)
    even = _least(own_experts * of_expert, most)
    sums = -(-of_expert // _SUMMED)
    room = most if one_round else _least(_ROOM * even, most)
    together = -(-of_expert // sums)
    return Blocks(rows, most, even, room, _least(together, room), _least(own_experts * sums, even))


class Crossing(NamedTuple):
    """What one device sends to the devices of its own place in other nodes, itself among them, in one round.

    num_nodes: that there are. own: tokens of the device. room: of the rows of experts that they have on one
    node, those that end in a round. tokens: to one node in a round, at most. rows: that these are made into
    there, at most. rounds: of the worst load. even: tokens to all nodes by even load. Numbers, or arrays of
    one number for each of many layouts.
    """

    num_nodes: Any
    own: Any
    room: Any
    tokens: Any
    rows: Any
    rounds: Any
    even: Any


def crossing_of(num_tokens: Any, moe: MoE, num_nodes: Any, *, one_round: bool = False) -> Crossing:
    """What a device of so many tokens sends where a token goes to a node once.

    A round has room for twice the rows of an even load, k tokens / nodes, and takes the tokens whose last row
    is among so many: the first may have begun in the round before. one_round: that has room for all rows.

    >>> crossing_of(4096, MoE(64, 8, 64), 4)
    Crossing(num_nodes=4, own=4096, room=16384, tokens=4096, rows=16391, rounds=2, even=14744.0)
    """
    of_token = _least(moe.experts_per_token, moe.num_experts // num_nodes)
    most = num_tokens * of_token
    share = -(-moe.experts_per_token * num_tokens // num_nodes)
    room = most if one_round else _least(_ROOM * share, most)
    rounds = -(-most // room)
    nodes = nodes_of_token(num_nodes, moe.experts_per_token, moe.num_groups, moe.groups_per_token)
    even = -(-num_tokens * nodes // 1)
    rows = room + (of_token - 1) * (room < most)
    return Crossing(num_nodes, num_tokens, room, _least(num_tokens, room), rows, rounds, even)


def nodes_of_token(num_nodes: Any, num_rows: int, groups: int = 1, met: int = 1) -> Any:
    """How many of the nodes a token goes to with so many rows: r (1 - (1 - 1/r)^k) of k rows, their mean over
    random choices of r nodes.

    r: all, or as many as those groups of experts lie in, `met` of all, that a token may choose.

    >>> nodes_of_token(4, 2), round(nodes_of_token(8, 8), 2), round(nodes_of_token(8, 8, 8, 4), 2)
    (1.75, 5.25, 3.6)
    """
    lie_in = num_nodes * met / groups
    reached = _least(num_nodes, lie_in + met - _least(lie_in, met))
    return reached * (1 - (1 - 1 / reached) ** num_rows)


def _least(one: Any, other: Any) -> Any:
    return one - (one > other) * (one - other)

"""Experts without a capacity factor: the blocks of rows that a device multiplies.

The rows d[E, C, D] are sorted by expert (moves/experts.py). Each expert's rows are padded to whole blocks,
and a block is one product with that expert's weights. The number of blocks depends on the tokens' choices: it
is `even` if all experts get the same, which plans count, and never more than `most`. Blocks are multiplied in
passes with a capacity of twice `even`: one pass is enough unless a device gets more than twice its share. If
all stages of a pipeline run one program (SPMD 1F1B), one pass takes all rows: JAX cannot take the gradient of
an extra pass over stages (jax 0.10.2: a loop whose end depends on the load, under vmap over a mesh axis).
"""

from typing import Any, NamedTuple

from meshwright.layout.layout import Layout
from meshwright.layout.moves.experts import row_routing
from meshwright.models.config_tables import MoE
from meshwright.platforms import ExpertBlocks

# Numbers of rows that a block may have.
_SIZES = (8, 16, 32, 64, 128, 256, 512)
# The capacity of a pass, in blocks of an even load.
_CAPACITY = 2
# The most blocks of one expert whose gradient of its weight is one product: adding a product to the float32
# sum, which is read and written, takes four times the memory traffic of its weights.
_SUMMED = 4


class Blocks(NamedTuple):
    """The blocks of one device.

    rows: rows a block. most: maximum number of blocks. even: number of blocks under even load.
    capacity: blocks a pass. together: blocks of one expert that share one product for the weight's gradient.
    sums: number of such products under even load. least: minimum number of blocks of an expert: 1 if one
    product multiplies all experts, each with one block; otherwise 0. copied: 1 if a loop copies its operands,
    otherwise 0. Fields are numbers, or arrays with one for each layout.
    """

    rows: Any
    most: Any
    even: Any
    capacity: Any
    together: Any
    sums: Any
    least: Any = 0
    copied: Any = 0

    def filled(self, num_rows: Any) -> Any:
        """Each expert's number of blocks for its `num_rows` rows."""
        used = -(-num_rows // self.rows)
        return used + self.least * (used == 0)

    @property
    def passes(self) -> int:
        """Passes of the worst load."""
        return -(-self.most // self.capacity)


def blocks_of(
    num_tokens: Any, moe: MoE, own_experts: Any, sizes: ExpertBlocks, *, one_pass: bool = False
) -> Blocks:
    """The blocks of a device that has `own_experts` and gathers `num_tokens`.

    A block has 8 to 512 rows. Within these limits an expert's even share, k tokens / E, fills half of
    `sizes.share` blocks to all of them. A token has a row for at most k experts. With up to
    `sizes.whole_tokens` tokens, every expert has one block with a row for each of them, provided that its
    even share is a row or more. one_pass: a pass takes all rows.

    >>> blocks_of(4096, MoE(8, 2, 64), own_experts=8, sizes=ExpertBlocks(share=2))
    Blocks(rows=512, most=23, even=16.0, capacity=23.0, together=2.0, sums=8.0, least=0, copied=0)
    >>> blocks_of(4096, MoE(64, 2, 64), own_experts=1, sizes=ExpertBlocks(share=8))
    Blocks(rows=32, most=128, even=4.0, capacity=8.0, together=4.0, sums=1.0, least=0, copied=0)
    >>> blocks_of(60, MoE(8, 2, 64), own_experts=8, sizes=ExpertBlocks(whole_tokens=128))
    Blocks(rows=64, most=8, even=8.0, capacity=8.0, together=1.0, sums=8.0, least=1, copied=0)
    """
    share = moe.experts_per_token * num_tokens / moe.num_experts
    is_whole = (num_tokens <= sizes.whole_tokens) * (share >= 1)
    doublings = sum(share >= sizes.share * rows for rows in _SIZES[:-1])
    rows = _SIZES[0] * 2**doublings
    num_rows = num_tokens * _smaller(moe.experts_per_token, own_experts)
    # Only experts that have rows have part of a block more.
    most = (num_rows + _smaller(own_experts, num_rows) * (rows - 1)) // rows
    of_expert = -(-share // rows)
    even = _smaller(own_experts * of_expert, most)
    sums = -(-of_expert // _SUMMED)
    capacity = most if one_pass else _smaller(_CAPACITY * even, most)
    together = -(-of_expert // sums)
    of_loop = _smaller(together, capacity), _smaller(own_experts * sums, even), 0, int(sizes.copied)
    blocks = Blocks(rows, most, even, capacity, *of_loop)
    whole_rows = -(-num_tokens // _SIZES[0]) * _SIZES[0]
    whole = Blocks(whole_rows, own_experts, own_experts, own_experts, 1, own_experts, 1)
    return Blocks(*(_chosen(is_whole, *pair) for pair in zip(whole, blocks, strict=True)))


def block_sizes(sizes: ExpertBlocks, layout: Layout) -> ExpertBlocks:
    """The sizes of blocks in the phase of `layout`.

    `whole_tokens` applies in generation only, and only if no token is sent to another node: the number of
    tokens on a device would then depend on the load.
    """
    takes_whole = layout.phase == "generate" and not row_routing(layout).nodes
    return sizes if takes_whole else sizes._replace(whole_tokens=0)


class Crossing(NamedTuple):
    """The tokens that a device sends, in a pass, to the devices of its own place in all nodes.

    num_tokens: tokens of the device. capacity: rows for the experts of one node that a pass completes.
    tokens: maximum tokens to one node in a pass. rows: maximum rows that the node makes of these tokens.
    passes: passes under the worst load. even: tokens to all nodes under even load. Fields are numbers, or
    arrays with a number for each layout.
    """

    num_nodes: Any
    num_tokens: Any
    capacity: Any
    tokens: Any
    rows: Any
    passes: Any
    even: Any


def crossing_of(num_tokens: Any, moe: MoE, num_nodes: Any, *, one_pass: bool = False) -> Crossing:
    """The crossing of a device with `num_tokens`, if a token goes to a node once.

    The capacity is twice the rows of an even load, k tokens / nodes. A pass takes tokens whose last row is
    among these: the first may have begun in the pass before. one_pass: a pass takes all rows.

    >>> crossing_of(4096, MoE(64, 8, 64), 4)
    Crossing(num_nodes=4, num_tokens=4096, capacity=16384, tokens=4096, rows=16391, passes=2, even=14744.0)
    """
    of_token = _smaller(moe.experts_per_token, moe.num_experts // num_nodes)
    most = num_tokens * of_token
    share = -(-moe.experts_per_token * num_tokens // num_nodes)
    capacity = most if one_pass else _smaller(_CAPACITY * share, most)
    passes = -(-most // capacity)
    nodes = nodes_of_token(num_nodes, moe.experts_per_token, moe.num_groups, moe.groups_per_token)
    even = -(-num_tokens * nodes // 1)
    rows = capacity + (of_token - 1) * (capacity < most)
    return Crossing(num_nodes, num_tokens, capacity, _smaller(num_tokens, capacity), rows, passes, even)


def nodes_of_token(num_nodes: Any, num_rows: int, groups: int = 1, chosen: int = 1) -> Any:
    """Number of nodes that a token with `num_rows` rows reaches.

    It is r (1 - (1 - 1/r)^k) for k rows, the mean over random choices of r nodes. r: all nodes, or the nodes
    of the `chosen` groups of experts, out of `groups`, that a token may choose.

    >>> nodes_of_token(4, 2), round(nodes_of_token(8, 8), 2), round(nodes_of_token(8, 8, 8, 4), 2)
    (1.75, 5.25, 3.6)
    """
    nodes_of_groups = num_nodes * chosen / groups
    reached = _smaller(num_nodes, nodes_of_groups + chosen - _smaller(nodes_of_groups, chosen))
    return reached * (1 - (1 - 1 / reached) ** num_rows)


def _chosen(condition: Any, first: Any, other: Any) -> Any:
    """`first` if the condition holds, otherwise `other`; for each layout if they are arrays."""
    return other + condition * (first - other)


def _smaller(first: Any, other: Any) -> Any:
    return first - (first > other) * (first - other)

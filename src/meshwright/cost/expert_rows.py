"""Rows of tokens that experts receive in one pass, under one layout and shape."""

from dataclasses import dataclass, replace
from typing import Any

from meshwright.layout import Layout
from meshwright.layout.grouped import Blocks, Crossing, block_sizes, blocks_of, crossing_of
from meshwright.layout.moves.experts import expert_rows, has_fixed_rows, row_routing
from meshwright.models.config_tables import MoE
from meshwright.notation.mesh import Degrees
from meshwright.platforms import ExpertBlocks


@dataclass(frozen=True)
class ExpertRows:
    """Rows of one expert: C of d[E, C, D], and the part of it that is sent and multiplied.

    capacity: rows that have memory. even: rows by even load, which are sent. sorted: capacity of the device
    that sorts them. multiplied: share of the capacity. local_experts: experts of one device. blocks: of a
    program of static shapes. crossing: tokens that cross to nodes.
    """

    capacity: Any
    even: Any
    sorted: Any
    multiplied: Any = 1.0
    local_experts: Any = 1.0
    blocks: Blocks | None = None
    crossing: Crossing | None = None


NO_EXPERTS = ExpertRows(0.0, 0.0, 0.0)


def expert_rows_of(
    moe: MoE,
    layout: Layout,
    mesh: Degrees,
    num_sequences: Any,
    query_len: int,
    static_blocks: ExpertBlocks | None,
) -> ExpertRows:
    """The rows of an expert. static_blocks: see `Lowering`."""
    is_fixed, capacity = has_fixed_rows(layout), layout.schedule.capacity or 1
    routed = moe.experts_per_token * num_sequences * query_len
    even = routed / moe.num_experts * (capacity if is_fixed else min(1, capacity))
    rows, num_tokens = ExpertRows(even, even, even), num_sequences * query_len
    if row_routing(layout).nodes:
        rows = _across_nodes(rows, moe, layout, mesh, num_tokens, is_static=bool(static_blocks))
    if static_blocks and not is_fixed:
        rows = _of_one_pass(rows, moe, layout, mesh, num_tokens, static_blocks)
    return rows


def _of_one_pass(
    rows: ExpertRows, moe: MoE, layout: Layout, mesh: Degrees, num_tokens: Any, sizes: ExpertBlocks
) -> ExpertRows:
    """The rows with the capacity of one pass."""
    routing = row_routing(layout)
    over = mesh.size(
        tuple(axis for axis in expert_rows(layout, "d").axes_of("C") if axis not in routing.rows)
    )
    local = moe.num_experts / mesh.size(layout.table.axes_of("E"))
    blocks = blocks_of(num_tokens / over, moe, local, block_sizes(sizes, layout), one_pass=layout.spmd_stages)
    return replace(
        rows,
        capacity=blocks.capacity * blocks.rows / local * over,
        multiplied=blocks.even / blocks.capacity,
        local_experts=local,
        blocks=blocks,
    )


def _across_nodes(
    rows: ExpertRows, moe: MoE, layout: Layout, mesh: Degrees, num_tokens: Any, *, is_static: bool
) -> ExpertRows:
    """The rows, and the tokens that cross to nodes."""
    routing = row_routing(layout)
    over = mesh.size(routing.tokens)
    crossing = crossing_of(num_tokens / over, moe, mesh.size(routing.nodes), one_pass=layout.spmd_stages)
    if not is_static:
        crossing = crossing._replace(tokens=crossing.even / crossing.num_nodes, passes=1)
        return replace(rows, crossing=crossing)
    of_nodes = crossing.num_nodes * crossing.rows * over / moe.num_experts
    return replace(rows, sorted=of_nodes, crossing=crossing)

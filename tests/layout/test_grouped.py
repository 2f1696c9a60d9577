"""Blocks of the rows of experts against counting, for the loads that tokens may make."""

import numpy as np
import pytest

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.contractions import contraction_of
from meshwright.layout.grouped import Crossing, block_sizes, blocks_of, crossing_of
from meshwright.layout.moves.experts import (
    from_experts,
    gathered_in_node,
    row_routing,
    sums_from_node,
    sums_from_nodes,
    to_experts,
    to_nodes,
)
from meshwright.models.config_tables import MoE
from meshwright.platforms import CPU, GPU, TPU, Platform


@pytest.mark.parametrize("num_tokens", [1, 7, 64, 1000, 4096])
@pytest.mark.parametrize(("num_experts", "top_k", "own"), [(8, 2, 8), (8, 2, 1), (128, 8, 16), (4, 4, 2)])
def test_no_load_makes_more_blocks_than_there_is_room_for(
    num_tokens: int, num_experts: int, top_k: int, own: int
) -> None:
    moe, random = MoE(num_experts, top_k, 16), np.random.default_rng(num_tokens)
    blocks = blocks_of(num_tokens, moe, own, CPU.expert_blocks)
    loads = []
    for skew in (0.0, 2.0, 20.0):
        scores = random.gumbel(size=(num_tokens, num_experts)) - skew * np.arange(num_experts)
        chosen = np.argsort(-scores, axis=1)[:, :top_k]
        loads.append([np.sum(chosen == expert) for expert in range(own)])
    assert max(sum(-(-load // blocks.rows) for load in each) for each in loads) <= blocks.most
    even = [top_k * num_tokens / num_experts] * own
    assert blocks.even == min(sum(-(-load // blocks.rows) for load in even), blocks.most)
    assert blocks.capacity == min(2 * blocks.even, blocks.most)
    assert (blocks.passes - 1) * blocks.capacity < blocks.most <= blocks.passes * blocks.capacity
    together = blocks_of(num_tokens, moe, own, CPU.expert_blocks, one_pass=True)
    assert (together.passes, together._replace(capacity=blocks.capacity, together=blocks.together)) == (
        1,
        blocks,
    )


def test_many_layouts_have_the_blocks_of_each() -> None:
    moe, tokens = MoE(64, 4, 16), np.array([8.0, 500.0, 4096.0, 1e6])
    found = blocks_of(tokens, moe, np.array([64, 32, 16, 8]), GPU.expert_blocks)
    for place, (num, own) in enumerate(zip(tokens, (64, 32, 16, 8), strict=True)):
        one = blocks_of(float(num), moe, own, GPU.expert_blocks)
        assert [figure[place] for figure in found] == list(one)


def test_few_rows_are_filled_up_where_experts_have_many() -> None:
    """At an even load of 64 rows and more each, at most an eighth of the blocks' rows is filled up."""
    moe = MoE(16, 2, 16)
    for num_tokens in range(512, 9000, 8):
        blocks = blocks_of(num_tokens, moe, 16, CPU.expert_blocks)
        assert 1 <= blocks.even * blocks.rows / (2 * num_tokens) <= 1.25


@pytest.mark.parametrize("platform", [GPU, TPU])
def test_accelerators_read_the_weights_of_an_expert_once_or_twice_where_its_rows_are_few(
    platform: Platform,
) -> None:
    """A block of 512 rows computes longer than it reads; past that weights are read again."""
    moe = MoE(64, 4, 16)
    for num_tokens in (128, 200, 1000, 4096, 8191, 8192, 50_000):
        share = 4 * num_tokens / 64
        blocks = blocks_of(num_tokens, moe, 16, platform.expert_blocks._replace(whole_tokens=0))
        assert blocks.rows <= share
        assert blocks.even / 16 <= 2 if share < 1024 else blocks.rows == 512


def test_an_expert_has_one_block_for_all_tokens_if_they_are_few() -> None:
    """Each block has a row for every token, so one pass takes any load, also that of no rows."""
    moe, sizes = MoE(8, 2, 16), GPU.expert_blocks
    for num_tokens in (4, 60, 128):
        blocks = blocks_of(num_tokens, moe, 4, sizes)
        assert blocks.rows >= num_tokens and (blocks.capacity, blocks.passes, blocks.least) == (4, 1, 1)
        assert list(blocks.filled(np.array([0, 1, num_tokens]))) == [1, 1, 1]
    # Three tokens choose six rows of eight experts, so that one product of all would read unused weights.
    for num_tokens in (3, 129):
        blocks = blocks_of(num_tokens, moe, 4, sizes)
        assert blocks.least == 0 and list(blocks.filled(np.array([0, 1]))) == [0, 1]


def test_experts_have_whole_blocks_in_generation_only() -> None:
    layout, sizes = Layout.parse("tensor=8"), GPU.expert_blocks
    assert block_sizes(sizes, layout.at("generate")) == sizes
    for other in (
        layout,
        layout.at("prefill"),
        Layout.parse("fsdp=8,expert=4,expert_nodes=2,dispatch=once").at("generate"),
    ):
        assert block_sizes(sizes, other).whole_tokens == 0


def test_many_devices_of_experts_need_no_room_for_the_worst_load() -> None:
    """gpt-oss over 64 devices, two experts each: an even share is 1/32 of all rows that could come."""
    blocks = blocks_of(64 * 8192, MoE(128, 4, 2880), 2, GPU.expert_blocks)
    assert blocks.most * blocks.rows >= 64 * 8192 * 2
    assert blocks.capacity * blocks.rows == 2 * 8192 * 4
    assert blocks.passes == 17


def test_what_grouped_products_cannot_be_combined_with_is_said() -> None:
    with pytest.raises(LayoutError, match=r"capacity = 1.25 .*with grouped = true .*fits: one of the two"):
        Layout.parse("fsdp=2,grouped=true,capacity=1.25")


@pytest.mark.parametrize(
    ("text", "exchanged", "met", "rows", "repeated", "nodes"),
    [
        ("fsdp=8", "", "", "", "", ""),
        ("fsdp=8,expert=4", "expert", "", "", "", ""),
        ("fsdp=8,expert=4,grouped=true", "", "expert", "", "", ""),
        # Without an axis of experts nothing travels by row, grouped or not.
        ("fsdp=2,tensor=2,sequence_parallel=true", "", "tensor", "", "", ""),
        ("fsdp=4,expert=4,tensor=2,sequence_parallel=true", "expert", "", "tensor", "", ""),
        ("fsdp=4,expert=4,tensor=2", "expert", "", "", "tensor", ""),
        ("fsdp=2,expert=4,tensor=2", "expert", "", "", "tensor", ""),
        ("fsdp=2,expert=4,tensor=2,sequence_parallel=true", "expert tensor", "", "", "", ""),
        ("context=2,fsdp=4,expert=4", "expert", "", "", "", ""),
        ("fsdp=8,expert=4,expert_nodes=2,dispatch=once", "expert", "", "", "", "expert_nodes"),
        ("fsdp=4,expert=2,expert_nodes=2,tensor=2,dispatch=once", "", "", "", "tensor", "expert_nodes"),
        # All devices of a node have columns of its experts.
        (
            "fsdp=4,expert=2,expert_nodes=2,tensor=2,sequence_parallel=true,dispatch=once",
            "",
            "tensor",
            "",
            "",
            "expert_nodes",
        ),
    ],
)
def test_axes_on_the_way_to_experts(
    text: str, exchanged: str, met: str, rows: str, repeated: str, nodes: str
) -> None:
    found = row_routing(Layout.parse(text))
    assert [" ".join(axes) for axes in found[3:]] == [exchanged, met, rows, repeated, nodes]


def test_rows_travel_by_collectives_of_the_notation() -> None:
    layout = Layout.of(fsdp=4, expert=2, tensor=2, sequence_parallel=True)
    into, out_of = contraction_of(layout, "w", "ECD,EDM->ECM"), contraction_of(layout, "w", "ECM,EMD->ECD")
    steps = (to_experts(layout, "d"), into.lhs_reshard, out_of.out_reshard, from_experts(layout, "y"))
    assert [str(step) for one in steps for step in one.forward] == [
        "AllToAll_{expert} d[E, C_{fsdp,tensor,expert}, D] -> d[E_expert, C_{fsdp,tensor}, D]",
        "AllGather_{tensor} x[E_expert, C_{fsdp,tensor}, D] -> x[E_expert, C_fsdp, D]",
        "ReduceScatter_{tensor} w_out[E_expert, C_fsdp, D]{U_tensor} -> w_out[E_expert, C_{fsdp,tensor}, D]",
        "AllToAll_{expert} y[E_expert, C_{fsdp,tensor}, D] -> y[E, C_{fsdp,tensor,expert}, D]",
    ]


def test_tokens_that_cross_once_do_so_before_their_rows_travel() -> None:
    layout = Layout.of(fsdp=8, expert=4, expert_nodes=2, tensor=2, sequence_parallel=True, dispatch="once")
    there = (to_nodes(layout, "x"), gathered_in_node(layout, "x"), to_experts(layout, "d"))
    back = (from_experts(layout, "y"), sums_from_node(layout, "y"), sums_from_nodes(layout, "y"))
    assert [str(step) for one in (*there, *back) for step in one.forward] == [
        "AllToAll_{expert_nodes} x[E, C_{fsdp,tensor,expert,expert_nodes}, D] -> "
        "x[E_expert_nodes, C_{fsdp,tensor,expert}, D]",
        "AllToAll_{expert} d[E_expert_nodes, C_{fsdp,tensor,expert}, D] -> "
        "d[E_{expert_nodes,expert}, C_{fsdp,tensor}, D]",
        "AllToAll_{expert} y[E_{expert_nodes,expert}, C_{fsdp,tensor}, D] -> "
        "y[E_expert_nodes, C_{fsdp,tensor,expert}, D]",
        "AllToAll_{expert_nodes} y[E_expert_nodes, C_{fsdp,tensor,expert}, D] -> "
        "y[E, C_{fsdp,tensor,expert,expert_nodes}, D]",
    ]
    layout = layout.replace(expert=2)
    sums = (gathered_in_node(layout, "x"), sums_from_node(layout, "y"))
    assert [str(step) for one in sums for step in one.forward] == [
        "AllGather_{tensor} x[E_expert_nodes, C_{fsdp,tensor}, D] -> x[E_expert_nodes, C_fsdp, D]",
        "ReduceScatter_{tensor} y[E_expert_nodes, C_fsdp, D]{U_tensor} -> "
        "y[E_expert_nodes, C_{fsdp,tensor}, D]",
    ]


@pytest.mark.parametrize(
    ("num_tokens", "moe", "num_nodes", "expected"),
    [
        # Two nodes: a round has room for all, k rows of each token.
        (100, MoE(8, 2, 64), 2, Crossing(2, 100, 200, 100, 200, 1, 150)),
        # Each of eight has one expert: 25 rows by even load, and room for twice as many.
        (100, MoE(8, 2, 64), 8, Crossing(8, 100, 50, 50, 50, 2, 188)),
        # 8 of 64 experts over 16 nodes of four: 50 rows by even load, and a last token with three more.
        (100, MoE(64, 8, 64), 16, Crossing(16, 100, 100, 100, 103, 4, 646)),
    ],
)
def test_a_round_of_what_crosses_has_room_for_twice_an_even_load(
    num_tokens: int, moe: MoE, num_nodes: int, expected: Crossing
) -> None:
    assert crossing_of(num_tokens, moe, num_nodes) == expected
    assert crossing_of(num_tokens, moe, num_nodes, one_pass=True).passes == 1


def test_the_short_form_keeps_the_word_and_its_rules() -> None:
    text = "fsdp=2,tensor=2,sequence_parallel=true,grouped=true,remat=none"
    layout = Layout.parse(text)
    assert str(layout) == text
    assert Layout.from_dict(layout.to_dict()).form == layout.form
    plain = Layout.parse("fsdp=2,tensor=2,sequence_parallel=true")
    assert plain.replace(grouped=True) == layout
    assert layout.replace(grouped=False) == plain

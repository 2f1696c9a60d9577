"""Blocks of attention, against counts of positions one by one."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.layout.attention_kernels import BLOCK, SMALL_BLOCK, attention_block, visible_pairs
from meshwright.models.layer_kinds import Window


@given(st.integers(1, 20_000))
def test_blocks_are_alike_and_of_an_even_number_two_at_least(positions: int) -> None:
    block = attention_block(positions)
    assert positions % block == 0
    assert positions % 2 or positions // block >= 2


@given(st.integers(1, 40))
def test_there_are_eight_blocks_at_least_of_many_positions(pieces: int) -> None:
    assert attention_block(8 * BLOCK * pieces) == BLOCK
    assert attention_block(8 * SMALL_BLOCK * pieces) in range(SMALL_BLOCK, SMALL_BLOCK * min(pieces, 4) + 1)


@given(st.integers(1, 6), st.integers(1, 6), st.none() | st.builds(Window, st.integers(1, 40), st.booleans()))
def test_visible_pairs_are_those_with_a_query_that_sees_a_key(
    num_blocks: int, block: int, window: Window | None
) -> None:
    length = num_blocks * block
    sees = {
        (query // block, key // block)
        for query in range(length)
        for key in range(query + 1)
        if window is None or key >= window.first(query)
    }
    assert visible_pairs(num_blocks, block, window) == len(sees)

"""The lengths of attention over a cache of pages (nn/paged.py): of pages and rows, and what a row meets.

A row is some consecutive tokens of one sequence. On CPUs it meets the pages of its sequence one by one, from
the first that it sees to its own; elsewhere whole tables of pages are gathered for it.
"""

from functools import lru_cache
from math import lcm

# Positions of a page, and queries of a row of a prompt.
DEFAULT_PAGE, DEFAULT_BLOCK = 64, 64
# Where attention goes page by page, tables are not gathered for each row, and short ones waste less.
_BLOCK_OF_CPU = 16
# Pages that one trip of a long row's loop attends to, since a trip has a cost of its own, and of these the
# pages that one product reads: so many stay in a core's cache.
TOGETHER, SIDE_BY_SIDE = 8, 2


def block_of(platform: str) -> int:
    """Queries of a row of a prompt on devices of this platform, as JAX calls it."""
    return _BLOCK_OF_CPU if platform == "cpu" else DEFAULT_BLOCK


def divided_block(block: int, num_shards: int) -> int:
    """Positions of a block of prompts that are dealt to so many devices, two pieces to each.

    >>> divided_block(64, 1), divided_block(64, 4), divided_block(16, 3)
    (64, 64, 48)
    """
    return lcm(block, 2 * num_shards) if num_shards > 1 else block


def page_of(positions: int, window: int | None) -> int:
    """Positions of a page of sequences of so many, of which the widest layer with a window sees `window`."""
    return min(DEFAULT_PAGE, positions, window or positions)


@lru_cache(maxsize=1024)
def pages_met(queries: int, positions: int, block: int, page: int, window: int | None) -> tuple[int, ...]:
    """Pages that each row of `block` queries meets on CPUs, of the last `queries` of so many positions.

    >>> pages_met(64, 64, 16, 16, None), pages_met(64, 64, 16, 16, 16), pages_met(1, 64, 1, 16, 20)
    ((1, 2, 3, 4), (1, 2, 2, 2), (2,))
    """
    found = []
    for begin in range(positions - queries, positions, block):
        end = min(begin + block, positions)
        first = 0 if window is None else max(begin - window + 1, 0) // page
        found.append(-(-end // page) - first)
    return tuple(found)

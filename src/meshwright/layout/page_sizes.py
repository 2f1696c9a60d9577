"""Pages of a cache: page size, rows of prompts, and the pages that a row reads.

A row is a number of consecutive tokens of one sequence.
"""

from functools import lru_cache
from math import lcm
from typing import Any

from meshwright.errors import PlanError
from meshwright.layout.layout import Layout
from meshwright.layout.workload import DEFAULT_CHUNK
from meshwright.models.config import ModelConfig
from meshwright.models.count import widest_window
from meshwright.models.layer_kinds import Window
from meshwright.units import Numeric

# Positions of a page.
DEFAULT_PAGE = 64
_MIN_PAGES = 4  # of a table that is worth a program
# Pages per turn of a long row's loop, since each turn has a fixed cost; and pages per product, which fit the
# cache of a core.
TOGETHER, SIDE_BY_SIDE = 8, 2

# Positions, of all queries together, whose index's keys or chosen latents are gathered at a time.
KEYS_AT_ONCE = 1 << 17


def divided_block(block: int, num_shards: int) -> int:
    """Queries of a row that divides over `num_shards` devices, two pieces each.

    >>> divided_block(64, 1), divided_block(64, 4), divided_block(16, 3)
    (64, 64, 48)
    """
    return lcm(block, 2 * num_shards) if num_shards > 1 else block


def chunk_of(layout: Layout, context: int, asked: int | None = None) -> int:
    """Maximum prompt tokens of a server's step: as requested, or a whole prompt if devices split prompts.

    Raises PlanError if devices split prompts and fewer tokens are requested.
    """
    if not layout.rules.prompt_axes:
        return DEFAULT_CHUNK if asked is None else asked
    if asked is not None and asked < context:
        over = "·".join(layout.rules.prompt_axes)
        raise PlanError(
            f"a chunk of {asked} tokens cannot be: {over} = {layout.num_prompt_shards} splits whole prompts, "
            f"of up to {context} tokens; fits: no --chunk, or {over} = 1"
        )
    return context


def page_of(config: ModelConfig, positions: int) -> int:
    """Positions of a page for sequences of `positions` tokens.

    >>> from meshwright.models.presets import PRESETS
    >>> page_of(PRESETS["deepseek-v4-flash"], 4096), page_of(PRESETS["llama-3-8b"], 48)
    (128, 48)
    """
    window = widest_window(config)
    return whole_page(config, min(DEFAULT_PAGE, positions, window.size if window else positions))


def whole_page(config: ModelConfig, page_size: int) -> int:
    """The smallest multiple of `page_size` that a whole number of compressed keys fills.

    >>> from meshwright.models.presets import PRESETS
    >>> whole_page(PRESETS["deepseek-v4-flash"], 64), whole_page(PRESETS["llama-3-8b"], 64)
    (128, 64)
    """
    return lcm(page_size, *(layer.compressed for layer in config.each_variant if layer.compressed))


def first_page(position: int, page: int, window: Window | None) -> int:
    """The page with the first position that a query sees.

    >>> first_page(100, 16, None), first_page(100, 16, Window(32)), first_page(100, 16, Window(32, True))
    (0, 4, 6)
    """
    return 0 if window is None else max(window.first(position), 0) // page


def num_state_entries(num_slots: Numeric, num_snapshots: Numeric = 0, num_drafts: int = 0) -> Any:
    """Entries of a replica's states, in this order: slots, padding rows, snapshots, drafts of each slot.

    A slot's own entry holds the state after its last token. A step that verifies drafts keeps the state after
    each of them too, so that the next step starts from the last right one.

    >>> num_state_entries(4), num_state_entries(4, num_snapshots=4, num_drafts=2)
    (5, 17)
    """
    return num_slots * (1 + num_drafts) + 1 + num_snapshots


def compiled_sizes(largest: int) -> list[int]:
    """Numbers of rows or blocks of the compiled programs: powers of two below `largest`, and `largest`.

    >>> compiled_sizes(6), compiled_sizes(1)
    ([1, 2, 4, 6], [1])
    """
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def most_pages(window: Window, queries: int, page: int) -> int:
    """Maximum number of pages with positions that consecutive queries see through a window.

    page: positions of one page. The first position may be anywhere in a page.

    >>> most_pages(Window(128), 1, 128), most_pages(Window(20), 16, 16)
    (2, 4)
    """
    return (window.size + queries + page - 3) // page + 1


def table_widths(max_pages: int) -> list[int]:
    """Pages of the tables of short sequences: a sixteenth and a quarter of `max_pages`.

    >>> table_widths(64), table_widths(16), table_widths(4)
    ([4, 16], [4], [])
    """
    return [pages for pages in (max_pages // 16, max_pages // 4) if pages >= _MIN_PAGES]


@lru_cache(maxsize=1024)
def pages_read(queries: int, positions: int, block: int, page: int, window: Window | None) -> tuple[int, ...]:
    """Pages that each row of `block` queries reads, for the last `queries` of `positions` tokens.

    >>> pages_read(64, 64, 16, 16, None), pages_read(64, 64, 16, 16, Window(16))
    ((1, 2, 3, 4), (1, 2, 2, 2))
    >>> pages_read(1, 64, 1, 16, Window(20)), pages_read(1, 64, 1, 16, Window(20, chunked=True))
    ((2,), (1,))
    """
    pages = []
    for begin in range(positions - queries, positions, block):
        end = min(begin + block, positions)
        pages.append(-(-end // page) - first_page(begin, page, window))
    return tuple(pages)

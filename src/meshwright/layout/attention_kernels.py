"""Attention on a platform: which kernels take it, and its blocks of queries and keys.

Without a kernel for whole sequences XLA's own operations compute scores one block at a time. Without one for
a cache, each row reads the used pages of its sequence one after another (`Platform.page_by_page`) or a
gathered table of all pages.
"""

from functools import cache, lru_cache
from math import ceil, log

from meshwright.hardware.topology import Hardware
from meshwright.layout.layout import Layout
from meshwright.layout.moves.attention import attention_layout, uses_ring
from meshwright.models.config import ModelConfig
from meshwright.models.count import cache_windows
from meshwright.models.layer_kinds import Window
from meshwright.platforms.platform import Attention, Platform
from meshwright.platforms.tpu import LANES

# The maximum size of a block of queries or keys, and the maximum for short sequences.
BLOCK, SMALL_BLOCK = 512, 128


def why_no_flash(
    platform: Platform, capability: float | None, config: ModelConfig, layout: Layout, seq_len: int
) -> str | None:
    """Why no flash kernel runs attention over `seq_len` tokens; None if one does.

    capability: compute capability of an NVIDIA GPU; None for other chips.
    """
    if platform.flash is None:
        return f"{platform.plural} have none"
    split = attention_layout(layout).activation("q", "BTNH").axes_of("T")
    return platform.flash.why_not(
        Attention(
            head_dim=config.d_head,
            compute_dtype=layout.precision.compute_dtype,
            kv_dtype=layout.precision.cache_dtype,
            indexed=config.reads_some_keys,
            alibi=config.positions == "alibi",
            sinks=config.attention_sinks,
            softcap=config.attention_softcap is not None,
            chunk=config.attention_chunk if has_chunks(config, seq_len) else None,
            split=split,
            piece=seq_len // (2 * layout.mesh.size(split)) if split else seq_len,
            ring=uses_ring(layout),
            capability=capability,
        )
    )


def lacks_flash(config: ModelConfig, hardware: Hardware, layout: Layout, seq_len: int) -> str | None:
    """`why_no_flash` on `hardware`; None for other software, assumed to have kernels for everything."""
    chip = hardware.chip
    if not hardware.software.is_ours:
        return None
    return why_no_flash(chip.platform, chip.compute_capability, config, layout, seq_len)


def why_no_paged(platform: Platform, config: ModelConfig, layout: Layout, queries: int = 1) -> str | None:
    """Why no kernel attends to a cache in rows of `queries`; None if one does."""
    if platform.paged is None:
        return f"{platform.plural} have none"
    kept = layout.activation("k", "BKSH")
    return platform.paged.why_not(
        Attention(
            head_dim=config.d_head,
            compute_dtype=layout.precision.compute_dtype,
            kv_dtype=layout.precision.cache_dtype,
            num_kv_heads=config.num_kv_heads // layout.mesh.size(kept.axes_of("K")),
            indexed=config.reads_some_keys,
            alibi=config.positions == "alibi",
            sinks=config.attention_sinks,
            latents=config.mla is not None,
            windows=any(cache_windows(config)),
            chunk=config.attention_chunk,
            split=kept.axes_of("S"),
            queries=queries,
        )
    )


def has_prompt_programs(platform: Platform, layout: Layout) -> bool:
    """Whether whole prompts have programs of their own, which read no pages.

    Otherwise a prompt is computed in rows over its pages, which takes half of the time on CPUs. Programs
    that split the positions of a prompt over devices are always of whole prompts.
    """
    return not platform.page_by_page or bool(layout.rules.prompt_axes)


@cache
def attention_block(positions: int) -> int:
    """Queries or keys of a block, for XLA's operations on the `positions` of a device.

    Blocks have equal sizes, so that they divide the positions. An even number of positions has at least two
    blocks, one for each half of a zigzag. A block is about an eighth of the positions, so that it needs
    little memory compared with the device's arrays, and between SMALL_BLOCK and BLOCK if sizes permit.

    >>> [attention_block(positions) for positions in (64, 1024, 4096, 1280, 1000, 101)]
    [32, 128, 512, 160, 125, 101]
    """
    whole = positions // 2 if positions % 2 == 0 else positions
    wanted = min(max(positions // 8, SMALL_BLOCK), BLOCK)
    sizes = [size for size in range(1, min(whole, 4 * BLOCK)) if whole % size == 0]
    return min([*sizes, whole], key=lambda size: abs(log(size / wanted)))


def has_chunks(config: ModelConfig, seq_len: int) -> bool:
    """Whether some layer attends to chunks that are shorter than the sequence."""
    return config.attention_chunk is not None and config.attention_chunk < seq_len


@lru_cache(maxsize=1024)
def visible_pairs(num_blocks: float, block: int, window: Window | None) -> float:
    """Blocks of scores with a visible entry, out of num_blocks^2.

    Queries and keys have the same positions. The mask is causal, within `window` if it is given.

    >>> visible_pairs(4, 32, None), visible_pairs(4, 32, Window(32)), visible_pairs(4, 32, Window(1))
    (10.0, 7.0, 4.0)
    >>> visible_pairs(5, 32, Window(64, chunked=True)), visible_pairs(4, 32, Window(48, chunked=True))
    (7.0, 6.0)
    """
    if window and window.chunked and window.size < num_blocks * block:
        # If a chunk begins within a block, the block's first query sees the previous chunk.
        first_blocks = (window.first(number * block) // block for number in range(ceil(num_blocks)))
        visible = sum(number + 1 - first for number, first in enumerate(first_blocks))
        return visible * num_blocks / ceil(num_blocks)
    reach = num_blocks - 1
    if window and not window.chunked:
        reach = min(reach, -(-(window.size - 1) // block))
    return (reach + 1) * (num_blocks - reach / 2)


@lru_cache(maxsize=1024)
def visible_share(length: int, window: Window) -> float:
    """The share of pairs of a query block and a key block with a visible key, if entries follow the keys.

    >>> visible_share(64, Window(64, compressed=4)), visible_share(4096, Window(128, compressed=4))
    (1.0, 0.3375)
    """
    num_keys = length + window.entries(length)
    of_queries, of_keys = attention_block(length), attention_block(num_keys)
    visible = 0
    for start in range(0, num_keys, of_keys):
        seen: set[int] = set()
        if start < length:
            last = window.last(min(start + of_keys, length) - 1)
            seen |= {*range(start // of_queries, min(last, length - 1) // of_queries + 1)}
        if start + of_keys > length:
            first = (max(start, length) - length + 1) * window.compressed - 1
            seen |= {*range(first // of_queries, length // of_queries)}
        visible += len(seen)
    return visible / (length // of_queries) / (num_keys // of_keys)


def window_block(window: Window) -> int:
    """Queries and keys of a block of splash attention under a window.

    Blocks are at most as wide as the window, since the kernel computes whole blocks.

    >>> window_block(Window(128)), window_block(Window(300)), window_block(Window(4096))
    (128, 256, 512)
    """
    return max(LANES, min(BLOCK, 1 << (window.size.bit_length() - 1)))

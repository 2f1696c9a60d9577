"""Lengths of attention over a cache of pages: page size, row length, and the positions that a row reads.

A row is some consecutive tokens of one sequence. On CPUs, and in kernels, it meets the pages of its sequence
one by one, from the first that it sees to its own; elsewhere whole tables of pages are gathered for it.
"""

from functools import lru_cache
from math import lcm

from meshwright.dtypes import dtype_bytes
from meshwright.errors import PlanError
from meshwright.layout.flash import TPU_LANES
from meshwright.layout.layout import Layout
from meshwright.layout.workload import DEFAULT_CHUNK
from meshwright.models.config import ModelConfig, Window
from meshwright.models.count import cache_windows

# Positions of a page, and queries of a row of a prompt.
DEFAULT_PAGE, DEFAULT_BLOCK = 64, 64
# Where attention goes page by page, tables are not gathered for each row, and short ones waste less.
_BLOCK_OF_CPU = 16
# Pages that one trip of a long row's loop attends to, since a trip has a cost of its own, and of these the
# pages that one product reads: so many stay in a core's cache.
TOGETHER, SIDE_BY_SIDE = 8, 2
# Of keys and queries in the TPU's kernel.
_TPU_DTYPES = ("bf16", "f32")


def block_of(platform: str) -> int:
    """Queries of a row of a prompt on devices of this platform, as JAX calls it."""
    return _BLOCK_OF_CPU if platform == "cpu" else DEFAULT_BLOCK


def divided_block(block: int, num_shards: int) -> int:
    """Positions of a block of prompts that are dealt to so many devices, two pieces to each.

    >>> divided_block(64, 1), divided_block(64, 4), divided_block(16, 3)
    (64, 64, 48)
    """
    return lcm(block, 2 * num_shards) if num_shards > 1 else block


def chunk_of(layout: Layout, context: int, asked: int | None = None) -> int:
    """Most prompt tokens of a server's step: as asked, or a whole prompt where devices have parts of one.

    Raises PlanError where fewer are asked for there: prefill by position is of whole prompts.
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


def attends_to_whole_prompts(platform: str, layout: Layout) -> bool:
    """Whether whole prompts have programs of their own on this platform, which read no page.

    They have where there are kernels, and where devices have parts of a prompt. Else on CPUs blocks over
    pages take half of the time.
    """
    return platform != "cpu" or bool(layout.rules.prompt_axes)


def why_no_paged_kernel(kind: str, config: ModelConfig, layout: Layout, queries: int = 1) -> str | None:
    """Why rows of so many queries attend to their pages without a kernel on chips of a kind; None if by one.

    kind: tpu, gpu or cpu. The kernels are JAX's: ragged paged attention on TPUs, for which key and value of
    each head lie side by side, and paged attention on GPUs, of one query a row, which sees all before it.
    """
    if kind == "cpu":
        return "CPUs have none"
    kept, width, dtype = layout.activation("k", "BKSH"), config.d_head, layout.precision.cache_dtype
    reasons = {
        "the model has latents": config.mla is not None,
        "the model has ALiBi": config.positions == "alibi",
        "the model has attention sinks": config.attention_sinks,
        f"positions are split over {', '.join(kept.axes_of('S'))}": bool(kept.axes_of("S")),
    }
    if kind == "tpu":
        computed = layout.precision.compute_dtype
        heads = config.num_kv_heads // layout.mesh.size(kept.axes_of("K"))
        tiles = 2 * heads * dtype_bytes(dtype) / 4
        reasons |= {
            "layers see chunks of positions": config.attention_chunk is not None,
            f"keys are in {dtype}, queries in {computed}": dtype != computed,
            f"it takes {' and '.join(_TPU_DTYPES)}, not {dtype}": dtype not in _TPU_DTYPES,
            # Its strided loads are of one row of lanes (jax 0.10.2).
            f"its heads are of {TPU_LANES}, the model's of {width}": width != TPU_LANES,
            f"{heads} KV heads on a device do not fill tiles": tiles not in (1, 2, 4) and tiles % 8 != 0,
        }
    else:
        reasons |= {
            f"it takes rows of one query, not of {queries}": queries > 1,
            "layers have windows": any(cache_windows(config)),
            f"heads of {width} are no power of two": width & (width - 1) != 0,
        }
    return next((reason for reason, holds in reasons.items() if holds), None)


def page_of(positions: int, window: Window | None) -> int:
    """Positions of a page of sequences of so many, of which the widest layer with a window sees `window`."""
    return min(DEFAULT_PAGE, positions, window.size if window else positions)


def first_page(position: int, page: int, window: Window | None) -> int:
    """The page of the first position that a query sees.

    >>> first_page(100, 16, None), first_page(100, 16, Window(32)), first_page(100, 16, Window(32, True))
    (0, 4, 6)
    """
    return 0 if window is None else max(window.first(position), 0) // page


@lru_cache(maxsize=1024)
def pages_met(queries: int, positions: int, block: int, page: int, window: Window | None) -> tuple[int, ...]:
    """Pages that each row of `block` queries meets on CPUs, of the last `queries` of so many positions.

    >>> pages_met(64, 64, 16, 16, None), pages_met(64, 64, 16, 16, Window(16))
    ((1, 2, 3, 4), (1, 2, 2, 2))
    >>> pages_met(1, 64, 1, 16, Window(20)), pages_met(1, 64, 1, 16, Window(20, chunked=True))
    ((2,), (1,))
    """
    found = []
    for begin in range(positions - queries, positions, block):
        end = min(begin + block, positions)
        found.append(-(-end // page) - first_page(begin, page, window))
    return tuple(found)

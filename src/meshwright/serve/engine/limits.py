"""Sizes of a runner: slots, pages and tokens of a step, and the times of its steps. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.fit import num_replicas
from meshwright.layout.paged import DEFAULT_BLOCK, DEFAULT_PAGE, block_of, chunk_of, divided_block
from meshwright.layout.workload import DEFAULT_CHUNK
from meshwright.models.config import ModelConfig, Window
from meshwright.models.count import even_context, widest_window

# Of prompts, in a step by which they are timed.
_TIMED_TOKENS = 64


def on_each(num_replicas: int) -> str:
    """Words behind what each replica has, where there are several."""
    return f" on each of {num_replicas} replicas" if num_replicas > 1 else ""


def compiled_sizes(most: int) -> list[int]:
    """The numbers of rows or blocks that programs have: powers of two below `most`, and `most`.

    >>> compiled_sizes(6), compiled_sizes(1)
    ([1, 2, 4, 6], [1])
    """
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


@dataclass(frozen=True)
class Limits:
    """How much a runner holds, in sequences, positions and tokens.

    num_slots: sequences that run at once, split evenly over num_replicas, in order. context: most tokens of
    one. page_size: positions of a page. num_pages: of a replica's cache.
    chunk: most prompt tokens of a replica's step, of which each sequence takes whole blocks of `block`.
    window: of the layers that have pages of their own, num_window_pages of a replica, since they keep no more
    positions; None where all layers share pages. num_host_pages: of a replica in the host's memory, for what
    is evicted from the cache. even_context: the position behind which attention takes a token as long as its
    products do; a step takes fewer tokens of a prompt that are far behind it. multiplies_padding: whether
    rows of a step that nobody holds take as long as others, but for attention.
    """

    num_slots: int
    context: int
    page_size: int
    num_pages: int
    chunk: int
    block: int
    num_replicas: int = 1
    window: Window | None = None
    num_window_pages: int = 0
    num_host_pages: int = 0
    even_context: float = inf
    multiplies_padding: bool = True

    @property
    def slots_per_replica(self) -> int:
        return self.num_slots // self.num_replicas

    @classmethod
    def of_layout(
        cls,
        config: ModelConfig,
        layout: Layout,
        platform: str,
        num_slots: int,
        context: int,
        *,
        num_pages: int | None = None,
        page_size: int = DEFAULT_PAGE,
        chunk: int | None = None,
        block: int | None = None,
        keeps_windows: bool = True,
    ) -> "Limits":
        """The limits of a runner of this layout on devices of a platform, as `of` has them.

        chunk: most prompt tokens of a step, as `chunk_of` has it. block: the platform's where None.
        keeps_windows: whether layers with a window keep no more pages than it needs.
        """
        at, longest = layout.at("generate"), chunk_of(layout, context, chunk)
        replicas = num_replicas(at, config)
        return cls.of(
            num_slots,
            context,
            num_replicas=replicas,
            num_pages=num_pages,
            page_size=page_size,
            # The chunks of replicas that share a shard of the batch are computed by all of its devices.
            chunk=max(1, longest // (replicas // at.num_batch_shards)),
            block=divided_block(block or block_of(platform), layout.num_prompt_shards),
            window=widest_window(config) if keeps_windows else None,
            even_context=even_context(config, context),
        )

    @classmethod
    def of(
        cls,
        num_slots: int,
        context: int,
        *,
        num_replicas: int = 1,
        num_pages: int | None = None,
        page_size: int = DEFAULT_PAGE,
        chunk: int = DEFAULT_CHUNK,
        block: int = DEFAULT_BLOCK,
        window: Window | None = None,
        even_context: float = inf,
    ) -> "Limits":
        """The limits of a runner: whole slots and pages a replica, chunks of whole blocks within a context.

        num_pages: in all, as many as all slots can fill where None. window: the widest of the model's layers,
        if any; their pages are as many as all slots need at once, where these are fewer. Raises PlanError
        where those of a replica are too few for one context.
        """
        of_context = -(-context // page_size)
        num_slots = num_slots // num_replicas * num_replicas
        num_pages = num_slots * of_context if num_pages is None else num_pages
        least = of_context * num_replicas
        if num_pages < least:
            raise PlanError(
                f"a cache of {num_pages} pages of {page_size} positions is too small for a context of "
                f"{context}{on_each(num_replicas)}; "
                f"fits: {least} pages or more, {least * page_size} positions"
            )
        block = min(block, 1 << (context - 1).bit_length())
        chunk = min(-(-chunk // block), -(-context // block)) * block
        found = cls(
            num_slots,
            context,
            page_size,
            num_pages // num_replicas,
            chunk,
            block,
            num_replicas,
            even_context=even_context,
        )
        if window is None:
            return found
        # So many positions in a row lie on a page more than they fill, and a step adds a chunk to one window.
        of_window = (window.size + page_size - 2) // page_size + 1
        needed = found.slots_per_replica * of_window + -(-chunk // page_size)
        return replace(found, window=window, num_window_pages=needed) if needed < found.num_pages else found

    def max_step_tokens(self, num_drafts: int) -> int:
        """Most tokens of a step, of all replicas: their chunks, and a token and its drafts of every slot."""
        return self.chunk * self.num_replicas + self.num_slots * (1 + num_drafts)

    @cached_property
    def block_counts(self) -> list[int]:
        """The numbers of blocks of a replica's prompts that programs have."""
        return compiled_sizes(self.chunk // self.block)

    def prompt_time(self, start: int, count: int) -> float:
        """The time of so many tokens of a prompt from position `start` on, in tokens without attention."""
        return count * (1 + (start + count / 2) / self.even_context)

    @cached_property
    def longest_prompts(self) -> float:
        """The most time of the prompts of a replica's step: twice that of a chunk at the beginning of one.

        Far behind it fewer tokens fit, since attention to all before them takes longer.
        """
        return 2 * self.prompt_time(0, self.chunk)

    @property
    def pages_per_context(self) -> int:
        return -(-self.context // self.page_size)


class IdleSeconds(NamedTuple):
    """Seconds of steps of an engine that does nothing else.

    generate: of steps for so many sequences of each replica, in order up to all slots, with sampling and
    without attention.
    prompt_token: that one more token of a prompt takes beside all of them, at the prompt's beginning.
    """

    generate: tuple[tuple[int, float], ...]
    prompt_token: float

    @classmethod
    def of(cls, generate: Sequence[tuple[int, float]], mixed: float, limits: Limits) -> "IdleSeconds":
        """The seconds by measured steps: those that generate, and one of all slots beside `timed_blocks`."""
        num_tokens = timed_blocks(limits) * limits.block
        return cls(tuple(generate), max(mixed - generate[-1][1], 0.0) / num_tokens)


def timed_blocks(limits: Limits) -> int:
    """The blocks of a replica's step that tells what a token of a prompt takes: no more than it needs to."""
    sizes = limits.block_counts
    return next((size for size in sizes if size * limits.block >= _TIMED_TOKENS), sizes[-1])

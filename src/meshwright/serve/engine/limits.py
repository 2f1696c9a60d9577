"""Sizes of a runner: slots, pages and tokens of a step, and the times of its steps. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from meshwright.errors import PlanError, RequestError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import num_replicas
from meshwright.layout.page_sizes import (
    DEFAULT_PAGE,
    chunk_of,
    compiled_sizes,
    divided_block,
    num_state_entries,
    whole_page,
)
from meshwright.layout.workload import DEFAULT_CHUNK
from meshwright.models.config import ModelConfig
from meshwright.models.count import even_context, num_states, widest_window
from meshwright.models.layer_kinds import Window
from meshwright.platforms.platform import PROMPT_ROWS, Platform

_TIMED_TOKENS = 64  # prompt tokens of the timed step


def on_each(num_replicas: int) -> str:
    """The end of an error about each replica, if there are several."""
    return f" on each of {num_replicas} replicas" if num_replicas > 1 else ""


def check_length(num_tokens: int, context: int, longest: int, param: str = "prompt") -> None:
    """Raise RequestError if a prompt of more than `longest` tokens was sent in the field `param`."""
    if num_tokens > longest:
        raise RequestError(
            f"{'the prompt' if param == 'prompt' else param} has {num_tokens} tokens, but the context holds "
            f"{context}; send at most {longest}",
            param=param,
            code="context_length_exceeded",
        )


@dataclass(frozen=True)
class Limits:
    """The capacity of a runner, in sequences, positions and tokens.

    num_slots: sequences that run at once, split evenly over num_replicas, in order.
    context: maximum tokens per sequence, prompt plus answer. page_size: positions of a page.
    num_pages: of each replica's cache. num_host_pages: of each replica's part of host memory.
    chunk: maximum prompt tokens of each replica in a step. block: a sequence takes whole blocks of them.
    window: of layers with pages of their own, num_window_pages of each replica; None if all layers share
    pages. even_context: the position after which attention takes longer than matmuls; far after it a step
    takes fewer prompt tokens. multiplies_padding: padding rows of a step take the time of others, except in
    attention. has_states: layers keep a state of each sequence, which its pages do not hold. Cached pages of
    a prefix are then of use only with a snapshot of the states after them, num_snapshots of each replica, and
    num_host_snapshots in its part of host memory.
    num_kept_drafts: drafts of each slot after which a step keeps the states.
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
    has_states: bool = False
    num_snapshots: int = 0
    num_host_snapshots: int = 0
    num_kept_drafts: int = 0

    @classmethod
    def of_layout(
        cls,
        config: ModelConfig,
        layout: Layout,
        platform: Platform,
        num_slots: int,
        context: int,
        *,
        num_pages: int | None = None,
        page_size: int = DEFAULT_PAGE,
        chunk: int | None = None,
        block: int | None = None,
        keeps_windows: bool = True,
    ) -> "Limits":
        """The limits of a runner of this layout on devices of a platform; see `of`.

        chunk: of all replicas, as in `chunk_of`. block: None for the platform's.
        keeps_windows: layers with a window keep only the pages that it needs.
        """
        at, chunk = layout.at("generate"), chunk_of(layout, context, chunk)
        page_size = whole_page(config, page_size)
        replicas = num_replicas(at, config)
        limits = cls.of(
            num_slots,
            context,
            num_replicas=replicas,
            num_pages=num_pages,
            page_size=page_size,
            # All devices of a shard of the batch compute the chunks of all of its replicas.
            chunk=max(1, chunk // (replicas // at.num_batch_shards)),
            block=divided_block(block or platform.prompt_rows, layout.num_prompt_shards),
            window=widest_window(config) if keeps_windows else None,
            even_context=even_context(config, context),
        )
        return replace(limits, has_states=num_states(config) > 0)

    def with_states(self, num_kept_drafts: int, *, keeps_snapshots: bool) -> "Limits":
        """These limits with entries for states: after each draft, and in snapshots.

        keeps_snapshots: keep as many snapshots as slots, for a prefix cache. The limits are unchanged for
        models without states.
        """
        if not self.has_states:
            return self
        kept = self.slots_per_replica if keeps_snapshots else 0
        return replace(self, num_snapshots=kept, num_kept_drafts=num_kept_drafts)

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
        block: int = PROMPT_ROWS,
        window: Window | None = None,
        even_context: float = inf,
    ) -> "Limits":
        """Limits with equal slots and pages per replica, and chunks of whole blocks within a context.

        num_pages: of all replicas; None: enough to fill all slots. window: the widest of the model's layers,
        which get pages of their own if all slots need fewer of them. Raises PlanError if a replica has too
        few pages for one context.
        """
        per_context = -(-context // page_size)
        num_slots = num_slots // num_replicas * num_replicas
        num_pages = num_slots * per_context if num_pages is None else num_pages
        smallest = per_context * num_replicas
        if num_pages < smallest:
            raise PlanError(
                f"a cache of {num_pages} pages of {page_size} positions is too small for a context of "
                f"{context}{on_each(num_replicas)}; "
                f"fits: {smallest} pages or more, {smallest * page_size} positions"
            )
        num_pages //= num_replicas
        block = min(block, 1 << (context - 1).bit_length())
        chunk = min(-(-chunk // block), -(-context // block)) * block
        limits = cls(
            num_slots, context, page_size, num_pages, chunk, block, num_replicas, even_context=even_context
        )
        if window is None:
            return limits
        # A window touches up to one page more than it fills, and a step adds a chunk to one of them.
        per_window = (window.size + page_size - 2) // page_size + 1
        needed = limits.slots_per_replica * per_window + -(-chunk // page_size)
        return replace(limits, window=window, num_window_pages=needed) if needed < num_pages else limits

    @property
    def slots_per_replica(self) -> int:
        return self.num_slots // self.num_replicas

    @property
    def num_state_entries(self) -> int:
        """Entries of each replica's states."""
        return num_state_entries(self.slots_per_replica, self.num_snapshots, self.num_kept_drafts)

    @property
    def pages_per_context(self) -> int:
        return -(-self.context // self.page_size)

    def max_step_tokens(self, num_drafts: int) -> int:
        """Maximum tokens of a step: chunks of all replicas, and a token and its drafts of every slot."""
        return self.chunk * self.num_replicas + self.num_slots * (1 + num_drafts)

    @cached_property
    def block_counts(self) -> list[int]:
        """Numbers of blocks of a replica's prompts in the compiled programs."""
        return compiled_sizes(self.chunk // self.block)

    def prompt_time(self, start: int, count: int) -> float:
        """Time of `count` prompt tokens from position `start` on, in tokens without attention."""
        return count * (1 + (start + count / 2) / self.even_context)

    @cached_property
    def max_prompt_time(self) -> float:
        """Maximum time of a replica's prompts in a step: twice a chunk at the beginning of a prompt."""
        return 2 * self.prompt_time(0, self.chunk)


class IdleSeconds(NamedTuple):
    """Seconds of steps on an idle machine.

    generate: (sequences of each replica, seconds of a step that generates for them), up to all slots, with
    sampling and without attention. prompt_token: seconds that one more prompt token, at the beginning of its
    prompt, adds to a step of all slots.
    """

    generate: tuple[tuple[int, float], ...]
    prompt_token: float

    @classmethod
    def of(cls, generate: Sequence[tuple[int, float]], mixed: float, limits: Limits) -> "IdleSeconds":
        """mixed: measured seconds of a step of all slots with `timed_blocks` of prompts."""
        num_tokens = timed_blocks(limits) * limits.block
        return cls(tuple(generate), max(mixed - generate[-1][1], 0.0) / num_tokens)


def timed_blocks(limits: Limits) -> int:
    """The smallest number of blocks of each replica that times prompt tokens well enough."""
    sizes = limits.block_counts
    return next((size for size in sizes if size * limits.block >= _TIMED_TOKENS), sizes[-1])

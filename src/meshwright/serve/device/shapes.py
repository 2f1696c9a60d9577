"""The shapes of steps that a runner compiles, and the one that a batch runs in. Plain Python.

    generate    1, 2, 4, ... sequences, a token each
    mixed       the next token of all sequences, and 1, 2, 4, ... blocks of prompts
    verify      1, 2, 4, ... sequences, a token and its drafts each, if there are drafts at all
    fresh       a whole prompt of 1, 2, 4, ... blocks and nothing else, if a kernel attends to whole prompts

    hidden      as mixed, for prompts whose hidden states are read: scores and embeddings

If attention reads whole tables, steps that generate or verify are also compiled for short tables, so that
short sequences do not pay for the whole context.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from meshwright.layout.page_sizes import compiled_sizes, table_widths
from meshwright.serve.engine.batch import Batch
from meshwright.serve.engine.limits import Limits


class Shape(NamedTuple):
    """The rows of a step on each replica: tokens to generate, drafts to verify, blocks of prompts.

    fresh: blocks of the only prompt of a fresh step. pages: of the longest sequence; 0: of a whole context.
    hidden: the step yields the hidden states of its tokens.
    """

    generate: int = 0
    verify: int = 0
    blocks: int = 0
    fresh: int = 0
    pages: int = 0
    hidden: bool = False

    @property
    def rank(self) -> tuple[float, ...]:
        """The smaller, the less it computes and reads."""
        return *self[:4], self.pages or inf


@dataclass(frozen=True)
class Shapes:
    """The shapes of a runner.

    num_drafts: maximum drafts of a sequence in a step. has_fresh: whole prompts have a kernel.
    num_sharing: replicas that prefill a prompt together.
    reads_whole_tables: whether attention of rows with this number of tokens does.
    """

    limits: Limits
    num_drafts: int
    has_fresh: bool
    num_sharing: int
    reads_whole_tables: Callable[[int], bool]

    @cached_property
    def all(self) -> list[Shape]:
        sizes, blocks = compiled_sizes(self.limits.slots_per_replica), self.limits.block_counts
        verified = [(size, pages) for size in sizes for pages in self._table_widths(1 + self.num_drafts)]
        return [
            *[Shape(generate=size, pages=pages) for size in sizes for pages in self._table_widths(1)],
            *[Shape(generate=self.limits.slots_per_replica, blocks=count) for count in blocks],
            *[Shape(verify=size, pages=pages) for size, pages in verified if self.num_drafts],
            *[Shape(fresh=count) for count in blocks if self.has_fresh],
        ]

    @cached_property
    def hidden(self) -> list[Shape]:
        """Shapes for works with `reads`: every other size, so that few programs are compiled for them."""
        counts = self.limits.block_counts[::-2]
        return [Shape(self.limits.slots_per_replica, blocks=count, hidden=True) for count in counts]

    def _table_widths(self, num_queries: int) -> list[int]:
        """Pages of the tables of steps whose rows have this number of tokens; 0: of a whole context."""
        widths = table_widths(self.limits.pages_per_context) if self.reads_whole_tables(num_queries) else []
        return [*widths, 0]

    def num_heads(self, shape: Shape) -> int:
        """Number of tokens in a replica's step with logits.

        A step with blocks of prompts has a row for every slot. A prompt that ends takes one of these rows.
        """
        return shape.generate + shape.verify * (1 + self.num_drafts) + min(shape.fresh, 1)

    def of(self, batch: Batch) -> Shape:
        """The smallest shape that holds the batch."""
        limits = self.limits
        blocks, others, prompts = Counter[int](), Counter[int](), Counter[int]()
        for work in batch.works:
            replica = work.slot // limits.slots_per_replica
            blocks[replica] += -(-len(work.tokens) // limits.block) if work.is_prompt else 0
            others[replica] += not work.is_prompt
            prompts[replica // self.num_sharing] += 1
        num_blocks, num_others = max(blocks.values(), default=0), max(others.values(), default=0)
        if any(work.reads for work in batch.works):
            return min(shape for shape in self.hidden if shape.blocks >= num_blocks)
        has_one_prompt = not num_others and max(prompts.values(), default=2) == 1
        if self.has_fresh and has_one_prompt and not any(work.start for work in batch.works):
            return min(shape for shape in self.all if shape.fresh >= num_blocks)
        verifies = any(work.num_drafts for work in batch.works)
        num_pages = max((len(work.pages) for work in batch.works), default=0)
        fitting = (
            shape
            for shape in self.all
            if shape.blocks >= num_blocks
            and bool(shape.blocks) == bool(num_blocks)
            and not shape.fresh
            and (shape.verify if verifies else shape.generate) >= num_others
            and (not shape.pages or shape.pages >= num_pages)
        )
        return min(fitting, key=lambda shape: shape.rank)

"""The model on its devices, with a cache of pages: what the engine runs.

Every program is compiled ahead for its exact shapes, and a compiled program takes no others, so no request
ever waits for the compiler:

    generate    1, 2, 4, ... sequences, a token each: few pay for few
    mixed       the next token of all sequences, and 1, 2, 4, ... blocks of prompts
    verify      1, 2, 4, ... sequences, a token and its drafts each; where there are drafts at all
    fresh       a whole prompt of 1, 2, 4, ... blocks while nobody generates, where a kernel attends to it

Where attention reads whole tables, steps that generate or verify are compiled for short ones as well, so that
short sequences do not pay for the whole context.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby, islice
from math import inf
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.fit import num_replicas
from meshwright.layout.paged import DEFAULT_PAGE, attends_to_whole_prompts
from meshwright.layout.runnable import check_runs
from meshwright.models.config import ModelConfig
from meshwright.native import kernels
from meshwright.native.processor import put_in_huge_pages
from meshwright.nn.attention.paged import NOBODY, Rows
from meshwright.nn.cached_ops import layered
from meshwright.nn.start.compiled_cache import NothingCompiled
from meshwright.serve.device.host_pages import HostPages
from meshwright.serve.device.programs import (
    InferencePrograms,
    StepShape,
)
from meshwright.serve.device.sampling import Edits, Needs, Sampled, SampledRows, batch_edits, batch_rows
from meshwright.serve.engine.batch import CACHED, Batch, SequenceWork
from meshwright.serve.engine.limits import IdleSeconds, Limits, compiled_sizes, on_each, timed_blocks
from meshwright.serve.engine.logit_edits import LogitEdits
from meshwright.serve.engine.pages import Move
from meshwright.serve.engine.request import GREEDY, Request, TokenScore
from meshwright.serve.engine.scoring import TokenScores
from meshwright.serve.engine.sequence import TokenSequence

_SHORTEST_SCORED = 16
_FEWEST_PAGES = 4  # that a program of its own is worth
_COMPILED_AT_ONCE = 8  # programs: each takes hundreds of MB meanwhile
_ONE_PROGRAM = threading.Lock()  # of all runners of this process


class _Shape(NamedTuple):
    """What a step computes of a replica: rows that generate and verify, blocks of prompts, and of one prompt.

    pages: of the longest sequence; 0 for those of a whole context.
    """

    generate: int
    verify: int
    blocks: int
    fresh: int = 0
    pages: int = 0

    @property
    def rank(self) -> tuple[float, ...]:
        """The smaller, the less it computes and reads."""
        return *self[:-1], self.pages or inf


class _Choice(NamedTuple):
    """What a program that chooses tokens is for; needs: None where it finds them itself."""

    num_logits: int
    needs: Needs | None
    with_edits: bool


class JaxRunner:
    """The engine's Runner: `num_slots` sequences of up to `context` tokens each.

    params: on `mesh` as the layout stores them, from `load_hf` or a checkpoint; they are moved into arrays a
    layer. Axes that split the batch or the cache's sequences make replicas, among which slots and pages are
    split evenly. num_pages: of the cache in all, as many as all slots can fill where None. chunk: most prompt
    tokens of a step, as `chunk_of` has it. block: tokens of a prompt's row; None: as suits the platform.
    num_drafts: most drafts of one sequence a step. strict: what this process
    compiles after the first step is an error of the next one; scores of prompts of every length are compiled
    ahead, too. keeps_windows: layers with a sliding window keep its positions alone, in pages of their own;
    else every position, as the others. shares_pages: with another runner, of all layers.
    host_bytes: of the host's memory, for pages that are evicted from the cache; then all layers keep every
    position. with_native: on CPUs the C++ kernels run what they can, if they can be built (native/).
    batch_invariant: log-probabilities of a request's tokens do not depend, bit for bit, on what else runs, on
    the shapes of steps, chunks of prompts, or cached beginnings.
    Call `warm_up` before use.
    Raises LayoutError where the layout does not fit the model or serving, PlanError where the context is
    longer than the model's, there is no slot, too few pages for one sequence, too few bytes for a page, or
    what is asked cannot be batch-invariant.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        config: ModelConfig,
        layout: Layout,
        mesh: Mesh,
        *,
        num_slots: int,
        context: int,
        num_pages: int | None = None,
        page_size: int = DEFAULT_PAGE,
        chunk: int | None = None,
        block: int | None = None,
        num_drafts: int = 0,
        strict: bool = False,
        keeps_windows: bool = True,
        shares_pages: bool = False,
        host_bytes: int = 0,
        with_native: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        layout = layout.at("generate")
        check_serves(config, layout, num_slots, context, batch_invariant=batch_invariant)
        platform = mesh.devices.flat[0].platform
        limits = Limits.of_layout(
            config,
            layout,
            platform,
            num_slots,
            context,
            num_pages=num_pages,
            page_size=page_size,
            chunk=chunk,
            block=block,
            keeps_windows=keeps_windows and not host_bytes,
        )
        if limits.block % layout.num_prompt_shards:
            over, count = "·".join(layout.prompt_axes), layout.num_prompt_shards
            raise PlanError(
                f"{config.name}: prompts of a context of {context} tokens fill no block that divides over "
                f"{over} = {count}; fits: a context of {limits.block * count} or more, or {over} = 1"
            )
        self.vocab_size, self._mesh, self._num_drafts = config.vocab_size, mesh, num_drafts
        self._num_together = limits.num_replicas // layout.num_batch_shards
        self._programs = InferencePrograms(
            config,
            layout,
            mesh,
            num_slots=limits.slots_per_replica,
            num_pages=limits.num_pages,
            page_size=page_size,
            num_window_pages=limits.num_window_pages,
            with_native=with_native and kernels.runs_on(mesh),
            batch_invariant=batch_invariant,
        )
        self._host = HostPages(self._programs.exported(1), limits.num_replicas, host_bytes, page_size)
        self.limits = replace(
            limits,
            num_host_pages=self._host.num_pages,
            multiplies_padding=self._programs.multiplies_padding,
        )
        self._is_invariant = batch_invariant
        self._has_whole_prompts = attends_to_whole_prompts(platform, layout) and not batch_invariant
        self._params = (
            layered(params, config, layout, mesh, with_panels=self._programs.with_panels) if params else {}
        )
        self._steps: dict[_Shape, Any] = {}
        self._seconds: dict[_Shape, float] = {}
        self._choices: dict[_Choice, Any] = {}
        self._shares_pages = shares_pages
        self._exports: dict[int, Any] = {}
        self._accepts: dict[int, Any] = {}
        self._score_programs: dict[int, Any] = {}
        self.idle_seconds: IdleSeconds | None = None
        self._nothing_compiled = NothingCompiled() if strict else None
        self._scoring = threading.Lock()

    def warm_up(self) -> None:
        """Compile every program, make the cache, and measure steps."""
        shapes = self._shapes()
        steps = [self._step_of(shape) for shape in shapes]
        choices = [
            _Choice(count, needs, with_edits)
            for count in sorted({step.num_logits for step in steps})
            for needs in (Needs.all() if self._programs.has_choice_by_needs else [None])
            for with_edits in (False, True)
        ]
        # JAX traces here, under the settings of this thread; compilers have several threads only in places.
        of_steps = [self._programs.step(step) for step in steps]
        of_choices = [
            self._programs.choice(one.num_logits, one.needs, with_edits=one.with_edits) for one in choices
        ]
        with ThreadPoolExecutor(min(_COMPILED_AT_ONCE, os.cpu_count() or 1)) as pool:
            compiled, chosen = (pool.map(lambda one: one.compile(), some) for some in (of_steps, of_choices))
            self._steps = dict(zip(shapes, compiled, strict=True))
            self._choices = dict(zip(choices, chosen, strict=True))
        moves_pages = self._shares_pages or self._host.num_pages
        for count in compiled_sizes(self.limits.pages_per_context) if moves_pages else ():
            self._exports[count] = self._programs.export(count)
            self._accepts[count] = self._programs.accept(count)
        self._pools, self._last = self._programs.empty()
        put_in_huge_pages(jax.tree.leaves((self._params, self._pools)))
        of_tokens = [
            shape
            for shape in self._steps
            if shape.generate + shape.verify and not (shape.blocks or shape.pages)
        ]
        self._seconds = {shape: self._idle_seconds(shape) for shape in of_tokens}
        self.idle_seconds = self._measured()
        if self._nothing_compiled is not None:
            for length in score_lengths(self.limits.context):
                self._score_program(length)

    def _idle_seconds(self, shape: _Shape, prompts: Sequence[SequenceWork] = ()) -> float:
        """How long a step of this shape and these prompts takes, its tokens read.

        All rows that generate or verify are held, at the first position, where attention takes no time.
        """
        batch, seconds = Batch((*self._first_tokens(shape), *prompts)), []
        for _ in range(5):
            started = time.perf_counter()
            self._dispatched(batch, shape).read()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def _first_tokens(self, shape: _Shape) -> list[SequenceWork]:
        """The first tokens, with their drafts, of as many sequences as have a row to generate or verify."""
        num_drafts = self._num_drafts if shape.verify else 0
        return [
            _of_nobody(self.limits, replica, row, 1 + num_drafts, num_drafts)
            for replica in range(self.limits.num_replicas)
            for row in range(shape.generate + shape.verify)
        ]

    def step_seconds(self) -> float:
        """Seconds of a step that generates for one sequence of each replica, without attention."""
        return self._idle_seconds(_Shape(1, 0, 0))

    def _measured(self) -> IdleSeconds:
        of_steps = [(shape.generate, seconds) for shape, seconds in self._seconds.items() if shape.generate]
        slots, count = self.limits.slots_per_replica, timed_blocks(self.limits)
        prompts = [
            _of_nobody(self.limits, replica, 0, count * self.limits.block, samples=False)
            for replica in range(self.limits.num_replicas)
        ]
        return IdleSeconds.of(of_steps, self._idle_seconds(_Shape(slots, 0, count), prompts), self.limits)

    def generate_seconds(self, num_sequences: int) -> float:
        """Seconds of a step that generates for so many sequences, without attention."""
        return self._seconds[_Shape(self._rows_for(num_sequences), 0, 0)]

    def _rows_for(self, num_sequences: int) -> int:
        of_replica = -(-num_sequences // self.limits.num_replicas)
        return next(n for n in compiled_sizes(self.limits.slots_per_replica) if n >= of_replica)

    def cost_ratio(self, num_sequences: int) -> float:
        """How much longer a step that verifies drafts of so many sequences takes than one that generates."""
        count = self._rows_for(num_sequences)
        return self._seconds[_Shape(0, count, 0)] / self._seconds[_Shape(count, 0, 0)]

    def _shapes(self) -> list[_Shape]:
        slots = compiled_sizes(self.limits.slots_per_replica)
        blocks = self.limits.block_counts
        return [
            *[_Shape(count, 0, 0, pages=pages) for count in slots for pages in self._pages_of_rows(1)],
            *[_Shape(self.limits.slots_per_replica, 0, count) for count in blocks],
            *[
                _Shape(0, count, 0, pages=pages)
                for count in slots
                for pages in self._pages_of_rows(1 + self._num_drafts)
                if self._num_drafts
            ],
            *[_Shape(0, 0, 0, count) for count in blocks if self._has_whole_prompts],
        ]

    def _pages_of_rows(self, queries: int) -> list[int]:
        """The widths of tables that steps with rows of so many queries are compiled for; 0: of a context."""
        is_narrower = self._programs.reads_whole_tables(queries) and not self._is_invariant
        return [*(_widths(self.limits.pages_per_context) if is_narrower else []), 0]

    def _step_of(self, shape: _Shape) -> StepShape:
        """The step of this shape. Its logits are one, those of all slots or the most of any shape.

        So few programs sample.
        """
        num_heads = self._num_heads(shape)
        sizes = 1, self.limits.slots_per_replica, max(map(self._num_heads, self._shapes()))
        num_logits = next(size for size in sizes if size >= num_heads)
        block = self.limits.block
        rows = (
            Rows(shape.generate, 1),
            Rows(shape.verify, 1 + self._num_drafts),
            Rows(shape.blocks, block),
            Rows(min(shape.fresh, 1), shape.fresh * block),
        )
        used = tuple(row for row in rows if row.num_rows)
        pages = shape.pages or self.limits.pages_per_context
        return StepShape(used, num_heads, num_logits, pages, is_fresh=bool(shape.fresh))

    def _num_heads(self, shape: _Shape) -> int:
        """Tokens of a replica's step after which logits are wanted.

        Beside blocks of prompts all slots have a row, and whoever ends a prompt has one of these slots.
        """
        return shape.generate + shape.verify * (1 + self._num_drafts) + min(shape.fresh, 1)

    def run(self, batch: Batch) -> "_UnderWay":
        """Dispatches one step."""
        assert self._steps, "warm_up() comes first"
        if self._nothing_compiled is not None:  # after the warm-up of every runner of the process
            self._nothing_compiled.check()
        self.move(batch.moves)
        return self._dispatched(batch, self._shape_of(batch))

    def _dispatched(self, batch: Batch, shape: _Shape) -> "_UnderWay":
        """Dispatches the batch in the program of this shape."""
        step = self._step_of(shape)
        inputs = self._inputs(batch, step)
        rows, edits = inputs.sampling(self.vocab_size)
        needs = Needs.of(rows) if self._programs.has_choice_by_needs else None
        choose = self._choices[_Choice(step.num_logits, needs, edits is not None)]
        with self._alone():
            logits, self._pools = self._steps[shape](self._params, self._pools, self._last, *inputs.of_step)
            self._last, sampled = choose(self._last, logits, inputs.chosen_slots, rows, edits)
            if self._is_starved:
                jax.block_until_ready((sampled, self._pools))
        self._host.settle()  # while the device works
        return _UnderWay(sampled, inputs.sampled, np.asarray(rows.num_top))

    @property
    def _is_starved(self) -> bool:
        """Whether a program must end before the next begins.

        XLA's collectives on CPU (jaxlib 0.10.2) hold threads of one pool while they wait for each other, so
        programs dispatched behind or beside one another can starve it; see train/loop.py.
        """
        return self._mesh.size > 1 and self._mesh.devices.flat[0].platform == "cpu"

    def _alone(self) -> AbstractContextManager[object]:
        return _ONE_PROGRAM if self._is_starved else nullcontext()

    def export(self, pages: Sequence[int]) -> Any:
        """Dispatches a copy of what stands in these pages, for another runner of the same model."""
        return self._exported([pages])

    def exported(self, num_pages: int) -> Any:
        """The types and shardings of what `export` gives of so many pages."""
        return self._programs.exported(self._size_for([range(num_pages)]))

    def accept(self, pages: Sequence[int], exported: Any) -> None:
        """Dispatches writing what another runner exported to these pages, but those CACHED."""
        no_page = self.limits.num_pages
        self._accept([[no_page if page == CACHED else page for page in pages]], exported)

    def move(self, moves: Sequence[Move]) -> None:
        """Makes these moves of pages between the cache and the host's memory, in their order."""
        most = self.limits.pages_per_context
        for is_out, run in groupby(moves, key=lambda move: move.is_out):
            for some in _in_parts(run, most):
                of_replicas = [
                    [move for move in some if move.replica == number]
                    for number in range(self.limits.num_replicas)
                ]
                pages = [[move.page for move in own] for own in of_replicas]
                host_pages = [[move.host_page for move in own] for own in of_replicas]
                if is_out:
                    self._host.take(host_pages, self._exported(pages))
                else:
                    count = self._size_for(pages)
                    self._accept(pages, self._host.pages(host_pages, count))

    def _size_for(self, pages: Sequence[Sequence[int]]) -> int:
        """How many pages of each replica the smallest program moves that holds these."""
        return min(size for size in self._exports if size >= max(map(len, pages)))

    def _exported(self, pages: Sequence[Sequence[int]]) -> Any:
        """What stands in these pages of each replica."""
        count = self._size_for(pages)
        return self._exports[count](self._pools, _rows_of(pages, count, 0))

    def _accept(self, pages: Sequence[Sequence[int]], exported: Any) -> None:
        """Writes it to these pages of each replica."""
        count = self._size_for(pages)
        numbers = _rows_of(pages, count, self.limits.num_pages)  # no page
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._programs.exported(count))
        self._pools = self._accepts[count](self._pools, numbers, jax.device_put(exported, shardings))

    def prepare_scores(self, num_tokens: int) -> None:
        """Compile what scores prompts of so many tokens; called from any thread."""
        self._score_program(self._padded_length(num_tokens))

    def scores(self, tokens: list[int]) -> TokenScores:
        """Log-probabilities of `tokens` but the first, each given those before it."""
        length = self._padded_length(len(tokens))
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(tokens)] = tokens
        found = jax.device_get(self._score_program(length)(self._params, padded))
        return TokenScores(*(column[: len(tokens) - 1] for column in found))

    def _padded_length(self, num_tokens: int) -> int:
        return next(length for length in score_lengths(self.limits.context) if length >= num_tokens)

    def _score_program(self, length: int) -> Any:
        """The compiled program for prompts of up to `length` tokens; few servers ever need one."""
        with self._scoring:
            if length not in self._score_programs:
                self._score_programs[length] = self._programs.scores(length)
            return self._score_programs[length]

    def _inputs(self, batch: Batch, step: StepShape) -> "_Inputs":
        sharing = self._programs.num_sharing if step.is_fresh else 1
        return _Inputs(batch, step, self.limits, self._num_together, sharing)

    def _shape_of(self, batch: Batch) -> _Shape:
        """The smallest compiled shape that holds the batch."""
        of_replica, sharing = self.limits.slots_per_replica, self._programs.num_sharing
        blocks, others, prompts = Counter[int](), Counter[int](), Counter[int]()
        for work in batch.works:
            replica = work.slot // of_replica
            blocks[replica] += _num_blocks(work, self.limits.block)
            others[replica] += len(work.tokens) == 1 + work.num_drafts
            prompts[replica // sharing] += 1
        num_blocks, num_others = max(blocks.values(), default=0), max(others.values(), default=0)
        if (
            self._has_whole_prompts
            and not num_others
            and max(prompts.values(), default=2) == 1
            and not any(w.start for w in batch.works)
        ):
            return min(shape for shape in self._steps if shape.fresh >= num_blocks)
        verifies = any(work.num_drafts for work in batch.works)
        num_pages = max((len(work.pages) for work in batch.works), default=0)
        fitting = (
            shape
            for shape in self._steps
            if shape.blocks >= num_blocks
            and bool(shape.blocks) == bool(num_blocks)
            and not shape.fresh
            and (shape.verify if verifies else shape.generate) >= num_others
            and (not shape.pages or shape.pages >= num_pages)
        )
        return min(fitting, key=lambda shape: shape.rank)


class _Inputs:
    """A batch as arrays, replica by replica: each work in a row of its kind, a long one in several blocks.

    num_together: replicas that share a shard of the batch. num_sharing: those that prefill together, and have
    the tokens of their prompts together.
    """

    def __init__(
        self, batch: Batch, step: StepShape, limits: Limits, num_together: int, num_sharing: int
    ) -> None:
        self._step, self._slots = step, limits.slots_per_replica
        self._num_together, self._num_sharing = num_together, num_sharing
        count = limits.num_replicas
        num_shares = count // num_sharing
        num_logits = count * step.num_logits
        self.tokens = np.zeros(num_shares * step.num_tokens, np.int32)
        self.positions = np.full(count * step.num_tokens, NOBODY, np.int32)
        self.slots = np.full(num_shares * step.num_tokens, self._slots, np.int32)
        groups = 2 if limits.window else 1
        self.tables = np.zeros((count * step.num_rows, groups, step.pages_of_row), np.int32)
        self.heads = np.full(num_shares * step.num_heads, NOBODY, np.int32)
        self.chosen_slots = np.full(num_logits, self._slots, np.int32)
        self.chosen_positions = np.zeros(num_logits, np.int32)
        self._params = [GREEDY] * num_logits
        self._edits: list[LogitEdits | None] = [None] * num_logits
        self.sampled: list[range] = []
        self._num_sampled = [0] * num_shares
        starts = [list(_starts(step.rows)) for _ in range(num_shares)]
        for work in batch.works:
            share = work.slot // self._slots // num_sharing
            is_block = len(work.tokens) > 1 + work.num_drafts
            kind = len(step.rows) - 1 if is_block else 0
            length = step.rows[kind].length
            begins = range(0, len(work.tokens), length)
            for begin in begins:
                row, token = starts[share][kind]
                self._put(work, begin, min(length, len(work.tokens) - begin), row, token)
                starts[share][kind] = row + 1, token + length
            self._choose(work, starts[share][kind][1] - length, len(work.tokens) - begins[-1])

    @property
    def of_step(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.positions, self.slots, self.tables, self.heads

    def sampling(self, vocab_size: int) -> tuple[SampledRows, Edits | None]:
        """How each row of logits is sampled; no edits where none of them has any."""
        edits = batch_edits(list(zip(self._params, self._edits, strict=True)), vocab_size)
        return batch_rows(self._params, self.chosen_positions), edits

    def _put(self, work: SequenceWork, begin: int, count: int, row: int, token: int) -> None:
        """`count` tokens of the work from its number `begin` on, as a row of its replica."""
        replica = work.slot // self._slots
        place, row = token + replica * self._step.num_tokens, row + replica * self._step.num_rows
        token += replica // self._num_sharing * self._step.num_tokens
        start = work.start + begin
        self.tokens[token : token + count] = work.tokens[begin : begin + count]
        self.positions[place : place + count] = range(start, start + count)
        self.slots[token] = self._slot_of(work)
        self.tables[row, 0, : len(work.pages)] = work.pages
        if work.window_pages:  # what is no page is never seen, so any number does
            self.tables[row, 1, : len(work.pages)] = np.maximum(work.window_pages, 0)

    def _choose(self, work: SequenceWork, token: int, count: int) -> None:
        """Asks for what is sampled behind the last of the row's `count` tokens, and before each draft."""
        replica = work.slot // self._slots
        share = replica // self._num_sharing
        if self._num_sharing == 1:
            token += replica % self._num_together * self._step.num_tokens
        head = self._num_sampled[share]
        self._num_sampled[share] += work.num_samples
        first = replica * self._step.num_logits + head
        self.sampled.append(range(first, first + work.num_samples))
        head += share * self._step.num_heads
        for number, behind in zip(self.sampled[-1], range(work.num_samples, 0, -1), strict=True):
            self.heads[head + number - first] = token + count - behind
            self.chosen_positions[number] = work.start + len(work.tokens) - behind + 1
            self._params[number] = work.sequence.request.sampling
            self._edits[number] = work.sequence.edits
        if work.num_samples == 1:
            self.chosen_slots[first] = self._slot_of(work)

    def _slot_of(self, work: SequenceWork) -> int:
        """The slot's number on its shard of the batch, where each replica has one more, nobody's."""
        replica, slot = divmod(work.slot, self._slots)
        return replica % self._num_together * (self._slots + 1) + slot


class _UnderWay:
    """The tokens of a step that may still run: which of them are whose, and how many alternatives of each."""

    def __init__(self, sampled: Sampled, numbers: list[range], num_top: np.ndarray) -> None:
        self._sampled, self._numbers, self._num_top = sampled, numbers, num_top

    def read(self) -> Sequence[Sequence[TokenScore]]:
        found = jax.device_get(self._sampled)
        tokens, logprobs = found.tokens.tolist(), found.logprobs.tolist()

        def score(i: int) -> TokenScore:
            top = slice(self._num_top[i])
            likeliest = zip(found.top_ids[i, top].tolist(), found.top_logprobs[i, top].tolist(), strict=True)
            return TokenScore(tokens[i], logprobs[i], tuple(likeliest))

        return [[score(i) for i in numbers] for numbers in self._numbers]


def _of_nobody(
    limits: Limits, replica: int, row: int, count: int, num_drafts: int = 0, *, samples: bool = True
) -> SequenceWork:
    """So many tokens at the beginning of a sequence, in a slot and on pages that nobody has yet."""
    pages = tuple(range(-(-count // limits.page_size)))
    return SequenceWork(
        TokenSequence(Request((0,), sampling=GREEDY), 1, 0, lambda _: None),
        replica * limits.slots_per_replica + row,
        0,
        (0,) * count,
        pages,
        num_drafts,
        samples=samples,
        window_pages=pages if limits.window else (),
    )


def _in_parts(moves: Iterable[Move], most: int) -> Iterator[list[Move]]:
    """The moves in order, up to `most` at a time."""
    rest = iter(moves)
    while part := list(islice(rest, most)):
        yield part


def _rows_of(pages: Sequence[Sequence[int]], count: int, fill: int) -> np.ndarray:
    """i32[R count]: the pages of each replica, filled up."""
    rows = np.full((len(pages), count), fill, np.int32)
    for row, own in zip(rows, pages, strict=True):
        row[: len(own)] = own
    return rows.reshape(-1)


def _starts(rows: tuple[Rows, ...]) -> Any:
    """(number of its first row, number of its first token) of each kind of rows."""
    row = token = 0
    for kind in rows:
        yield row, token
        row, token = row + kind.num_rows, token + kind.num_tokens


def _num_blocks(work: SequenceWork, block: int) -> int:
    return -(-len(work.tokens) // block) if work.is_prompt else 0


def _widths(most: int) -> list[int]:
    """Pages of the tables of short sequences, of up to `most`: a sixteenth and a quarter.

    >>> _widths(64), _widths(16), _widths(4)
    ([4, 16], [4], [])
    """
    return [pages for pages in (most // 16, most // 4) if pages >= _FEWEST_PAGES]


def score_lengths(context: int) -> list[int]:
    """The lengths that prompts are padded to for their scores: powers of two up to the context.

    >>> score_lengths(100), score_lengths(8)
    ([16, 32, 64, 100], [8])
    """
    lengths = [_SHORTEST_SCORED]
    while lengths[-1] < context:
        lengths.append(2 * lengths[-1])
    return [*lengths[:-1], context]


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def check_serves(
    config: ModelConfig, layout: Layout, num_slots: int, context: int, *, batch_invariant: bool = False
) -> None:
    """Raises LayoutError or PlanError for what a JaxRunner cannot serve, before any weight is read."""
    check_runs(layout, "generate")
    layout.check(config)
    least = num_replicas(layout.at("generate"), config)
    if num_slots < least:
        raise PlanError(
            f"{config.name}: {num_slots} slots can serve no request{on_each(least)}; fits: {least} or more"
        )
    if context > config.max_seq_len:
        raise PlanError(
            f"{config.name}: a context of {context} tokens is longer than the model's {config.max_seq_len}; "
            f"fits: up to {config.max_seq_len}"
        )
    if batch_invariant:
        _check_batch_invariant(config, layout.at("generate"))


def _check_batch_invariant(config: ModelConfig, layout: Layout) -> None:
    if config.moe:
        raise PlanError(
            f"{config.name}: results cannot be batch-invariant with {config.moe.num_experts} experts, among "
            "which the tokens of all requests are sorted together; fits: a model without experts"
        )
    if (shared := layout.mesh.num_devices // layout.num_batch_shards) > 1:
        raise PlanError(
            f"{config.name}: results cannot be batch-invariant under {layout}, where {shared} devices add up "
            "their parts of a sum in an order that may depend on its size; fits: a layout over data alone"
        )

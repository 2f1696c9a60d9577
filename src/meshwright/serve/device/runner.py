"""The model on its devices, with a cache of pages: the engine's Runner.

Every program is compiled ahead for its exact shapes (`shapes.py`), and a compiled program takes no others, so
that no request waits for the compiler.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from meshwright.errors import PlanError
from meshwright.layout import Layout
from meshwright.layout.attention_kernels import has_prompt_programs
from meshwright.layout.layout_checks import check_fits, num_replicas
from meshwright.layout.page_sizes import DEFAULT_PAGE, compiled_sizes
from meshwright.layout.runnable import check_model_runs, check_runs
from meshwright.models.config import ModelConfig
from meshwright.native import kernels
from meshwright.native.processor import put_in_huge_pages
from meshwright.nn.attention.paged import Rows
from meshwright.nn.layer_weights import layered
from meshwright.nn.start.compiled_cache import NothingCompiled
from meshwright.platforms import platform_of
from meshwright.serve.device.cache_programs import CacheSizes
from meshwright.serve.device.device_cache import DeviceCache
from meshwright.serve.device.forward_steps import StepShape
from meshwright.serve.device.in_turn import one_at_a_time
from meshwright.serve.device.joined import joined
from meshwright.serve.device.programs import InferencePrograms
from meshwright.serve.device.readout import Readout, Results
from meshwright.serve.device.sampling import Needs, Sampled
from meshwright.serve.device.shapes import Shape, Shapes
from meshwright.serve.device.step_inputs import StepInputs, placeholder
from meshwright.serve.engine.batch import Batch, SequenceWork, WorkOutput
from meshwright.serve.engine.limits import IdleSeconds, Limits, on_each, timed_blocks
from meshwright.serve.engine.pages import NO_PAGE, Move
from meshwright.serve.engine.request import TokenScore

_COMPILED_AT_ONCE = 8  # programs: each takes hundreds of MB meanwhile


class _Choice(NamedTuple):
    """A program that chooses tokens. needs: of the rows it is for; None: it finds them itself."""

    num_logits: int
    needs: Needs | None
    with_edits: bool
    with_guesses: bool


class JaxRunner:
    """A Runner of `num_slots` sequences of up to `context` tokens each. Call `warm_up` before use.

    params: on `mesh` as the layout stores them, from `load_hf` or a checkpoint; they are moved into arrays a
    layer. Axes that split the batch or the cache's sequences make replicas, which divide slots and pages.
    num_pages: of the whole cache; None: enough to fill all slots. chunk: maximum prompt tokens of a step, as
    in `chunk_of`. block: tokens of a prompt's row; None: the platform's. num_drafts: maximum drafts of a
    sequence in a step. strict: compilation after the first step is an error of the next one; programs that
    score prompts are compiled ahead, too. keeps_windows: layers with a sliding window keep only its
    positions, in pages of their own. shares_pages: exports and accepts pages, of all layers.
    keeps_states: a prefix cache keeps copies of the states of layers that have them, as many as slots.
    host_bytes: of host memory, for pages and snapshots of states that are evicted from the cache; all layers
    then keep every position, and models with states need keeps_states.
    with_native: use the C++ kernels on CPUs, if they can be built (native/).
    batch_invariant: log-probabilities do not depend, bit for bit, on other requests, the shapes of steps,
    chunks of prompts, or cached prefixes. by_ratio: drafts with logits are accepted by the ratio test.
    keeps_logits: steps return the logits of sampled tokens. keeps_hidden: they return hidden states of all
    tokens.
    Raises LayoutError if the layout does not fit the model or serving, PlanError for a context longer than
    the model's, no slot, too few pages for one sequence, too few bytes for a page, or a model or layout that
    cannot be batch-invariant.
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
        keeps_states: bool = False,
        with_native: bool = True,
        batch_invariant: bool = False,
        by_ratio: bool = False,
        keeps_logits: bool = False,
        keeps_hidden: bool = False,
    ) -> None:
        layout = layout.at("generate")
        check_serves(config, layout, num_slots, context, batch_invariant=batch_invariant)
        platform = platform_of(mesh)
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
        _check_prompts(config, layout, limits, keeps_hidden=keeps_hidden)
        limits = limits.with_states(num_drafts, keeps_snapshots=keeps_states)
        self.embedding_size = config.d_model
        self.vocab_size, self._mesh, self._num_drafts = config.vocab_size, mesh, num_drafts
        self._by_ratio, self._keeps_logits, self._keeps_hidden = by_ratio, keeps_logits, keeps_hidden
        self._num_read = config.d_model if config.draft_head else 0
        sizes = CacheSizes(
            limits.slots_per_replica,
            limits.num_pages,
            limits.page_size,
            limits.num_window_pages,
            limits.num_snapshots,
            limits.num_kept_drafts,
        )
        with_native = with_native and kernels.serves_mesh(mesh)
        self._programs = InferencePrograms(
            config, layout, mesh, sizes, with_native=with_native, batch_invariant=batch_invariant
        )
        self._cache = DeviceCache(self._programs.cache, limits, host_bytes)
        self.limits = replace(self._cache.limits, multiplies_padding=self._programs.multiplies_padding)
        self._shapes = Shapes(
            self.limits,
            num_drafts,
            has_fresh=has_prompt_programs(platform, layout) and not batch_invariant,
            num_sharing=self._programs.num_sharing,
            reads_whole_tables=self._programs.reads_whole_tables,
        )
        self._cuts: dict[str, Any] = {}
        self._params: dict[str, Any] = {}
        if params:
            self.load(params)
        self._steps: dict[Shape, Any] = {}
        self._seconds: dict[Shape, float] = {}
        self._choices: dict[_Choice, Any] = {}
        self._shares_pages = shares_pages
        self._readout: Readout | None = None
        self.idle_seconds: IdleSeconds | None = None
        self._nothing_compiled = NothingCompiled() if strict else None
        self._preparing = threading.Lock()

    def load(self, params: Mapping[str, Any]) -> None:
        """Take these weights, with the types and shardings of the first ones, while no request runs.

        Pages that are cached for later prompts are of the weights before.
        """
        programs = self._programs
        self._params = layered(
            params,
            programs.config,
            programs.layout,
            self._mesh,
            with_panels=programs.with_panels,
            cuts=self._cuts,
        )

    def share_tables(self, model: "JaxRunner") -> None:
        """Read the table and output projection of the model that this is the draft head of."""
        self._params |= {name: model._params[name] for name in self._params if name in model._params}

    def warm_up(self, *, only_greedy: bool = False) -> None:
        """Compile every program, make the cache, and measure steps.

        only_greedy: leave out programs of requests with a temperature or with edited logits.
        """
        shapes = self._shapes.all
        steps = [self._step_of(shape) for shape in shapes]
        choices = [
            _Choice(count, needs, with_edits, with_guesses)
            for count in sorted({step.num_logits for step in steps})
            for needs in (Needs.all() if self._programs.has_choice_by_needs else [None])
            for with_edits in (False, True)
            if not (only_greedy and (with_edits or (needs and needs.draws)))
            for with_guesses in (
                [False, True] if self._by_ratio and (needs is None or needs.draws) else [False]
            )
        ]
        # JAX traces here, under the settings of this thread; only parts of compilers have several threads.
        lowered = [self._lowered(step) for step in steps]
        lowered += [
            self._programs.choice(
                choice.num_logits,
                choice.needs,
                with_edits=choice.with_edits,
                with_guesses=choice.with_guesses,
            )
            for choice in choices
        ]
        compiled = _compiled(lowered)
        self._steps = dict(zip(shapes, compiled, strict=False))
        self._choices = dict(zip(choices, compiled[len(shapes) :], strict=True))
        self._cache.compile(shares_pages=self._shares_pages)
        self._cache.pools, self._last = self._programs.empty()
        put_in_huge_pages(jax.tree.leaves((self._params, self._cache.pools)))
        token_shapes = [
            shape for shape in shapes if shape.generate + shape.verify and not (shape.blocks or shape.pages)
        ]
        self._seconds = {shape: self._idle_seconds(shape) for shape in token_shapes}
        self.idle_seconds = self._measured()
        if self._nothing_compiled is not None:
            self.prepare_reads()

    def _lowered(self, step: StepShape) -> Any:
        programs = self._programs
        return programs.joined_step(step) if programs.joins_inputs else programs.step(step)

    def _idle_seconds(self, shape: Shape, prompts: Sequence[SequenceWork] = ()) -> float:
        """Seconds of a step of this shape and these prompts, until its tokens are read.

        All rows that generate or verify are used, at the first position, where attention takes no time.
        """
        batch, seconds = Batch((*self._first_tokens(shape), *prompts)), []
        for _ in range(5):
            started = time.perf_counter()
            self._dispatched(batch, shape).read()
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    def _first_tokens(self, shape: Shape) -> list[SequenceWork]:
        """First tokens, with their drafts, for every row that generates or verifies."""
        num_drafts = self._num_drafts if shape.verify else 0
        return [
            placeholder(self.limits, replica, row, 1 + num_drafts, num_drafts)
            for replica in range(self.limits.num_replicas)
            for row in range(shape.generate + shape.verify)
        ]

    def step_seconds(self) -> float:
        """Seconds of a step that generates for one sequence of each replica, without attention."""
        return self._idle_seconds(Shape(generate=1))

    def _measured(self) -> IdleSeconds:
        generate = [(shape.generate, seconds) for shape, seconds in self._seconds.items() if shape.generate]
        slots, count = self.limits.slots_per_replica, timed_blocks(self.limits)
        prompts = [
            placeholder(self.limits, replica, 0, count * self.limits.block, samples=False)
            for replica in range(self.limits.num_replicas)
        ]
        mixed = self._idle_seconds(Shape(generate=slots, blocks=count), prompts)
        return IdleSeconds.of(generate, mixed, self.limits)

    def generate_seconds(self, num_sequences: int) -> float:
        """Seconds of a step that generates for `num_sequences` sequences, without attention."""
        return self._seconds[Shape(generate=self._rows_for(num_sequences))]

    def _rows_for(self, num_sequences: int) -> int:
        """Rows of each replica in the smallest program for this number of sequences."""
        per_replica = -(-num_sequences // self.limits.num_replicas)
        return next(n for n in compiled_sizes(self.limits.slots_per_replica) if n >= per_replica)

    def cost_ratio(self, num_sequences: int) -> float:
        """Seconds of a step that verifies drafts of `num_sequences` sequences, over one that generates."""
        count = self._rows_for(num_sequences)
        return self._seconds[Shape(verify=count)] / self._seconds[Shape(generate=count)]

    def _step_of(self, shape: Shape) -> StepShape:
        """The step of this shape.

        It yields one row of logits, one for each slot, or the most of any shape, so that few programs sample.
        """
        num_heads = self._shapes.num_heads(shape)
        sizes = 1, self.limits.slots_per_replica, max(map(self._shapes.num_heads, self._shapes.all))
        num_logits = next(size for size in sizes if size >= num_heads)
        block = self.limits.block
        rows = (
            Rows(shape.generate, 1),
            Rows(shape.verify, 1 + self._num_drafts, verifies=True),
            Rows(shape.blocks, block),
            Rows(min(shape.fresh, 1), shape.fresh * block),
        )
        used = tuple(row for row in rows if row.num_rows)
        pages = shape.pages or self.limits.pages_per_context
        num_hidden = self._num_hidden if shape.hidden else 0
        return StepShape(
            used,
            num_heads,
            num_logits,
            pages,
            is_fresh=bool(shape.fresh),
            num_hidden=num_hidden,
            keeps_hidden=self._keeps_hidden,
        )

    def run(self, batch: Batch) -> "_UnderWay":
        """Dispatch one step."""
        assert self._steps, "warm_up() comes first"
        if self._nothing_compiled is not None:  # after the warm-up of every runner of the process
            self._nothing_compiled.check()
        self.move(batch.moves)
        if any(work.reads for work in batch.works):
            self.prepare_reads()
        self._cache.restore(batch.works)
        under_way = self._dispatched(batch, self._shapes.of(batch))
        self._cache.save(batch.works)
        return under_way

    def _dispatched(self, batch: Batch, shape: Shape) -> "_UnderWay":
        """Dispatch the batch in the program of this shape."""
        step, cache = self._step_of(shape), self._cache
        num_sharing = self._programs.num_sharing if step.is_fresh else 1
        per_shard = self._programs.cache.replicas_per_shard
        inputs = StepInputs(batch, step, self.limits, per_shard, num_sharing, num_hidden=self._num_read)
        rows, edits = inputs.sampling(self.vocab_size)
        needs = Needs.of(rows) if self._programs.has_choice_by_needs else None
        guesses = inputs.guesses(self.vocab_size) if needs is None or needs.draws else None
        choose = self._choices[_Choice(step.num_logits, needs, edits is not None, guesses is not None)]
        columns: Sequence[Any] = inputs.arrays
        of_choice: Sequence[Any] = inputs.chosen_slots, rows
        if self._programs.joins_inputs:
            columns, of_choice = [joined(columns)], [joined(of_choice)]
        results = None
        with one_at_a_time(self._mesh, lambda: (sampled, cache.pools, results and results.outputs)):
            yielded = self._steps[shape](self._params, cache.pools, self._last, *columns)
            logits, cache.pools, *hidden = yielded
            self._last, sampled = choose(self._last, logits, *of_choice, edits, guesses)
            if step.num_hidden and self._readout is not None:
                results = self._readout.dispatch(self._params, hidden[0], inputs.scored, inputs.embedded)
        cache.settle()  # while the device works
        kept = logits if self._keeps_logits else None
        num_top = np.asarray(rows.num_top)
        normed = (hidden[-1], inputs.computed) if step.keeps_hidden else None
        return _UnderWay(sampled, inputs.sampled, num_top, results, kept, normed)

    def export(self, pages: Sequence[int], snapshot: int = NO_PAGE) -> Any:
        """Dispatch a copy of the pages' contents and of a snapshot, for another runner of the same model."""
        return self._cache.export(pages, snapshot)

    def exported(self, num_pages: int) -> Any:
        """Types and shardings of the result of `export` for `num_pages` pages."""
        return self._cache.exported(num_pages)

    def accept(self, pages: Sequence[int], exported: Any, snapshot: int = NO_PAGE) -> None:
        """Dispatch a write of another runner's pages to `pages`, without CACHED ones, and of its snapshot."""
        self._cache.accept(pages, exported, snapshot)

    def move(self, moves: Sequence[Move]) -> None:
        """Make these moves between the cache and the host's memory, in their order."""
        self._cache.move(moves)

    def prepare_reads(self) -> None:
        """Compile the programs for works with `reads`; called from any thread. Few servers ever need them."""
        with self._preparing:
            if self._readout is None:
                shapes = self._shapes.hidden
                lowered = [self._lowered(self._step_of(shape)) for shape in shapes]
                self._steps |= dict(zip(shapes, _compiled(lowered), strict=True))
                self._readout = Readout(self._programs, self._num_hidden)

    @property
    def _num_hidden(self) -> int:
        """Tokens of a replica in the largest step whose hidden states are read."""
        return self.limits.slots_per_replica + self.limits.chunk


class _UnderWay:
    """The StepResult of a step that may still run.

    rows: the rows of each work's tokens. num_top: alternatives to report, by row. results: scores and
    embeddings from hidden states. hidden: of all tokens, and the rows of each work in it.
    """

    def __init__(
        self,
        sampled: Sampled,
        rows: list[range],
        num_top: np.ndarray,
        results: Results | None,
        logits: jax.Array | None,
        hidden: tuple[jax.Array, list[range]] | None,
    ) -> None:
        self._sampled, self._rows, self._num_top, self._results = sampled, rows, num_top, results
        self._logits, self._hidden = logits, hidden

    def read(self) -> Sequence[WorkOutput]:
        given = self._sampled
        has_top = bool(self._num_top.any())  # otherwise the device sends two arrays less
        tokens, logprobs = (x.tolist() for x in jax.device_get((given.tokens, given.logprobs)))
        top_ids, top_logprobs = jax.device_get((given.top_ids, given.top_logprobs)) if has_top else ([], [])

        def score(i: int) -> TokenScore:
            if not self._num_top[i]:
                return TokenScore(tokens[i], logprobs[i], ())
            top = slice(self._num_top[i])
            likeliest = zip(top_ids[i][top].tolist(), top_logprobs[i][top].tolist(), strict=True)
            return TokenScore(tokens[i], logprobs[i], tuple(likeliest))

        scores, embeddings = self._results.read() if self._results else ({}, {})
        logits = None if self._logits is None else jax.device_get(self._logits)
        hidden = [None] * len(self._rows)
        if self._hidden is not None:
            of_step, of_works = jax.device_get(self._hidden[0]), self._hidden[1]
            hidden = [of_step[one.start : one.stop] for one in of_works]
        return [
            WorkOutput(
                [score(i) for i in rows],
                scores.get(work, ()),
                embeddings.get(work),
                () if logits is None else [logits[i] for i in rows],
                hidden[work],
            )
            for work, rows in enumerate(self._rows)
        ]


def _compiled(lowered: Sequence[Any]) -> list[Any]:
    """The programs, several compiled at once."""
    with ThreadPoolExecutor(min(_COMPILED_AT_ONCE, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda choice: choice.compile(), lowered))


def check_serves(
    config: ModelConfig, layout: Layout, num_slots: int, context: int, *, batch_invariant: bool = False
) -> None:
    """Raise LayoutError or PlanError if a JaxRunner cannot serve this, before any weight is read."""
    check_runs(layout, "generate")
    check_model_runs(config, layout.at("prefill"))
    check_fits(layout, config)
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


def _check_prompts(config: ModelConfig, layout: Layout, limits: Limits, *, keeps_hidden: bool) -> None:
    """Raise PlanError if the axes that split positions of prompts do not divide what they have to."""
    over, count = "·".join(layout.rules.prompt_axes), layout.num_prompt_shards
    if limits.block % count:
        raise PlanError(
            f"{config.name}: prompts of a context of {limits.context} tokens fill no block that divides over "
            f"{over} = {count}; fits: a context of {limits.block * count} or more, or {over} = 1"
        )
    if keeps_hidden and count > 1:
        raise PlanError(
            f"{config.name}: a draft head reads the hidden states of whole prompts, whose positions "
            f"{over} splits; fits: a layout without it"
        )


def _check_batch_invariant(config: ModelConfig, layout: Layout) -> None:
    if config.state_mixer:
        raise PlanError(
            f"{config.name}: results cannot be batch-invariant with the {config.state_mixer.title}, which "
            "computes prompts in chunks and answers token by token; fits: a model whose layers have attention"
        )
    if config.moe:
        raise PlanError(
            f"{config.name}: results cannot be batch-invariant with {config.moe.num_experts} experts, among "
            "which the tokens of all requests are sorted together; fits: a model without experts"
        )
    if (shared := layout.mesh.num_devices // layout.num_batch_shards) > 1:
        raise PlanError(
            f"{config.name}: results cannot be batch-invariant under {layout}, where {shared} devices add up "
            "their parts of a sum in an order that may depend on its size; fits: a layout over data only"
        )

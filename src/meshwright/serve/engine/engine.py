"""Continuous batching: requests join and leave the running batch between two steps.

One background thread owns the device. Each turn it asks the scheduler for the next step, has it run, and
only then reads the tokens of the step before: so the device has work while tokens are handed out. Everything
else (submit, cancel) only changes the scheduler, under a lock.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import NamedTuple

from meshwright.errors import RequestError
from meshwright.serve.engine.batch import Batch, Runner, SequenceWork, StepResult
from meshwright.serve.engine.logit_edits import LogitEdits
from meshwright.serve.engine.metrics import Forecast, Metrics
from meshwright.serve.engine.pace import Pace
from meshwright.serve.engine.scheduler import Counts, Drafter, Mode, Scheduler
from meshwright.serve.engine.sequence import (
    EngineError,
    EngineStopped,
    FinishReason,
    Lifetime,
    Request,
    Sequence,
    TokenScore,
)
from meshwright.serve.engine.token_stream import TokenStream

logger = logging.getLogger(__name__)


class _Dispatched(NamedTuple):
    """A step on its way, and when it was dispatched."""

    batch: Batch
    seconds: float
    sampled: StepResult


class Engine:
    """Serves requests with a runner from entering its `with` block to leaving it.

    mode, prefix_cache, drafter: of the Scheduler. forecast: what its steps should take, for the metrics.
    generator: an engine on other devices, which gets each request after its first token, with the pages of
    its prompt; it runs while this one does, and its metrics are this one's.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_waiting: int = 256,
        mode: Mode = "interleaved",
        prefix_cache: bool = True,
        drafter: Drafter | None = None,
        forecast: Forecast | None = None,
        generator: "Engine | None" = None,
    ) -> None:
        self._runner, self._generator = runner, generator
        idle = runner.idle_seconds
        self._pace = None if idle is None else Pace(idle, runner.limits)
        self._scheduler = Scheduler(
            runner.limits,
            max_waiting,
            mode=mode,
            prefix_cache=prefix_cache,
            drafter=drafter,
            first_only=generator is not None,
            pace=self._pace,
        )
        self._handed_over: list[tuple[Sequence, int, object]] = []  # to this engine, with their pages
        self._arrived: list[tuple[Ordered[int], object]] = []  # pages of prompts that another process filled
        self._changed = threading.Condition()
        self._stopped: str | None = "the engine has not started"
        self._read_seconds = 0.0  # when the tokens of a step were last read
        self._thread = threading.Thread(target=self._serve, name="meshwright-engine", daemon=True)
        self.metrics = Metrics(self._counts, forecast)
        if generator is not None:
            generator.metrics = self.metrics

    @property
    def _num_waiting(self) -> int:
        return self._scheduler.num_waiting + len(self._handed_over)

    def _counts(self) -> Counts:
        with self._changed:
            own = self._scheduler.counts
        return own if self._generator is None else own + self._generator._counts()

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._runner.limits.context

    @property
    def page_size(self) -> int:
        """Positions of a page of the cache."""
        return self._runner.limits.page_size

    @property
    def num_cached_pages(self) -> int:
        """Pages of prompts and answers that are kept for others that begin alike."""
        there = 0 if self._generator is None else self._generator.num_cached_pages
        return self._scheduler.num_cached_pages + there

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def stopped(self) -> str | None:
        """Why the engine serves nothing, or None while it serves."""
        return self._stopped or (self._generator.stopped if self._generator else None)

    def __enter__(self) -> "Engine":
        if self._generator is not None:
            self._generator.__enter__()
        self._stopped = None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop("the server is shutting down")
        self._thread.join()
        if self._generator is not None:
            self._generator.__exit__()

    def submit(self, *requests: Request) -> TokenStream:
        """The events of `requests`, numbered in order; all of them are queued, or none.

        Called from a running asyncio loop. Raises RequestError (400: it cannot fit the context; 429: the
        queue is full) and EngineStopped.
        """
        lifetimes = [Lifetime() for _ in requests]
        stream = TokenStream(lifetimes, lambda index, reason: self._release(sequences[index], reason))
        sequences = [
            Sequence(
                request,
                self._max_tokens(request),
                index,
                stream.put,
                edits=LogitEdits.of(request, self.vocab_size),
                lifetime=lifetime,
            )
            for index, (request, lifetime) in enumerate(zip(requests, lifetimes, strict=True))
        ]
        with self._changed:
            if self.stopped:
                raise EngineStopped(self.stopped)
            self._scheduler.add(sequences, self._generator._num_waiting if self._generator else 0)
            self._changed.notify()
        return stream

    def num_unknown_pages(self, prompt: Ordered[int]) -> int:
        """Full pages of a prompt, whose last token is always computed, that the cache does not hold."""
        with self._changed:
            known = self._scheduler.num_known_pages(prompt[:-1])
        return (len(prompt) - 1) // self.page_size - known

    def take_pages(self, tokens: Ordered[int], exported: object) -> None:
        """Caches full pages of a prompt that another engine has exported; requests from now on find them."""
        with self._changed:
            self._arrived.append((tokens, exported))

    def prepare_scores(self, num_tokens: int) -> None:
        """Compile what a request with `scores_prompt` needs, which would else hold up everyone's steps."""
        self._runner.prepare_scores(num_tokens)

    def _max_tokens(self, request: Request) -> int:
        num_prompt, context = len(request.prompt), self.context
        assert num_prompt > 0, "the prompt is empty; send at least one token"
        wrong = next((token for token in request.prompt if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token {wrong} is not in the vocabulary of {self.vocab_size} tokens", param="prompt"
            )
        if num_prompt >= context:
            raise RequestError(
                f"the prompt has {num_prompt} tokens, but the context holds {context}; "
                f"send at most {context - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        if request.max_tokens is None:
            return context - num_prompt
        if num_prompt + request.max_tokens > context:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens = {request.max_tokens} make "
                f"{num_prompt + request.max_tokens}, but the context holds {context}; "
                f"ask for at most {context - num_prompt}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return request.max_tokens

    def _serve(self) -> None:
        under_way: _Dispatched | None = None
        try:
            while (batch := self._next_step(wait=under_way is None)) is not None:
                dispatched = None
                try:
                    if batch.works:
                        dispatched = _Dispatched(batch, time.perf_counter(), self._runner.run(batch))
                finally:  # also where the device fails: what it did before is whole
                    if under_way is not None:
                        self._deliver(under_way)
                under_way = dispatched
        except Exception as error:
            logger.exception("the engine failed")
            self._stop(f"the engine failed: {type(error).__name__}: {error}")

    def _next_step(self, *, wait: bool) -> Batch | None:
        """The next step, empty where there is none yet; None once the engine has stopped.

        wait: for a sequence to serve, since no step is under way whose tokens could be read meanwhile.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(
                    lambda: self._stopped or self._scheduler.unfinished or self._handed_over
                )
            if self._stopped is not None:
                return None
            self._adopt()
            batch = self._scheduler.schedule()
            assert batch or not wait, "the first of those that run can always go on"
            for work in batch.works if batch else ():
                work.sequence.lifetime.start()
            return batch or Batch(())

    def _deliver(self, step: "_Dispatched") -> None:
        """Hand each sequence its tokens, unless it was cancelled while the device worked."""
        batch, read = step.batch, step.sampled.read()
        # A step that was dispatched behind another began when that one ended.
        began, self._read_seconds = max(step.seconds, self._read_seconds), time.perf_counter()
        seconds = self._read_seconds - began
        self.metrics.step(batch, seconds)
        for sequence in (work.sequence for work in batch.works if work.samples):
            if sequence.request.scores_prompt and not sequence.num_generated:
                self._score_prompt(sequence)
        with self._changed:
            if self._pace is not None:
                self._pace.took(batch, seconds)
            for work, tokens in zip(batch.works, read, strict=True):
                if work.samples:
                    self._deliver_one(work, tokens)

    def _score_prompt(self, sequence: Sequence) -> None:
        prompt, num_top = list(sequence.request.prompt), sequence.request.sampling.top_logprobs
        sequence.prompt_scores = self._runner.scores(prompt).of(prompt[1:], num_top)

    def _deliver_one(self, work: SequenceWork, tokens: Ordered[TokenScore]) -> None:
        num_taken = 0
        for token in self._scheduler.delivered(work, tokens):
            self._append(work.sequence, token)
            num_taken += 1
        self.metrics.drafted(work.num_drafts, num_taken - 1)
        if self._generator is not None and num_taken and work.sequence.finish_reason is None:
            self._hand_over(work.sequence, self._generator)

    def _hand_over(self, sequence: Sequence, generator: "Engine") -> None:
        """The rest of the answer is `generator`'s, which gets the pages of the prompt filled here."""
        pages = self._scheduler.hand_over(sequence)
        exported = self._runner.export(pages) if pages else None
        sequence.is_handed_over = True
        with generator._changed:
            generator._handed_over.append((sequence, len(pages), exported))
            if generator._stopped is not None:
                generator._stop(generator._stopped)
            generator._changed.notify()

    def _adopt(self) -> None:
        """Queues what was handed over to this engine; writes the pages that came, as far as there is room."""
        while self._arrived:
            tokens, exported = self._arrived.pop(0)
            self._write(self._scheduler.keep_copied(tokens), exported)
        while self._handed_over:
            sequence, num_pages, exported = self._handed_over.pop(0)
            self._write(self._scheduler.adopt(sequence, num_pages), exported)

    def _write(self, places: list[int], exported: object) -> None:
        if places:
            self._runner.move(self._scheduler.take_moves())  # out of the pages that are written next
            self._runner.accept(places, exported)

    def _append(self, sequence: Sequence, token: TokenScore) -> None:
        if not math.isfinite(token.logprob):  # its neighbours' logits are their own, so only this one fails
            position = len(sequence.tokens)
            self._fail(sequence, f"the model's logits at position {position} are not finite")
            return
        event = sequence.append(token)
        self.metrics.generated_tokens.inc()
        if sequence.num_generated == 1:
            self.metrics.prefilled(sequence)
        if sequence.request.exports_pages and event.finish_reason:
            event = replace(event, pages=self._exported(sequence))
        if event.finish_reason:
            self._finish(sequence, event.finish_reason)
        sequence.emit(event)

    def _exported(self, sequence: Sequence) -> object:
        """The full pages of its prompt; None where it has none, or has lost them."""
        count = sequence.num_prompt // self.page_size
        pages = sequence.pages.whole[:count]
        return self._runner.export(pages) if pages and len(pages) == count else None

    def _release(self, sequence: Sequence, reason: FinishReason) -> None:
        with self._changed:
            if sequence.finish_reason is not None:
                return
            if sequence.is_handed_over and self._generator is not None:
                self._generator._release(sequence, reason)
            else:
                self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        arrived = next((one for one in self._handed_over if one[0] is sequence), None)
        if arrived is None:
            self._scheduler.release(sequence, reason)
        else:
            self._handed_over.remove(arrived)
            sequence.finish_reason = reason
        sequence.lifetime.finish(reason)
        self.metrics.finish(sequence)

    def _stop(self, why: str) -> None:
        """Serve nothing more, and tell everyone who waits; the first reason stays."""
        with self._changed:
            self._stopped = self._stopped or why
            arrived = [sequence for sequence, _, _ in self._handed_over]
            for sequence in [*self._scheduler.unfinished, *arrived]:
                self._fail(sequence, self._stopped)
            self._changed.notify()

    def _fail(self, sequence: Sequence, why: str) -> None:
        self._finish(sequence, "failed")
        sequence.emit(EngineError(why))

"""Continuous batching: requests join and leave the running batch between two steps.

One background thread owns the device. Each turn it schedules a step, dispatches it, and then reads the tokens
of the step before, so that the device has work while tokens are handed out. All other calls (submit, cancel)
change only the scheduler, under a lock.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.errors import RequestError
from meshwright.serve.engine.batch import Batch, Runner, StepResult
from meshwright.serve.engine.handover import Arrivals
from meshwright.serve.engine.limits import check_length
from meshwright.serve.engine.metrics import Forecast, Metrics
from meshwright.serve.engine.occupancy import Occupancy
from meshwright.serve.engine.policy import Mode, policy_of
from meshwright.serve.engine.request import EngineError, EngineStopped, FinishReason, Request, TokenScore
from meshwright.serve.engine.scheduler import Scheduler
from meshwright.serve.engine.sequence import Lifetime, TokenSequence
from meshwright.serve.engine.speculate import Drafter
from meshwright.serve.engine.token_stream import TokenStream

logger = logging.getLogger(__name__)


class _Dispatched(NamedTuple):
    """A step under way, and the time of its dispatch."""

    batch: Batch
    seconds: float
    result: StepResult


class Engine:
    """A context manager that serves requests with a runner.

    mode: of the scheduler's policy. prefix_cache, drafter: of the Scheduler.
    forecast: planned seconds and bytes of steps, for the metrics.
    generator: an engine on other devices. It gets each request after its first token, with the pages of its
    prompt, runs while this one does, and shares its metrics.
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
        self._runner, self._generator, self.max_waiting = runner, generator, max_waiting
        policy = policy_of(mode, runner.limits, runner.idle_seconds)
        self._drafter = drafter or Drafter()
        self._scheduler = Scheduler(
            runner.limits, max_waiting, policy, prefix_cache=prefix_cache, drafter=self._drafter, is_fair=True
        )
        self._arrivals = Arrivals(self._scheduler, runner)
        self._changed = threading.Condition()
        self._stopped: str | None = "the engine has not started"
        self._read_seconds = 0.0  # when the tokens of a step were last read
        self._thread = threading.Thread(target=self._serve, name="meshwright-engine", daemon=True)
        self.metrics = Metrics(self._occupancy, forecast)
        if generator is not None:
            generator.metrics = self.metrics

    @property
    def _num_waiting(self) -> int:
        return len(self._scheduler.waiting) + len(self._arrivals.sequences)

    def _occupancy(self) -> Occupancy:
        with self._changed:
            occupancy = self._scheduler.occupancy
        return occupancy if self._generator is None else occupancy + self._generator._occupancy()

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt and its answer."""
        return self._runner.limits.context

    @property
    def page_size(self) -> int:
        """Positions of a page of the cache."""
        return self._runner.limits.page_size

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def embedding_size(self) -> int:
        """Dimensions of an embedding."""
        return self._runner.embedding_size

    @property
    def max_answers(self) -> int:
        """Maximum answers of one request."""
        return self._scheduler.max_answers

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
        """The events of `requests`, numbered in order; either all of them are queued or none.

        Call it from a running asyncio loop. Raises RequestError (400: it cannot fit the context; 429: the
        queue is full) and EngineStopped.
        """
        for prompt in {id(request.prompt): request.prompt for request in requests}.values():
            self._check_tokens(prompt)
        # Hundreds of answers to a long prompt would take more memory than the model.
        num_answers = Counter(id(request.prompt) for request in requests)
        shared = {id(request.prompt): list(request.prompt) for request in requests}
        lifetimes, group = [Lifetime() for _ in requests], object()
        stream = TokenStream(lifetimes, lambda index, reason: self._release(sequences[index], reason))
        sequences = [
            TokenSequence(
                request,
                self._max_tokens(request),
                index,
                stream.put,
                limit=1 if self._generator is not None and request.generates else -1,
                lifetime=lifetime,
                new_tokens=lambda prompt: shared[id(prompt)],
                shares_tokens=num_answers[id(request.prompt)] > 1,
                group=group,
            )
            for index, (request, lifetime) in enumerate(zip(requests, lifetimes, strict=True))
        ]
        with self._changed:
            if self.stopped:
                raise EngineStopped(self.stopped)
            self._scheduler.add(sequences, self._generator._num_waiting if self._generator else 0)
            self._changed.notify()
        return stream

    def end_requests(self, why: str) -> None:
        """Fail all requests, also later ones."""
        self._stop(why)
        if self._generator is not None:
            self._generator._stop(why)

    def num_unknown_pages(self, prompt: Sequence[int]) -> int:
        """Full pages of a prompt that are not cached; its last token is always computed."""
        with self._changed:
            num_known = max(replica.num_known_pages(prompt) for replica in self._scheduler.replicas)
        return (len(prompt) - 1) // self.page_size - num_known

    def num_exported(self, num_prompt: int) -> int:
        """Pages of a prompt that another engine gets: the full ones; with states before its last token."""
        return (num_prompt - self._runner.limits.has_states) // self.page_size

    def take_pages(self, tokens: Sequence[int], exported: object) -> None:
        """Cache full pages of a prompt that another engine has exported, for later requests."""
        with self._changed:
            self._arrivals.put_pages(tokens, exported)

    def prepare_reads(self) -> None:
        """Compile the programs for scores and embeddings, which would otherwise delay a step."""
        self._runner.prepare_reads()

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        assert prompt, "the prompt is empty; send at least one token"
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise RequestError(
                f"token {wrong} is not in the vocabulary of {self.vocab_size} tokens", param="prompt"
            )

    def _max_tokens(self, request: Request) -> int:
        num_prompt, context = len(request.prompt), self.context
        check_length(num_prompt, context, context - 1 if request.generates else context)
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
                    dispatched = self._dispatch(batch) if batch.works else None
                finally:  # also if the device fails: the step before was whole
                    if under_way is not None:
                        self._deliver(under_way)
                under_way = dispatched
        except BaseException as error:  # native libraries raise panics that are no Exception
            logger.exception("the engine failed")
            self._stop(f"the engine failed: {type(error).__name__}: {error}")

    def _dispatch(self, batch: Batch) -> _Dispatched:
        for work in batch.works:
            if work.samples:
                self._prepare_edits(work.sequence)
        return _Dispatched(batch, time.perf_counter(), self._runner.run(batch))

    def _prepare_edits(self, sequence: TokenSequence) -> None:
        """Compute the edits of its next token, on which a faulty grammar may fail.

        Only now: hundreds may wait, each with arrays over the vocabulary. The step runs in any case, since
        pages that it computes may be cached already.
        """
        try:
            sequence.prepare_edits(self.vocab_size)
        except BaseException as error:
            with self._changed:
                sequence.edits = None
                if sequence.finish_reason is None:
                    self._fail_after(sequence, error)

    def _next_step(self, *, wait: bool) -> Batch | None:
        """The next step, empty if there is none yet; None once the engine has stopped.

        wait: for a sequence to serve, since no step is under way whose tokens could be read meanwhile.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._stopped or self._unfinished)
            if self._stopped is not None:
                return None
            self._arrivals.take_in()
            batch = self._scheduler.schedule()
            assert batch or not wait, "the first running sequence can always go on"
            for work in batch.works if batch else ():
                work.sequence.lifetime.start()
            return batch or Batch(())

    @property
    def _unfinished(self) -> list[TokenSequence]:
        return [*self._scheduler.unfinished, *self._arrivals.sequences]

    def _deliver(self, step: _Dispatched) -> None:
        """Hand each sequence its tokens, unless it was cancelled while the device worked."""
        batch, outputs = step.batch, step.result.read()
        # A step that was dispatched during another began when that one ended.
        began, self._read_seconds = max(step.seconds, self._read_seconds), time.perf_counter()
        seconds = self._read_seconds - began
        self.metrics.step(batch, seconds)
        with self._changed:
            self._scheduler.policy.measured(batch, seconds)
            for work, output in zip(batch.works, outputs, strict=True):
                if work.reads == "scores":
                    work.sequence.add_prompt_scores(work.start, output.scores)
                elif work.reads == "embedding":
                    work.sequence.embedding = output.embedding
                if output.hidden is not None:
                    self._drafter.computed(work, output.hidden)
            sampled = [output.tokens for output in outputs]
            for work, tokens in self._scheduler.postprocess(batch.works, sampled):
                try:
                    num_taken = self._take(work.sequence, tokens)
                except BaseException as error:
                    self._fail_after(work.sequence, error)
                else:
                    self.metrics.drafted(work.num_drafts, num_taken - 1)

    def _take(self, sequence: TokenSequence, tokens: Sequence[TokenScore]) -> int:
        """Append these tokens up to the last of the answer; how many they are."""
        num_taken = 0
        if not tokens:
            self._append(sequence, None)
            return num_taken
        for token in tokens:
            num_taken += 1
            self._append(sequence, token)
            if sequence.finish_reason is not None:
                return num_taken
        if self._generator is not None:
            self._hand_over(sequence, self._generator)
        return num_taken

    def _hand_over(self, sequence: TokenSequence, generator: "Engine") -> None:
        """Leave the rest of an answer to `generator`, with the full pages that were computed here."""
        known = self._scheduler.exported(sequence, sequence.num_computed)
        self._scheduler.remove(sequence)
        pages = known.whole
        exported = self._runner.export(pages, known.snapshot) if pages else None
        sequence.limit = sequence.max_tokens
        with generator._changed:
            generator._arrivals.put(sequence, len(pages), exported)
            if generator._stopped is not None:
                generator._stop(generator._stopped)
            generator._changed.notify()

    def _append(self, sequence: TokenSequence, token: TokenScore | None) -> None:
        """Emit the event of a token, or of a prompt without an answer."""
        if token is not None and not math.isfinite(token.logprob):  # no other sequence's logits are affected
            position = len(sequence.tokens)
            self._fail(sequence, f"the model's logits at position {position} are not finite")
            return
        event = sequence.append(token)
        if token is not None:
            self.metrics.generated_tokens.inc()
        if sequence.num_generated < 2:
            self.metrics.prefilled(sequence)
        if sequence.request.exports_pages and event.finish_reason:
            event = replace(event, pages=self._exported(sequence))
        if event.finish_reason:
            self._finish(sequence, event.finish_reason)
        sequence.emit(event)

    def _exported(self, sequence: TokenSequence) -> object:
        """The full pages of its prompt; None if it has none, or has lost them."""
        known = self._scheduler.exported(sequence, sequence.num_prompt)
        if not known.whole or len(known.whole) != self.num_exported(sequence.num_prompt):
            return None
        return self._runner.export(known.whole, known.snapshot)

    def _release(self, sequence: TokenSequence, reason: FinishReason) -> None:
        with self._changed:
            if sequence.finish_reason is not None:
                return
            is_here = sequence in self._unfinished
            if self._generator is not None and not is_here:
                self._generator._release(sequence, reason)
            else:
                self._finish(sequence, reason)

    def _finish(self, sequence: TokenSequence, reason: FinishReason) -> None:
        if self._arrivals.discard(sequence):
            sequence.finish_reason = reason
        else:
            self._scheduler.release(sequence, reason)
        sequence.lifetime.finish(reason)
        self.metrics.finish(sequence)
        sequence.tokens = []  # its stream may go on with other answers

    def _stop(self, why: str) -> None:
        """Fail all requests and serve nothing more; the first reason stays."""
        with self._changed:
            self._stopped = self._stopped or why
            for sequence in self._unfinished:
                self._fail(sequence, self._stopped)
            self._changed.notify()

    def _fail_after(self, sequence: TokenSequence, error: BaseException) -> None:
        """Fail the one request that an error concerns."""
        logger.error("a request failed", exc_info=error)
        self._fail(sequence, f"the request failed: {type(error).__name__}: {error}")

    def _fail(self, sequence: TokenSequence, why: str) -> None:
        if sequence in self._unfinished:  # an error may have come after its slot was free
            self._finish(sequence, "failed")
        sequence.emit(EngineError(why))

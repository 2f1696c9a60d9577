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

from meshwright.errors import RequestError
from meshwright.serve.batch import Batch, Runner, Sampled, Work
from meshwright.serve.logit_edits import LogitEdits
from meshwright.serve.metrics import Metrics
from meshwright.serve.scheduler import Drafter, Mode, Scheduler
from meshwright.serve.sequence import EngineError, FinishReason, Request, Sequence, TokenScore
from meshwright.serve.token_stream import TokenStream

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests with a runner from entering its `with` block to leaving it.

    mode, prefix_cache, drafter: of the Scheduler.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_waiting: int = 256,
        mode: Mode = "interleaved",
        prefix_cache: bool = True,
        drafter: Drafter | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = Scheduler(
            runner.limits, max_waiting, mode=mode, prefix_cache=prefix_cache, drafter=drafter
        )
        self._changed = threading.Condition()
        self._stopped: str | None = "the engine has not started"
        self._thread = threading.Thread(target=self._serve, name="meshwright-engine", daemon=True)
        self.metrics = Metrics(lambda: self._scheduler.num_waiting, lambda: self._scheduler.num_running)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._runner.limits.context

    @property
    def num_cached_pages(self) -> int:
        """Pages of prompts and answers that are kept for others that begin alike."""
        return self._scheduler.num_cached_pages

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def stopped(self) -> str | None:
        """Why the engine serves nothing, or None while it serves."""
        return self._stopped

    def __enter__(self) -> "Engine":
        self._stopped = None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop("the server is shutting down")
        self._thread.join()

    def submit(self, *requests: Request) -> TokenStream:
        """The events of `requests`, numbered in order; all of them are queued, or none.

        Called from a running asyncio loop. Raises RequestError (400: it cannot fit the context; 429: the
        queue is full) and EngineError (the engine has stopped).
        """
        stream = TokenStream(len(requests), lambda index, reason: self._release(sequences[index], reason))
        sequences = [
            Sequence(
                request,
                self._max_tokens(request),
                index,
                stream.put,
                edits=LogitEdits.of(request, self.vocab_size),
            )
            for index, request in enumerate(requests)
        ]
        with self._changed:
            if self._stopped:
                raise EngineError(self._stopped)
            self._scheduler.add(sequences)
            self._changed.notify()
        return stream

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
        under_way: tuple[Batch, Sampled] | None = None
        try:
            while (batch := self._next_step(wait=under_way is None)) is not None:
                dispatched = None
                try:
                    if batch.works:
                        dispatched = batch, self._runner.run(batch)
                finally:  # also where the device fails: what it did before is whole
                    if under_way is not None:
                        self._deliver(*under_way)
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
                self._changed.wait_for(lambda: self._stopped or self._scheduler.unfinished)
            if self._stopped is not None:
                return None
            batch = self._scheduler.schedule()
            assert batch or not wait, "the first of those that run can always go on"
            return batch or Batch(())

    def _deliver(self, batch: Batch, sampled: Sampled) -> None:
        """Hand each sequence its tokens, unless it was cancelled while the device worked."""
        read = sampled.read()
        for sequence in (work.sequence for work in batch.works if work.samples):
            if sequence.request.scores_prompt and not sequence.num_generated:
                self._score_prompt(sequence)
        with self._changed:
            for work, tokens in zip(batch.works, read, strict=True):
                if work.samples:
                    self._deliver_one(work, tokens)

    def _score_prompt(self, sequence: Sequence) -> None:
        prompt, num_top = list(sequence.request.prompt), sequence.request.sampling.top_logprobs
        sequence.prompt_scores = self._runner.scores(prompt).of(prompt[1:], num_top)

    def _deliver_one(self, work: Work, tokens: Ordered[TokenScore]) -> None:
        for token in self._scheduler.delivered(work, tokens):
            self._append(work.sequence, token)

    def _append(self, sequence: Sequence, token: TokenScore) -> None:
        if not math.isfinite(token.logprob):  # its neighbours' logits are their own, so only this one fails
            position = len(sequence.tokens)
            self._fail(sequence, f"the model's logits at position {position} are not finite")
            return
        event = sequence.append(token)
        self.metrics.generated_tokens.inc()
        if sequence.num_generated == 1:
            self.metrics.prompt_tokens.inc(len(sequence.request.prompt))
            self.metrics.time_to_first_token.observe(sequence.time_to_first_token_seconds)
        if event.finish_reason:
            self._finish(sequence, event.finish_reason)
        sequence.emit(event)

    def _release(self, sequence: Sequence, reason: FinishReason) -> None:
        with self._changed:
            if sequence.finish_reason is None:
                self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.release(sequence, reason)
        self.metrics.finished.labels(reason).inc()
        if sequence.num_generated > 1:
            seconds = sequence.time_per_output_token_seconds(time.perf_counter())
            self.metrics.time_per_output_token.observe(seconds)

    def _stop(self, why: str) -> None:
        """Serve nothing more, and tell everyone who waits; the first reason stays."""
        with self._changed:
            self._stopped = self._stopped or why
            for sequence in self._scheduler.unfinished:
                self._fail(sequence, self._stopped)
            self._changed.notify()

    def _fail(self, sequence: Sequence, why: str) -> None:
        self._scheduler.release(sequence, "failed")
        self.metrics.finished.labels("failed").inc()
        sequence.emit(EngineError(why))

"""Continuous batching: requests join and leave the running batch between two steps.

One background thread owns the device. Each turn it prefills at most one waiting prompt into a free
slot, so that those already generating stall for one prompt at most, and then generates one token for
every slot that is taken. Everything else (submit, cancel) only changes the scheduler, under a lock.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence as Ordered
from typing import Protocol

import jax
import numpy as np

from meshwright.errors import RequestError
from meshwright.serve.logit_edits import LogitEdits, batch_edits, batch_rows, no_edits
from meshwright.serve.metrics import Metrics
from meshwright.serve.sampling import Edits, Rows, sample
from meshwright.serve.scheduler import Scheduler
from meshwright.serve.scoring import Scores
from meshwright.serve.sequence import (
    EngineError,
    FinishReason,
    Request,
    SamplingParams,
    Sequence,
    TokenScore,
)
from meshwright.serve.token_stream import TokenStream

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The model on its devices: `num_slots` sequences of up to `context` tokens each.

    Called from one thread at a time. Logits are replicated over the mesh (sampling is not sharded).
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def prefill(self, slot: int, tokens: list[int]) -> jax.Array:
        """Logits f32[V] after `tokens`, whose keys and values now fill positions 0.. of `slot`."""
        ...

    def generate(self, tokens: np.ndarray, positions: np.ndarray) -> jax.Array:
        """Logits f32[num_slots, V] after each slot's token int32 at its position int32.

        A slot that nobody holds is given token 0 at position 0.
        """
        ...

    def prepare_scores(self, num_tokens: int) -> None:
        """Compile what scores prompts of so many tokens; called from any thread."""
        ...

    def scores(self, tokens: list[int]) -> Scores:
        """Log-probabilities of `tokens` but the first, each given those before it."""
        ...


class Engine:
    """Serves requests with a runner from entering its `with` block to leaving it."""

    def __init__(self, runner: Runner, *, max_waiting: int = 256) -> None:
        self._runner = runner
        self._scheduler = Scheduler(runner.num_slots, max_waiting)
        self._changed = threading.Condition()
        self._stopped: str | None = "the engine has not started"
        self._thread = threading.Thread(target=self._serve, name="meshwright-engine", daemon=True)
        self.metrics = Metrics(lambda: self._scheduler.num_waiting, lambda: self._scheduler.num_running)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._runner.context

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def stopped(self) -> str | None:
        """Why the engine serves nothing, or None while it serves."""
        return self._stopped

    def __enter__(self) -> "Engine":
        self._warm_up()
        self._stopped = None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop("the server is shutting down")
        self._thread.join()

    def _warm_up(self) -> None:
        """Compile prefill, generate and sampling now rather than under the first request."""
        num_slots, vocab_size = self._runner.num_slots, self._runner.vocab_size
        first = self._runner.prefill(0, [0])[None]
        idle = np.zeros(num_slots, np.int32)
        rest = self._runner.generate(idle, idle)
        for logits, positions in ((first, [1]), (rest, idle + 1)):
            rows = batch_rows([_GREEDY] * len(positions), positions)
            _sample(logits, rows, None)
            _sample(logits, rows, no_edits(len(positions), vocab_size))

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
        assert num_prompt > 0, "an empty prompt has no last token to continue"
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
        try:
            while self._wait_for_work():
                self._prefill_one()
                self._generate_all()
        except Exception as error:
            logger.exception("the engine failed")
            self._stop(f"the engine failed: {type(error).__name__}: {error}")

    def _wait_for_work(self) -> bool:
        """True once a sequence waits or runs, False once the engine has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._scheduler.unfinished)
            return self._stopped is None

    def _prefill_one(self) -> None:
        with self._changed:
            sequence = self._scheduler.admit()
        if sequence is None:
            return
        assert sequence.slot is not None
        prompt = list(sequence.request.prompt)
        if sequence.request.scores_prompt:
            num_top = sequence.request.sampling.top_logprobs
            sequence.prompt_scores = self._runner.scores(prompt).of(prompt[1:], num_top)
        logits = self._runner.prefill(sequence.slot, prompt)
        self._deliver([sequence], self._choose(logits[None], [sequence], [len(prompt)]))

    def _generate_all(self) -> None:
        with self._changed:
            running = self._scheduler.running
        if not running:
            return
        rows = [running.get(slot) for slot in range(self._runner.num_slots)]
        last_tokens = np.array([row.last_token if row else 0 for row in rows], np.int32)
        positions = np.array([row.position if row else 0 for row in rows], np.int32)
        logits = self._runner.generate(last_tokens, positions)
        chosen = self._choose(logits, rows, positions + 1)
        self._deliver(list(running.values()), [chosen[slot] for slot in running])

    def _choose(
        self, logits: jax.Array, rows: Ordered[Sequence | None], positions: Ordered[int] | np.ndarray
    ) -> list[TokenScore]:
        """The next token of each row, sampled as its sequence asks; any token where there is no sequence."""
        params = [row.request.sampling if row else _GREEDY for row in rows]
        edits = [row.edits if row else None for row in rows]
        changed = batch_edits(list(zip(params, edits, strict=True)), self.vocab_size)
        return _sample(logits, batch_rows(params, positions), changed)

    def _deliver(self, sequences: list[Sequence], scores: list[TokenScore]) -> None:
        """Hand each sequence its token, unless it was cancelled while the device worked."""
        with self._changed:
            for sequence, score in zip(sequences, scores, strict=True):
                if sequence.finish_reason is None:
                    self._deliver_one(sequence, score)

    def _deliver_one(self, sequence: Sequence, score: TokenScore) -> None:
        # Its neighbours' logits are their own, so only this one fails.
        if not math.isfinite(score.logprob):
            self._fail(sequence, f"the model's logits at position {sequence.position + 1} are not finite")
            return
        event = sequence.append(score)
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


_GREEDY = SamplingParams(temperature=0.0)


def _sample(logits: jax.Array, rows: Rows, edits: Edits | None) -> list[TokenScore]:
    """The sampled token of each row with its log-probability and as many alternatives as it asks for."""
    found = jax.device_get(sample(logits, rows, edits))
    return [
        TokenScore(token, logprob, tuple(zip(top_ids[:num].tolist(), tops[:num].tolist(), strict=True)))
        for token, logprob, top_ids, tops, num in zip(
            found.tokens.tolist(),
            found.logprobs.tolist(),
            found.top_ids,
            found.top_logprobs,
            np.asarray(rows.num_top).tolist(),
            strict=True,
        )
    ]

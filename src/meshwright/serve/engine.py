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
from meshwright.serve.metrics import Metrics
from meshwright.serve.sampling import sample
from meshwright.serve.scheduler import Scheduler
from meshwright.serve.sequence import EngineError, FinishReason, Request, SamplingParams, Sequence
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
        num_slots = self._runner.num_slots
        _choose(self._runner.prefill(0, [0])[None], [_GREEDY], [1])
        idle = np.zeros(num_slots, np.int32)
        _choose(self._runner.generate(idle, idle), [_GREEDY] * num_slots, idle + 1)

    def submit(self, *requests: Request) -> TokenStream:
        """The events of `requests`, numbered in order; all of them are queued, or none.

        Called from a running asyncio loop. Raises RequestError (400: it cannot fit the context; 429: the
        queue is full) and EngineError (the engine has stopped).
        """
        stream = TokenStream(len(requests), lambda index, reason: self._release(sequences[index], reason))
        sequences = [
            Sequence(request, self._max_tokens(request), index, stream.put)
            for index, request in enumerate(requests)
        ]
        with self._changed:
            if self._stopped:
                raise EngineError(self._stopped)
            self._scheduler.add(sequences)
            self._changed.notify()
        return stream

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
        logits = self._runner.prefill(sequence.slot, prompt)
        tokens, logprobs = _choose(logits[None], [sequence.request.sampling], [len(prompt)])
        self._deliver([sequence], tokens, logprobs)

    def _generate_all(self) -> None:
        with self._changed:
            running = self._scheduler.running
        if not running:
            return
        rows = [running.get(slot) for slot in range(self._runner.num_slots)]
        last_tokens = np.array([row.last_token if row else 0 for row in rows], np.int32)
        positions = np.array([row.position if row else 0 for row in rows], np.int32)
        logits = self._runner.generate(last_tokens, positions)
        sampling = [row.request.sampling if row else _GREEDY for row in rows]
        tokens, logprobs = _choose(logits, sampling, positions + 1)
        slots = list(running)
        self._deliver(list(running.values()), tokens[slots], logprobs[slots])

    def _deliver(self, sequences: list[Sequence], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Hand each sequence its token, unless it was cancelled while the device worked."""
        with self._changed:
            for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
                if sequence.finish_reason is None:
                    self._deliver_one(sequence, token, logprob)

    def _deliver_one(self, sequence: Sequence, token: int, logprob: float) -> None:
        if not math.isfinite(logprob):  # its neighbours' logits are their own, so only this one fails
            self._fail(sequence, f"the model's logits at position {sequence.position + 1} are not finite")
            return
        event = sequence.append(token, logprob)
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


def _choose(
    logits: jax.Array, params: list[SamplingParams], positions: Ordered[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The sampled tokens and their log-probabilities, on the host."""
    return jax.device_get(
        sample(
            logits,
            np.array([row.temperature for row in params], np.float32),
            np.array([row.top_p for row in params], np.float32),
            np.array([row.top_k for row in params], np.int32),
            np.array([row.seed for row in params], np.uint32),
            np.asarray(positions, np.int32),
        )
    )

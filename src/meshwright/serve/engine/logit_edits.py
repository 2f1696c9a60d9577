"""What one request changes in its logits as its answer grows, and the arrays of a batch for the sampler.

Kept on the host: penalties count tokens that the host has seen, and a grammar is followed token by token.
A batch in which nobody asks for any of it is sampled without these arrays.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from meshwright.serve.device.sampling import Edits, SampledRows
from meshwright.serve.engine.sequence import Request, SamplingParams


class Constraint(Protocol):
    """A constraint on the next token by those before: a JSON schema, a regular expression, a grammar."""

    def allowed(self) -> np.ndarray:
        """bool[V], at least one of them true."""
        ...

    def accept(self, token: int) -> None:
        """Go on past `token`, which was allowed."""
        ...


NewConstraint = Callable[[], Constraint]


class LogitEdits:
    """The edits of one sequence, over a vocabulary of `vocab_size` tokens."""

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = self._params = request.sampling
        self._stop_ids = sorted(request.stop_ids)
        self._constraint = request.new_constraint() if request.new_constraint else None
        self._num_generated = 0
        self.counts = np.zeros(vocab_size, np.int32)
        self.prompt = np.zeros(vocab_size, bool)
        self.prompt[list(request.prompt)] = True
        self._bias = np.zeros(vocab_size, np.float32)
        for token, bias in params.logit_bias:
            self._bias[token] += bias
        if params.allowed_ids is not None:
            forbidden = np.ones(vocab_size, bool)
            forbidden[list(params.allowed_ids)] = False
            self._bias[forbidden] = -np.inf

    @staticmethod
    def of(request: Request, vocab_size: int) -> "LogitEdits | None":
        """The edits of `request`, None if it has none."""
        return LogitEdits(request, vocab_size) if request.edits_logits else None

    def accept(self, token: int) -> None:
        """Count a token of the answer."""
        self.counts[token] += 1
        self._num_generated += 1
        if self._constraint is not None:
            self._constraint.accept(token)

    def bias(self) -> np.ndarray:
        """f32[V] to be added before the next token is chosen."""
        bias = self._bias
        if self._num_generated < self._params.min_tokens:
            bias = bias.copy()
            bias[self._stop_ids] = -np.inf
        if self._constraint is not None:
            bias = np.where(self._constraint.allowed(), bias, -np.inf)
        return bias


def batch_edits(rows: Sequence[tuple[SamplingParams, LogitEdits | None]], vocab_size: int) -> Edits | None:
    """The edits of a batch, row by row; None if no row has any."""
    if all(edits is None for _, edits in rows):
        return None
    shape = (len(rows), vocab_size)
    counts, prompt, bias = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for number, (_, edits) in enumerate(rows):
        if edits is not None:
            counts[number], prompt[number], bias[number] = edits.counts, edits.prompt, edits.bias()
    params = [row for row, _ in rows]
    return Edits(
        counts,
        prompt,
        bias,
        np.array([row.repetition_penalty for row in params], np.float32),
        np.array([row.presence_penalty for row in params], np.float32),
        np.array([row.frequency_penalty for row in params], np.float32),
    )


def no_edits(num_rows: int, vocab_size: int) -> Edits:
    """Edits that change nothing, to compile the sampler with."""
    shape = (num_rows, vocab_size)
    ones, zeros = np.ones(num_rows, np.float32), np.zeros(num_rows, np.float32)
    return Edits(
        np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32), ones, zeros, zeros
    )


def batch_rows(params: Sequence[SamplingParams], positions: Sequence[int] | np.ndarray) -> SampledRows:
    """The sampler's parameters of a batch whose next tokens stand at `positions`."""
    return SampledRows(
        np.array([row.temperature for row in params], np.float32),
        np.array([row.top_p for row in params], np.float32),
        np.array([row.top_k for row in params], np.int32),
        np.array([row.min_p for row in params], np.float32),
        np.array([row.seed for row in params], np.uint32),
        np.asarray(positions, np.int32),
        np.array([row.top_logprobs for row in params], np.int32),
    )

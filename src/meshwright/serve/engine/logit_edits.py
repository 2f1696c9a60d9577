"""Changes of one request to its logits, which depend on the tokens of its answer so far.

Kept on the host: penalties count tokens that the host has seen, and a grammar is followed token by token.
"""

import numpy as np

from meshwright.serve.engine.request import Request


class LogitEdits:
    """The edits of one sequence, over a vocabulary of `vocab_size` tokens.

    bias: f32[V], added before the next token is chosen; `prepare` computes it.
    """

    def __init__(self, request: Request, vocab_size: int) -> None:
        params = self._params = request.sampling
        # Clients and tokenizers may name stop tokens that the model does not have.
        self._stop_ids = sorted(token for token in request.stop_ids if token < vocab_size)
        self._constraint = request.new_constraint() if request.new_constraint else None
        self._num_generated = 0
        self.counts = np.zeros(vocab_size, np.int32)
        self.prompt = np.zeros(vocab_size, bool)
        self.prompt[list(request.prompt)] = True
        self._constant_bias = np.zeros(vocab_size, np.float32)
        for token, bias in params.logit_bias:
            self._constant_bias[token] += bias
        if params.allowed_ids is not None:
            forbidden = np.ones(vocab_size, bool)
            forbidden[list(params.allowed_ids)] = False
            self._constant_bias[forbidden] = -np.inf
        self.bias = self._constant_bias

    def accept(self, token: int) -> None:
        """Count a token of the answer."""
        self.counts[token] += 1
        self._num_generated += 1
        if self._constraint is not None:
            self._constraint.accept(token)

    def prepare(self) -> None:
        """Compute `bias` for the next token."""
        bias = self._constant_bias
        if self._num_generated < self._params.min_tokens:
            bias = bias.copy()
            bias[self._stop_ids] = -np.inf
        if self._constraint is not None:
            bias = np.where(self._constraint.allowed(), bias, -np.inf)
        self.bias = bias

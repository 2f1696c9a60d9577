"""Log-probabilities of a prompt's own tokens, which evaluation harnesses ask for.

    scores[t] = log p(tokens[t + 1] | tokens[..t]),  t = 0 .. T - 2

One forward pass without a cache; the head runs over a few positions at a time, since logits[T, V] of a long
prompt would be larger than the model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from meshwright.models.config import ModelConfig
from meshwright.models.transformer import Places, enter, leave, through
from meshwright.serve.device.sampling import top_tokens
from meshwright.serve.engine.request import TokenScore

_POSITIONS = 64  # of one product with the head


class TokenScores(NamedTuple):
    """Scores of each position but the last: logprobs f32[T - 1] of the next token, and the likeliest tokens.

    top_ids int32[T - 1, NUM_TOP], top_logprobs f32[T - 1, NUM_TOP]: descending.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    def of(self, tokens: list[int], num_top: int) -> tuple[TokenScore, ...]:
        """The scores of `tokens`, the prompt without its first, with `num_top` alternatives."""
        columns = (self.logprobs, self.top_ids[:, :num_top], self.top_logprobs[:, :num_top])
        rows = zip(tokens, *(column.tolist() for column in columns), strict=True)
        return tuple(
            TokenScore(token, logprob, tuple(zip(ids, logprobs, strict=True)))
            for token, logprob, ids, logprobs in rows
        )


def score(
    config: ModelConfig, ops: Any, params: Any, tokens: Array, prompt: Array, whole: Any
) -> tuple[Array, Array, Array]:
    """Scores of prompt[T], arrays with T rows, the last of which means nothing.

    tokens[B, T]: the prompt, once on every replica. whole: gathers logits, as float32.
    """
    length = tokens.shape[1]
    places = Places(
        lax.broadcasted_iota(jnp.int32, tokens.shape, 1, out_sharding=jax.typeof(tokens).sharding)
    )
    x, _ = through(
        config, ops, params, enter(config, ops, params, tokens, places), places, None, config.layers
    )
    chunk = min(_POSITIONS, length)
    # The last chunk overlaps the one before where T is no multiple; both hold the same.
    starts = np.minimum(np.arange(0, length, chunk, dtype=np.int32), length - chunk)
    row_of = np.zeros(length, np.int32)
    row_of[starts[:, None] + np.arange(chunk)] = np.arange(starts.size * chunk).reshape(-1, chunk)
    targets = jnp.roll(prompt, -1)

    def of_chunk(start: Array) -> tuple[Array, Array, Array]:
        indices = start + jnp.arange(chunk, dtype=jnp.int32)
        asked = jnp.broadcast_to(indices, (tokens.shape[0], chunk), out_sharding=jax.typeof(tokens).sharding)
        logits = whole(leave(config, ops, params, x, asked))[0]
        normalisers = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = jnp.take_along_axis(logits, targets[indices][:, None], axis=-1) - normalisers
        top_ids, top_logits = top_tokens(logits)
        return logprobs[:, 0], top_ids, top_logits - normalisers

    found = lax.map(of_chunk, jnp.asarray(starts))
    logprobs, top_ids, top_logprobs = (part.reshape(-1, *part.shape[2:])[row_of] for part in found)
    return logprobs, top_ids, top_logprobs

"""Which token comes next, given the logits: temperature, top-k, top-p and a seed, a row at a time."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike


@jax.jit
def sample(
    logits: ArrayLike,
    temperature: ArrayLike,
    top_p: ArrayLike,
    top_k: ArrayLike,
    seeds: ArrayLike,
    positions: ArrayLike,
) -> tuple[Array, Array]:
    """Tokens int32[B] drawn from logits[B, V], and their log-probabilities f32[B].

    temperature f32[B]: divides the logits; 0 takes the most likely token.
    top_k int32[B]: keep the k most likely tokens; 0 keeps all.
    top_p f32[B]: of those, keep the fewest whose probabilities sum to at least p; 1 keeps all.
    seeds uint32[B], positions int32[B]: the random key of a row, so a row's token depends on its own
    logits, seed and position, never on its neighbours in the batch.
    The log-probability is that of the unmodified logits, in nats: NaN if the logits are not finite.
    """
    logits = jnp.asarray(logits, jnp.float32)
    temperature, top_p, top_k = jnp.asarray(temperature), jnp.asarray(top_p), jnp.asarray(top_k)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Batch-wide conditions only skip work: a row that needs none of it gets the same token either way.
    drawn = jax.lax.cond(
        jnp.any(temperature > 0),
        _draw,
        lambda *_: greedy,
        logits,
        temperature,
        top_p,
        top_k,
        seeds,
        positions,
    )
    tokens = jnp.where(temperature > 0, drawn, greedy)
    return tokens, jax.vmap(_logprob)(logits, tokens)


def _draw(
    logits: Array, temperature: Array, top_p: Array, top_k: Array, seeds: Array, positions: Array
) -> Array:
    scaled = jax.vmap(_scale)(logits, temperature)
    filtered = jnp.any((top_p < 1) | (top_k > 0))
    allowed = jax.lax.cond(
        filtered, jax.vmap(_allowed), lambda scaled, *_: jnp.ones(scaled.shape, bool), scaled, top_p, top_k
    )
    return jax.vmap(_gumbel_argmax)(scaled, allowed, seeds, positions)


def _scale(logits: Array, temperature: Array) -> Array:
    # The maximum goes first: dividing by a tiny temperature then gives 0 and -inf, never inf - inf.
    return (logits - jnp.max(logits)) / jnp.where(temperature > 0, temperature, 1.0)


def _allowed(scaled: Array, top_p: Array, top_k: Array) -> Array:
    """Which of V tokens top-k and then top-p leave; always at least the most likely one."""
    ranks = jnp.arange(scaled.shape[0], dtype=jnp.int32)
    order = jnp.argsort(-scaled)
    in_top_k = (top_k <= 0) | (ranks < top_k)
    probabilities = jax.nn.softmax(jnp.where(in_top_k, scaled[order], -jnp.inf))
    before = jnp.cumsum(probabilities) - probabilities
    # A float32 sum can reach 1 before the tail, so p = 1 is not left to the comparison.
    in_top_p = (before < top_p) | (top_p >= 1) | (ranks == 0)
    return jnp.zeros(scaled.shape, bool).at[order].set(in_top_k & in_top_p)


def _gumbel_argmax(scaled: Array, allowed: Array, seed: Array, position: Array) -> Array:
    """argmax(logits + Gumbel noise), which is a draw from softmax(logits).

    The noise belongs to the token's id, not to its rank, so two nearly equal logits that change
    places do not change the draw.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    noise = jax.random.gumbel(key, scaled.shape, jnp.float32)
    return jnp.argmax(jnp.where(allowed, scaled + noise, -jnp.inf)).astype(jnp.int32)


def _logprob(logits: Array, token: Array) -> Array:
    return logits[token] - jax.nn.logsumexp(logits)

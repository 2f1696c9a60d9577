"""Which token comes next, given the logits: temperature, top-k, top-p and a seed, a row at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
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
    top_k int32[B]: keep the k most likely tokens, and those equal to the k-th; 0 keeps all.
    top_p f32[B]: of those, keep the fewest whose probabilities sum to at least p; 1 keeps all.
    seeds uint32[B], positions int32[B]: the random key of a row, so a row's token depends on its own
    logits, seed and position, never on its neighbours in the batch.
    The log-probability is that of the unmodified logits, in nats: NaN if the logits are not finite.
    """
    logits = jnp.asarray(logits, jnp.float32)
    temperature, top_p, top_k = jnp.asarray(temperature), jnp.asarray(top_p), jnp.asarray(top_k)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Batch-wide conditions only skip work: a row that needs none of it gets the same token either way.
    drawn = lax.cond(
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
    allowed = lax.cond(
        filtered, jax.vmap(_allowed), lambda scaled, *_: jnp.ones(scaled.shape, bool), scaled, top_p, top_k
    )
    return jax.vmap(_gumbel_argmax)(scaled, allowed, seeds, positions)


def _scale(logits: Array, temperature: Array) -> Array:
    # The maximum goes first: dividing by a tiny temperature then gives 0 and -inf, never inf - inf.
    return (logits - jnp.max(logits)) / jnp.where(temperature > 0, temperature, 1.0)


def _allowed(scaled: Array, top_p: Array, top_k: Array) -> Array:
    """Which of V tokens top-k and then top-p leave: at least the most likely one, and equals together."""
    probabilities = jax.nn.softmax(scaled)
    kth = _threshold(probabilities, lambda kept: jnp.sum(kept) >= top_k)
    in_top_k = (top_k <= 0) | (probabilities >= kth)
    probabilities = jax.nn.softmax(jnp.where(in_top_k, scaled, -jnp.inf))
    last = _threshold(probabilities, lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0)) >= top_p)
    # A float32 sum can reach 1 before the tail, so p = 1 is not left to the comparison.
    return in_top_k & ((top_p >= 1) | (probabilities >= last))


def _threshold(probabilities: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest probability c for which enough(probabilities >= c), at most their maximum.

    Halves the range of float32 bit patterns, which for numbers >= 0 are ordered as the numbers are: 31
    sums over V. Sorting the V logits instead took 30 times as long on a CPU (V = 8192; JAX 0.10.2).
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        fits = enough(probabilities >= lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    above = lax.bitcast_convert_type(jnp.max(probabilities), jnp.int32) + 1
    low, _ = lax.fori_loop(0, 31, halve, (jnp.zeros_like(above), above))
    return lax.bitcast_convert_type(low, jnp.float32)


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

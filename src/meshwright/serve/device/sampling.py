"""Sampling of the next token from logits: penalties, temperature, filters and a seed, one row at a time."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from meshwright.layout.server_programs import SAMPLERS
from meshwright.serve.engine.logit_edits import LogitEdits
from meshwright.serve.engine.request import NUM_TOP, SamplingParams


class SampledRows(NamedTuple):
    """How each row of logits[B, V] is sampled; arrays [B].

    temperature f32: divides the logits; 0 takes the most likely token.
    top_p f32: keep the fewest tokens whose probabilities sum to at least p; 1 keeps all.
    top_k int32: keep the k most likely tokens, and those equal to the k-th; 0 keeps all.
    min_p f32: keep tokens at least p times as likely as the most likely one; 0 keeps all.
    seeds uint32, positions int32: the random key of a row.
    num_top int32: how many alternatives to report, at most NUM_TOP.
    """

    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    seeds: Any
    positions: Any
    num_top: Any


class Needs(NamedTuple):
    """What some row of a batch asks of the sampler: a random draw, a filter of it, alternatives to report."""

    draws: bool
    filters: bool
    top: bool

    @classmethod
    def of(cls, rows: SampledRows) -> "Needs":
        """The needs of rows that the host knows."""
        draws = rows.temperature > 0
        filters = draws & _is_filtered(rows)
        return cls(bool(draws.any()), bool(filters.any()), bool((rows.num_top > 0).any()))

    @classmethod
    def all(cls) -> "list[Needs]":
        """Every combination that `of` finds."""
        return [cls(*needs) for needs in SAMPLERS]


class Edits(NamedTuple):
    """Changes to the logits of each row before sampling.

    counts int32[B, V]: how often each token was generated. prompt bool[B, V]: which tokens the prompt has.
    bias f32[B, V]: added; -inf forbids a token, and at least one token must remain.
    repetition f32[B]: divides positive logits of tokens in prompt or answer, and multiplies negative ones
    (Keskar et al. 2019); 1 changes nothing.
    presence f32[B]: taken from logits of tokens in the answer; frequency f32[B]: the same, times their count.
    """

    counts: Any
    prompt: Any
    bias: Any
    repetition: Any
    presence: Any
    frequency: Any


class Guesses(NamedTuple):
    """Tokens that a draft model drew, and its logits, for the ratio test.

    tokens int32[B]: -1 for rows without a guess. logits f32[B, V]: of the draft model, without changes.
    """

    tokens: Any
    logits: Any


class Sampled(NamedTuple):
    """A token for each row, int32[B], its log-probability f32[B], and the row's likeliest tokens.

    Log-probabilities are of the unmodified logits, in nats: NaN if the logits are not finite.
    top_ids int32[B, NUM_TOP], top_logprobs f32[B, NUM_TOP]: descending; zeros where no row asks for them.
    """

    tokens: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array


@partial(jax.jit, static_argnames="needs")
def sample(
    logits: ArrayLike,
    rows: SampledRows,
    edits: Edits | None = None,
    needs: Needs | None = None,
    guesses: Guesses | None = None,
) -> Sampled:
    """A token for each row of logits[B, V], by its own row of `rows` and `edits`.

    A row's token depends on its own logits, parameters, seed and position, never on its neighbours in the
    batch. Filters apply in this order: min-p, top-k, top-p. needs: the sampling features that `rows` use, or
    more; None: the device finds them, and the host of a GPU waits for the result. guesses: a drawn row with a
    guess yields the guess if the ratio test accepts it, and otherwise a token that the test draws.
    """
    logits = jnp.asarray(logits, jnp.float32)
    rows = SampledRows(*map(jnp.asarray, rows))
    edited = logits if edits is None else jax.vmap(_edit)(logits, Edits(*map(jnp.asarray, edits)))
    greedy = _argmax(edited)
    # Batch-wide conditions only skip work: a row that needs none of it gets the same token either way.
    sampled = rows.temperature > 0
    draws, filters, top = needs or (jnp.any(sampled), jnp.any(_is_filtered(rows)), jnp.any(rows.num_top > 0))
    drawn = _if(draws, partial(_draw, filters, guesses), lambda *_: greedy, edited, rows)
    tokens = jnp.where(sampled, drawn, greedy)
    normalisers = jax.nn.logsumexp(logits, axis=-1)
    logprobs = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - normalisers
    top_ids, top_logits = _if(top, top_tokens, _no_top, logits)
    return Sampled(tokens, logprobs, top_ids, top_logits - normalisers[:, None])


def top_tokens(logits: Array) -> tuple[Array, Array]:
    """The NUM_TOP largest of logits[B, V], descending: ids int32[B, NUM_TOP] and logits."""
    top_logits, top_ids = lax.top_k(logits, min(NUM_TOP, logits.shape[-1]))
    room = ((0, 0), (0, NUM_TOP - top_ids.shape[-1]))
    return jnp.pad(top_ids, room).astype(jnp.int32), jnp.pad(top_logits, room, constant_values=-jnp.inf)


def _no_top(logits: Array) -> tuple[Array, Array]:
    shape = (logits.shape[0], NUM_TOP)
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _edit(logits: Array, edits: Edits) -> Array:
    """logits[V] of one row after its penalties and bias."""
    counts = jnp.asarray(edits.counts)
    generated = counts > 0
    factor = jnp.where(generated | edits.prompt, edits.repetition, 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    taken = edits.presence * generated.astype(jnp.float32) + edits.frequency * counts.astype(jnp.float32)
    logits = logits - taken
    return logits + edits.bias


def _is_filtered(rows: SampledRows) -> Any:
    return (rows.top_p < 1) | (rows.top_k > 0) | (rows.min_p > 0)


def _if(condition: Array | bool, then: Callable[..., Any], otherwise: Callable[..., Any], *on: object) -> Any:
    """`lax.cond`, but decided here where the condition is known."""
    if isinstance(condition, bool):
        return (then if condition else otherwise)(*on)
    return lax.cond(condition, then, otherwise, *on)


def _draw(filters: Array | bool, guesses: Guesses | None, logits: Array, rows: SampledRows) -> Array:
    scaled = _kept(filters, logits, rows)
    keys = jax.vmap(_key)(rows.seeds, rows.positions)
    drawn = jax.vmap(_gumbel_argmax)(scaled, keys)
    if guesses is None:
        return drawn
    tokens, of_guesses = jnp.asarray(guesses.tokens), jnp.asarray(guesses.logits)
    tested = jax.vmap(_by_ratio)(tokens, scaled, _kept(filters, of_guesses, rows), keys)
    return jnp.where(tokens < 0, drawn, tested)


def _by_ratio(token: Array, scaled: Array, of_guess: Array, key: Array) -> Array:
    """`token` with probability min(1, p / q), otherwise a draw from max(0, p - q).

    p, q: softmax of scaled[V] and of_guess[V]; `token` was drawn from q with the noise of `key`. The result
    has distribution p (Leviathan et al. 2023, appendix A.1).
    """
    p, q = jax.nn.softmax(scaled), jax.nn.softmax(of_guess)
    accepts = jax.random.uniform(jax.random.fold_in(key, 1)) * q[token] < p[token]
    remaining = jnp.log(jnp.maximum(p - q, 0.0))
    return jnp.where(accepts, token, _gumbel_argmax(remaining, jax.random.fold_in(key, 2)))


def _kept(filters: Array | bool, logits: Array, rows: SampledRows) -> Array:
    """logits[B, V] over the temperature, -inf for tokens that the filters leave out."""
    scaled = jax.vmap(_scale)(logits, rows.temperature)
    allowed = _if(filters, jax.vmap(_allowed), lambda scaled, _: jnp.ones(scaled.shape, bool), scaled, rows)
    return jnp.where(allowed, scaled, -jnp.inf)


def _scale(logits: Array, temperature: Array) -> Array:
    # The maximum goes first: dividing by a tiny temperature then gives 0 and -inf, never inf - inf.
    return (logits - jnp.max(logits)) / jnp.where(temperature > 0, temperature, 1.0)


def _allowed(scaled: Array, row: SampledRows) -> Array:
    """Which of V tokens min-p, top-k and top-p leave: at least the most likely one, and equals together."""
    scaled = jnp.where(scaled >= jnp.log(row.min_p), scaled, -jnp.inf)  # the maximum is 0
    probabilities = jax.nn.softmax(scaled)
    kth = _threshold(probabilities, lambda kept: jnp.sum(kept) >= row.top_k)
    kept = (scaled > -jnp.inf) & ((row.top_k <= 0) | (probabilities >= kth))
    probabilities = jax.nn.softmax(jnp.where(kept, scaled, -jnp.inf))
    last = _threshold(probabilities, lambda kept: jnp.sum(jnp.where(kept, probabilities, 0.0)) >= row.top_p)
    # A float32 sum can reach 1 before the tail, so p = 1 is not left to the comparison.
    return kept & ((row.top_p >= 1) | (probabilities >= last))


def _threshold(probabilities: Array, enough: Callable[[Array], Array]) -> Array:
    """The largest c with enough(probabilities >= c), at most the largest probability.

    Bisects the range of float32 bit patterns, which for numbers >= 0 have the order of the numbers: 31
    sums over V. Sorting the V logits instead took 30 times the time on a CPU (V = 8192; JAX 0.10.2).
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        fits = enough(probabilities >= lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    above = lax.bitcast_convert_type(jnp.max(probabilities), jnp.int32) + 1
    low, _ = lax.fori_loop(0, 31, halve, (jnp.zeros_like(above), above))
    return lax.bitcast_convert_type(low, jnp.float32)


def _key(seed: Array, position: Array) -> Array:
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)


def _gumbel_argmax(scaled: Array, key: Array) -> Array:
    """argmax(logits + Gumbel noise), which is a draw from softmax(logits).

    The noise belongs to the token's id, not to its rank, so two nearly equal logits that change
    places do not change the draw.
    """
    return _argmax(scaled + jax.random.gumbel(key, scaled.shape, jnp.float32))


def _argmax(x: Array) -> Array:
    """i32: first index of the largest number along the last dimension; 0 if any is NaN.

    XLA for CPU reduces values with their indices one by one: 16 rows of 32,000 took 2.4 ms, and this way take
    0.5 (jax 0.10.2, Zen 4).
    """
    places = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.min(jnp.where(x < jnp.max(x, axis=-1, keepdims=True), x.shape[-1], places), axis=-1)


def batch_edits(rows: Sequence[tuple[SamplingParams, LogitEdits | None]], vocab_size: int) -> Edits | None:
    """The edits of a batch, row by row; None if no row has any."""
    if all(edits is None for _, edits in rows):
        return None
    shape = (len(rows), vocab_size)
    counts, prompt, bias = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
    for number, (_, edits) in enumerate(rows):
        if edits is not None:
            counts[number], prompt[number], bias[number] = edits.counts, edits.prompt, edits.bias
    params = [row for row, _ in rows]
    return Edits(
        counts,
        prompt,
        bias,
        np.array([row.repetition_penalty for row in params], np.float32),
        np.array([row.presence_penalty for row in params], np.float32),
        np.array([row.frequency_penalty for row in params], np.float32),
    )


def no_guesses(num_rows: int, vocab_size: int) -> Guesses:
    """Rows without guesses, to compile the sampler with."""
    return Guesses(np.full(num_rows, -1, np.int32), np.zeros((num_rows, vocab_size), np.float32))


def no_edits(num_rows: int, vocab_size: int) -> Edits:
    """Edits that change nothing, to compile the sampler with."""
    shape = (num_rows, vocab_size)
    ones, zeros = np.ones(num_rows, np.float32), np.zeros(num_rows, np.float32)
    return Edits(
        np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32), ones, zeros, zeros
    )


def batch_rows(params: Sequence[SamplingParams], positions: Sequence[int] | np.ndarray) -> SampledRows:
    """The sampler's parameters of a batch; positions: the positions of the next tokens."""
    return SampledRows(
        np.array([row.temperature for row in params], np.float32),
        np.array([row.top_p for row in params], np.float32),
        np.array([row.top_k for row in params], np.int32),
        np.array([row.min_p for row in params], np.float32),
        np.array([row.seed for row in params], np.uint32),
        np.asarray(positions, np.int32),
        np.array([row.top_logprobs for row in params], np.int32),
    )

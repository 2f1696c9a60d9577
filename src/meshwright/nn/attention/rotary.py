"""Rotary position embedding (Su et al., 2021), the two halves of a head rotated together."""

from collections.abc import Callable
from math import log, pi, sqrt

import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import RopeScaling, yarn_magnitude
from meshwright.nn.norms import norm
from meshwright.nn.stack import KindInLoop


def apply_rope(
    x: Array,
    positions: Array,
    config: ModelConfig,
    kind: KindInLoop,
    once: Callable[[Array], Array] = lambda x: x,
    *,
    leading: bool = False,
    back: bool = False,
) -> Array:
    """x[B, T, N, H], or one head's x[B, T, A], rotated by positions[B, T]; angles are float32.

    With `rotary_dim` the rest of each head is not rotated. Latent attention rotates the last A elements of a
    head, or with `leading` the first A.
    Layers without rotary positions return x. back: rotates in the other direction, by -positions. once:
    returns its argument, and keeps XLA for CPU from computing the cosines and sines again for each head.
    """
    return _where_turned(x, lambda: _turned(x, positions, config, kind, once, leading, back), kind)


def _turned(
    x: Array,
    positions: Array,
    config: ModelConfig,
    kind: KindInLoop,
    once: Callable[[Array], Array],
    leading: bool,
    back: bool,
) -> Array:
    turning, magnitude = _turning(positions, config, kind), _magnitude_of(config, kind)
    angles = positions.astype(jnp.float32)[:, :, None] * turning
    angles = angles[:, :, None, :] if x.ndim == 4 else angles
    cos, sin = (once(turn(angles) * magnitude) for turn in (jnp.cos, jnp.sin))
    sin = -sin if back else sin
    half = turning.shape[-1]
    start = x.shape[-1] - 2 * half if config.mla and not leading else 0
    parts = (slice(start, start + half), slice(start + half, start + 2 * half))
    first, second = (x[..., part].astype(jnp.float32) for part in parts)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    before, after = (
        x[..., part].astype(jnp.float32) for part in (slice(start), slice(start + 2 * half, None))
    )
    whole = [part for part in (before, *rotated, after) if part.shape[-1]]
    return jnp.concatenate(whole, axis=-1).astype(x.dtype)


def norm_turned(x: Array, config: ModelConfig, kind: KindInLoop) -> Array:
    """x[B, T, N, H] divided by its root mean square over H, in layers with rotary positions."""
    return _where_turned(x, lambda: norm(x, None, None, "rms", config), kind)


def _where_turned(x: Array, made: Callable[[], Array], kind: KindInLoop) -> Array:
    """The result of `made` in layers whose positions turn queries and keys; in other layers x."""
    turned = [one.turned for one in kind.among]
    if all(turned):
        return made()
    return jnp.where(kind.choose([jnp.int32(one) for one in turned]) > 0, made(), x) if any(turned) else x


def apply_temperature(q: Array, positions: Array, config: ModelConfig, kind: KindInLoop) -> Array:
    """q[B, T, N, H] times 1 + slope ln(1 + floor((1 + position) / floor)), in layers without RoPE.

    If all layers have rotary positions, then in all of them, from position 0.
    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025, as in Llama 4.
    """
    floor, turned = config.temperature_floor, [one.turned for one in kind.among]
    assert floor is not None, "queries have a temperature"
    is_of_unturned = bool(config.nope_every or config.nope_layers)
    start = 1 if is_of_unturned else 0
    grown = config.temperature_slope * jnp.log1p(((positions + start) // floor).astype(jnp.float32))
    if is_of_unturned:
        if all(turned):
            return q
        grown *= kind.choose([jnp.float32(not one) for one in turned])
    factor = 1 + grown
    return (q.astype(jnp.float32) * factor[:, :, None, None]).astype(q.dtype)


def _turning(positions: Array, config: ModelConfig, kind: KindInLoop) -> Array:
    """The frequencies, over [B, T, .] of the positions.

    If a sequence goes beyond the original length, LongRoPE divides by its other factors.
    """
    scaling = config.rope_scaling
    choices = [frequencies(config, local=window is not None) for window in kind.windows]
    turning = kind.choose([jnp.asarray(choice, jnp.float32) for choice in choices])[None, None, :]
    if scaling is None or scaling.kind != "longrope":
        return turning
    assert scaling.original_max_seq_len is not None
    beyond = jnp.asarray(frequencies(config, local=False, beyond=True), jnp.float32)[None, None, :]
    is_beyond = jnp.max(positions, axis=1) >= scaling.original_max_seq_len
    return jnp.where(is_beyond[:, None, None], beyond, turning)


def frequencies(config: ModelConfig, *, local: bool, beyond: bool = False) -> np.ndarray:
    """theta ** (-2i / H) for H/2 pairs, stretched if the model asks for it: see RopeScaling.

    local: of a layer with a window; with a theta of its own it is not stretched. beyond: of a sequence that
    goes beyond the original length, which matters only to LongRoPE.
    """
    num_turned = config.rotary_dim or (config.mla.rope_dim if config.mla else config.d_head)
    exponents = np.arange(0, num_turned, 2, dtype=np.float64) / num_turned
    if local and config.rope_theta_local is not None:
        return config.rope_theta_local**-exponents
    base = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "longrope":
        return base / np.asarray(scaling.long_factor if beyond else scaling.short_factor)
    kept = (
        _kept_by_llama3(base, scaling) if scaling.kind == "llama3" else _kept_by_yarn(base, scaling, config)
    )
    return base * (kept + (1 - kept) / scaling.factor)


def _kept_by_llama3(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """The unscaled share of each frequency: 1 if it turns often within the original length."""
    assert scaling.original_max_seq_len is not None
    turns = scaling.original_max_seq_len * base / (2 * pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    if not width:
        return (turns >= scaling.low_freq_factor).astype(np.float64)
    return np.clip((turns - scaling.low_freq_factor) / width, 0.0, 1.0)


def _kept_by_yarn(base: np.ndarray, scaling: RopeScaling, config: ModelConfig) -> np.ndarray:
    """The kept share: linear in the pair's index, between pairs that turn beta_fast and beta_slow times."""
    original, pairs = scaling.original_max_seq_len, len(base)
    assert original is not None

    def number_of(turns: float) -> float:
        return pairs * log(original / (turns * 2 * pi)) / log(config.rope_theta)

    low, high = number_of(scaling.beta_fast), number_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    return 1 - np.clip((np.arange(pairs) - low) / width, 0.0, 1.0)


def _magnitude_of(config: ModelConfig, kind: KindInLoop) -> Array | float:
    """The factor of cosines and sines: 1 in local layers with their own theta, which are not stretched."""
    magnitude = _magnitude(config.rope_scaling)
    has_local = config.rope_theta_local is not None
    factors = [1.0 if has_local and window is not None else magnitude for window in kind.windows]
    if len(set(factors)) == 1:
        return factors[0]
    return kind.choose([jnp.float32(factor) for factor in factors])


def _magnitude(scaling: RopeScaling | None) -> float:
    """The factor of cosines and sines that keeps scores from fading if positions are stretched."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        assert scaling.original_max_seq_len is not None
        return (
            sqrt(1 + log(scaling.factor) / log(scaling.original_max_seq_len)) if scaling.factor > 1 else 1.0
        )
    if scaling.mscale and scaling.mscale_all_dim:
        whole = yarn_magnitude(scaling.factor, scaling.mscale_all_dim)
        return yarn_magnitude(scaling.factor, scaling.mscale) / whole
    return yarn_magnitude(scaling.factor)

"""Rotary position embedding (Su et al., 2021), the two halves of a head rotated together."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.models.config import ModelConfig


def apply_rope(x: Array, positions: Array, turning: Array) -> Array:
    """x[B, T, N, H] rotated by positions[B, T] times the frequencies `turning`; angles are float32.

    There are H/2 frequencies, or fewer: then the rest of each head stays as it is.
    """
    angles = positions.astype(jnp.float32)[:, :, None] * turning[None, None, :]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    half = turning.shape[0]
    first, second = (x[..., part].astype(jnp.float32) for part in (slice(half), slice(half, 2 * half)))
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        rotated.append(x[..., 2 * half :].astype(jnp.float32))
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def frequencies(config: ModelConfig, window: int | None) -> Array:
    """H/2 angular frequencies of a layer with this window, on the device; fewer with `rotary_dim`."""
    return jnp.asarray(_frequencies(config, local=window is not None))


def _frequencies(config: ModelConfig, *, local: bool) -> np.ndarray:
    """theta ** (-2i / H), stretched where asked.

    As LLaMA 3.1 stretches, wavelengths beyond the original context are divided by `factor`, those well
    inside stay, and between the two it is interpolated; linear scaling divides all. Local layers with a
    theta of their own are not stretched.
    """
    num_turned = config.rotary_dim or config.d_head
    exponents = np.arange(0, num_turned, 2, dtype=np.float64) / num_turned
    if local and config.rope_theta_local is not None:
        return (config.rope_theta_local**-exponents).astype(np.float32)
    base = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return base.astype(np.float32)
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32)
    assert scaling.original_max_seq_len is not None
    turns = scaling.original_max_seq_len * base / (2 * np.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (base * (smooth + (1 - smooth) / scaling.factor)).astype(np.float32)

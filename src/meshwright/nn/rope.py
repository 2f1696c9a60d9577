"""Rotary position embedding (Su et al., 2021), the two halves of a head rotated together."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from meshwright.models.config import ModelConfig


def apply_rope(x: Array, positions: Array, config: ModelConfig) -> Array:
    """x[B, T, N, H] rotated by positions[B, T]; angles are float32."""
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(frequencies(config))[None, None, :]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    half = x.shape[-1] // 2
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def frequencies(config: ModelConfig) -> np.ndarray:
    """H/2 angular frequencies: theta ** (-2i / H), stretched as LLaMA 3.1 does where asked.

    With scaling, wavelengths beyond the original context are divided by `factor`, those well
    inside stay, and between the two it is interpolated.
    """
    exponents = np.arange(0, config.d_head, 2, dtype=np.float64) / config.d_head
    base = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return base.astype(np.float32)
    turns = scaling.original_max_seq_len * base / (2 * np.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (base * (smooth + (1 - smooth) / scaling.factor)).astype(np.float32)

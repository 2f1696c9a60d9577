"""Rotary positions of the whole context, in the narrow type of activations, against the formula.

The twin's sequences are short. Positions of 257 and more, which 16 bits cannot hold, and those beyond the
original length of a stretched context, are therefore checked here, with the operation of the forward pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.audit.numerics import reference
from meshwright.audit.numerics.twin_checks import TwinCheck
from meshwright.layout import Layout
from meshwright.models.at_layer import AtLayer, Places
from meshwright.models.config import ModelConfig
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.stack import KindInLoop
from meshwright.nn.start.device_mesh import device_mesh

# Mostly odd, so that bfloat16 cannot hold the large ones; the last position of the context is added. None is
# later than 131,071, since angles are float32 and the error of a later one nears the tolerance.
_POSITIONS = (0, 1, 63, 257, 1_001, 4_097, 33_001, 131_071)
# Relative to the largest entry: rounding to bfloat16 is 0.004, and rounding the largest angle up to 0.016.
_TOLERANCE = 0.03


def rotation_check(config: ModelConfig) -> list[TwinCheck]:
    """The check of rotary positions in each kind of layer; empty if no layer has any."""
    kinds = {(one.kind.window is None, one.kind.turned): one for one in config.layers if one.kind.attends}
    layers = [one for one in kinds.values() if one.kind.turned]
    if config.positions != "rope" or not layers:
        return []
    rng, layout = np.random.default_rng(0), Layout.of(weights_dtype="bf16", compute_dtype="bf16")
    worst = 0.0
    with jax.set_mesh(device_mesh(layout)):
        ops = JaxOps(config, layout)
        for positions in _sequences(config):
            x = jnp.asarray(rng.standard_normal((1, len(positions), 2, config.d_head)), jnp.bfloat16)
            for layer in layers:
                turned = _turned(ops, x, positions, KindInLoop((layer.kind,)))
                expected = np.asarray(reference.rope(config, x.astype(jnp.float32), layer, positions))
                worst = max(worst, float(np.abs(turned - expected).max() / np.abs(expected).max()))
    return [TwinCheck("rotations of far positions", worst if np.isfinite(worst) else None, _TOLERANCE)]


def _turned(ops: JaxOps, x: Any, positions: np.ndarray, kind: KindInLoop) -> np.ndarray:
    places = Places(jnp.asarray(positions[None], jnp.int32))
    turned = jax.jit(lambda x, places: ops.rope("q_rope", x, AtLayer(places, None, kind)))(x, places)
    return np.asarray(turned.astype(jnp.float32))


def _sequences(config: ModelConfig) -> list[np.ndarray]:
    """Positions through the whole context, and within the length that it had before it was stretched."""
    scaling = config.rope_scaling
    original = scaling.original_max_seq_len if scaling else None
    ends = {config.max_seq_len, min(original or config.max_seq_len, config.max_seq_len)}
    within = [[one for one in _POSITIONS if one < end] for end in sorted(ends)]
    return [
        np.asarray(sorted({*some, min(end, _POSITIONS[-1]) - 1}))
        for some, end in zip(within, sorted(ends), strict=True)
    ]

"""Optimizers on Optax, by the names of `meshwright.optimizers`, on clipped gradients."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshwright.models.config import ModelConfig
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.moments import Packed, is_packed, packed, packed_zeros, unpacked
from meshwright.optimizers.optimizer import PACKED_DTYPES
from meshwright.train.optimizers.adafactor import adafactor
from meshwright.train.optimizers.adamw import adamw
from meshwright.train.optimizers.constants import OptimizerConfig, decay_mask, learning_rate
from meshwright.train.optimizers.lion import lion
from meshwright.train.optimizers.muon import muon

__all__ = [
    "OPTAX", "OptimizerConfig", "by_factor", "by_quotient", "clipped", "decay_mask", "gradient_norm",
    "learning_rate", "make_optimizer",
]  # fmt: skip

# By the record's name. Muon needs the model for the dimensions of matrices.
OPTAX: Mapping[str, Callable[[OptimizerConfig, ModelConfig | None], optax.GradientTransformationExtraArgs]]
OPTAX = MappingProxyType({"adamw": adamw, "adafactor": adafactor, "lion": lion, "muon": muon})


def make_optimizer(
    config: OptimizerConfig, moments_dtype: str = "f32", model: ModelConfig | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer on gradients clipped by their global norm; moments and updates are float32.

        g  <- g * min(1, clip / |g|)

    Its update takes that norm as `norm` if the caller has it (`gradient_norm`); Adafactor's also takes
    `whole`. Weight decay applies to matrices only (`decay_mask`), and not with Adafactor. moments_dtype: type
    of the moments between updates, which compute in float32. "bf16" has 8 significant bits, so it loses
    relative changes below 1/256, such as those of v with b2 above 0.996. Types with scales are stored in
    blocks (nn/moments.py), and not available with Adafactor.
    """
    chosen = OPTAX[config.optimizer](config, model)
    if moments_dtype in PACKED_DTYPES:
        return _in_eight_bits(optax.chain(clipped(config.clip_norm, by_factor), chosen), moments_dtype)
    return _in_float32(optax.chain(clipped(config.clip_norm), chosen), jax_dtype(moments_dtype))


@jax.named_scope("update")
def gradient_norm(gradients: optax.Updates) -> jax.Array:
    """|g|, the square root of the sum of all gradients' squares, in float32."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradients))


def by_quotient(g: jax.Array, norm: jax.Array, clip_norm: float) -> jax.Array:
    """g * min(1, clip_norm / norm), as optax computes it."""
    return jnp.where(norm < clip_norm, g, g / norm * clip_norm)


def by_factor(g: jax.Array, norm: jax.Array, clip_norm: float) -> jax.Array:
    """g * min(1, clip_norm / norm) without a division of each number.

    XLA keeps quotients in memory, but computes a product again for each reader.
    """
    return g * jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def clipped(
    clip_norm: float, clip: Callable[[jax.Array, jax.Array, float], jax.Array] = by_quotient
) -> optax.GradientTransformationExtraArgs:
    """g * min(1, clip_norm / |g|), with the caller's norm if given.

    optax's clipping always computes a norm. A step that reports the norm would then compute it twice, each
    time with sums over devices.
    """

    def update(updates: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> Any:
        size = gradient_norm(updates) if norm is None else norm
        return jax.tree.map(lambda g: clip(g, size, clip_norm), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _in_float32(
    inner: optax.GradientTransformationExtraArgs, stored: jax.typing.DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """`inner` on float32 copies; its state is `stored` between updates."""

    def init(params: optax.Params) -> Any:
        return _cast(inner.init(_cast(params)), stored)

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        updates, state = inner.update(_cast(updates), _cast(state), _cast(params), **given)
        return updates, _cast(state, stored)

    return optax.GradientTransformationExtraArgs(init, update)


def _cast(tree: object, dtype: jax.typing.DTypeLike = jnp.float32) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _in_eight_bits(
    inner: optax.GradientTransformationExtraArgs, stored: str
) -> optax.GradientTransformationExtraArgs:
    """`inner` on float32 copies; its moments are packed between updates (nn/moments.py)."""

    def mapped(pack: Callable[..., Packed], state: Any) -> Any:
        def leaf(path: tuple[Any, ...], x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return pack(x, stored, of_squares=_SQUARES in map(_key_name, path))

        return jax.tree_util.tree_map_with_path(leaf, state)

    def unpack(x: Any) -> Any:
        return unpacked(x) if is_packed(x) else x

    def init(params: optax.Params) -> Any:
        return mapped(packed_zeros, inner.init(_cast(params)))

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        wide = jax.tree.map(unpack, state, is_leaf=is_packed)
        updates, wide = inner.update(_cast(updates), wide, _cast(params), **given)
        return updates, mapped(packed, wide)

    return optax.GradientTransformationExtraArgs(init, update)


# Optax's name of the mean of squares of gradients.
_SQUARES = "nu"


def _key_name(key: object) -> str:
    return jax.tree_util.keystr((key,), simple=True)

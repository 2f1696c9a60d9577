"""AdamW, Adafactor, Lion or Muon, and the course of the learning rate, as large models are trained."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import reshard

from meshwright.errors import MeshwrightError
from meshwright.layout.precision import PACKED_DTYPES
from meshwright.models.config import ModelConfig
from meshwright.nn.moments import Packed, is_packed, packed, packed_zeros, unpacked
from meshwright.nn.params import JAX_DTYPES
from meshwright.train import muon
from meshwright.train.adafactor import adafactor
from meshwright.train.settings import OptimizerName, ScheduleName

# Arithmetic of Lion: Chen et al., arXiv:2302.06675, section 4; its usual rates for language models.
_LION_B1, _LION_B2 = 0.95, 0.98
_MUON_BETA = 0.95


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer's constants. Defaults: the decay rates and clip of GPT-3 (Brown et al. 2020, appendix B).

    peak_learning_rate is reached after warmup_steps and falls to final_fraction of itself at
    total_steps: along a cosine, or under "wsd" in a straight line over the last decay_fraction of the
    steps, or under "constant" not at all. clip_norm bounds the global norm of the gradients. z_loss: see
    `JaxOps`. balance_loss, router_z_loss: what the losses of each layer's router weigh (nn/experts/).
    b1, b2, eps are AdamW's; Lion's decay rates are its authors'.
    """

    peak_learning_rate: float
    warmup_steps: int
    total_steps: int
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    z_loss: float = 0.0
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    optimizer: OptimizerName = "adamw"
    schedule: ScheduleName = "cosine"
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise MeshwrightError(
                f"optimizer: {self.warmup_steps} warm-up steps do not fit in {self.total_steps} steps;"
                f" fits: at most {max(self.total_steps - 1, 0)}"
            )
        if self.peak_learning_rate <= 0:
            raise MeshwrightError(f"optimizer: learning rate {self.peak_learning_rate:g} is not above 0")


def make_optimizer(
    config: OptimizerConfig,
    moments_dtype: str = "f32",
    model: ModelConfig | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer on gradients clipped by their global norm; moments and updates are float32.

    Its update takes that norm as `norm`, where the caller has it (`gradient_norm`); that of Adafactor also
    `whole` (`train/adafactor.py`).

        g  <- g * min(1, clip / |g|)
        AdamW:  m  <- b1 m + (1 - b1) g           v <- b2 v + (1 - b2) g^2
                w  <- w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
        Lion:   w  <- w - lr (sign(b1 m + (1 - b1) g) + decay w)
                m  <- b2 m + (1 - b2) g
        Muon:   m  <- b m + g,   w  <- w - lr (0.2 sqrt(max(rows, columns)) U V^T + decay w)
        Adafactor:  AdamW's v as the product of a row and a column, no m, w scaled by its own size

    U V^T: m's orthogonal factor, about, by Newton and Schulz. decay applies to matrices alone (`decay_mask`),
    and not with Adafactor. Lion has half of AdamW's moments, and wants a learning rate three to ten times
    lower and a decay as much higher. Muon takes the matrices of the layers of `model`, which it needs, with
    AdamW's learning rate (0.2: AdamW's usual size of an update), and leaves the rest to AdamW (with Nesterov
    momentum). moments_dtype: of the moments between two updates, which compute in float32. "bf16" has 8
    bits: it drops what an update changes by less than 1/256, as it does v's with b2 above 0.996. "fp8" and
    "int8": in blocks with scales (nn/moments.py), not of Adafactor. Sources:
    Loshchilov & Hutter, arXiv:1711.05101; Chen et al., arXiv:2302.06675; Shazeer & Stern, arXiv:1804.04235;
    Jordan et al., "Muon" (2024), and Liu et al., arXiv:2502.16982, section 2.2.
    """
    rate, decay = learning_rate(config), config.weight_decay
    if config.optimizer == "lion":
        chosen = optax.lion(rate, b1=_LION_B1, b2=_LION_B2, weight_decay=decay, mask=decay_mask)
    elif config.optimizer == "adafactor":
        chosen = _placed_as_updated(adafactor(rate))
    elif config.optimizer == "muon":
        assert model is not None, "Muon asks the model which dimensions a matrix has"
        of_matrices = optax.chain(optax.trace(_MUON_BETA, nesterov=True), muon.orthogonalised(model))
        of_others = optax.scale_by_adam(config.b1, config.b2, config.eps, nesterov=True)
        chosen = optax.chain(
            optax.partition({"muon": of_matrices, "adam": of_others}, partial(muon.labels, model)),
            optax.add_decayed_weights(decay, decay_mask),
            optax.scale_by_learning_rate(rate),
        )
    else:
        chosen = optax.adamw(
            rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=decay, mask=decay_mask
        )
    if moments_dtype in PACKED_DTYPES:
        return _in_eight_bits(optax.chain(clipped(config.clip_norm, by_factor), chosen), moments_dtype)
    return _in_float32(optax.chain(clipped(config.clip_norm), chosen), JAX_DTYPES[moments_dtype])


@jax.named_scope("update")
def gradient_norm(gradients: Any) -> jax.Array:
    """|g|, the square root of the sum of all gradients' squares, in float32."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradients))


def by_quotient(g: jax.Array, norm: jax.Array, clip_norm: float) -> jax.Array:
    """g * min(1, clip_norm / norm), as optax computes it."""
    return jnp.where(norm < clip_norm, g, g / norm * clip_norm)


def by_factor(g: jax.Array, norm: jax.Array, clip_norm: float) -> jax.Array:
    """g * min(1, clip_norm / norm) without a division of each number.

    XLA divides once and keeps what it has divided; it multiplies again for everything that reads it.
    """
    return g * jnp.where(norm < clip_norm, 1.0, clip_norm / norm)


def clipped(
    clip_norm: float, clip: Callable[[jax.Array, jax.Array, float], jax.Array] = by_quotient
) -> optax.GradientTransformationExtraArgs:
    """g * min(1, clip_norm / |g|), by the norm of the gradients that its caller has taken, else takes it.

    optax's own takes a norm of its own: a step that reports it then has two, each with its sums over devices.
    """

    def update(updates: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> Any:
        size = gradient_norm(updates) if norm is None else norm
        return jax.tree.map(lambda g: clip(g, size, clip_norm), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def learning_rate(config: OptimizerConfig) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The learning rate of update i, counted from 0: linear to the peak, then as the schedule has it.

        i < warmup:  peak (i + 1) / (warmup + 1)
        cosine:      peak (f + (1 - f) (1 + cos(pi (i - warmup) / (total - warmup))) / 2)
        wsd:         peak (f + (1 - f) min(1, (total - i) / (d total)))
        constant:    peak

    f: final_fraction, d: decay_fraction. The + 1 lets the first update move; from `total` on the rate
    stays where it is. Source of wsd: Hu et al., arXiv:2404.06395.
    """

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        update = jnp.asarray(count, jnp.float32)
        warmup = (update + 1) / (config.warmup_steps + 1)
        if config.schedule == "cosine":
            done = (update - config.warmup_steps) / (config.total_steps - config.warmup_steps)
            left = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1)))
        elif config.schedule == "wsd":
            left = (config.total_steps - update) / (config.decay_fraction * config.total_steps)
        else:
            left = jnp.ones_like(update)
        decayed = config.final_fraction + (1 - config.final_fraction) * jnp.clip(left, 0, 1)
        return config.peak_learning_rate * jnp.where(update < config.warmup_steps, warmup, decayed)

    return rate


def decay_mask(params: Any) -> Any:
    """True for each parameter that decays: those of rank 2 and more that are no norm or bias.

    Rank alone does not tell: the norms of all layers, stacked for the scan, are a matrix [L, D].
    """

    def decays(path: tuple[Any, ...], value: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return value.ndim >= 2 and not any(word in name for word in ("norm", "bias"))

    return jax.tree_util.tree_map_with_path(decays, params)


def _on_mesh(tree: Any) -> bool:
    return any(not jax.typeof(leaf).sharding.mesh.empty for leaf in jax.tree.leaves(tree))


def _placed_as_updated(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """`inner`, whose first state lies on the shards where an update leaves it."""

    def init(params: Any) -> Any:
        state = inner.init(params)
        if not _on_mesh(params):
            return state
        after = jax.eval_shape(inner.update, params, state, params)[1]
        return jax.tree.map(lambda x, to: reshard(x, to.sharding.spec), state, after)

    return optax.GradientTransformationExtraArgs(init, inner.update)


def _in_float32(
    inner: optax.GradientTransformationExtraArgs, stored: jax.typing.DTypeLike
) -> optax.GradientTransformationExtraArgs:
    """`inner` on float32 copies, whose state is kept in `stored` from one update to the next."""

    def init(params: Any) -> Any:
        return _cast(inner.init(_cast(params)), stored)

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        updates, state = inner.update(_cast(updates), _cast(state), _cast(params), **given)
        return updates, _cast(state, stored)

    return optax.GradientTransformationExtraArgs(init, update)


def _cast(tree: Any, dtype: jax.typing.DTypeLike = jnp.float32) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _in_eight_bits(
    inner: optax.GradientTransformationExtraArgs, stored: str
) -> optax.GradientTransformationExtraArgs:
    """`inner` on float32 copies, whose moments are packed from one update to the next (nn/moments.py)."""

    def mapped(pack: Callable[..., Packed], state: Any) -> Any:
        def leaf(path: tuple[Any, ...], x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return pack(x, stored, of_squares=_SQUARES in map(_key_name, path))

        return jax.tree_util.tree_map_with_path(leaf, state)

    def unpack(x: Any) -> Any:
        return unpacked(x) if is_packed(x) else x

    def init(params: Any) -> Any:
        return mapped(packed_zeros, inner.init(_cast(params)))

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        wide = jax.tree.map(unpack, state, is_leaf=is_packed)
        updates, wide = inner.update(_cast(updates), wide, _cast(params), **given)
        return updates, mapped(packed, wide)

    return optax.GradientTransformationExtraArgs(init, update)


# What optax calls the mean of squares of gradients.
_SQUARES = "nu"


def _key_name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)

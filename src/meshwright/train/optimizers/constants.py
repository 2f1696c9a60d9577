"""The constants of an optimizer, its learning rate, and the weights that decay."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import MeshwrightError
from meshwright.models.config import DRAFT_WEIGHT
from meshwright.train.settings import ScheduleName


@dataclass(frozen=True)
class OptimizerConfig:
    """The constants of an optimizer, with GPT-3's decay rates and clip (Brown et al. 2020, appendix B).

    The learning rate rises to peak_learning_rate over warmup_steps and falls to final_fraction of it at
    total_steps: with "cosine" along a cosine, with "wsd" linearly over the last decay_fraction of the steps,
    and with "constant" not at all. clip_norm: bound of the gradients' global norm. z_loss: see `JaxOps`.
    balance_loss, router_z_loss: weights of the losses of each layer's router (nn/experts/). draft_weight: of
    the loss of a draft head that is trained with the model. b1, b2, eps: AdamW's; Lion has the decay rates of
    its paper. optimizer: a name in `OPTIMIZERS`.
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
    draft_weight: float = DRAFT_WEIGHT
    optimizer: str = "adamw"
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


def learning_rate(config: OptimizerConfig) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """The learning rate of update i, counted from 0: linear to the peak, then the schedule's.

        i < warmup:  peak (i + 1) / (warmup + 1)
        cosine:      peak (f + (1 - f) (1 + cos(pi (i - warmup) / (total - warmup))) / 2)
        wsd:         peak (f + (1 - f) min(1, (total - i) / (d total)))
        constant:    peak

    f: final_fraction, d: decay_fraction. With the + 1 the first update is not 0. After `total` updates the
    rate is constant. Source of wsd: Hu et al., arXiv:2404.06395.
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
    """True for each parameter that decays: of rank 2 or more, except norms and biases.

    Rank is not enough, since the norms of all layers, stacked for the scan, are a matrix [L, D].
    """

    def decays(path: tuple[Any, ...], value: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return value.ndim >= 2 and not any(word in name for word in ("norm", "bias"))

    return jax.tree_util.tree_map_with_path(decays, params)

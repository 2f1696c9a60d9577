"""AdamW on Optax."""

import optax

from meshwright.models.config import ModelConfig
from meshwright.train.optimizers.constants import OptimizerConfig, decay_mask, learning_rate


def adamw(config: OptimizerConfig, model: ModelConfig | None) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101).

    m  <- b1 m + (1 - b1) g           v <- b2 v + (1 - b2) g^2
    w  <- w - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
    """
    return optax.adamw(
        learning_rate(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )

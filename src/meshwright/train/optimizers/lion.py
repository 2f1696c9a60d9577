"""Lion on Optax."""

import optax

from meshwright.models.config import ModelConfig
from meshwright.train.optimizers.constants import OptimizerConfig, decay_mask, learning_rate

# Section 4 of the paper: the usual rates for language models.
_B1, _B2 = 0.95, 0.98


def lion(config: OptimizerConfig, model: ModelConfig | None) -> optax.GradientTransformationExtraArgs:
    """Lion (Chen et al., arXiv:2302.06675).

        w  <- w - lr (sign(b1 m + (1 - b1) g) + decay w)
        m  <- b2 m + (1 - b2) g

    It needs a learning rate three to ten times below AdamW's, and a decay that is higher by the same factor.
    """
    rate = learning_rate(config)
    return optax.lion(rate, b1=_B1, b2=_B2, weight_decay=config.weight_decay, mask=decay_mask)

"""The clipped policy loss of reinforcement learning, next to the cross-entropy of `nn/loss.py`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from meshwright.nn.loss import nats_of


class PolicyRows(NamedTuple):
    """Rows of rollouts, or their targets, with figures of each target; all [B, T + 1] or [B, T].

    tokens: coded as `train.row_codes` says, or ids of targets. old: log-probability by the weights that
    rolled out. reference: by the reference model. advantages: of the rollout. weights: of the target in the
    mean over all targets; 0 for prompts and padding.
    """

    tokens: Any
    old: Any
    reference: Any
    advantages: Any
    weights: Any


@dataclass(frozen=True)
class ClippedPolicyLoss:
    """The loss of GRPO and PPO for each target, with a penalty for the distance to a reference model.

        l = -w [min(r A, clip(r, 1 - e, 1 + h) A) - b (exp(q - p) - (q - p) - 1)],  r = exp(p - o)

    p: log-probability of the target; o: of the weights that rolled out; q: of the reference. A: advantage. w:
    weight. e, h: clip_low, clip_high; b: kl. Sources: Schulman et al., arXiv:1707.06347, equation 7; Shao et
    al., arXiv:2402.03300, equations 3 and 4.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0

    def __call__(self, logits: Array, targets: PolicyRows) -> Array:
        """f32[B, T] of logits[B, T, V] and targets[B, T]."""
        log_probs = -nats_of(logits, targets.tokens, masked=True, z_loss=0.0)
        counts = targets.weights > 0
        # A target that does not count has any figures; exp of them could overflow.
        ratio = jnp.exp(jnp.where(counts, log_probs - targets.old, 0.0))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        loss = -jnp.minimum(ratio * targets.advantages, clipped * targets.advantages)
        if self.kl:
            above = jnp.where(counts, targets.reference - log_probs, 0.0)
            loss += self.kl * (jnp.exp(above) - above - 1)
        return jnp.where(counts, targets.weights * loss, 0.0)

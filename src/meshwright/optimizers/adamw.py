"""AdamW: two moments of each weight. Source: Loshchilov & Hutter, arXiv:1711.05101."""

from meshwright.optimizers.optimizer import ADAMW_OPERATIONS, Optimizer

ADAMW = Optimizer("adamw", "two moments of every weight", ("m", "v"), operations=ADAMW_OPERATIONS)

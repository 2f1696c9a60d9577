"""Lion: one moment of each weight, whose sign is the update. Source: Chen et al., arXiv:2302.06675."""

from meshwright.optimizers.optimizer import Optimizer

# b1 m + (1 - b1) g 3, its sign, m 3, and the seven of clipping, decay, rate and weight that AdamW has too.
LION = Optimizer("lion", "one moment of every weight", ("m",), operations=14)

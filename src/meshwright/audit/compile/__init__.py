"""Compiles a plan's step for its target: a TPU's or GPU's compiler, or XLA for CPU, no chip attached."""

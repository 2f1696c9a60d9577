"""Mixers with a state in JAX: the operations that `models/mixers/` calls."""

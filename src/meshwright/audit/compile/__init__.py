"""Compilation of a plan's step by its target's compiler, without a chip."""

"""Comparison of planned and emitted collectives and FLOPs, with the cost of differences."""

"""Reshards of activations within a layer: how attention and experts bring arrays together."""

"""Weights loaded from files, and their logits, for tests to compare."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshwright.layout import Layout
from meshwright.layout.moves.attention import token_sharding
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.models.model_files import read_model
from meshwright.nn.files.weights import load_hf
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.start.device_mesh import device_mesh, named_sharding

TOKENS = np.random.default_rng(3).integers(0, 64, (2, 48)).tolist()


def f32(text: str = "data=1") -> Layout:
    return Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")


def logits(params: Any, config: ModelConfig, layout: Layout) -> np.ndarray:
    """f32[B, T, V] of TOKENS."""
    ops, mesh = JaxOps(config, layout), device_mesh(layout)
    placed = named_sharding(token_sharding(layout, "tokens"), mesh)
    tokens = np.asarray(TOKENS, np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)

    def forward(params: Any, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        return transformer.logits(config, ops, params, tokens, transformer.Places(positions))[0]

    with jax.set_mesh(mesh):
        inputs = [jax.device_put(np.ascontiguousarray(array), placed) for array in (tokens, positions)]
        return np.asarray(jax.jit(forward)(params, *inputs))


def assert_same(tree: Any, other: Any) -> None:
    """Equal values, types and tree, whatever the shards."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two), strict=True)


def load(folder: Path, layout: Layout) -> tuple[Any, ModelConfig]:
    config = read_model(folder)
    return load_hf(folder, config, layout, device_mesh(layout)), config

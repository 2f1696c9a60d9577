"""A small model's loss and gradients under a layout, compared with those of one device.

Values are float32, in which a layout changes nothing but the order of sums; TOLERANCE is relative to a
tensor's largest entry. Over the table of test_layouts.py the differences seen are at most 1.6e-6, some ten
roundings of 1.2e-7 (jax 0.10.2); a sum that is missing or made twice changes a gradient by a factor.
"""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from tests.nn.small_models import TINY, WITHOUT_GRADIENT

from meshwright.layout import Layout
from meshwright.layout.moves.attention import attention_layout, token_sharding
from meshwright.models import transformer
from meshwright.models.config import ModelConfig
from meshwright.nn.attention.blockwise import dealt_positions
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.params import flatten, init_params, shardings
from meshwright.nn.start.device_mesh import device_mesh, named_sharding

TOLERANCE = 5e-6
B, T = 8, 16
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (B, T + 1), dtype=np.int32)

Arrays = dict[str, np.ndarray]


@cache
def initial_weights(config: ModelConfig) -> dict[str, Any]:
    """The parameters that every layout starts from, in float32 on one device."""
    layout = Layout.of(weights_dtype="f32", compute_dtype="f32")
    return init_params(config, layout, device_mesh(layout), seed=0)


@cache
def on_the_host(config: ModelConfig) -> dict[str, Any]:
    """`initial_weights` in the host's memory, so that no layout compiles a program to make them."""
    return jax.tree.map(np.asarray, initial_weights(config))


class Step:
    """Loss and gradients of one batch under a layout. first: the first position of each token's document."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        tokens: np.ndarray = TOKENS,
        first: np.ndarray | None = None,
    ) -> None:
        self.mesh, ops = device_mesh(layout), JaxOps(config, layout)
        self.params = jax.device_put(on_the_host(config), shardings(config, layout, self.mesh))
        sharding = named_sharding(token_sharding(layout, "tokens"), self.mesh)
        attended = token_sharding(attention_layout(layout), "tokens").axes_of("T")
        num_rows, length = tokens[:, 1:].shape
        order = dealt_positions(length, layout.mesh.size(attended))  # as `mw train` deals tokens
        positions = np.broadcast_to(order, (num_rows, length))
        rows = named_sharding(token_sharding(layout, "tokens").replace(axes={"T": ()}), self.mesh)
        segments = None if first is None else first[:, order]
        positions = positions if segments is None else positions - segments
        places = jax.device_put(transformer.Places(positions, segments), rows)
        self.batch = [
            *(jax.device_put(x[:, order], sharding) for x in (tokens[:, :-1], tokens[:, 1:])),
            places,
        ]
        self.run = jax.jit(
            jax.value_and_grad(lambda w, *batch: transformer.losses(config, ops, w, *batch)[0])
        )

    def __call__(self) -> tuple[float, Arrays]:
        with jax.set_mesh(self.mesh):
            loss, gradients = self.run(self.params, *self.batch)
        return float(loss), {path: np.asarray(g, np.float32) for path, g in flatten(gradients).items()}


@cache
def of_one_device(config: ModelConfig) -> tuple[float, Arrays]:
    return Step(config, Layout.of(weights_dtype="f32", compute_dtype="f32"))()


def assert_agrees(config: ModelConfig, layout: Layout, tolerance: float = TOLERANCE) -> None:
    assert_equal(config, Step(config, layout)(), of_one_device(config), tolerance)


def assert_equal(
    config: ModelConfig, result: tuple[float, Arrays], of_one: tuple[float, Arrays], tolerance: float
) -> None:
    (loss, gradients), (expected_loss, expected) = result, of_one
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert gradients.keys() == expected.keys()
    for path, gradient in gradients.items():
        assert_equal_gradient(config, path, gradient, expected[path], tolerance)


def assert_equal_gradient(
    config: ModelConfig, path: str, gradient: Any, expected: np.ndarray, tolerance: float
) -> None:
    """The gradient of one parameter, or zeros if it gets none. tolerance: of the largest entry."""
    if (config.name, path) in WITHOUT_GRADIENT:
        assert np.abs(gradient).max() < 1e-7
        return
    scale = np.abs(expected).max()
    assert scale > 0, f"{path} has no gradient to compare"
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=tolerance * scale, err_msg=path)

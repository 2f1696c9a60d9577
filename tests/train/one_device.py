"""Gradients of a step of training under a layout, compared with those of one device.

Values are float32, where a layout changes nothing but the order of sums. Differences seen are at most
2e-6 of a tensor's largest entry.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from tests.nn.one_device import assert_equal_gradient, on_the_host
from tests.nn.small_models import TINY

from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.params import flatten, shardings
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.row_codes import BEGINS, UNCOUNTED
from meshwright.train.stage_step import StagedStep, training_step
from meshwright.train.step import CompiledStep

TOLERANCE = 5e-6
# The gradient of a decay is a sum of terms that cancel: without stages differences of 2e-4 are seen, too.
OF_STATES = 5e-4
TOKENS = np.random.default_rng(0).integers(0, TINY.vocab_size, (16, 17), dtype=np.int32)


def _masked() -> np.ndarray:
    """Documents that begin at another place in each row, and targets of some that are not counted."""
    rows = TOKENS.copy()
    for number, row in enumerate(rows):
        row[1 + number % 11 :: 7] |= BEGINS
    rows[3:7, 9:] |= UNCOUNTED
    return rows


MASKED = _masked()
NO_LOSSES = (0.0, 0.0)  # the weights of the balance loss and of the z-loss of routers
OPTIMIZER = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=2, total_steps=100)


def compiled_step(
    config: ModelConfig, layout: Layout, losses: tuple[float, float] = NO_LOSSES, *, masked: bool = False
) -> CompiledStep:
    return _step(config, layout, losses, CompiledStep, masked=masked)


def _step(
    config: ModelConfig, layout: Layout, losses: tuple[float, float], kind: Any, *, masked: bool = False
) -> Any:
    optimizer = replace(OPTIMIZER, balance_loss=losses[0], router_z_loss=losses[1])
    layout = layout.replace(weights_dtype="f32", compute_dtype="f32")
    return kind(config, layout, Workload(16, 16), optimizer, chip_flops_per_second=1e11, masked=masked)


def gradients_of(step: Any, rows: np.ndarray = TOKENS) -> tuple[float, dict[str, Any]]:
    """Loss, and gradients by path: those of stages with programs of their own joined in the host's memory."""
    dtype = jax_dtype(step.layout.precision.weights_dtype)
    whole = jax.tree.map(lambda weight: weight.astype(dtype), on_the_host(step.config))
    if isinstance(step, StagedStep):
        return step.whole_gradients(whole, rows)
    placed = jax.device_put(whole, shardings(step.config, step.layout, step.mesh)), step.put(rows)
    with jax.set_mesh(step.mesh):
        loss, gradients = jax.jit(step.loss_and_gradients)(*placed)
    return float(loss), flatten(gradients)


@cache
def of_one_device(
    config: ModelConfig, losses: tuple[float, float], masked: bool = False
) -> tuple[float, dict[str, np.ndarray]]:
    step = _step(config, Layout.of(), losses, CompiledStep, masked=masked)
    loss, gradients = gradients_of(step, MASKED if masked else TOKENS)
    return loss, {path: np.asarray(gradient) for path, gradient in gradients.items()}


def assert_agrees(
    config: ModelConfig,
    text: str,
    losses: tuple[float, float] = NO_LOSSES,
    *,
    masked: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """masked: of rows whose documents are masked, and with targets that are not counted."""
    step = _step(config, Layout.parse(text), losses, training_step, masked=masked)
    loss, gradients = gradients_of(step, MASKED if masked else TOKENS)
    expected_loss, expected = of_one_device(config, losses, masked)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    moments = {leaf.sharding for leaf in jax.tree.leaves(step.abstract_state().opt_state) if leaf.ndim}
    assert gradients.keys() == expected.keys()
    for path, gradient in gradients.items():
        joined = isinstance(gradient, np.ndarray)
        assert joined or gradient.sharding in moments, f"{path} does not lie as a moment does"
        assert_equal_gradient(config, path, gradient, expected[path], tolerance)

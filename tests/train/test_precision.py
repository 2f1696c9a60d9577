"""Master weights, and moments in bfloat16: what is kept between two updates, on many devices as on one."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.nn.small_models import TINY
from tests.train.one_device import TOKENS

from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.train.optimizers import OptimizerConfig, make_optimizer
from meshwright.train.step import CompiledStep, Mastered, TrainState

pytestmark = pytest.mark.sampled(4)

OPTIMIZER = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=20)


def _after(text: str, **words: object) -> TrainState:
    """The state after three steps of the tiny model, which computes in float32."""
    layout = Layout.parse(text).replace(compute_dtype="f32", **words)
    step = CompiledStep(TINY, layout, Workload(16, 16), OPTIMIZER, chip_flops_per_second=1e11)
    state = step.init(0)
    for _ in range(3):
        state, _ = step.step(state, TOKENS)
    return state


def _differences(one: Any, other: Any) -> list[float]:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return [float(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max()) for a, b in pairs]


def test_moments_in_bfloat16_are_rounded_from_float32() -> None:
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    gradient = {"w": jnp.full((4, 4), 0.3, jnp.bfloat16)}
    states = [make_optimizer(OPTIMIZER, dtype).init(params) for dtype in ("f32", "bf16")]
    (_, wide), (_, narrow) = (
        make_optimizer(OPTIMIZER, dtype).update(gradient, state, params)
        for dtype, state in zip(("f32", "bf16"), states, strict=True)
    )
    kept = [leaf for leaf in jax.tree.leaves(narrow) if leaf.ndim]
    assert {leaf.dtype for leaf in kept} == {jnp.dtype(jnp.bfloat16)}
    exact = [leaf for leaf in jax.tree.leaves(wide) if leaf.ndim]
    assert [np.array_equal(a.astype(jnp.bfloat16), b) for a, b in zip(exact, kept, strict=True)] == [
        True,
        True,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["data=8,zero=1", "fsdp=4,tensor=2", "data=4,tensor=2,zero=2,microbatches=2", "data=2,fsdp=4"]
)
def test_master_weights_are_those_of_one_device(text: str) -> None:
    found, expected = (_after(t, weights_dtype="bf16", master_weights=True) for t in (text, "data=1"))
    assert isinstance(found.opt_state, Mastered)
    rounded = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), found.opt_state.weights)
    assert max(_differences(found.params, rounded)) == 0
    # An update is at most the learning rate; bfloat16 gradients of 8 bits differ by their last.
    assert max(_differences(found.opt_state.weights, expected.opt_state.weights)) < 1e-3


@pytest.mark.slow
def test_master_weights_move_where_bfloat16_stands_still() -> None:
    """An update of 1e-5 is less than half a step of bfloat16 at 1, where norms begin."""
    slow = OptimizerConfig(peak_learning_rate=1e-5, warmup_steps=0, total_steps=20)
    layout = Layout.of(weights_dtype="bf16", compute_dtype="f32", master_weights=True)
    step = CompiledStep(TINY, layout, Workload(16, 16), slow, chip_flops_per_second=1e11)
    state, _ = step.step(step.init(0), TOKENS)
    assert (np.asarray(state.params["final_norm"], np.float32) == 1).all()
    assert (np.asarray(state.opt_state.weights["final_norm"]) != 1).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matmul_dtype", "scales", "far"), [("fp8", "tiles", 0.02), ("int8", "tiles", 0.02), ("fp4", None, 0.1)]
)
def test_blocks_of_narrow_operands_train_as_bfloat16_does(
    matmul_dtype: str, scales: str | None, far: float
) -> None:
    """Near the loss of bfloat16 at every step: a model of two tiles along D and three along F.

    With fp4, whose gradients have three quarters of the direction, it falls more slowly.
    """
    config, slow = replace(TINY, d_model=256, d_ff=384), replace(OPTIMIZER, peak_learning_rate=2e-4)
    losses = []
    for words in ({}, {"matmul_dtype": matmul_dtype, "matmul_scales": scales}):
        layout = Layout.of(weights_dtype="f32", fsdp=2).replace(**words)
        step = CompiledStep(config, layout, Workload(16, 16), slow, chip_flops_per_second=1e11)
        state, found = step.init(0), []
        for _ in range(6):
            state, metrics = step.step(state, TOKENS)
            found.append(float(metrics["loss"]))
        losses.append(found)
    plain, narrow = losses
    assert plain[-1] < 0.9 * plain[0]
    assert narrow == pytest.approx(plain, rel=far) and narrow != plain
    assert narrow[-1] < 0.9 * narrow[0]

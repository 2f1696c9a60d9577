"""Gradients of several microbatches and of ZeRO 1 and 2: every one of them is that of one device.

Values are float32, where a layout changes nothing but the order of sums. Differences seen are at most
2e-6 of a tensor's largest entry.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from tests.nn.test_layouts import GPT, LOCAL, MIXTURE, TIED, TINY, WITHOUT_GRADIENT, on_the_host

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.array_types import jax_dtype
from meshwright.nn.params import flatten, shardings
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.row_codes import BEGINS, UNCOUNTED
from meshwright.train.stage_step import StagedStep, training_step
from meshwright.train.step import CompiledStep

pytestmark = pytest.mark.sampled(4)

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


# What the balance loss and the z-loss of routers weigh.
NO_LOSSES = (0.0, 0.0)


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
def _one_device(
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
    expected_loss, expected = _one_device(config, losses, masked)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    moments = {leaf.sharding for leaf in jax.tree.leaves(step.abstract_state().opt_state) if leaf.ndim}
    assert gradients.keys() == expected.keys()
    for path, gradient in gradients.items():
        joined = isinstance(gradient, np.ndarray)
        assert joined or gradient.sharding in moments, f"{path} does not lie as a moment does"
        if (config.name, path) in WITHOUT_GRADIENT:
            assert np.abs(gradient).max() < 1e-7
            continue
        scale = np.abs(expected[path]).max()
        assert scale > 0, f"{path} has no gradient to compare"
        np.testing.assert_allclose(gradient, expected[path], rtol=0, atol=tolerance * scale, err_msg=path)


@pytest.mark.parametrize(
    "text",
    [
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in (
                "data=2,fsdp=2,tensor=2,microbatches=2,sequence_parallel=true",
                "data=4,tensor=2,zero=1,microbatches=2",
            )
        ),
        "data=2,fsdp=2,tensor=2,zero=2,microbatches=4,remat=full",
    ],
)
def test_loss_and_gradients_are_those_of_one_device(text: str) -> None:
    assert_agrees(TINY, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "data=8,microbatches=2",
        "data=8,zero=1",
        "data=8,zero=2",
        "fsdp=8,microbatches=2,remat=matmuls",
        "fsdp=4,tensor=2,zero=1,sequence_parallel=true",
        "data=2,context=4,microbatches=2,remat=full",
        "fsdp=2,context=2,tensor=2,zero=2,microbatches=2,sequence_parallel=true",
        "data=2,fsdp=2,context=2,zero=1,microbatches=4,remat=matmuls",
    ],
)
def test_the_other_pairs_of_options(text: str) -> None:
    assert_agrees(TINY, text)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TIED, LOCAL, GPT], ids=lambda config: config.name)
@pytest.mark.parametrize(
    "text",
    [
        "data=2,fsdp=2,tensor=2,microbatches=2,sequence_parallel=true",
        "data=2,fsdp=2,tensor=2,zero=1,microbatches=2,sequence_parallel=true",
        "data=4,tensor=2,zero=2,microbatches=2",
        "context=2,fsdp=2,tensor=2,zero=1,remat=full",
    ],
)
def test_other_families_agree(config: ModelConfig, text: str) -> None:
    """A table that is used twice, windows in periods, norms of heads, biases and learned positions."""
    assert_agrees(config, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["data=8,zero=2", "data=4,expert=2,tensor=2,zero=2,microbatches=2,grouped=true"]
)
def test_a_dense_layer_before_experts_agrees(text: str) -> None:
    """Each stack's gradients are scattered: those of the first, dense layers, too."""
    assert_agrees(MIXTURE, text)


def test_a_shard_that_does_not_divide_is_refused() -> None:
    """The weights are whole: only what ZeRO shards of them must divide."""
    with pytest.raises(LayoutError) as error:
        compiled_step(replace(TINY, d_model=20), Layout.of(data=8, zero=1))
    assert str(error.value) == (
        "dembed[V, D_data]: 20 model dimension (D) do not divide over data = 8; "
        "fits: data in {1, 2, 4, 5, 10, 20}, or replicate: dembed[V, D]"
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_is_offloaded_comes_back(remat: str) -> None:
    assert_agrees(TINY, f"fsdp=4,tensor=2,microbatches=2,offload=true,remat={remat}")


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["attention", "alternate"])
def test_every_policy_of_recomputing_agrees(remat: str) -> None:
    assert_agrees(TINY, f"data=2,fsdp=2,tensor=2,remat={remat}")


@pytest.mark.parametrize(
    "text",
    [
        "data=2,fsdp=2,tensor=2,microbatches=2",
        pytest.param("data=4,tensor=2,zero=2,microbatches=2,sequence_parallel=true", marks=pytest.mark.slow),
        pytest.param("data=2,fsdp=2,pipe=2,microbatches=4,schedule=lanes", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_bfloat16_weights_are_summed_in_float32(text: str) -> None:
    """They keep more digits than bfloat16 has, which one that was rounded on its way would have lost.

    What is summed was computed in bfloat16: a gradient's direction is that of float32 within 2%.
    """
    layout = Layout.parse(text).replace(weights_dtype="bf16", compute_dtype="bf16", gradients_dtype="f32")
    _, gradients = gradients_of(
        CompiledStep(TINY, layout, Workload(16, 16), OPTIMIZER, chip_flops_per_second=1e11)
    )
    _, expected = _one_device(TINY, NO_LOSSES)
    for path, gradient in gradients.items():
        assert gradient.dtype == np.float32
        found = np.asarray(gradient)
        a, b = found.ravel(), expected[path].ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, path
        if found.ndim > 1 and "norm" not in path:
            rounded = found.astype(jax.numpy.bfloat16).astype(np.float32)
            assert np.mean(found != rounded) > 0.5, path


@pytest.mark.slow
def test_gradients_of_float32_weights_may_be_summed_in_bfloat16() -> None:
    """Each sum of two rounds to 8 bits: 2% of a tensor's largest entry at most, after some such sums."""
    layout = Layout.parse("data=2,fsdp=2,tensor=2,microbatches=2").replace(gradients_dtype="bf16")
    _, gradients = gradients_of(compiled_step(TINY, layout))
    _, expected = _one_device(TINY, NO_LOSSES)
    for path, gradient in gradients.items():
        assert gradient.dtype == jax.numpy.bfloat16
        found, scale = np.asarray(gradient, np.float32), np.abs(expected[path]).max()
        np.testing.assert_allclose(found, expected[path], rtol=0, atol=0.02 * scale, err_msg=path)
        assert np.abs(found - expected[path]).max() > 1e-4 * scale, f"{path} was not rounded"


@pytest.mark.slow
def test_an_optimizer_that_waits_on_the_host_makes_the_same_updates() -> None:
    """XLA for CPU has one memory, and moves nothing between the two that it knows by name."""
    after = []
    for text in ("fsdp=2", "fsdp=2,offload_optimizer=true"):
        step = compiled_step(TINY, Layout.parse(text))
        state = step.init(0)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim}
        assert kinds == {"pinned_host" if "offload" in text else "device"}
        for _ in range(2):
            state, metrics = step.step(state, TOKENS)
        wanted = jax.tree.map(lambda leaf: leaf.sharding, step.abstract_state().opt_state)
        found = jax.tree.map(lambda leaf: leaf.sharding, state.opt_state)
        assert jax.tree.leaves(found) == jax.tree.leaves(wanted)
        assert step.num_compiled == 1
        after.append((float(metrics["loss"]), flatten(state.params)))
    (loss, params), (other_loss, others) = after
    assert loss == other_loss
    for path, weight in params.items():
        np.testing.assert_array_equal(np.asarray(weight), np.asarray(others[path]), err_msg=path)

"""Gradients of several microbatches and of ZeRO 1 and 2: every one of them is that of one device."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from tests.nn.small_models import GPT, LOCAL, MIXTURE, TIED, TINY
from tests.train.one_device import (
    NO_LOSSES,
    OPTIMIZER,
    TOKENS,
    assert_agrees,
    compiled_step,
    gradients_of,
    of_one_device,
)

from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn.params import flatten
from meshwright.train.step import CompiledStep

pytestmark = pytest.mark.sampled(4)


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
    _, expected = of_one_device(TINY, NO_LOSSES)
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
    _, expected = of_one_device(TINY, NO_LOSSES)
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

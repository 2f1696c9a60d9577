"""Layouts agree: under each, on eight virtual devices, loss and gradients are those of one device.

Options meet in pairs rather than in every product.
"""

import jax
import numpy as np
import pytest
from tests.nn.one_device import B, Step, T, assert_agrees, initial_weights, of_one_device
from tests.nn.small_models import (
    ALIBI,
    CHUNKED,
    COMPRESSED,
    CONVOLUTION,
    DELTA,
    DELTA_BY_ELEMENT,
    GPT,
    LATENT,
    LIGHTNING,
    LINEAR_UNIT,
    LOCAL,
    MAMBA,
    MIXTURE,
    NARROW_EXPERTS,
    OSS,
    PARALLEL,
    SELECTIVE,
    SHARED_CHOICE,
    SPARSE,
    SPARSE_BLOCKS,
    TIED,
    TINY,
    WIDE,
    WITHOUT_GRADIENT,
)

from meshwright.layout import Layout
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import dimensions, parameters
from meshwright.nn.params import flatten, init_params
from meshwright.nn.start.device_mesh import device_mesh

pytestmark = pytest.mark.sampled(5)


@pytest.mark.parametrize(
    "text",
    [
        "tensor=4",
        "data=2,fsdp=2,tensor=2",
        "tensor=4,sequence_parallel=true,remat=full",
        "fsdp=4,tensor=2,inner=fsdp,sequence_parallel=true,remat=matmuls",
        "context=4,fsdp=2,context_method=ring",
        "context=2,fsdp=2,tensor=2,context_method=ulysses,sequence_parallel=true",
        "tensor=4,kv_replicas=2,sequence_parallel=true",
        "fsdp=2,tensor=2,tensor2=2,sequence_parallel=true",
    ],
)
def test_loss_and_gradients_are_those_of_one_device(text: str) -> None:
    assert_agrees(TINY, Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "data=8",
        "fsdp=8",
        "context=8",
        "context=4,fsdp=2,remat=matmuls",
        "context=2,tensor=2,fsdp=2,sequence_parallel=true,remat=full",
        "data=8,remat=full",
        "data=2,fsdp=4,remat=matmuls",
        "data=4,tensor=2,sequence_parallel=true",
        "fsdp=2,tensor=4,remat=full",
        "fsdp=2,tensor=4,sequence_parallel=true",
        "data=2,context=4",
        "context=2,tensor=4,remat=matmuls",
        "data=2,context=2,tensor=2,sequence_parallel=true",
        "data=2,fsdp=2,context=2,remat=full",
        "context=2,fsdp=2,zero_context=true,tensor=2",
        "context=4,fsdp=2,zero=1,zero_context=true,microbatches=2",
        "tensor=4,kv_replicas=2,remat=matmuls",
        "data=2,tensor=2,tensor2=2,remat=full",
        "tensor2=8",
    ],
)
def test_the_other_pairs_of_options(text: str) -> None:
    assert_agrees(TINY, Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32"))


@pytest.mark.slow  # `make test` has a tied table in the layers of another family
@pytest.mark.parametrize("text", ["data=2,fsdp=2,tensor=2,sequence_parallel=true"])
def test_a_tied_table_collects_both_gradients(text: str) -> None:
    """It is looked up and multiplied, in two shardings; its gradient is the sum of both."""
    assert "unembed" not in initial_weights(TIED)
    assert_agrees(TIED, Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32"))


@pytest.mark.parametrize(
    "config", [pytest.param(LOCAL, marks=pytest.mark.slow), GPT], ids=lambda config: config.name
)
@pytest.mark.parametrize(
    "text",
    [
        "data=2,fsdp=2,tensor=2,sequence_parallel=true",
        pytest.param("context=2,fsdp=2,tensor=2,remat=full", marks=pytest.mark.slow),
        pytest.param("context=2,tensor=4,sequence_parallel=true,remat=matmuls", marks=pytest.mark.slow),
    ],
)
def test_other_families_agree(config: ModelConfig, text: str) -> None:
    assert_agrees(config, Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32"))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param(MIXTURE, "data=2,fsdp=4,expert=2,remat=matmuls", marks=pytest.mark.slow),
        pytest.param(OSS, "data=4,expert=2,tensor=2,remat=full", marks=pytest.mark.slow),
        (LATENT, "data=2,fsdp=2,tensor=2,sequence_parallel=true"),
        (SPARSE_BLOCKS, "data=2,fsdp=2,tensor=2,sequence_parallel=true"),
        pytest.param(SPARSE, "data=2,fsdp=2,tensor=2,sequence_parallel=true", marks=pytest.mark.slow),
        pytest.param(WIDE, "data=2,fsdp=2,tensor=2,sequence_parallel=true", marks=pytest.mark.slow),
        pytest.param(PARALLEL, "fsdp=4,tensor=2,expert=2,sequence_parallel=true", marks=pytest.mark.slow),
        *(
            pytest.param(config, text, marks=pytest.mark.slow)
            for config, text in [
                (MIXTURE, "fsdp=4,expert=4,tensor=2,sequence_parallel=true"),
                (MIXTURE, "data=4,expert=2,tensor=2,fold=true"),
                (MIXTURE, "data=8,expert=8"),
                (NARROW_EXPERTS, "fsdp=4,tensor=2,sequence_parallel=true,expert=2"),
                (NARROW_EXPERTS, "data=8,expert=8,expert_nodes=4,dispatch=once"),
                (NARROW_EXPERTS, "fsdp=2,tensor=2,tensor2=2,expert=2,grouped=true,remat=matmuls"),
                (MIXTURE, "data=8,expert=8,expert_nodes=4,dispatch=once"),
                (MIXTURE, "fsdp=8,expert=4,expert_nodes=2,remat=matmuls,dispatch=once"),
                (MIXTURE, "fsdp=2,tensor=4,sequence_parallel=true,expert=8,expert_nodes=2,dispatch=once"),
                (MIXTURE, "fsdp=2,tensor=2,tensor2=2,expert=2,expert_nodes=2,dispatch=once"),
                (OSS, "context=2,fsdp=4,expert=4,expert_nodes=2,remat=full,dispatch=once"),
                (MIXTURE, "fsdp=4,expert=4,tensor=2,sequence_parallel=true,grouped=true"),
                (MIXTURE, "fsdp=2,tensor=4,sequence_parallel=true,expert=8,remat=full,grouped=true"),
                (MIXTURE, "context=2,fsdp=2,tensor=2,expert=2,grouped=true"),
                (MIXTURE, "fsdp=2,tensor=2,tensor2=2,expert=2,grouped=true"),
                (OSS, "data=4,expert=2,tensor=2,remat=full,grouped=true"),
                (MIXTURE, "data=2,fsdp=4,expert=2,remat=matmuls,grouped=true"),
                (MIXTURE, "fsdp=4,expert=2,tensor=2"),
                (MIXTURE, "fsdp=2,tensor=4,expert=8"),
                (MIXTURE, "fsdp=2,tensor=4,expert=8,grouped=true"),
                (MIXTURE, "fsdp=2,tensor=4,sequence_parallel=true,expert=8,remat=full"),
                (MIXTURE, "context=2,fsdp=2,tensor=2,expert=2,sequence_parallel=true"),
                (MIXTURE, "data=2,tensor=4"),
                (OSS, "fsdp=8,expert=8"),
                (OSS, "fsdp=4,tensor=2,sequence_parallel=true,expert=4"),
                (LATENT, "context=2,fsdp=2,tensor=2,remat=full"),
                (LATENT, "fsdp=8,remat=latents"),
                (LATENT, "context=2,fsdp=2,tensor=2,sequence_parallel=true"),
                (SPARSE, "fsdp=4,tensor=2,remat=latents"),
                (SHARED_CHOICE, "fsdp=2,tensor=2,context=2,sequence_parallel=true,remat=full"),
                (SHARED_CHOICE, "data=4,fsdp=2,microbatches=2,zero=2,remat=matmuls"),
                (SPARSE, "fsdp=2,tensor=2,tensor2=2,sequence_parallel=true"),
                (SPARSE, "context=2,fsdp=2,tensor=2,sequence_parallel=true,remat=full"),
                (SPARSE, "context=4,tensor=2,context_method=ring,remat=matmuls"),
                (SPARSE, "data=4,fsdp=2,microbatches=2,zero=2"),
                (SPARSE_BLOCKS, "fsdp=4,tensor=2,remat=matmuls"),
                (SPARSE_BLOCKS, "tensor=4,kv_replicas=2,sequence_parallel=true,remat=full"),
                (SPARSE_BLOCKS, "context=2,fsdp=2,tensor=2,sequence_parallel=true,remat=full"),
                (SPARSE_BLOCKS, "context=4,tensor=2,context_method=ring,remat=matmuls"),
                (SPARSE_BLOCKS, "data=4,fsdp=2,microbatches=2,zero=2"),
                (ALIBI, "context=2,fsdp=2,tensor=2"),
                (ALIBI, "context=2,fsdp=2,tensor=2,context_method=ring"),
                (OSS, "context=2,fsdp=2,tensor=2,context_method=ring,remat=full"),
                (LATENT, "context=4,tensor=2,context_method=ring"),
                (ALIBI, "context=2,fsdp=2,tensor=2,context_method=ulysses"),
                (OSS, "context=2,tensor=2,fsdp=2,context_method=ulysses,remat=full"),
                (LATENT, "context=4,tensor=2,context_method=ulysses,remat=matmuls"),
                (MIXTURE, "context=2,fsdp=4,expert=4,context_method=ulysses"),
                (MIXTURE, "fsdp=2,tensor=2,tensor2=2,expert=2"),
                (OSS, "data=2,tensor=2,tensor2=2,sequence_parallel=true"),
                (CHUNKED, "context=2,fsdp=2,tensor=2,expert=2,context_method=ring"),
                (CHUNKED, "data=2,fsdp=4,expert=2,remat=matmuls"),
                (CHUNKED, "fsdp=4,expert=4,tensor=2,sequence_parallel=true,grouped=true"),
                (CHUNKED, "fsdp=4,expert=4,tensor=2,remat=full"),
                (CHUNKED, "context=2,fsdp=2,tensor=2,expert=2,remat=full"),
                (CHUNKED, "context=2,fsdp=2,tensor=2,context_method=ulysses"),
                (CHUNKED, "fsdp=2,tensor=2,tensor2=2,expert=2"),
                (LATENT, "fsdp=2,tensor=2,tensor2=2"),
                (WIDE, "fsdp=2,tensor=2,tensor2=2"),
                (WIDE, "context=2,fsdp=2,tensor=2,context_method=ulysses,remat=full"),
                (PARALLEL, "context=2,fsdp=2,tensor=2,context_method=ring,remat=matmuls"),
                (LOCAL, "data=2,tensor=2,tensor2=2"),
                (GPT, "fsdp=2,tensor=2,tensor2=2,sequence_parallel=true"),
            ]
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ModelConfig) else value,
)
def test_experts_and_latents_agree(config: ModelConfig, text: str) -> None:
    assert_agrees(config, Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32"))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param(DELTA, "data=2,fsdp=2,tensor=2,sequence_parallel=true", marks=pytest.mark.slow),
        pytest.param(
            MAMBA, "data=2,fsdp=2,tensor=2,sequence_parallel=true,remat=matmuls", marks=pytest.mark.slow
        ),
        (CONVOLUTION, "fsdp=2,tensor=4,sequence_parallel=true"),
        pytest.param(SELECTIVE, "data=2,fsdp=2,tensor=2,sequence_parallel=true", marks=pytest.mark.slow),
        pytest.param(SELECTIVE, "fsdp=2,tensor=4,remat=full", marks=pytest.mark.slow),
        pytest.param(
            LINEAR_UNIT, "data=2,fsdp=2,tensor=2,sequence_parallel=true,remat=full", marks=pytest.mark.slow
        ),
        pytest.param(LINEAR_UNIT, "fsdp=2,tensor=4,remat=matmuls", marks=pytest.mark.slow),
        (LIGHTNING, "fsdp=2,tensor=4,sequence_parallel=true,remat=matmuls"),
        pytest.param(DELTA, "data=2,tensor=4,remat=full", marks=pytest.mark.slow),
        pytest.param(
            DELTA_BY_ELEMENT, "fsdp=2,tensor=4,sequence_parallel=true,remat=matmuls", marks=pytest.mark.slow
        ),
        pytest.param(MAMBA, "fsdp=4,tensor=2", marks=pytest.mark.slow),
        pytest.param(MAMBA, "tensor=4,kv_replicas=2,sequence_parallel=true", marks=pytest.mark.slow),
    ],
)
def test_mixers_with_a_state_agree(config: ModelConfig, text: str) -> None:
    """Each device has a share of the heads, or of the channels.

    The gradient of a decay is a sum of terms that cancel: differences of up to 2e-4 of the largest are seen.
    """
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    assert_agrees(config, layout, tolerance=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "fsdp=2,kv_replicas=4,sequence_parallel=true",
        "data=4,fsdp=2,remat=matmuls,microbatches=2,zero=2",
        "data=2,kv_replicas=2,fsdp=2,expert=2,remat=full",
        "context=2,fsdp=2,kv_replicas=2,remat=full",
    ],
)
def test_compressed_keys_and_streams_agree(text: str) -> None:
    """Gradients of gates are sums that cancel: differences of up to 1.2e-5 of the largest are seen."""
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32")
    assert_agrees(COMPRESSED, layout, tolerance=3e-5)


@pytest.mark.parametrize("weights_dtype", [pytest.param("f32", marks=pytest.mark.slow), "bf16"])
def test_bfloat16_is_near(weights_dtype: str) -> None:
    """bfloat16 keeps 8 bits, 0.4% a rounding: the loss within 1%, a gradient's direction within 2%."""
    layout = Layout.of(fsdp=4, tensor=2, weights_dtype=weights_dtype)
    loss, gradients = Step(TINY, layout)()
    expected_loss, expected = of_one_device(TINY)
    assert loss == pytest.approx(expected_loss, rel=0.01)
    for path, gradient in gradients.items():
        a, b = gradient.ravel(), expected[path].ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, path


def test_parameters_do_not_depend_on_the_layout() -> None:
    layout = Layout.of(data=2, fsdp=2, tensor=2, weights_dtype="f32")
    made = flatten(init_params(TINY, layout, device_mesh(layout), seed=0))
    for path, expected in flatten(initial_weights(TINY)).items():
        np.testing.assert_array_equal(np.asarray(made[path]), np.asarray(expected), err_msg=path)


def test_parameters_start_as_described() -> None:
    """Scales are ones; a matrix is normal with variance 1 / fan-in. Another seed is another model."""
    params = flatten(initial_weights(TINY))
    sizes = dimensions(TINY)
    for path, param in parameters(TINY).items():
        values = np.asarray(params[path])
        assert values.shape == param.shape(sizes)
        if param.init == "ones":
            assert (values == 1).all()
        else:
            fan_in = np.prod([sizes[letter] for letter in param.fan_in])
            # 2048 draws or more: the deviation of a deviation is 1/sqrt(2 x 2048) = 1.6%; five of them.
            assert values.std() == pytest.approx(fan_in**-0.5, rel=0.08), path
            assert abs(values.mean()) < 5 * fan_in**-0.5 / values.size**0.5, path
    layout = Layout.of(weights_dtype="f32")
    other = flatten(init_params(TINY, layout, device_mesh(layout), seed=1))
    assert not np.array_equal(np.asarray(other["layers/wq"]), np.asarray(params["layers/wq"]))
    assert not np.array_equal(np.asarray(params["layers/wk"]), np.asarray(params["layers/wv"]))


def test_a_second_step_does_not_compile_and_a_gradient_lies_where_its_weight_lies() -> None:
    """Otherwise the update would move it, or recompile once its own output is its input."""
    layout = Layout.of(fsdp=2, tensor=4, weights_dtype="f32", compute_dtype="f32")
    step = Step(TINY, layout)
    step()
    with jax.set_mesh(step.mesh):
        _, gradients = step.run(step.params, *step.batch)
        for path, gradient in flatten(gradients).items():
            assert gradient.sharding == flatten(step.params)[path].sharding, path
        moved = jax.tree.map(lambda w, g: w - 0.1 * g, step.params, gradients)
        step.run(moved, *step.batch)
    assert step.run._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_an_untrained_model_knows_nothing() -> None:
    """The loss starts near ln V: unit-variance logits add half a nat."""
    loss, _ = of_one_device(TINY)
    assert np.log(TINY.vocab_size) < loss < np.log(TINY.vocab_size) + 1


@pytest.mark.parametrize(
    ("config", "matmul_dtype", "text"),
    [
        (TINY, "fp8", "fsdp=2,data=2,tensor=2,sequence_parallel=true"),
        *(
            pytest.param(config, matmul_dtype, text, marks=pytest.mark.slow)
            for config, matmul_dtype, text in [
                (TINY, "int8", "fsdp=2,tensor=2,tensor2=2"),
                (TINY, "fp8", "fsdp=4,tensor=2,matmul_scales=tiles"),
                (TINY, "fp4", "fsdp=2,tensor=2,sequence_parallel=true,remat=matmuls"),
                (MIXTURE, "fp4", "fsdp=2,expert=2"),
                (TINY, "f16", "fsdp=2,tensor=2,sequence_parallel=true,remat=matmuls"),
                (MIXTURE, "f16", "fsdp=2,expert=2"),
                (TINY, "int8", "fsdp=2,tensor=2,tensor2=2,matmul_scales=tiles"),
                (MIXTURE, "fp8", "fsdp=4,expert=4,tensor=2,matmul_scales=tiles"),
            ]
        ),
    ],
)
def test_narrow_products_are_near(config: ModelConfig, matmul_dtype: str, text: str) -> None:
    """fp8 keeps 3 bits, 6% a rounding: the loss within 2%, a gradient's direction within 5%. f16 keeps 10.

    fp4 keeps 1 bit, 11% a rounding and 15% a product, of which a gradient has a dozen one after another: the
    loss within 4%, a gradient's direction within 30%.
    That a layout splits the rows that a scale is of changes less than the rounding does.
    """
    layout = Layout.parse(text).replace(weights_dtype="f32", compute_dtype="f32", matmul_dtype=matmul_dtype)
    loss, gradients = Step(config, layout)()
    expected_loss, expected = of_one_device(config)
    far, near = (0.04, 0.7) if matmul_dtype == "fp4" else (0.02, 0.95)
    assert loss == pytest.approx(expected_loss, rel=far) and loss != expected_loss
    if config.moe:  # some tokens choose other experts after rounding, whose gradients have other directions
        return
    for path, gradient in gradients.items():
        a, b = gradient.ravel(), expected[path].ravel()
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > near, path


@pytest.mark.slow
@pytest.mark.parametrize("text", ["data=2,fsdp=4", "data=4,zero=2,microbatches=2"])
def test_products_of_fp4_are_those_of_one_device(text: str) -> None:
    """Where no sum of the forward pass is split; of weights' gradients it is, over whole blocks of tokens."""
    narrow = {"weights_dtype": "f32", "compute_dtype": "f32", "matmul_dtype": "fp4"}
    loss, gradients = Step(TINY, Layout.parse(text).replace(**narrow))()
    expected_loss, expected = Step(TINY, Layout.of(**narrow))()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for path, gradient in gradients.items():
        # A last bit of what a norm adds up may move a number to the other side of a tie.
        assert np.linalg.norm(gradient - expected[path]) < 0.02 * np.linalg.norm(expected[path]), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("matmul_dtype", "text", "bound"),
    [
        ("fp8", "data=2,fsdp=4,expert=4", 0.05),
        ("int8", "data=2,fsdp=4,expert=4,remat=full", 0.02),
        ("fp8", "fsdp=8,expert=2,grouped=true", 0.05),
        ("fp4", "data=2,fsdp=4,expert=4", 0.2),
    ],
)
def test_narrow_products_of_experts_are_those_of_one_device(
    matmul_dtype: str, text: str, bound: float
) -> None:
    """Each row and column is rounded alike, so that tokens choose the same experts and the loss is the same.

    But for ties of int8, where the last bit of a float32 sum decides, and a token may choose another expert:
    the loss of one device is 4.48607 with LLVM's optimizations and 4.48636 without. And gradients of weights
    have a scale for what is summed over, a device's tokens or a block of rows: they differ by rounding (see
    test_narrow for the bounds).
    """
    narrow = {"weights_dtype": "f32", "compute_dtype": "f32", "matmul_dtype": matmul_dtype}
    loss, gradients = Step(MIXTURE, Layout.parse(text).replace(**narrow))()
    expected_loss, expected = Step(MIXTURE, Layout.of(**narrow))()
    # A token whose choice differs has another loss by less than half a nat.
    of_ties = 0.5 / (B * T) if matmul_dtype == "int8" else 0
    assert loss == pytest.approx(expected_loss, abs=of_ties + 1e-5 * expected_loss)
    assert loss != pytest.approx(of_one_device(MIXTURE)[0], rel=1e-6), "products are rounded"
    for path, gradient in gradients.items():
        if (MIXTURE.name, path) not in WITHOUT_GRADIENT:
            difference = np.linalg.norm(gradient - expected[path])
            assert difference < bound * np.linalg.norm(expected[path]), path

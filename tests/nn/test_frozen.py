"""Frozen weights in narrow types: their numbers, their gradients next to adapters, and groups on shards."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.dtypes import number_type, types_for
from meshwright.errors import LayoutError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.param import Param
from meshwright.models.parameters import is_adapter
from meshwright.models.presets import load_model
from meshwright.nn.frozen import Frozen, frozen, frozen_type, widened
from meshwright.nn.params import abstract_params, build, flatten, init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

DTYPES = types_for("frozen weights", "train")
MODEL = replace(load_model("tiny"), lora_rank=4, lora_alpha=8.0)
# In one program, which compiles faster than its operations one by one.
WIDENED = jax.jit(partial(widened, dtype=jnp.float32))


def quantised(w: np.ndarray, dtype: str, letters: str = "DF", fan_in: str = "D") -> tuple[Frozen, np.ndarray]:
    mesh = device_mesh(Layout.of(data=1))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * w.ndim))
    types = frozen_type(
        jax.ShapeDtypeStruct(w.shape, jnp.float32, sharding=sharding),
        dtype,
        "w",
        Param(letters, fan_in=fan_in),
    )
    with jax.set_mesh(mesh):
        made = jax.jit(lambda w: frozen(w, types))(jax.device_put(w, sharding))
        return made, np.asarray(WIDENED(made))


def test_the_known_types_are_those_with_float32_scales() -> None:
    assert set(DTYPES) == {"fp8", "int8", "nf4", "int4"}


@pytest.mark.parametrize("dtype", ["nf4", "int4"])
def test_groups_of_inputs_are_rounded_to_the_nearest_level(dtype: str) -> None:
    record = number_type(dtype)
    levels = np.asarray(record.levels or [n / 7 for n in range(-7, 8)], np.float32)
    w = np.random.default_rng(0).normal(size=(128, 6)).astype(np.float32)
    made, wide = quantised(w, dtype)
    group = record.group
    assert group and made.values.shape == (64, 6) and made.scales.shape == (128 // group, 6)
    largest = np.abs(w.reshape(-1, group, 6)).max(1, keepdims=True)
    nearest = np.abs(w.reshape(-1, group, 6)[..., None] / largest[..., None] - levels).argmin(-1)
    np.testing.assert_allclose(wide, (levels[nearest] * largest).reshape(128, 6), rtol=1e-6)


@pytest.mark.parametrize(("letters", "fan_in"), [("LDNH", "D"), ("LNHD", "NH")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_levels_come_back(dtype: str, letters: str, fan_in: str) -> None:
    """A widened weight is stored and widened again without a change."""
    w = np.random.default_rng(1).normal(size=[{"L": 2, "D": 64, "N": 3, "H": 64}[x] for x in letters])
    _, once = quantised(w.astype(np.float32), dtype, letters, fan_in)
    _, twice = quantised(once, dtype, letters, fan_in)
    np.testing.assert_allclose(once, twice, rtol=1e-5)
    assert 0 < np.abs(once - w).mean() < {"nf4": 0.1, "int4": 0.12, "fp8": 0.03, "int8": 0.02}[dtype]


def test_an_odd_number_of_inputs_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"w\[DF\] in nf4: a device has 7 of 7 inputs \(D\), an odd number"):
        quantised(np.ones((7, 2), np.float32), "nf4")


def step(text: str, dtype: str) -> CompiledStep:
    layout = Layout.parse(text, weights_dtype=dtype, compute_dtype="f32")
    return CompiledStep(
        MODEL, layout, Workload(8, 16), OptimizerConfig(1e-2, 0, 10), chip_flops_per_second=1e12
    )


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("fsdp=2,tensor=2,microbatches=2", "nf4"),
        pytest.param("data=1", "nf4", marks=pytest.mark.slow),
        pytest.param("fsdp=4,tensor=2", "int4", marks=pytest.mark.slow),
        pytest.param("data=2", "int8", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_adapters_are_those_of_the_widened_weights(text: str, dtype: str) -> None:
    """The same loss and gradients as adapters on float32 weights with the same values; float32 sums."""
    narrow, wide = step(text, dtype), step(text, "f32")
    tokens = np.random.default_rng(2).integers(0, MODEL.vocab_size, (8, 17)).astype(np.int32)
    params = flatten(init_params(MODEL, narrow.layout, narrow.mesh, 0))
    types = flatten(abstract_params(MODEL, narrow.layout, narrow.mesh))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), types
    )
    frozen_paths = {path for path, leaf in params.items() if isinstance(leaf, Frozen)}
    assert {path.rpartition("/")[2] for path in frozen_paths} >= {"wq", "wo", "w_in", "w_out"}
    assert "embed" not in frozen_paths and not any(map(is_adapter, frozen_paths))
    with jax.set_mesh(narrow.mesh):
        for path in params:  # B of a new adapter is zero, and so would be the gradient of A
            if path.endswith("_lora_b"):
                params[path] = params[path] + jnp.asarray(0.02, params[path].dtype)
        seen = {path: WIDENED(leaf) if isinstance(leaf, Frozen) else leaf for path, leaf in params.items()}
        got = jax.jit(narrow.loss_and_gradients)(
            build(MODEL, lambda path, _: params[path]), narrow.put(tokens)
        )
        expected = jax.jit(wide.loss_and_gradients)(
            build(MODEL, lambda path, _: seen[path]), wide.put(tokens)
        )
    assert float(got[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    gradients, wanted = flatten(got[1]), flatten(expected[1])
    assert gradients.keys() == wanted.keys() and all(map(is_adapter, gradients))
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[path], rtol=0, atol=1e-6 * np.abs(wanted[path]).max())
        assert np.abs(gradient).max() > 0

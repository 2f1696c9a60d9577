"""AdamW against steps worked by hand."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import MeshwrightError
from meshwright.layout import Layout
from meshwright.models.parameters import dimensions, parameters
from meshwright.models.presets import load_model
from meshwright.nn.params import abstract_params, flatten, init_params
from meshwright.nn.start.device_mesh import device_mesh
from meshwright.optimizers import OPTIMIZERS
from meshwright.optimizers.optimizer import WeightShard
from meshwright.train.optimizers import OptimizerConfig, decay_mask, learning_rate, make_optimizer

CONFIG = OptimizerConfig(peak_learning_rate=0.5, warmup_steps=1, total_steps=11)


def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """(updates, state) under CONFIG; optax's own types say less."""
    return make_optimizer(CONFIG).update(gradients, state, params)


def moment(state: Any, name: str) -> jax.Array:
    moments: Any = optax.tree.get(state, name)
    return moments["w"]


def apply(params: Any, updates: Any) -> Any:
    return optax.apply_updates(params, updates)


def test_two_updates_worked_by_hand():
    """One weight, one norm; |g| = 5 is clipped to 1, so g = (0.6, 0.8), and the first update is its sign.

    First: m / (1 - b1) = g and sqrt(v / (1 - b2)) = |g|, so w falls by lr (1 + decay w) with
    lr = peak / 2; the norm, which does not decay, by lr. Then the gradient turns to (0, -1).
    """
    optimizer = make_optimizer(CONFIG)
    params = {"wq": jnp.array([[2.0]]), "norm": jnp.array([[1.0]])}
    state = optimizer.init(params)
    updates, state = update({"wq": jnp.array([[3.0]]), "norm": jnp.array([[4.0]])}, state, params)
    params = apply(params, updates)
    assert float(params["wq"][0, 0]) == pytest.approx(2.0 - 0.25 * (1 + 0.1 * 2.0), rel=1e-6)
    assert float(params["norm"][0, 0]) == pytest.approx(1.0 - 0.25, rel=1e-6)

    updates, _ = update({"wq": jnp.array([[0.0]]), "norm": jnp.array([[-1.0]])}, state, params)
    m, v = 0.9 * 0.1 * 0.6, 0.95 * 0.05 * 0.36
    direction = (m / (1 - 0.9**2)) / math.sqrt(v / (1 - 0.95**2))
    assert float(updates["wq"][0, 0]) == pytest.approx(-0.5 * (direction + 0.1 * 1.7), rel=1e-5)
    m, v = 0.9 * 0.1 * 0.8 - 0.1, 0.95 * 0.05 * 0.64 + 0.05
    direction = (m / (1 - 0.9**2)) / math.sqrt(v / (1 - 0.95**2))
    assert float(updates["norm"][0, 0]) == pytest.approx(-0.5 * direction, rel=1e-5)


def test_two_updates_of_lion_worked_by_hand():
    """g = (0.6, 0.8) after clipping, then (0, -1): the sign of 0.95 m + 0.05 g, m kept at 0.98."""
    optimizer = make_optimizer(replace(CONFIG, optimizer="lion"))
    params: Any = {"wq": jnp.array([[2.0]]), "norm": jnp.array([[1.0]])}
    state: Any = optimizer.init(params)
    for gradients, steps in (((3.0, 4.0), (-1.2, -1.0)), ((0.0, -1.0), (-1.17, 1.0))):
        given = {"wq": jnp.array([[gradients[0]]]), "norm": jnp.array([[gradients[1]]])}
        updates, state = optimizer.update(given, state, params)
        rate = 0.25 if gradients[0] else 0.5
        found: Any = updates
        assert float(found["wq"][0, 0]) == pytest.approx(rate * steps[0], rel=1e-6)
        assert float(found["norm"][0, 0]) == pytest.approx(rate * steps[1], rel=1e-6)
        params = apply(params, updates)
    assert not hasattr(optax.tree.get(state, "nu"), "items")


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("wsd", [0.2, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1]), ("constant", [0.2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])],
)
def test_other_courses_of_the_learning_rate(schedule, expected):
    """Of 40 updates wsd falls over the last 8 to a tenth: half of the way at update 36."""
    config = OptimizerConfig(peak_learning_rate=1.0, warmup_steps=4, total_steps=40, schedule=schedule)
    values = [float(learning_rate(config)(count)) for count in (0, 4, 20, 32, 36, 40, 1000)]
    assert values == pytest.approx(expected)


def test_learning_rate_climbs_then_falls_to_a_tenth():
    rate = learning_rate(OptimizerConfig(peak_learning_rate=1.0, warmup_steps=4, total_steps=24))
    values = [float(rate(count)) for count in (0, 1, 3, 4, 14, 24, 1000)]
    assert values == pytest.approx([0.2, 0.4, 0.8, 1.0, 0.55, 0.1, 0.1])


def test_gradients_below_the_clip_are_left_alone():
    """Scaling a gradient changes nothing in Adam's first step but, above the clip, also not its norm."""
    optimizer = make_optimizer(CONFIG)
    params = {"w": jnp.zeros((1, 2))}
    small, large = jnp.array([[0.3, 0.4]]), jnp.array([[30.0, 40.0]])
    _, state_small = update({"w": small}, optimizer.init(params), params)
    _, state_large = update({"w": large}, optimizer.init(params), params)
    np.testing.assert_allclose(moment(state_small, "mu"), 0.1 * small, rtol=1e-6)
    np.testing.assert_allclose(moment(state_large, "mu"), 0.1 * large / 50, rtol=1e-6)


def test_only_matrices_decay_even_where_layers_are_stacked():
    shapes = {
        "embed": (32, 8),
        "layers": {"wq": (2, 8, 4, 2), "attention_norm": (2, 8), "bias": (2, 8)},
        "final_norm": (8,),
        "scale": (8,),
    }
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    assert decay_mask(params) == {
        "embed": True,
        "layers": {"wq": True, "attention_norm": False, "bias": False},
        "final_norm": False,
        "scale": False,
    }


def test_moments_of_bfloat16_parameters_are_float32_and_lie_as_the_parameters_do():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), (AxisType.Explicit,) * 2)
    sharding = NamedSharding(mesh, P("fsdp", "tensor"))
    params = {"w": jax.device_put(jnp.ones((8, 4), jnp.bfloat16), sharding)}
    optimizer = make_optimizer(CONFIG)
    with jax.set_mesh(mesh):
        state = jax.jit(optimizer.init)(params)
        updates, state = jax.jit(update)({"w": params["w"] * 3}, state, params)
    for name in ("mu", "nu"):
        array = moment(state, name)
        assert (array.dtype, array.sharding) == (jnp.float32, sharding)
    assert updates["w"].dtype == jnp.float32
    assert apply(params, updates)["w"].dtype == jnp.bfloat16


def test_sharded_updates_equal_unsharded_ones():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), (AxisType.Explicit,) * 2)
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "norm": jnp.ones(4)}
    gradients = {"w": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "norm": jnp.full(4, 0.5)}
    specs = {"w": NamedSharding(mesh, P("fsdp", "tensor")), "norm": NamedSharding(mesh, P())}
    optimizer = make_optimizer(CONFIG)
    expected, _ = update(gradients, optimizer.init(params), params)
    params, gradients = jax.device_put(params, specs), jax.device_put(gradients, specs)
    with jax.set_mesh(mesh):
        updates, _ = jax.jit(update)(gradients, jax.jit(optimizer.init)(params), params)
    for name in params:  # rtol: the norm is summed in another order
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-6)


def test_warm_up_that_does_not_fit_is_refused():
    with pytest.raises(MeshwrightError) as error:
        OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=20, total_steps=10)
    assert str(error.value) == "optimizer: 20 warm-up steps do not fit in 10 steps; fits: at most 9"
    with pytest.raises(MeshwrightError, match=r"optimizer: learning rate 0 is not above 0"):
        OptimizerConfig(peak_learning_rate=0.0, warmup_steps=0, total_steps=10)


# Wide enough that Adafactor keeps rows and columns.
WIDE = replace(load_model("tiny"), d_model=128)
OF_STEP = OptimizerConfig(peak_learning_rate=0.5, warmup_steps=0, total_steps=11, weight_decay=0.0)
SOME = ("embed", "layers/wq", "layers/w_out", "layers/mlp_norm")


def _first_update(name: str, layout: Layout) -> dict[str, np.ndarray]:
    """The updates of some parameters whose gradients are random, split as `layout` says."""
    optimizer = make_optimizer(replace(OF_STEP, optimizer=name), model=WIDE)
    mesh = device_mesh(layout)
    params = init_params(WIDE, layout, mesh, 0, only=SOME)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda mine: optimizer.update(mine, optimizer.init(mine), mine)[0])
        return {path: np.asarray(update) for path, update in flatten(run(params)).items()}


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_updates_of_shards_are_those_of_one_device(name: str) -> None:
    """Orthogonal factors of float32 matrices, in five iterations, differ by some thousand roundings."""
    alone = _first_update(name, Layout.of(weights_dtype="f32"))
    found = _first_update(name, Layout.of(fsdp=4, tensor=2, weights_dtype="f32"))
    for path, update in alone.items():
        np.testing.assert_allclose(found[path], update, atol=2e-4, err_msg=path)
    if name == "muon":
        # Singular values near 0.2 sqrt(max(D, N H)) lr, but for the smallest, which five iterations leave.
        for layer in alone["layers/wq"].reshape(WIDE.num_layers, WIDE.d_model, -1):
            sizes = np.linalg.svd(layer)[1] / (0.5 * 0.2 * np.sqrt(max(layer.shape)))
            assert np.quantile(sizes, 0.05) > 0.5 and sizes.max() < 1.5
        # The embedding is Adam's: its first update is of one size wherever the gradient is not near eps.
        small, large = np.quantile(np.abs(alone["embed"]), [0.1, 0.9])
        assert large == pytest.approx(small, rel=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_planner_knows_the_state_of_each_optimizer(name: str) -> None:
    layout = Layout.of(weights_dtype="f32")
    optimizer = make_optimizer(replace(OF_STEP, optimizer=name), model=WIDE)
    mesh = device_mesh(layout)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(optimizer.init, abstract_params(WIDE, layout, mesh))
    kept = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 3)  # else counters and constants
    found = sum(
        OPTIMIZERS[name].state_elements(
            WeightShard(
                path, param, layout.rules.updated.weight(path, param.letters), dimensions(WIDE), layout.mesh
            )
        )
        for path, param in parameters(WIDE).items()
    )
    assert found == kept

"""Checkpoints restore bit for bit onto any mesh, and refuse what is cut short or of another model."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshwright.errors import CheckpointError
from meshwright.nn import checkpoint
from meshwright.train.optimizer import OptimizerConfig, make_optimizer

SPECS = {"wq": P("data", "tensor"), "norm": P("tensor")}
OPTIMIZER = make_optimizer(OptimizerConfig(peak_learning_rate=0.1, warmup_steps=2, total_steps=20))


def mesh(data: int, tensor: int) -> Mesh:
    devices = jax.devices()[: data * tensor]
    return jax.make_mesh((data, tensor), ("data", "tensor"), (AxisType.Explicit,) * 2, devices=devices)


def make_state(on: Mesh, seed: int = 0, d_model: int = 8) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    params = {
        "wq": jnp.asarray(rng.normal(size=(16, d_model)), jnp.float32),
        "norm": jnp.asarray(rng.normal(size=d_model), jnp.bfloat16),
    }
    params = {name: jax.device_put(array, NamedSharding(on, SPECS[name])) for name, array in params.items()}
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": jnp.int32(3)}


def abstract(state: Any, on: Mesh) -> Any:
    """`state` as shapes whose shardings have the same specs on another mesh."""

    def leaf(array: jax.Array) -> jax.ShapeDtypeStruct:
        spec = array.sharding.spec if isinstance(array.sharding, NamedSharding) else P()
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(on, spec))

    return jax.tree.map(leaf, state)


def assert_same(tree: Any, other: Any) -> None:
    """Bit equality, types and tree included."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert one.dtype == two.dtype
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Steps 2 and 3 of one small model, saved from a 4 x 2 mesh. Not to be changed: copy it."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    state = make_state(mesh(4, 2))
    checkpoint.save(directory, 2, make_state(mesh(4, 2), seed=1), {"next_example": 20})
    checkpoint.save(directory, 3, state, {"next_example": 30, "seed": 7})
    return directory, state


@pytest.mark.parametrize("shape", [(4, 2), (2, 2), (1, 8), (1, 1)])
def test_restores_bit_for_bit_onto_another_mesh(saved, shape):
    directory, state = saved
    wanted = abstract(state, mesh(*shape))
    restored, position, step = checkpoint.restore(directory, wanted)
    assert_same(restored, state)
    assert (position, step) == ({"next_example": 30, "seed": 7}, 3)
    assert restored["params"]["wq"].sharding == wanted["params"]["wq"].sharding


def test_restores_an_earlier_step_when_asked(saved):
    directory, state = saved
    restored, position, step = checkpoint.restore(directory, abstract(state, mesh(2, 2)), step=2)
    assert (position, step) == ({"next_example": 20}, 2)
    assert_same(restored, make_state(mesh(4, 2), seed=1))


def test_params_alone_are_restored_for_serving_in_the_type_asked_for(saved):
    directory, state = saved
    one = NamedSharding(mesh(1, 1), P())
    wanted = {
        "wq": jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=one),
        "norm": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
    }
    params = checkpoint.restore_params(directory, wanted)
    assert_same(params, {name: array.astype(jnp.bfloat16) for name, array in state["params"].items()})
    assert params["norm"].devices() == {jax.devices()[0]}


def test_resumed_training_equals_uninterrupted(tmp_path):
    @jax.jit
    def update(state: dict[str, Any]) -> dict[str, Any]:
        gradients = jax.grad(lambda p: jnp.sum(jnp.sin(p["wq"])) + jnp.sum(p["norm"] ** 2))(state["params"])
        updates, opt_state = OPTIMIZER.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    # One array on one device cannot meet arrays on a mesh inside a jit, so the counters move there.
    on = mesh(4, 2)
    state = jax.device_put(make_state(on), jax.tree.map(lambda s: s.sharding, abstract(make_state(on), on)))
    state = update(update(state))
    checkpoint.save(tmp_path, 2, state, {})
    restored, _, _ = checkpoint.restore(tmp_path, abstract(state, on))
    assert_same(update(update(restored)), update(update(state)))


def test_keeps_the_last_two_and_leaves_nothing_half_written(tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, {"w": jnp.float32(step)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    assert checkpoint.latest_step(tmp_path) == 4


def test_latest_step_of_nothing_is_none(tmp_path):
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "absent") is None
    assert not (tmp_path / "absent").exists()


def test_a_step_still_being_written_is_no_checkpoint(saved, tmp_path):
    directory = Path(shutil.copytree(saved[0], tmp_path / "run"))
    (directory / "3").rename(directory / "3.orbax-checkpoint-tmp")
    assert checkpoint.latest_step(directory) == 2


def test_every_file_cut_short_or_deleted_is_noticed(saved, tmp_path):
    """Whatever file of the checkpoint is damaged, the message names the step and the way on."""
    directory, state = saved
    wanted = abstract(state, mesh(2, 2))
    names = [path.relative_to(directory) for path in (directory / "3").rglob("*") if path.is_file()]
    assert len(names) > 5
    for number, name in enumerate(names):
        broken = Path(shutil.copytree(directory, tmp_path / str(number)))
        if number % 2:
            (broken / name).unlink()
        else:
            (broken / name).write_bytes((broken / name).read_bytes()[:-1])
        if (broken / name).exists() and (broken / name).stat().st_size == (directory / name).stat().st_size:
            continue  # an empty file cannot be cut shorter
        with pytest.raises(CheckpointError) as error:
            checkpoint.restore(broken, wanted)
        message = str(error.value)
        assert message.startswith(f"checkpoint {broken}/3: is cut short: ")
        assert message.endswith("; delete that folder to go on from step 2")
        assert "\n" not in message


def test_a_cut_file_is_named_with_both_sizes(saved, tmp_path):
    directory = Path(shutil.copytree(saved[0], tmp_path / "run"))
    shutil.rmtree(directory / "2")
    position = directory / "3" / "data" / "metadata"
    size = position.stat().st_size
    position.write_bytes(position.read_bytes()[:4])
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore_params(directory, abstract(saved[1], mesh(1, 1))["params"])
    assert str(error.value) == (
        f"checkpoint {directory}/3: is cut short: data/metadata has 4 of {size} bytes;"
        " delete that folder and train again: there is no earlier step"
    )


@pytest.mark.parametrize("name", ["data/metadata", "state/_METADATA"])
def test_bytes_changed_in_place_are_noticed(saved, tmp_path, name):
    directory = Path(shutil.copytree(saved[0], tmp_path / "run"))
    content = (directory / "3" / name).read_bytes()
    (directory / "3" / name).write_bytes(b"x" + content[1:])
    with pytest.raises(CheckpointError, match=r"/3: is cut short: cannot be read \(.+\); delete that folder"):
        checkpoint.restore(directory, abstract(saved[1], mesh(1, 1)))


def test_another_models_checkpoint_names_the_first_array_and_both_shapes(saved):
    directory, _ = saved
    wanted = abstract(make_state(mesh(1, 1), d_model=16), mesh(1, 1))
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(directory, {"params": wanted["params"]})
    assert str(error.value) == (
        f"checkpoint {directory}/3: params.norm is [8] there and [16] in this model;"
        " name the run of this model"
    )


def test_arrays_missing_or_left_over_are_refused(saved):
    directory, state = saved
    wanted = abstract(state, mesh(1, 1))
    more = {"params": {"wk": wanted["params"]["wq"]}}
    with pytest.raises(CheckpointError, match=r"has no params\.wk\[16, 8\]; name the run of this model"):
        checkpoint.restore(directory, more)
    with pytest.raises(CheckpointError, match=r"holds opt_state\..*, which this model has not"):
        checkpoint.restore(directory, {"params": wanted["params"], "step": wanted["step"]})


def test_training_in_another_type_is_refused(saved):
    directory, state = saved
    wanted = abstract(state, mesh(1, 1))
    wanted["params"]["norm"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(CheckpointError, match=r"norm is bfloat16 there and float32 in this run"):
        checkpoint.restore(directory, wanted)


def test_no_checkpoint_and_no_such_step(saved, tmp_path):
    directory, state = saved
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore(tmp_path / "absent", state)
    assert str(error.value) == (f"checkpoint: {tmp_path}/absent holds none; train first, or without --resume")
    with pytest.raises(CheckpointError, match=r"holds no step 9; there: 2, 3"):
        checkpoint.restore(directory, abstract(state, mesh(1, 1)), step=9)

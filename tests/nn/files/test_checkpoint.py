"""Checkpoints restore bit for bit onto any mesh, and refuse what is cut short or of another model."""

import errno
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.nn.saving import save

from meshwright.errors import CheckpointError, OutputError
from meshwright.nn.files import checkpoint, checkpoint_files
from meshwright.train.optimizers import OptimizerConfig, make_optimizer

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
    save(directory, 2, make_state(mesh(4, 2), seed=1), {"next_example": 20})
    save(directory, 3, state, {"next_example": 30, "seed": 7})
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
    save(tmp_path, 2, state, {})
    restored, _, _ = checkpoint.restore(tmp_path, abstract(state, on))
    assert_same(update(update(restored)), update(update(state)))


def test_keeps_the_last_two_and_leaves_nothing_half_written(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, {"w": jnp.float32(step)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    assert checkpoint_files.checkpoint_steps(tmp_path) == [3, 4]


def test_keeps_the_best_validated_beside_the_last(tmp_path):
    for step, loss in ((1, 3.0), (2, 2.0), (3, 2.5), (4, None), (5, None)):
        save(tmp_path, step, {"w": jnp.float32(step)}, {"validation_loss": loss}, keep=1)
    assert checkpoint_files.checkpoint_steps(tmp_path) == [2, 5]


def test_no_steps_of_nothing(tmp_path):
    assert checkpoint_files.checkpoint_steps(tmp_path) == []
    assert checkpoint_files.checkpoint_steps(tmp_path / "absent") == []
    assert not (tmp_path / "absent").exists()


def test_a_save_that_was_cut_off_is_no_checkpoint_and_goes_with_the_next(saved, tmp_path):
    """Whatever of it was written: only the rename makes it one."""
    directory = Path(shutil.copytree(saved[0], tmp_path / "run"))
    (directory / ".saving").mkdir()
    (directory / "3").rename(directory / ".saving" / "3")
    assert checkpoint_files.checkpoint_steps(directory) == [2]
    save(directory, 4, saved[1], {})
    assert sorted(path.name for path in directory.iterdir()) == ["2", "4"]


def test_the_state_saved_is_that_of_the_call_though_the_next_step_donates_it(tmp_path):
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    on = mesh(4, 2)
    x = jax.device_put(jnp.zeros((512, 512)), NamedSharding(on, P("data", "tensor")))
    with closing(checkpoint.Saver(tmp_path, 9)) as saver:
        for step in range(4):
            saver.save(step, {"x": x}, {})
            x = add(add(x))
    for step in range(4):
        state, _, _ = checkpoint.restore(tmp_path, abstract({"x": x}, on), step)
        assert (np.asarray(state["x"]) == 2 * step).all()


def test_the_checksums_are_those_of_sha256sum(saved):
    path = saved[0] / "3"
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True)
    assert done.returncode == 0 and "position.json: OK" in done.stdout, done.stderr


@given(where=st.integers(0), bit=st.integers(0, 7))
def test_one_bit_anywhere_is_noticed(saved, where, bit):
    names = sorted(path for path in (saved[0] / "3").rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in names]
    where %= sum(sizes)
    ends = np.cumsum(sizes)
    path = names[number := int(np.searchsorted(ends, where, side="right"))]
    where -= int(ends[number]) - sizes[number]
    content = path.read_bytes()
    try:
        path.write_bytes(content[:where] + bytes([content[where] ^ (1 << bit)]) + content[where + 1 :])
        found = checkpoint_files.damage(saved[0] / "3")
        assert found is not None and path.name in found, found
        assert checkpoint_files.newest_sound(saved[0])[0] == 2
    finally:
        path.write_bytes(content)
    assert checkpoint_files.damage(saved[0] / "3") is None


def test_every_file_cut_short_or_deleted_is_named_and_the_step_before_used(saved, tmp_path):
    directory, state = saved
    wanted = abstract(state, mesh(2, 2))
    names = [path.relative_to(directory) for path in (directory / "3").rglob("*") if path.is_file()]
    assert len(names) > 5
    for number, name in enumerate(names):
        broken = Path(shutil.copytree(directory, tmp_path / str(number)))
        content = (broken / name).read_bytes()
        if number % 2 or not content:
            (broken / name).unlink()
        else:
            (broken / name).write_bytes(content[:-1])
        with pytest.warns(UserWarning, match="is damaged") as warned:
            _, _, step = checkpoint.restore(broken, wanted)
        message = str(warned[0].message)
        assert step == 2 and message.endswith("; going on from step 2") and name.name in message
        assert message.startswith(f"checkpoint {broken}/3: is damaged: ")
        shutil.rmtree(broken)


def test_a_damaged_checkpoint_without_another_is_refused(saved, tmp_path):
    directory = Path(shutil.copytree(saved[0], tmp_path / "run"))
    shutil.rmtree(directory / "2")
    (directory / "3" / "position.json").write_text("{}")
    wanted = abstract(saved[1], mesh(1, 1))["params"]
    with pytest.raises(CheckpointError) as error:
        checkpoint.restore_params(directory, wanted)
    assert str(error.value) == (
        f"checkpoint {directory}/3: is damaged: position.json does not match its checksum;"
        " there is no sound one, so train again"
    )
    with pytest.raises(CheckpointError, match=r"/3: is damaged: position\.json does not match its checksum$"):
        checkpoint.restore_params(directory, wanted, step=3)


def test_a_checkpoint_of_0_1_0_is_named_as_such(tmp_path):
    """Its folder has state/, data/ and files.json, the sizes of their files."""
    path = tmp_path / "3"
    (path / "state").mkdir(parents=True)
    (path / "files.json").write_text('{"state/a": 1}')
    for read in (checkpoint_files.newest_sound, lambda directory: checkpoint_files.check_sound(directory, 3)):
        with pytest.raises(
            CheckpointError, match=r"3: has the format of meshwright 0\.1\.0.*; continue this"
        ):
            read(tmp_path)


def test_a_full_disk_names_the_step_to_go_on_from(saved, tmp_path, monkeypatch):
    """The save fails in its own thread; the error reaches the one that trains."""
    directory = Path(shutil.copytree(saved[0], tmp_path / "run"))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint_files, "seal", full)
    with pytest.raises(OutputError) as error, closing(checkpoint.Saver(directory, 2)) as saver:
        saver.save(4, saved[1], {})
    assert str(error.value) == (
        f"checkpoint {directory}/4: cannot be written (No space left on device);"
        " make room, then go on from step 3 with --resume"
    )
    assert checkpoint_files.checkpoint_steps(directory) == [2, 3]
    assert not (directory / ".saving").exists()


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

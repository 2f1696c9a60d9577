"""Moments in 8 bits: against numpy, on many devices as on one, with float32's loss, and resumed anywhere."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.nn.saving import save
from tests.nn.small_models import MIXTURE, TINY
from tests.train.one_device import TOKENS

from meshwright.cost.record import record_training
from meshwright.cost.recorder import PassShape
from meshwright.cost.state import StageState
from meshwright.errors import CheckpointError, LayoutError
from meshwright.hardware.catalog import load
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_fits
from meshwright.layout.workload import Workload
from meshwright.models.config import ModelConfig
from meshwright.nn import moments
from meshwright.nn.files import checkpoint
from meshwright.nn.files.checkpoint import by_name
from meshwright.nn.moments import Packed, packed, unpacked
from meshwright.optimizers.optimizer import PACKED_DTYPES
from meshwright.train.optimizers import OptimizerConfig, make_optimizer
from meshwright.train.stage_step import training_step
from meshwright.train.step import CompiledStep

pytestmark = pytest.mark.sampled(4)

OPTIMIZER = OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=1, total_steps=20)
# Rows of two blocks, so that those of half of a row are the same; experts' too.
WIDE = replace(TINY, d_model=256, d_ff=256, vocab_size=256)
EXPERTS = replace(MIXTURE, d_model=256, d_ff=256, vocab_size=256)


def _blocks(size: int) -> Iterator[slice]:
    count = -(-size // 128)
    begins = [i * size // count for i in range(count + 1)]
    return (slice(*pair) for pair in pairwise(begins))


# Of m and of v: the largest number over the scale, as stored, and as it is meant.
_REFERENCE: dict[tuple[str, bool], Any] = {
    ("int8", False): (127**2, lambda x: np.round(np.sign(x) * np.sqrt(np.abs(x))), lambda q: q * np.abs(q)),
    ("int8", True): (255**2, lambda x: np.maximum(np.round(np.sqrt(x)), 1), lambda q: q**2),
    ("fp8", False): (448, lambda x: x.astype(ml_dtypes.float8_e4m3fn), lambda q: q),
    ("fp8", True): (
        448**2,
        lambda x: np.maximum(np.sqrt(x).astype(ml_dtypes.float8_e4m3fn).astype(float), 2.0**-9),
        lambda q: q**2,
    ),
}


def _reference(x: np.ndarray, dtype: str, of_squares: bool) -> tuple[np.ndarray, np.ndarray]:
    """(values, what they stand for) of a moment, block by block, in float64."""
    most, pack, unpack = _REFERENCE[dtype, of_squares]
    values, meant = np.zeros(x.shape), np.zeros(x.shape)
    for block in _blocks(x.shape[-1]):
        own = x[..., block].astype(float)
        scale = np.maximum(np.abs(own).max(-1, keepdims=True), 1e-30) / most
        values[..., block] = np.where(own != 0, pack(own / scale).astype(float), 0)
        meant[..., block] = unpack(values[..., block]) * scale
    return values, meant


def _steps_between(one: Any, other: Any) -> int:
    """How many numbers of their type two arrays of values are apart at most."""

    def place(x: Any) -> np.ndarray:
        x = np.asarray(x)
        if x.dtype != ml_dtypes.float8_e4m3fn:
            return x.astype(int)
        bits = x.view(np.uint8).astype(int)
        return np.where(bits < 128, bits, 128 - bits)

    return int(np.abs(place(one) - place(other)).max())


@pytest.mark.parametrize("size", [5, 128, 130, 257, 384])
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_moments_are_packed_as_numpy_does(dtype: str, size: int) -> None:
    """Rows whose numbers have many sizes, a row of zeros, and a zero among others."""
    rng = np.random.default_rng(size)
    x = (rng.normal(size=(4, size)) * 10 ** rng.uniform(-6, 0, (4, size))).astype(np.float32)
    x[1], x[2, 3] = 0, 0
    for of_squares in (False, True):
        given = x**2 if of_squares else x
        moment = packed(jnp.asarray(given), dtype, of_squares=of_squares)
        values, meant = _reference(given, dtype, of_squares)
        assert moment.values.shape == x.shape and moment.scales.shape == (4, -(-size // 128))
        assert _steps_between(moment.values, values.astype(moment.values.dtype)) <= 1
        same = np.asarray(moment.values, float) == values
        assert same.mean() > 0.99  # but for ties, which float32 rounds the other way
        np.testing.assert_allclose(np.asarray(unpacked(moment))[same], meant[same], rtol=1e-5)
        if of_squares:
            assert ((np.asarray(moment.values, float) > 0) == (given > 0)).all()


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_updates_are_those_of_adamw_on_packed_moments(dtype: str) -> None:
    """Three updates of a matrix of AdamW, worked in numpy, whose moments are rounded between them."""
    rng, rate = np.random.default_rng(0), 1e-2
    config = OptimizerConfig(rate, 0, 10, schedule="constant", weight_decay=0.0, clip_norm=1e9)
    optimizer = make_optimizer(config, dtype)
    weight = rng.normal(size=(3, 130)).astype(np.float32)
    params: Any = {"w": jnp.asarray(weight)}
    state = optimizer.init(params)
    m, v = np.zeros(weight.shape), np.zeros(weight.shape)
    for t in (1, 2, 3):
        gradient = rng.normal(size=weight.shape).astype(np.float32)
        updates, state = optimizer.update({"w": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient.astype(float) ** 2
        weight = weight - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        m, v = (_reference(x, dtype, of_squares)[1] for x, of_squares in ((m, False), (v, True)))
        # A tie that is rounded the other way changes a moment by a step, an eighth of it at most.
        found = np.abs(np.asarray(params["w"]) - weight)
        assert np.median(found) < 1e-6 and found.max() < 0.2 * rate * t
    kept: Any = optax.tree.get(state, "nu")
    assert isinstance(kept["w"], Packed)


def _after(config: ModelConfig, text: str, dtype: str, **words: object) -> Any:
    """The state after three steps, in whole arrays."""
    layout = Layout.parse(text).replace(compute_dtype="f32", optimizer_dtype=dtype, **words)
    layout = layout.replace(weights_dtype=words.get("weights_dtype", "f32"))
    step = training_step(config, layout, Workload(16, 16), OPTIMIZER, chip_flops_per_second=1e11)
    state = step.init(0)
    for _ in range(3):
        state, _ = step.step(state, TOKENS)
    return jax.tree.map(np.asarray, step.saved(state))


# From the largest number of a block to the next, as a share of it: of m, of v, and in fp8 of m or v's root.
_LARGEST_STEP = {"int8": 1 - (126 / 127) ** 2, "uint8": 1 - (254 / 255) ** 2, "float8_e4m3fn": 32 / 448}


def _share(values: np.ndarray) -> np.ndarray:
    """What values stand for, as shares of the largest of their block; of v in fp8 the root of that."""
    wide = values.astype(float)
    if values.dtype == ml_dtypes.float8_e4m3fn:
        return wide / 448
    return wide * np.abs(wide) / (127 if values.dtype == np.int8 else 255) ** 2


def _check_same(found: Any, expected: Any) -> None:
    """Nearly all values are the same, and those that are not stand for numbers a step apart.

    Sums in another order turn a tie the other way. Such a step may be added to another number in the next
    update, so it is the step of the largest numbers of a block, not of those that are near 0.
    """
    one, other = by_name(found), by_name(expected)
    assert one.keys() == other.keys()
    for name, own in one.items():
        if name.endswith(".values"):
            assert np.mean(own != other[name]) < 2e-3, name
            apart = np.abs(_share(own) - _share(other[name])).max()
            assert apart < 1.001 * _LARGEST_STEP[own.dtype.name], name
        elif name.endswith(".scales"):
            # The largest number of a block may be one of those that are a step apart.
            apart = np.abs(own - other[name]) / np.maximum(other[name], 1e-12)
            step = _LARGEST_STEP[one[name.replace(".scales", ".values")].dtype.name]
            assert np.mean(apart > 1e-3) < 2e-3 and apart.max() < 2 * step, name
        else:
            # Lion's updates are signs, which a number near 0 turns.
            apart = np.abs(own.astype(np.float32) - other[name].astype(np.float32))
            assert np.mean(apart > 1e-4) < 1e-3, name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp=2,tensor=2", {}),
        ("data=2,zero=1", {}),
        ("data=2,tensor=2,zero=2,microbatches=2", {}),
        ("fsdp=2", {"offload_optimizer": True}),
        ("fsdp=2", {"master_weights": True}),
        ("fsdp=2,tensor=2", {"optimizer": "lion"}),
        ("fsdp=2,tensor=2", {"optimizer": "muon"}),
        ("pipe=2,fsdp=2,microbatches=4,schedule=lanes", {}),
        ("pipe=2,tensor=2,microbatches=4,schedule=1f1b", {}),
        ("pipe=2,microbatches=4,schedule=zb-v,interleave=2", {}),
    ],
)
@pytest.mark.slow
def test_the_state_on_many_devices_is_that_of_one(text: str, words: dict[str, object]) -> None:
    alone = {name: value for name, value in words.items() if name != "offload_optimizer"}
    _check_same(_after(WIDE, text, "int8", **words), _after(WIDE, "data=1", "int8", **alone))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text"), [(EXPERTS, "fsdp=2,expert=2"), (replace(WIDE, lora_rank=4), "fsdp=2,tensor=2")]
)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_the_state_of_experts_and_adapters_is_that_of_one_device(
    config: ModelConfig, text: str, dtype: str
) -> None:
    _check_same(_after(config, text, dtype), _after(config, "data=1", dtype))


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (TINY, "data=1"),
        (WIDE, "fsdp=2,tensor=4"),
        (WIDE, "data=4,tensor=2,zero=2,microbatches=2"),
        (EXPERTS, "fsdp=4,expert=2"),
        (replace(WIDE, lora_rank=4), "fsdp=2,tensor=2"),
        (replace(TINY, vocab_size=1030), "fsdp=2"),
    ],
)
def test_the_planned_bytes_are_those_of_the_state(
    config: ModelConfig, text: str, optimizer: str, dtype: str
) -> None:
    """Values and scales, on one device; counters are not counted."""
    layout = Layout.parse(text).replace(optimizer=optimizer, optimizer_dtype=dtype)
    workload = Workload(16, 16)
    step = CompiledStep(config, layout, workload, OPTIMIZER, chip_flops_per_second=1e11)
    held = sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(step.abstract_state().opt_state)
        if leaf.ndim
    )
    graph = record_training(config, load("cpu:8"), layout, PassShape.of_microbatch(workload, layout))
    _, _, planned = StageState(graph, layout).device_bytes(reduced_at_once=layout.schedule.microbatches == 1)
    assert planned == held


def _losses(dtype: str, num_steps: int = 40) -> np.ndarray:
    """Of a model that learns how two tokens are followed by a third."""
    config = replace(OPTIMIZER, peak_learning_rate=3e-3, warmup_steps=5, total_steps=num_steps)
    layout = Layout.of(weights_dtype="f32", compute_dtype="f32", optimizer_dtype=dtype)
    model = replace(TINY, d_model=64, d_ff=192, vocab_size=160)
    step = CompiledStep(model, layout, Workload(16, 16), config, chip_flops_per_second=1e11)
    state, rng, found = step.init(0), np.random.default_rng(0), []
    for _ in range(num_steps):
        rows = np.zeros((16, 17), np.int32)
        rows[:, 0] = rng.integers(0, 160, 16) ** 2 // 160  # small tokens more often: gradients of many sizes
        for t in range(16):
            rows[:, t + 1] = (rows[:, t] * 3 + 1) % 160
        state, metrics = step.step(state, rows)
        found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.slow
def test_packed_moments_train_as_float32_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2% of the loss of float32 at the end; int8 in even steps, which makes most of v 0, is not."""
    wide = _losses("f32")
    assert wide[-5:].mean() < 0.8 * wide[0]
    for dtype in PACKED_DTYPES:
        assert _losses(dtype)[-5:].mean() == pytest.approx(wide[-5:].mean(), rel=0.02), dtype

    even = tuple(
        moments._Code(kind, most, jnp.round, lambda q: q)
        for kind, most in ((jnp.int8, 127.0), (jnp.uint8, 255.0))
    )
    monkeypatch.setitem(moments._CODES, "int8", even)
    assert _losses("int8")[-5:].mean() > 1.1 * wide[-5:].mean()


def _abstract(state: Any, mesh: Any, optimizer: Any) -> Any:
    """The types of a state of the same weights on another mesh."""
    weights = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, SPECS[name]))
        for name, x in state["params"].items()
    }
    with jax.set_mesh(mesh):
        shapes = {"params": weights, "opt_state": jax.eval_shape(optimizer.init, weights)}
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec if x.sharding else P())
        ),
        shapes,
    )


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_rows_and_columns_of_adafactor_are_refused(dtype: str) -> None:
    layout = Layout.of(optimizer="adafactor", optimizer_dtype=dtype)
    with pytest.raises(LayoutError) as error:
        check_fits(layout, TINY, 16, 16)
    assert str(error.value) == (
        f"layout: optimizer_dtype = {dtype} with optimizer = adafactor, which keeps a row and a column in "
        "place of moments; fits: optimizer_dtype in {f32, bf16}"
    )


SPECS = {"wq": P("data", "tensor"), "norm": P("tensor")}


def _mesh(data: int, tensor: int) -> Any:
    devices = jax.devices()[: data * tensor]
    return jax.make_mesh((data, tensor), ("data", "tensor"), (AxisType.Explicit,) * 2, devices=devices)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_checkpoints_are_read_under_layouts_of_other_blocks(tmp_path: Path, dtype: str) -> None:
    """Rows of 520 in 6 blocks on 2 devices are in 5 on one and in 8 on 8: there within half a step."""
    optimizer, there = make_optimizer(OPTIMIZER, dtype), _mesh(4, 2)
    rng = np.random.default_rng(0)
    params = {"wq": rng.normal(size=(8, 520)), "norm": rng.normal(size=520)}
    params = {
        name: jax.device_put(jnp.asarray(x, jnp.float32), NamedSharding(there, SPECS[name]))
        for name, x in params.items()
    }
    with jax.set_mesh(there):
        opt_state = jax.jit(lambda w: optimizer.update(w, optimizer.init(w), w)[1])(params)
    state = {"params": params, "opt_state": opt_state}
    save(tmp_path, 1, state, {})
    for shape, count in (((2, 2), 6), ((4, 1), 5), ((1, 8), 8)):
        wanted = _abstract(state, _mesh(*shape), optimizer)
        restored, _, _ = checkpoint.restore(tmp_path, wanted)
        assert jax.tree.structure(restored) == jax.tree.structure(wanted)
        for name in ("mu", "nu"):
            before, after = (optax.tree.get(one["opt_state"], name)["wq"] for one in (state, restored))
            assert after.scales.shape == (8, count)
            assert after.values.sharding.spec == P("data", "tensor")
            if count == 6:
                assert np.array_equal(after.values, before.values) and np.array_equal(
                    after.scales, before.scales
                )
                continue
            with jax.set_mesh(there):
                meant = np.asarray(unpacked(before))
            _check_repacked(meant, np.asarray(after.values), np.asarray(after.scales), dtype, name == "nu")


def _check_repacked(
    x: np.ndarray, values: np.ndarray, scales: np.ndarray, dtype: str, of_squares: bool
) -> None:
    """Values are those of x in the blocks that the shape of the scales says."""
    most, pack, _ = _REFERENCE[dtype, of_squares]
    count, size = scales.shape[-1], x.shape[-1]
    for i in range(count):
        block = slice(i * size // count, (i + 1) * size // count)
        own = x[..., block].astype(float)
        scale = np.abs(own).max(-1, keepdims=True) / most
        np.testing.assert_allclose(scales[..., i : i + 1], scale, rtol=1e-6)
        expected = np.where(own != 0, pack(own / scale).astype(float), 0).astype(values.dtype)
        assert _steps_between(values[..., block], expected) <= 1


def test_a_moment_that_one_run_alone_packs_is_named(tmp_path: Path) -> None:
    on = _mesh(1, 1)
    params = {name: jnp.ones(shape, device=NamedSharding(on, SPECS[name])) for name, shape in _SHAPES.items()}
    states = {}
    for dtype in ("f32", "int8"):
        with jax.set_mesh(on):
            opt_state = jax.jit(make_optimizer(OPTIMIZER, dtype).init)(params)
        states[dtype] = {"params": params, "opt_state": opt_state}
        save(tmp_path / dtype, 1, states[dtype], {})
    for dtype, other, message in (
        ("f32", "int8", "norm.values is float32 there and int8 in this run; train on in float32"),
        ("int8", "f32", "norm is int8 there and float32 in this run; train on in int8"),
    ):
        wanted = _abstract(states[other], on, make_optimizer(OPTIMIZER, other))
        with pytest.raises(CheckpointError, match=f"mu.{message}$"):
            checkpoint.restore(tmp_path / dtype, wanted)


_SHAPES = {"wq": (4, 8), "norm": (8,)}

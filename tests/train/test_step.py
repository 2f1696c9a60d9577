"""The training step of a plan: equal on every layout to the step on one device."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.nn.saving import save

from meshwright.errors import DeviceError
from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.nn.files import checkpoint
from meshwright.nn.loss import NOT_COUNTED, nats_of
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep

pytestmark = pytest.mark.sampled(4)

_CONFIG = load_model("tiny")
_TOKENS = np.random.default_rng(0).integers(0, _CONFIG.vocab_size, (16, 65)).astype(np.int32)


def _step(**layout: object) -> CompiledStep:
    return CompiledStep(
        _CONFIG,
        Layout.from_dict({"weights_dtype": "f32", "compute_dtype": "f32", **layout}),
        Workload(16, 64),
        OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=2, total_steps=100),
        chip_flops_per_second=1e11,
    )


def _three_updates(step: CompiledStep) -> list[float]:
    state, figures = step.init(0), []
    for _ in range(3):
        state, metrics = step.step(state, _TOKENS)
        figures += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return [*figures, float(step.evaluate(state, _TOKENS))]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return _three_updates(_step())


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        {"data": 2, "fsdp": 2, "tensor": 2, "microbatches": 2, "remat": "full"},
        pytest.param({"fsdp": 4, "context": 2, "microbatches": 4}, marks=pytest.mark.slow),
        pytest.param({"data": 4, "tensor": 2, "zero": 1, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 8, "zero": 1}, marks=pytest.mark.slow),
        pytest.param({"data": 8, "zero": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 8, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 4, "zero": 2, "microbatches": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_updates_equal_one_device(layout: dict[str, object], alone: list[float]) -> None:
    """float32 sums in another order: 1e-5 is some hundred roundings."""
    assert _three_updates(_step(**layout)) == pytest.approx(alone, rel=1e-5)


def test_the_abstract_state_is_the_state() -> None:
    """What a checkpoint is restored into has the shapes, types and shardings of what was saved."""
    step = _step(data=2, fsdp=2, tensor=2)
    for made, described in zip(
        jax.tree.leaves(step.init(0)), jax.tree.leaves(step.abstract_state()), strict=True
    ):
        assert (made.shape, made.dtype, made.sharding) == (
            described.shape,
            described.dtype,
            described.sharding,
        )


@pytest.mark.slow  # as tests/nn/test_layouts.py has it of the loss
def test_a_second_step_compiles_nothing() -> None:
    step = _step(fsdp=8)
    state, _ = step.step(step.init(0), _TOKENS)
    step.step(state, _TOKENS)
    assert step.jitted._cache_size() == 1


def test_options_are_those_of_a_loop_over_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("meshwright.train.step.compiler_options", lambda *given: asked.append(given[2]))
    for step in (_step(), _step(microbatches=2)):
        assert step.jitted and step._jitted_nats
    assert asked == [1, 1, 2, 2]


def test_too_few_devices_are_said() -> None:
    with pytest.raises(DeviceError) as error:
        _step(data=16)
    assert str(error.value) == (
        "the layout data=16,remat=none needs 16 devices and JAX sees 8 (cpu); "
        "on CPU set XLA_FLAGS=--xla_force_host_platform_device_count=16"
    )


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [{"data": 2, "fsdp": 4}, {"data": 4, "tensor": 2, "zero": 2}], ids=str)
def test_a_checkpoint_goes_on_at_another_zero_stage(
    goes_on: dict[str, object], alone: list[float], tmp_path: Path
) -> None:
    """Moments sharded over `data` under ZeRO 1 are read onto other shards; the updates stay the same."""
    before, after = _step(data=8, zero=1), _step(**goes_on)
    state, _ = before.step(before.init(0), _TOKENS)
    save(tmp_path, 1, state, {})
    state, _, _ = checkpoint.restore(tmp_path, after.abstract_state())
    figures = []
    for _ in range(2):
        state, metrics = after.step(state, _TOKENS)
        figures += [float(metrics["loss"]), float(metrics["grad_norm"])]
    assert figures == pytest.approx(alone[2:6], rel=1e-5)


def test_z_loss_is_the_squared_log_of_the_softmax_sum() -> None:
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 8)), jnp.float32)
    targets = jnp.asarray([[1, 2, NOT_COUNTED], [0, 7, 3]])
    found = nats_of(logits, targets, masked=True, z_loss=0.5)
    sums = np.log(np.exp(np.asarray(logits)).sum(-1))
    hit = np.take_along_axis(np.asarray(logits), np.maximum(np.asarray(targets), 0)[..., None], -1)[..., 0]
    nats = np.where(np.asarray(targets) == NOT_COUNTED, 0, sums - hit + 0.5 * sums**2)
    np.testing.assert_allclose(found, nats, rtol=1e-6)

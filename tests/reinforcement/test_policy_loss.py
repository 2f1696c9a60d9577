"""The clipped loss against its formula, and the trainer's log-probabilities on several layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.layout import Layout
from meshwright.layout.workload import Workload
from meshwright.models.presets import load_model
from meshwright.nn.loss import NOT_COUNTED
from meshwright.nn.policy_loss import ClippedPolicyLoss, PolicyRows
from meshwright.reinforcement.rollouts import Rollout, pack_rollouts
from meshwright.train.optimizers import OptimizerConfig
from meshwright.train.step import CompiledStep


def test_the_loss_is_its_formula() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(2, 5, 7)).astype(np.float32)
    tokens = random.integers(0, 7, (2, 5)).astype(np.int32)
    tokens[0, 0] = NOT_COUNTED
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    new = np.take_along_axis(log_probs, np.maximum(tokens, 0)[..., None], -1)[..., 0]
    old, reference = (new + random.normal(size=new.shape).astype(np.float32) * 0.5 for _ in range(2))
    advantages = random.normal(size=new.shape).astype(np.float32)
    weights = (tokens != NOT_COUNTED).astype(np.float32) * 1.5
    found = ClippedPolicyLoss(0.2, 0.3, kl=0.1)(
        jnp.asarray(logits), PolicyRows(*map(jnp.asarray, (tokens, old, reference, advantages, weights)))
    )
    ratio = np.exp(new - old)
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.3) * advantages)
    kl = np.exp(reference - new) - (reference - new) - 1
    np.testing.assert_allclose(found, -weights * (surrogate - 0.1 * kl), rtol=1e-5, atol=1e-6)


def _learner(**layout: object) -> CompiledStep:
    return CompiledStep(
        load_model("tiny"),
        Layout.from_dict({"weights_dtype": "f32", "compute_dtype": "f32", **layout}),
        Workload(8, 16),
        OptimizerConfig(peak_learning_rate=1e-3, warmup_steps=0, total_steps=10),
        chip_flops_per_second=1e11,
        masked=True,
        objective=ClippedPolicyLoss(kl=0.1),
    )


def _figures(step: CompiledStep) -> list[float]:
    """Log-probabilities, and the loss and gradient's norm of an update with given figures."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(1, 200, 3 + n % 4).tolist()) for n in range(12)]
    rollouts = [Rollout(tuple(random.integers(1, 200, 4).tolist()), (0.0,) * 4, False) for _ in range(12)]
    rows = pack_rollouts(prompts, rollouts, 16)
    rows = rows.part(range(len(rows.tokens)), 8)
    state = step.init(0)
    old = np.pad(step.log_probs(state.params, rows.tokens), ((0, 0), (1, 0)))
    counts = rows.rollout >= 0
    assert (old[counts] < 0).all() and not old[~counts].any()
    figures = PolicyRows(
        rows.tokens,
        old,
        np.where(counts, old - 0.3, 0).astype(np.float32),
        np.where(counts, rows.rollout % 3 - 1, 0).astype(np.float32),
        counts.astype(np.float32),
    )
    _, metrics = step.step(state, figures)
    return [float(metrics["loss"]), float(metrics["grad_norm"]), *old[counts].tolist()]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return _figures(_learner())


def test_the_ratio_is_one_at_the_weights_that_rolled_out(alone: list[float]) -> None:
    """The loss is minus the mean advantage, here 0, plus the divergence of 12 rollouts of 4 tokens."""
    divergence = 0.1 * (np.exp(-0.3) + 0.3 - 1)
    assert alone[0] == pytest.approx(divergence * 48 / (8 * 16), rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "fsdp": 2, "tensor": 2, "microbatches": 2},
        pytest.param({"fsdp": 4, "context": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 8, "zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_agree(layout: dict[str, object], alone: list[float]) -> None:
    """float32 sums in another order."""
    assert _figures(_learner(**layout)) == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert jax.device_count() == 8

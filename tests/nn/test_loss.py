"""The head by chunks of positions beside the whole: loss and gradients by JAX's own rules."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from meshwright.layout import Layout
from meshwright.layout.contractions import input_groups
from meshwright.layout.moves.attention import token_sharding
from meshwright.models.config import ModelConfig
from meshwright.nn import loss as head
from meshwright.nn.loss import NOT_COUNTED, num_slices
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.start.device_mesh import device_mesh, named_sharding
from meshwright.notation.array import ShardedArray
from meshwright.platforms import CPU

D, V = 16, 40
SPECS = {"unembed": "BTD,DV->BTV", "embed": "BTD,VD->BTV"}
CONFIG = ModelConfig("tiny", 1, D, 16, 2, 2, 8, V, 64)


def operands(batch: int, length: int, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x[B, T, D], the head's weight and targets[B, T], of which the first is not counted."""
    random = np.random.default_rng(batch * length)
    x, w = random.normal(size=(batch, length, D)), random.normal(size=(D, V) if name == "unembed" else (V, D))
    targets = random.integers(0, V, (batch, length), np.int32)
    targets[0, 0] = NOT_COUNTED
    return x.astype(np.float32), w.astype(np.float32), targets


def plainly(x: Array, w: Array, targets: np.ndarray, cap: float | None, dtype: Any, name: str) -> Array:
    """The loss as one writes it down, of numbers rounded to `dtype` and multiplied in float32."""
    rounded = [operand.astype(dtype).astype(jnp.float32) for operand in (x, w)]
    logits = jnp.einsum(SPECS[name], *rounded)
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    hit = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return 3 * jnp.mean(jnp.where(targets == NOT_COUNTED, 0, log_sum - hit + 0.01 * log_sum**2))


@pytest.mark.parametrize(
    ("layout", "batch", "length", "name", "cap", "dtype"),
    [
        ("data=1", 3, 35, "embed", 2.0, "f32"),
        ("data=1", 2, 48, "unembed", None, "bf16"),
        ("data=2", 4, 24, "embed", None, "bf16"),
        ("data=2,fsdp=2", 8, 16, "unembed", 2.0, "f32"),
        ("data=2,fsdp=2", 4, 48, "embed", None, "f32"),
    ],
)
def test_a_head_by_chunks_has_the_loss_and_the_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    batch: int,
    length: int,
    name: str,
    cap: float | None,
    dtype: str,
) -> None:
    monkeypatch.setattr(head, "platform", lambda: replace(CPU, head_tokens=16))
    made = Layout.parse(layout, weights_dtype="f32", compute_dtype=dtype)
    ops, mesh = JaxOps(CONFIG, made, masked=True, z_loss=0.01), device_mesh(made)
    x, w, targets = operands(batch, length, name)
    arrays = (
        (x, made.activation("x", "BTD")),
        (w, made.weight(name, SPECS[name].split(",")[1].split("-")[0])),
        (targets, token_sharding(made, "tokens")),
    )
    placed = [_placed(array, where, mesh) for array, where in arrays]

    heads: dict[str, Any] = {name: SPECS[name]}

    def loss(x: Array, w: Array, targets: Array) -> Array:
        return 3 * ops.loss("loss", x.astype(ops.dtype), {name: w}, targets, cap, **heads)

    plain = partial(plainly, targets=targets, cap=cap, dtype=ops.dtype, name=name)
    expected, wanted = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(x, w)
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*placed)
        assert "stablehlo.while" in lowered.as_text(), "the head is whole"
        found, gradients = lowered.compile()(*placed)
        alone = jax.jit(loss)(*placed)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert float(alone) == pytest.approx(float(expected), rel=1e-6)
    # Cotangents of logits, and what they make, are rounded to the type of the products: 8 bits of bfloat16.
    tolerance = 2e-6 if dtype == "f32" else 1e-2
    for gradient, want in zip(gradients, wanted, strict=True):
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(np.asarray(gradient), np.asarray(want), rtol=0, atol=tolerance * scale)


def _placed(array: np.ndarray, where: ShardedArray, mesh: jax.sharding.Mesh) -> Array:
    return jax.device_put(array, named_sharding(where, mesh))


def _chunks(text: str, batch: int, length: int) -> int:
    layout = Layout.parse(text)
    with jax.set_mesh(device_mesh(layout)):
        [group] = input_groups(layout, {"unembed": SPECS["unembed"]})
        return num_slices(group, (batch, length), layout.num_batch_shards)


def test_a_chunk_is_of_about_512_tokens_of_a_device() -> None:
    assert _chunks("data=1", 8, 256) == 4
    assert _chunks("data=2", 8, 256) == 2
    assert _chunks("data=1", 1, 512) == 1
    assert _chunks("data=1", 2, 514) == 2
    assert _chunks("data=1", 1, 1021) == 1  # a prime


@pytest.mark.parametrize("layout", ["tensor=2", "context=2", "tensor=2,sequence_parallel=true"])
def test_a_head_whose_states_or_logits_are_split_is_whole(layout: str) -> None:
    assert _chunks(layout, 8, 256) == 1

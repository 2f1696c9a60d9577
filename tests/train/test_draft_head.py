"""A draft head's loss and gradients: by hand in numpy's terms, and on every layout those of one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.nn.one_device import on_the_host
from tests.nn.small_models import LOCAL, MIXTURE, TINY
from tests.train.one_device import MASKED, TOKENS, assert_agrees, compiled_step, gradients_of

from meshwright.errors import LayoutError, ModelError
from meshwright.layout import Layout
from meshwright.layout.layout_checks import check_stages
from meshwright.models.config import ModelConfig
from meshwright.models.parameters import is_of_draft
from meshwright.nn.params import flatten
from meshwright.train.row_codes import BEGINS, ID_BITS, UNCOUNTED

pytestmark = pytest.mark.sampled(4)

JOINT = replace(TINY, name="joint", draft_head="joint")
assert MIXTURE.moe
EXPERTS = replace(MIXTURE.moe, choice_bias=False)  # no gradient reaches that bias
FROZEN = replace(TINY, name="frozen", draft_head="frozen")


@pytest.mark.parametrize(
    ("config", "text", "masked"),
    [
        (JOINT, "data=2,fsdp=2,tensor=2,microbatches=2,sequence_parallel=true", True),
        pytest.param(FROZEN, "fsdp=4,tensor=2,remat=full", False, marks=pytest.mark.slow),
        pytest.param(JOINT, "context=2,fsdp=2,tensor=2", False, marks=pytest.mark.slow),
        pytest.param(
            replace(LOCAL, name="local joint", draft_head="joint"),
            "data=4,tensor=2,zero=2,microbatches=4",
            False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            replace(MIXTURE, name="mixture joint", draft_head="joint", moe=EXPERTS),
            "fsdp=2,data=2,expert=2,tensor=2",
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gradients_are_those_of_one_device(config: ModelConfig, text: str, masked: bool) -> None:
    assert_agrees(config, text, masked=masked, tolerance=1e-5)


def _by_hand(weights: dict, tokens: jax.Array, *, is_masked: bool) -> tuple[jax.Array, jax.Array]:
    """(loss, loss of the draft head) of rows[B, T+1] by DeepSeek-V3's equations 21 to 25."""
    ids, length = tokens & ID_BITS, tokens.shape[1] - 1
    begins = (tokens[:, :-1] & BEGINS) != 0
    starts = jnp.cumsum(begins, 1)
    sees = jnp.tril(jnp.ones((length, length), bool)) & (
        (starts[:, :, None] == starts[:, None, :]) if is_masked else True
    )
    first = jax.lax.cummax(jnp.where(begins & is_masked, jnp.arange(length), 0), axis=1)
    angle = (jnp.arange(length) - first)[:, :, None] * 10_000.0 ** (-jnp.arange(4) / 4)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale

    def turn(x: jax.Array) -> jax.Array:
        a, b = x[..., :4], x[..., 4:]
        cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def layer(x: jax.Array, w: dict) -> jax.Array:
        h = norm(x, w["attention_norm"])
        q, k = (turn(jnp.einsum("btd,dnh->btnh", h, w[name])) for name in ("wq", "wk"))
        v = jnp.einsum("btd,dkh->btkh", h, w["wv"])
        k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
        scores = jnp.where(
            sees.reshape(-1, 1, length, length), jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5, -jnp.inf
        )
        a = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v)
        x = x + jnp.einsum("btnh,nhd->btd", a, w["wo"])
        h = norm(x, w["mlp_norm"])
        return x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_in"])) @ w["w_out"]

    def nats(hidden: jax.Array, targets: jax.Array, counted: jax.Array) -> jax.Array:
        logs = jax.nn.log_softmax(hidden @ weights["unembed"])
        return -jnp.where(counted, jnp.take_along_axis(logs, targets[..., None], -1)[..., 0], 0)

    plain = (tokens & (BEGINS | UNCOUNTED)) == 0
    x = weights["embed"][ids[:, :-1]]
    for number in range(2):
        x = layer(x, {name: w[number] for name, w in weights["layers"].items()})
    hidden = norm(x, weights["final_norm"])
    loss = nats(hidden, ids[:, 1:], plain[:, 1:])
    both = norm(weights["embed"][ids[:, 1:]], weights["draft_embed_norm"])
    both = jnp.concatenate([both, norm(hidden, weights["draft_hidden_norm"])], -1)
    x = layer(both @ weights["draft_in"], {name: w[0] for name, w in weights["draft_layers"].items()})
    of_draft = nats(norm(x, weights["draft_norm"])[:, :-1], ids[:, 2:], plain[:, 2:] & ~begins[:, 1:])
    counted = jnp.sum(plain[:, 1:])
    return loss.sum() / counted, of_draft.sum() / counted


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_loss_is_that_of_the_equations(is_masked: bool) -> None:
    rows, weights = MASKED if is_masked else TOKENS, on_the_host(JOINT)
    weights = jax.tree.map(jnp.asarray, weights)

    def total(weights: dict) -> tuple[jax.Array, jax.Array]:
        loss, of_draft = _by_hand(weights, jnp.asarray(rows), is_masked=is_masked)
        return loss + 0.3 * of_draft, of_draft

    with jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("allow"):
        (_, of_draft), expected = jax.jit(jax.value_and_grad(total, has_aux=True))(weights)
    step = compiled_step(JOINT, Layout.of(), masked=is_masked)
    _, gradients = gradients_of(step, rows)
    for path, wanted in flatten(expected).items():
        np.testing.assert_allclose(gradients[path], wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=path)
    placed = jax.device_put(weights, jax.tree.map(lambda one: one.sharding, step.init(0).params))
    _, metrics = step.step(step.first_state(placed), rows)
    assert float(metrics["draft_loss"]) == pytest.approx(float(of_draft), rel=1e-5)


@pytest.mark.slow
def test_a_head_alone_learns_and_the_model_stays() -> None:
    step = compiled_step(FROZEN, Layout.of(fsdp=2))
    state = step.init(0)
    before = {path: np.asarray(leaf) for path, leaf in flatten(state.params).items()}
    state, first = step.step(state, TOKENS)
    for _ in range(4):
        state, last = step.step(state, TOKENS)
    assert float(last["loss"]) < float(first["loss"])
    for path, leaf in flatten(state.params).items():
        assert is_of_draft(path) != np.array_equal(before[path], leaf), path


@pytest.mark.parametrize(
    ("changed", "layout", "message"),
    [
        ({}, "pipe=2,microbatches=2", "pipe = 2 has on different stages; fits: pipe = 1"),
        ({"positions": "learned"}, "data=2", "does not go with positions = 'learned'"),
        ({"lora_rank": 4}, "data=2", "train different weights; leave one out"),
        ({"layers_per_cache": 2}, "data=2", "does not go with layers_per_cache = 2"),
    ],
)
def test_errors_name_what_does_not_go_together(changed: dict, layout: str, message: str) -> None:
    with pytest.raises((LayoutError, ModelError), match=message):
        check_stages(Layout.parse(layout), replace(JOINT, **changed))

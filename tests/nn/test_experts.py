"""Routing against a loop over tokens, and the rows of experts with and without a capacity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.layout import Layout
from meshwright.layout.grouped import blocks_of
from meshwright.models.config import MoE
from meshwright.nn.experts import combine, dispatch, gates_of, router_losses, rows_of
from meshwright.nn.grouped import grouped_product, routes_of, rows_of_tokens, tokens_of_rows
from meshwright.nn.mesh import device_mesh, partition_spec

B, T, D, E = 2, 6, 4, 8
LOGITS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
CHOICE = np.random.default_rng(1).normal(size=E).astype(np.float32)
X = np.random.default_rng(2).normal(size=(B, T, D)).astype(np.float32)


def by_hand(logits: np.ndarray, choice: np.ndarray, moe: MoE) -> np.ndarray:
    """Gates of one token: its groups, then its experts, then their weights."""
    scores = 1 / (1 + np.exp(-logits)) if moe.score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    wanted, size = scores + choice, E // moe.num_groups
    best = 2 if moe.score == "sigmoid" else 1
    worth = [np.sort(wanted[g * size : (g + 1) * size])[-best:].sum() for g in range(moe.num_groups)]
    groups = np.argsort(worth)[-moe.groups_per_token :]
    allowed = [e for e in range(E) if e // size in groups]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: moe.experts_per_token]
    gates = np.zeros(E)
    gates[chosen] = scores[chosen]
    return moe.scaling * (gates / gates.sum() if moe.normalized else gates)


@pytest.mark.parametrize(
    "moe",
    [
        MoE(E, 2, 8),
        MoE(E, 3, 8, num_groups=4, groups_per_token=2, normalized=False, scaling=3.0),
        MoE(E, 2, 8, score="sigmoid", num_groups=2, scaling=2.5),
        MoE(E, 1, 8, score="sigmoid", normalized=False),
    ],
)
def test_gates_are_those_of_a_loop_over_tokens(moe: MoE) -> None:
    layout = Layout.of()
    with jax.set_mesh(device_mesh(layout)):
        found = np.asarray(jax.jit(lambda x, b: gates_of(x, b, layout, moe))(LOGITS, CHOICE))
    expected = [[by_hand(LOGITS[b, t], CHOICE, moe) for t in range(T)] for b in range(B)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("moe", [MoE(E, 2, 8), MoE(E, 3, 8, score="sigmoid")])
def test_losses_of_a_router_are_those_of_a_loop_over_sequences(moe: MoE) -> None:
    gates = np.array([[by_hand(LOGITS[b, t], 0 * CHOICE, moe) for t in range(T)] for b in range(B)])
    scores = 1 / (1 + np.exp(-LOGITS)) if moe.score == "sigmoid" else np.exp(LOGITS)
    balance = 0.0
    for b in range(B):
        for e in range(E):
            times = E / moe.experts_per_token * np.mean([gates[b, t, e] > 0 for t in range(T)])
            balance += times * np.mean([scores[b, t, e] / scores[b, t].sum() for t in range(T)]) / B
    found = router_losses(jnp.asarray(LOGITS), jnp.asarray(gates, jnp.float32), moe)
    z = np.mean(np.log(np.exp(LOGITS).sum(-1)) ** 2)
    np.testing.assert_allclose(np.asarray(found), np.array([balance, float(z)]), rtol=1e-5)


def test_balance_is_one_where_experts_get_as_much_and_more_where_few_get_all() -> None:
    moe, even = MoE(E, 1, 8), np.eye(E, dtype=np.float32)[None]
    one = np.zeros((1, E, E), np.float32)
    one[..., 0] = 1

    def balance(gates: np.ndarray) -> float:
        return float(router_losses(jnp.asarray(100 * gates), jnp.asarray(gates), moe)[0])

    assert (balance(even), balance(one)) == (pytest.approx(1), pytest.approx(E))


@pytest.mark.parametrize("capacity", [None, 1.0, 2.0, 0.5])
def test_each_expert_takes_the_first_tokens_that_chose_it(capacity: float | None) -> None:
    """On one device, where expert e multiplies by e + 1; what it has no room for it does not see."""
    moe = MoE(E, 2, 8)
    layout = Layout.of().replace(capacity=capacity)
    gates = np.array(
        [[by_hand(LOGITS[b, t], 0 * CHOICE, moe) for t in range(T)] for b in range(B)], np.float32
    )

    def through(x: jax.Array, gates: jax.Array) -> jax.Array:
        rows = dispatch(x, gates, layout, moe)
        assert rows.shape == (E, rows_of(B * T, moe, capacity), D)
        return combine(rows * (1 + jnp.arange(E, dtype=rows.dtype))[:, None, None], gates, layout, moe)

    with jax.set_mesh(device_mesh(layout)):
        found = np.asarray(jax.jit(through)(X, gates)).reshape(-1, D)
    room, left = rows_of(B * T, moe, capacity), np.zeros(E, int)
    expected = np.zeros((B * T, D))
    for token, (x, gate) in enumerate(zip(X.reshape(-1, D), gates.reshape(-1, E), strict=True)):
        for expert in np.flatnonzero(gate):
            if left[expert] < room:
                expected[token] += gate[expert] * (expert + 1) * x
            left[expert] += 1
    assert (left > room).any() == (capacity in (1.0, 0.5))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("popular", [False, True])
def test_grouped_products_are_those_of_a_loop_over_tokens_and_their_experts(popular: bool) -> None:
    """On one device; popular: all tokens choose the same two experts, and six have no row."""
    moe, layout = MoE(E, 2, 3), Layout.of(weights_dtype="f32", compute_dtype="f32", grouped=True)
    logits = np.where(np.arange(E) < 2, 10.0, 0.0) + 0 * LOGITS if popular else LOGITS
    gates = np.array(
        [[by_hand(logits[b, t], 0 * CHOICE, moe) for t in range(T)] for b in range(B)], np.float32
    )
    weights = np.random.default_rng(3).normal(size=(E, D, D)).astype(np.float32)
    blocks = blocks_of(B * T, moe, E)

    def through(x: jax.Array, gates: jax.Array, w: jax.Array) -> jax.Array:
        routes = routes_of(gates, layout, moe)
        rows = rows_of_tokens(x, routes, layout)
        assert rows.shape == (1, blocks.most * blocks.rows, D)
        out = partition_spec(layout.activation("y", "ECD"))
        return tokens_of_rows(grouped_product(rows, w, routes, out), routes, layout)

    def by_loop(x: jax.Array, gates: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("BTE,BTED->BTD", gates, jnp.einsum("BTD,EDM->BTEM", x, w))

    def both(f: object) -> tuple:
        target = np.cos(np.arange(B * T * D)).reshape(B, T, D).astype(np.float32)

        def loss(*given: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = f(*given)  # pyright: ignore[reportCallIssue]
            return jnp.sum(out * target), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(X, gates, weights)

    with jax.set_mesh(device_mesh(layout)):
        (_, found), gradients = both(through)
        (_, expected), expected_gradients = both(by_loop)
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=1e-5)
    for name, one, other in zip("xgw", gradients, expected_gradients, strict=True):
        # A gate of zero chose no expert: what the expert would have made of the token is not computed.
        wanted = np.where(gates > 0, np.asarray(other), 0) if name == "g" else np.asarray(other)
        np.testing.assert_allclose(np.asarray(one), wanted, rtol=0, atol=1e-5, err_msg=name)

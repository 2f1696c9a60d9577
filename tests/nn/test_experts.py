"""Routing, and the rows of experts with and without a capacity, against a loop over tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from tests.nn.one_device import Step, assert_equal
from tests.nn.small_models import MIXTURE, OSS

import meshwright.nn.each_device as devices_module
import meshwright.nn.experts.dropless as routes_module
import meshwright.nn.experts.grouped_products as products_module
import meshwright.nn.experts.node_dispatch as crossing_module
from meshwright.layout import Layout
from meshwright.layout.moves.experts import row_routing
from meshwright.models.config import ModelConfig
from meshwright.models.config_tables import MoE
from meshwright.nn.experts.capacity import combine, dispatch, gates_of, router_losses, rows_of
from meshwright.nn.experts.dropless import choices_of, gathered_gates
from meshwright.nn.ops.jax_ops import JaxOps
from meshwright.nn.start.device_mesh import device_mesh, named_sharding
from meshwright.platforms import CPU

pytestmark = pytest.mark.sampled(5)

B, T, D, E = 2, 6, 4, 8
LOGITS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
CHOICE = np.random.default_rng(1).normal(size=E).astype(np.float32)
FLOAT32 = {"weights_dtype": "f32", "compute_dtype": "f32"}
SPECS = {"expert_in": "ECD,EDM->ECM", "expert_out": "ECM,EMD->ECD"}
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


@pytest.mark.parametrize("capacity", [1.0, 2.0, 0.5])
def test_each_expert_takes_the_first_tokens_that_chose_it(capacity: float) -> None:
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


# Columns of a tile, which do not divide a row.
_TILE = 48


def by_the_book(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: tuple[str, ...],
) -> jax.Array:
    """`lax.ragged_all_to_all` as JAX documents it, of whole arrays, which XLA for CPU has."""
    assert operand.shape[-1] % _TILE == 0, "whole tiles travel"
    everyone = [lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)]
    rows, starts, sizes, lands = everyone
    per_device, here = sizes.shape[1] // sizes.shape[0], lax.axis_index(axis_name)
    numbers = jnp.arange(output.shape[0])
    for source in range(sizes.shape[0]):
        for piece in range(per_device):
            place = here * per_device + piece
            row = numbers - lands[source, place]
            is_here = (row >= 0) & (row < sizes[source, place])
            moved = rows[source].at[starts[source, place] + row].get(mode="clip")
            output = jnp.where(is_here[:, None], moved, output)
    return output


def _as_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged exchanges of whole tiles, and unfilled arrays, which hold NaN."""
    like = replace(CPU, ragged_exchange=True, unfilled=True, lanes=_TILE)
    for module in (routes_module, crossing_module, devices_module, products_module):
        monkeypatch.setattr(module, "platform", lambda: like)
    monkeypatch.setattr(lax, "ragged_all_to_all", by_the_book)

    def allocated(_: Any, *, out_shape: jax.ShapeDtypeStruct, **options: object) -> Any:
        return lambda first: jnp.full(out_shape.shape, jnp.nan, out_shape.dtype)

    monkeypatch.setattr(pl, "pallas_call", allocated)


@pytest.mark.parametrize("load", ["router's", "all to a few experts"])
@pytest.mark.parametrize(
    ("text", "is_ragged"),
    [
        ("data=1", False),
        pytest.param("data=1", True, marks=pytest.mark.slow),
        ("data=2,fsdp=4,expert=4", False),
        ("data=4,expert=2,tensor=2,sequence_parallel=true", True),
        ("data=2,fsdp=4,expert=4,expert_nodes=2,dispatch=once", False),
        pytest.param("data=8,expert=8,expert_nodes=4,dispatch=once", True, marks=pytest.mark.slow),
        *(
            pytest.param(text, is_ragged, marks=pytest.mark.slow)
            for text, is_ragged in [
                ("data=4,tensor=2,sequence_parallel=true", False),
                ("data=2,fsdp=4,expert=4", True),
                ("data=2,expert=2,tensor=2,context=2,sequence_parallel=true", False),
                ("data=4,expert=2,tensor=2", True),
                ("data=2,expert=4,tensor=2", True),
                ("data=4,expert=4,tensor=2,sequence_parallel=true,grouped=true", False),
                *(
                    (f"{text},dispatch=once", is_ragged)
                    for text in (
                        "data=8,expert=8,expert_nodes=2",
                        "data=8,expert=8,expert_nodes=8",
                        "data=4,expert=4,expert_nodes=2,tensor=2,sequence_parallel=true",
                        "data=4,expert=2,expert_nodes=2,tensor=2,sequence_parallel=true",
                        "data=2,fsdp=2,expert=4,expert_nodes=2,tensor=2",
                        "fsdp=2,tensor=4,expert=8,expert_nodes=2",
                        "fsdp=2,tensor=4,expert=8,expert_nodes=2,sequence_parallel=true",
                        "fsdp=4,expert=4,expert_nodes=4,context=2",
                    )
                    for is_ragged in (False, True)
                ),
            ]
        ),
    ],
)
def test_experts_are_a_loop_over_tokens_and_their_experts(
    text: str, is_ragged: bool, load: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the load; with as many rows as exist, or room."""
    if is_ragged:
        _as_on_tpus(monkeypatch)
    _assert_as_a_loop(text, MoE(E, 2, 3), load, is_ragged=is_ragged)


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [None, "fp8"])
@pytest.mark.parametrize(
    ("config", "text"),
    [(OSS, "fsdp=8,expert=8"), (MIXTURE, "data=2,fsdp=4,expert=4"), (OSS, "data=2,expert=2,tensor=2")],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_no_operation_of_a_model_reads_arrays_that_nothing_filled(
    config: ModelConfig, text: str, narrow: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, activations, scales of narrow types and all gradients.

    With fp8 the products of weights' gradients round differently: the scale of some blocks' rows leaves out
    the rows of other experts.
    """
    layout = Layout.parse(text).replace(**FLOAT32, matmul_dtype=narrow)
    expected = Step(config, layout)()
    _as_on_tpus(monkeypatch)
    assert_equal(config, Step(config, layout)(), expected, 0.05 if narrow else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("load", ["router's", "all to a few experts"])
@pytest.mark.parametrize("moe", [MoE(E, 1, 3), MoE(E, 4, 3), MoE(E, 2, 3, scales_input=True)])
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_a_token_goes_once_to_each_of_its_nodes(num_nodes: int, moe: MoE, load: str) -> None:
    """Of experts without an activation between two products it is the same what their gates weigh."""
    text = f"data=2,fsdp=4,expert=4,expert_nodes={num_nodes},dispatch=once"
    _assert_as_a_loop(text, moe, load)


@pytest.mark.parametrize("capacity", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_the_same_tokens_go_past_full_experts_where_they_cross_once(capacity: float) -> None:
    each = Layout.parse("data=2,fsdp=4,expert=4").replace(**FLOAT32, capacity=capacity)
    given = _arrays(MoE(E, 2, 3), "router's")
    found = _through(each.replace(expert_nodes=2, dispatch="once"), MoE(E, 2, 3), *given)
    _assert_close(found, _of_chosen(_through(each, MoE(E, 2, 3), *given), given))


def _assert_as_a_loop(text: str, moe: MoE, load: str, *, is_ragged: bool = False) -> None:
    """Two products of 16 sequences of 4 tokens, as those that a loop over tokens and experts computes."""
    given = _arrays(moe, load)
    found = _through(Layout.parse(text).replace(**FLOAT32), moe, *given, is_ragged=is_ragged)
    _assert_close(found, _of_chosen(_with_gradients(_by_loop)(*given), given))


def _by_loop(x: jax.Array, gates: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    h = jnp.einsum("BTD,EDM->BTEM", x, first)
    return jnp.einsum("BTE,BTEM,EMD->BTD", gates, h, second)


def _of_chosen(expected: tuple[Any, Any], given: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """A gate of zero chose no expert: what the expert would have made of the token is not computed."""
    out, (d_x, d_gates, *d_weights) = expected
    return out, (d_x, np.where(given[2] > 0, np.asarray(d_gates), 0), *d_weights)


def _arrays(moe: MoE, load: str) -> list[np.ndarray]:
    """What the output is summed with for a loss, x, gates and the two weights."""
    random, num, length, width = np.random.default_rng(3), 16, 4, 8
    logits = random.normal(size=(num, length, E))
    few = np.where(np.arange(E) < moe.experts_per_token, 10.0, 0.0)
    logits = logits if load == "router's" else few + 0 * logits
    gates = np.array([[by_hand(one, 0 * CHOICE, moe) for one in row] for row in logits], np.float32)
    x = random.normal(size=(num, length, D)).astype(np.float32)
    weights = [random.normal(size=shape).astype(np.float32) for shape in ((E, D, width), (E, width, D))]
    target = np.cos(np.arange(num * length * D)).reshape(num, length, D).astype(np.float32)
    return [target, x, gates, *weights]


def _through(layout: Layout, moe: MoE, *given: np.ndarray, is_ragged: bool = False) -> tuple[Any, Any]:
    mesh = device_mesh(layout)
    arrays = [layout.activation(*one) for one in (("target", "BTD"), ("x", "BTD"), ("gates", "BTE"))]
    arrays += [layout.weight(name, spec[4:7]) for name, spec in SPECS.items()]
    placed = [
        jax.device_put(value, named_sharding(array, mesh)) for value, array in zip(given, arrays, strict=True)
    ]
    with jax.set_mesh(mesh):
        return _with_gradients(_experts(layout, moe, is_ragged))(*placed)


@cache
def _experts(layout: Layout, moe: MoE, is_ragged: bool) -> Callable[..., jax.Array]:
    """The experts of a layout: one function of all loads, so that it is compiled once.

    is_ragged: whether a test has `ragged_all_to_all` in place, which makes it another program.
    """

    def run(x: jax.Array, gates: jax.Array, *weights: jax.Array) -> jax.Array:
        ops = JaxOps(replace(MIXTURE, moe=moe), layout)

        def block(ops: JaxOps, w: Mapping[str, jax.Array], d: jax.Array) -> jax.Array:
            for name, spec in SPECS.items():
                (d,) = ops.einsums(d, w, **{name: spec})
            return d

        return ops.experts(block, dict(zip(SPECS, weights, strict=True)), x, gates)

    return run


@cache
def _with_gradients(f: Callable[..., jax.Array]) -> Callable[..., tuple[Any, Any]]:
    """The output of `f` and the gradients of its sum with a target, by all that follows the target."""

    def loss(target: jax.Array, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = f(*given)
        return jnp.sum(out * target), out

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(1, 2, 3, 4), has_aux=True))

    def run(*given: Any) -> tuple[Any, Any]:
        (_, out), gradients = compiled(*given)
        return out, gradients

    return run


def _assert_close(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    names = ["out", "x", "gates", *SPECS]
    pairs = zip(names, (found[0], *found[1]), (expected[0], *expected[1]), strict=True)
    for name, one, other in pairs:
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("text", "load", "rounds"),
    [
        # A group's 32 tokens have 64 rows, of which a device of two experts has 16 by an even load, in two
        # blocks of 8 rows, and room for four: all rows on one device are eight.
        ("data=2,fsdp=4,expert=4", [4] * 8, 1),
        ("data=2,fsdp=4,expert=4", [16, 16, 0, 0, 0, 0, 0, 0], 2),
        # Each token chooses 1 and 4, of two devices: four blocks each.
        ("data=2,fsdp=4,expert=4", [0, 16, 0, 0, 16, 0, 0, 0], 1),
        # Without an axis of experts there is room for all.
        ("data=8", [16, 16, 0, 0, 0, 0, 0, 0], 1),
    ],
)
def test_rows_come_in_as_many_rounds_as_the_busiest_device_needs(
    text: str, load: list[int], rounds: int
) -> None:
    """load: of the choices of 16 tokens, how many each expert has."""
    layout, moe = Layout.parse(text), MoE(E, 2, 3)
    owners = np.repeat(np.arange(E), load).reshape(2, -1).T
    assert all(len(set(two)) == 2 for two in owners), "a token chooses two experts"
    gates = np.zeros((16, 4, E), np.float32)
    np.put_along_axis(gates.reshape(-1, E), np.tile(owners, (4, 1)), 0.5, axis=1)
    mesh = device_mesh(layout)
    placed = jax.device_put(gates, named_sharding(layout.activation("gates", "BTE"), mesh))

    def found(gates: jax.Array) -> jax.Array:
        return choices_of(gathered_gates(gates, layout, row_routing(layout)), layout, moe, "kept").num_passes

    with jax.set_mesh(mesh):
        assert int(jax.jit(found)(placed)) == rounds

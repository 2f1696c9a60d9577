"""Ten programs sharded wrongly, each beside what it should be: the audit names the fault there alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright

P = PartitionSpec
EVERYWHERE = ("data", "tensor")
NUM_LAYERS, B, T, D, F, V = 3, 16, 32, 64, 256, 512


@dataclass(frozen=True)
class Case:
    """A program and its arguments (shape, spec, dtype); kind, tensor: the fault that it has.

    donated: numbers of the arguments that are donated.
    """

    run: Callable[..., Any]
    args: tuple[tuple[tuple[int, ...], PartitionSpec, str], ...]
    kind: str
    tensor: str
    donated: tuple[int, ...] = ()


def constrained(x: jax.Array, *spec: Any) -> jax.Array:
    return with_sharding_constraint(x, P(*spec))


def audited(
    run: Callable[..., Any],
    args: tuple[tuple[tuple[int, ...], PartitionSpec, str], ...],
    donated: tuple[int, ...] = (),
) -> dict:
    """The audit on data=2, tensor=4, where the compiler chooses what is not constrained."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        given = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, spec)) for s, spec, d in args]
        return meshwright.audit(jax.jit(run, donate_argnums=donated), *given, hardware="v5e")


X = ((B * T, D), P("data", None), "bfloat16")


def microbatches(*, constrain: bool) -> Case:
    """A batch cut into microbatches so that each lies on some devices only, and all compute it."""

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        parts = x.reshape(-1, 4, D).swapaxes(0, 1) if constrain else x.reshape(4, -1, D)

        def step(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + (jnp.tanh(x @ w).astype(jnp.float32) ** 2).sum(), None

        return jax.lax.scan(step, jnp.float32(0), parts)[0]

    return Case(run, (((D, F), P(None, "tensor"), "bfloat16"), X), "batch_gathered", "x")


def adam(*, sharded: bool) -> Case:
    """Data parallelism whose moments are whole on each device."""

    def run(w: jax.Array, mu: jax.Array, nu: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        def loss(w: jax.Array) -> jax.Array:
            return (jnp.tanh(x @ w).astype(jnp.float32) ** 2).mean()

        grad = constrained(jax.grad(loss)(w).astype(jnp.float32), *home)
        mu, nu = 0.9 * mu + 0.1 * grad, 0.99 * nu + 0.01 * grad**2
        step = constrained((mu / (jnp.sqrt(nu) + 1e-8)).astype(w.dtype), *home)
        return constrained(w - step, None, None), mu, nu

    home = P(EVERYWHERE if sharded else None, None)
    moments = ((D, F), home, "float32")
    batch = ((B * T, D), P(EVERYWHERE, None), "bfloat16")
    weight = ((D, F), P(None, None), "bfloat16")
    return Case(run, (weight, moments, moments, batch), "replicated_optimizer_state", "mu")


def decode(*, tensor_parallel: bool) -> Case:
    """Weights sharded as for training, gathered for every token."""

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            used = w if tensor_parallel else constrained(w, None, None)
            return constrained(jnp.tanh(x @ used), "data", None), None

        def token(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.scan(layer, x, w)[0], None

        return jax.lax.scan(token, x, None, length=5)[0]

    weight = ((NUM_LAYERS, D, D), P(None, "tensor", None), "bfloat16")
    tokens = ((B, D), P("data", None), "bfloat16")
    return Case(run, (weight, tokens), "weight_gathered_repeatedly", "w")


def wrong_axis(*, right: bool) -> Case:
    """w_out stored over data where its product needs it over tensor."""

    def run(w_in: jax.Array, w_out: jax.Array, x: jax.Array) -> jax.Array:
        h = constrained(jnp.tanh(x @ w_in), "data", "tensor")
        return constrained(h @ w_out, "data", None)

    w_out = ((F, D), P("tensor" if right else "data", None), "bfloat16")
    return Case(run, (((D, F), P(None, "tensor"), "bfloat16"), w_out, X), "weight_resharded", "w_out")


def gather(*, narrow: bool) -> Case:
    """f32 weights gathered, then cast to bf16 for the product."""

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        cast = constrained(w.astype(x.dtype), EVERYWHERE, None) if narrow else w
        return constrained(x @ constrained(cast, None, None).astype(x.dtype), EVERYWHERE, None)

    weight, batch = ((D, F), P(EVERYWHERE, None), "float32"), ((B * T, D), P(EVERYWHERE, None), "bfloat16")
    return Case(run, (weight, batch), "widened", "w")


def contraction(*, reduced: bool) -> Case:
    """The summed dimension gathered where the partial products should be summed."""

    def run(w_in: jax.Array, w_out: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("h"):  # jaxlib 0.12 gathers the product, 0.10 its tanh
            h = constrained(jnp.tanh(x @ w_in), "data", "tensor" if reduced else None)
        return constrained(h @ w_out, "data", None)

    weights = ((D, F), P(None, "tensor"), "bfloat16"), ((F, D), P("tensor", None), "bfloat16")
    return Case(run, (*weights, X), "contraction_gathered", "h")


def scan(*, same: bool) -> Case:
    """Two constraints inside the scan over layers that contradict each other."""
    home = P(EVERYWHERE if same else "data", None, None)

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            x = constrained(jnp.tanh(x), *(home if same else P("data", None, "tensor")))
            x = constrained(x * 2, *(home if same else P("data", "tensor", None)))
            return constrained(x @ w, *home), None

        return jax.lax.scan(layer, x, w)[0]

    args = ((NUM_LAYERS, D, D), P(), "bfloat16"), ((B, T, D), home, "bfloat16")
    return Case(run, args, "activation_resharded", "mul")


def norm(*, scattered: bool) -> Case:
    """ZeRO-1 whose gradient is clipped by its norm while it is whole."""

    def run(w: jax.Array, mu: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        def loss(w: jax.Array) -> jax.Array:
            return (jnp.tanh(x @ w).astype(jnp.float32) ** 2).mean()

        home = EVERYWHERE if scattered else None
        grad = constrained(jax.grad(loss)(w).astype(jnp.float32), home, None)
        grad = grad / jnp.maximum(1, jnp.sqrt((grad * grad).sum()))
        mu = 0.9 * mu + 0.1 * grad
        return constrained(w - constrained(mu, EVERYWHERE, None).astype(w.dtype), None, None), mu

    moments = ((D, F), P(EVERYWHERE, None), "float32")
    batch = ((B * T, D), P(EVERYWHERE, None), "bfloat16")
    return Case(run, (((D, F), P(), "bfloat16"), moments, batch), "summed_whole", "dot_general")


def lookup(*, sharded: bool) -> Case:
    """The embedding gathered whole to look up one row a token."""

    def run(table: jax.Array, tokens: jax.Array) -> jax.Array:
        used = table if sharded else constrained(table, None, None)
        return constrained(jnp.take(used, tokens, axis=0), "data", None)

    table = ((V, D), P("tensor", None), "bfloat16")
    return Case(run, (table, ((B,), P("data"), "int32")), "table_gathered", "table")


def cache(*, sharded: bool) -> Case:
    """Keys that every device of `tensor` holds whole."""

    def run(cache: jax.Array, wq: jax.Array, wk: jax.Array, x: jax.Array, at: jax.Array) -> tuple:
        q = jnp.einsum("BD,DNH->BNH", x, wq)
        k = jnp.einsum("BD,DNH->BNH", x, wk)
        cache = jax.lax.dynamic_update_slice(cache, k[:, None], (0, at, 0, 0))
        scores = jnp.einsum("BNH,BSNH->BNS", q, constrained(cache, *home))
        return jnp.einsum("BNS,BSNH->BNH", jax.nn.softmax(scores), cache), cache

    heads = "tensor" if sharded else None
    home = P("data", None, heads, None)
    weight = ((D, 4, 16), P(None, heads, None), "bfloat16")
    args = ((B, T, 4, 16), home, "bfloat16"), weight, weight, ((B, D), P("data", None), "bfloat16")
    return Case(run, (*args, ((), P(), "int32")), "replicated_cache", "cache", donated=(0,))


PAIRS: list[tuple[Case, Case]] = [
    (microbatches(constrain=False), microbatches(constrain=True)),
    (adam(sharded=False), adam(sharded=True)),
    (decode(tensor_parallel=False), decode(tensor_parallel=True)),
    (wrong_axis(right=False), wrong_axis(right=True)),
    (gather(narrow=False), gather(narrow=True)),
    (contraction(reduced=False), contraction(reduced=True)),
    (scan(same=False), scan(same=True)),
    (norm(scattered=False), norm(scattered=True)),
    (lookup(sharded=False), lookup(sharded=True)),
    (cache(sharded=False), cache(sharded=True)),
]


@pytest.mark.parametrize("case", [wrong for wrong, _ in PAIRS], ids=lambda case: case.kind)
def test_the_audit_names_the_fault(case: Case) -> None:
    found = audited(case.run, case.args, case.donated)
    named = {one["kind"]: one["what"] for one in found["warnings"]}
    assert f"`{case.tensor}`" in named[case.kind]
    assert set(named) - {case.kind} <= {"computed_repeatedly"}, "of which it may be the cause"
    assert found["verdict"] == "differs"
    assert all(one["seconds"] > 0 and one["change"] for one in found["warnings"])


@pytest.mark.parametrize(("wrong", "right"), PAIRS, ids=lambda case: case.kind)
def test_no_fault_is_named_where_there_is_none(wrong: Case, right: Case) -> None:
    del wrong
    found = audited(right.run, right.args, right.donated)
    assert (found["warnings"], found["not_understood"], found["verdict"]) == ([], [], "match")


def fsdp(*, constrain: bool) -> dict:
    """Two layers behind an embedding, weights and batch over data: held to the batch's axis or not."""

    def hold(x: jax.Array) -> jax.Array:
        return constrained(x, "data", None, None) if constrain else x

    def loss(weights: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        table, w_in, w_out = weights
        x = hold(table[tokens])
        x = hold(x + jnp.tanh(x @ w_in) @ w_out)
        x = hold(x + jnp.tanh(x @ w_in) @ w_out)
        return (jax.nn.softmax((x @ table.T).astype(jnp.float32)) ** 2).mean()

    def run(*args: jax.Array) -> tuple[jax.Array, ...]:
        return jax.grad(loss)(args[:3], args[3])

    weights = ((V, D), P(None, "data")), ((D, F), P("data", None)), ((F, D), P(None, "data"))
    args = tuple((shape, spec, "bfloat16") for shape, spec in weights)
    return audited(run, (*args, ((B, T), P("data", None), "int32")))


def test_fsdp_without_constraints_is_named_at_its_root() -> None:
    """One accident, however many activations move in consequence; none of them where they are held."""
    (named,) = fsdp(constrain=False)["warnings"]
    assert named["kind"] == "activations_not_constrained" and named["bytes"] > 0
    assert "with_sharding_constraint(x, P(batch axes))" in named["change"]
    held = fsdp(constrain=True)
    assert "activations_not_constrained" not in {one["kind"] for one in held["warnings"]}
    assert held["bytes"]["compiled"] < named["bytes"]

"""The search for cheaper shardings: each finding is a change that, once made, has the stated cost."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tests.audit.foreign_cases import array, constrained, mesh

from meshwright.audit import alternatives as alternatives_module
from meshwright.audit import foreign
from meshwright.audit.alternatives import (
    Place,
    alternatives,
    constraints,
    partition,
    spec_of,
    with_arguments,
)
from meshwright.audit.foreign import audit_compiled
from meshwright.notation.mesh import Mesh


def _found(step: Any, args: tuple[Any, ...], seconds: float = 60.0) -> list[dict]:
    document = audit_compiled(step, args, {}, "v5e", ahead_of_time=False, search_seconds=seconds)
    return [one for one in document["warnings"] if one["kind"] == "cheaper_sharding"]


def _mixer(*, of_batch: bool) -> tuple[Any, tuple[Any, ...]]:
    """Positions mixed by a product along them: split there, they are gathered."""
    m = mesh("x")
    spec = ("x",) if of_batch else (None, "x")

    def step(w: Any, x: Any) -> Any:
        for _ in range(2):
            x = jnp.tanh(jnp.einsum("bnd,nm->bmd", x, w))
            x = constrained(m, x, *spec)
        return x

    return jax.jit(step), (array(m, (256, 256)), array(m, (64, 256, 128), *spec))


def test_arguments_and_constraints_of_one_shape_change_together() -> None:
    (one,) = _found(*_mixer(of_batch=False))
    assert "argument `x` and the constraint at" in one["what"]
    assert "P('x', None, None) in place of P(None, 'x', None)" in one["change"]
    assert one["where"].partition(":")[0] == __file__
    assert _found(*_mixer(of_batch=True)) == []


def _accumulated(*, whole: bool) -> tuple[Any, tuple[Any, ...]]:
    """Gradients of microbatches that a constraint makes whole, though the weight is split."""
    m = mesh("x")

    def step(w: Any, xs: Any) -> Any:
        def turn(total: Any, x: Any) -> Any:
            whole_w = constrained(m, w)
            g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(whole_w)
            return constrained(m, total + g) if whole else total + g, None

        return w - jax.lax.scan(turn, jnp.zeros_like(w), xs)[0]

    return jax.jit(step), (array(m, (512, 512), "x"), array(m, (4, 512, 512), None, "x"))


def test_a_constraint_that_costs_time_is_left_out_or_moved() -> None:
    found = _found(*_accumulated(whole=True))
    assert found and "P(None, None)" in found[0]["change"]
    assert found[0]["seconds"] > 0
    before, after = (
        audit_compiled(*_accumulated(whole=whole), {}, "v5e", ahead_of_time=False) for whole in (True, False)
    )
    assert after["seconds"] < before["seconds"]


def test_arguments_alone_are_found_in_the_step_args() -> None:
    """Rows split along the dimension that a matmul sums over: its results are summed."""
    m = mesh("x")
    args = array(m, (4096, 512), None, "x"), array(m, (512, 512))
    (one,) = _found(jax.jit(lambda x, w: jnp.tanh(x @ w).sum(1)), args)
    assert one["where"] == "step_args" and one["tensor"] == "x"
    assert one["change"] == "split argument `x` as P('x', None) in place of P(None, 'x')"


def test_results_that_are_left_in_parts_are_gathered() -> None:
    """Weights by columns and by rows: with both by columns the hidden rows and the result are gathered."""
    m = mesh("x")
    weights = array(m, (32768, 2048), None, "x"), array(m, (2048, 2048), "x")
    args = array(m, (4096, 32768)), *weights
    assert _found(jax.jit(lambda x, a, b: jnp.tanh(x @ a) @ b), args) == []


def test_a_search_of_no_time_finds_nothing() -> None:
    assert _found(*_mixer(of_batch=False), seconds=1e-9) == []


@pytest.mark.parametrize("spec", [P("a", None), P(("a", "b"), P.UNCONSTRAINED), P()])
def test_specs_are_written_as_they_were(spec: P) -> None:
    assert spec_of(partition(spec_of(spec, 2)), 2) == spec_of(spec, 2)


def test_alternatives_divide_their_dimensions() -> None:
    """Eight devices do not divide four heads, so the axis moves to the first dimension alone."""
    place = Place("cache", (16, 4, 128), spec_of(P(None, None, "x"), 3), is_argument=True)
    specs = {one.spec for one in alternatives([place], Mesh({"x": 8}))}
    assert specs == {spec_of(P("x"), 3)}


def test_alternatives_of_costly_places_come_first_and_together() -> None:
    large, small = (Place(str(rows), (rows, 64), spec_of(P("x"), 2), True) for rows in (1024, 64))
    mesh_of_x = Mesh({"x": 8})
    by_size = alternatives([small, large], mesh_of_x)
    assert [one.places for one in by_size] == [(large,), (small,)]
    costs = {large: 1.0, small: 2.0}
    assert [one.places for one in alternatives([small, large], mesh_of_x, costs.__getitem__)] == [
        (small,),
        (large,),
    ]


def test_a_search_ends_with_the_places_of_which_one_saves_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[alternatives_module.Alternative] = []

    def counted(*args: Any) -> Any:
        tried.append(args[-1])
        return with_arguments(*args)

    monkeypatch.setattr(foreign, "with_arguments", counted)
    m = mesh("x")
    # The weight is split along the sum of its matmul, whose results are large; the others are not used.
    others = (array(m, (8, 8 * n), None, "x") for n in (1, 2))
    args = array(m, (4096, 512)), array(m, (512, 2048), "x"), *others
    (one,) = _found(jax.jit(lambda x, w, *others: jnp.tanh(x @ w).sum(1)), args)
    assert one["tensor"] == "w"
    assert {place.name for each in tried for place in each.places} == {"w"}


def test_constraints_of_a_trace_are_recorded_by_line_and_restored() -> None:
    m = mesh("x")

    def step(x: Any) -> Any:
        first = jax.lax.with_sharding_constraint(x, NamedSharding(m, P("x")))
        second = jax.lax.with_sharding_constraint(first * 2, NamedSharding(m, P(None, "x")))
        return second + 1

    with constraints() as seen:
        jax.jit(step).trace(array(m, (8, 8)))
    assert [one.spec for one in seen] == [spec_of(P("x"), 2), spec_of(P(None, "x"), 2)]
    assert len({one.name for one in seen}) == 2
    count = len(seen)
    jax.jit(step).trace(array(m, (8, 8), "x"))
    assert len(seen) == count


def test_the_constraint_of_a_gradient_is_that_of_its_line() -> None:
    """JAX adds one with the same sharding, on the line that asks for the gradient."""
    m = mesh("x")

    def loss(x: Any) -> Any:
        doubled = jax.lax.with_sharding_constraint(x * 2, NamedSharding(m, P("x")))
        total = doubled.sum()
        return total

    def step(x: Any) -> Any:
        start = jax.grad(loss)
        gradient = start(x)
        return gradient

    with constraints() as seen:
        jax.jit(step).trace(array(m, (8,)))
    assert len(seen) == 1


def test_a_cause_comes_before_a_sharding_that_saves_little_more() -> None:
    def ordered(kind: str, seconds: float) -> list[str]:
        warnings = [
            {"kind": "cheaper_sharding", "seconds": 1.0, "bytes": 0},
            {"kind": kind, "seconds": seconds, "bytes": 0},
        ]
        return [one["kind"] for one in foreign._costliest_first(warnings)]

    assert ordered("widened", 0.9)[0] == "widened"
    assert ordered("widened", 0.7)[0] == "cheaper_sharding"
    assert ordered("weight_resharded", 1.0)[0] == "cheaper_sharding"
    assert ordered("weight_resharded", 1.1)[0] == "weight_resharded"

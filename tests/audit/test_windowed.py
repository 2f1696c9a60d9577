"""A transfer in steps under its product: the result, both gradients, and what the rings send."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.audit.proofs import MESH, Case, arrays_of, cases, least_sizes, planned, random

from meshwright.audit.facts.emitted import Emitted
from meshwright.audit.shard.execution import emitted_by
from meshwright.audit.shard.windowed import windowed_contract, windowed_step
from meshwright.nn.sharded_arrays import max_abs_error, put
from meshwright.nn.start.device_mesh import explicit_mesh
from meshwright.notation.collective import Collective, ReshardOp
from meshwright.notation.einsum import ChosenSteps, Contraction, EinsumSide, cotangent
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array

WINDOWS = [
    ("rhs", "A[I_X, J]", "B[J_X, K]", "C[I_X, K]", {"X": "I"}),
    ("lhs", "A[I_X, J]", "B[J, K_X]", "C[I, K_X]", {"X": "K"}),
    ("lhs", "A[I_XY, J]", "B[J, K_XY]", "C[I, K_XY]", {"X": "K", "Y": "K"}),
    ("lhs", "A[L_X, I, J]", "B[L, J, K]", "C[L, I, K]", {"X": None}),
    ("out", "A[I, J_X]", "B[J_X, K]", "C[I, K_X]", {"X": "J"}),
    ("out", "A[I_Y, J_X]", "B[J_X, K]", "C[I_YX, K]", {"X": "J", "Y": "I"}),
    ("out", "A[L, I, J_X]", "B[L, J_X, K]", "C[L_X, I, K]{U_Y}", {"X": "J", "Y": "J"}),
    ("lhs", "A[I_X, J]{U_Y}", "B[J, K_X]", "C[I, K_X]", {"X": "K", "Y": None}),
    ("rhs", "A[I, J_X]", "B[J_X, K]{U_Y}", "C[I, K]", {"X": None, "Y": "I"}),
    ("lhs", "A[I_YX, J]", "B[J, K_XY]", "C[I, K_XY]", {"X": "K", "Y": "K"}),
    ("out", "A[I, J_X]{U_Y}", "B[J_X, K]", "C[I_Y, K_X]", {"X": "J", "Y": "I"}),
]


@dataclass(frozen=True)
class _Ran:
    """The largest differences from the dense result and gradients, and the backward collectives."""

    out: float
    d_lhs: float
    d_rhs: float
    emitted: list[Emitted]

    def sent(self, axes: tuple[str, ...]) -> int:
        return sum(e.op == "permute" and set(e.axes) == set(axes) for e in self.emitted)


def run(case: Case, window: EinsumSide) -> _Ran:
    plan, mesh, einsum = case.plan, explicit_mesh(case.mesh), case.plan.einsum
    lhs, rhs, weights = (random(a, case.sizes, seed) for seed, a in enumerate((plan.lhs, plan.rhs, plan.out)))
    operands = put(lhs, plan.lhs, mesh, seed=3), put(rhs, plan.rhs, mesh, seed=4)
    d_out = put(weights, cotangent(plan.out), mesh, reduced=plan.out.unreduced)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return windowed_contract(plan, window, jnp.float32, a, b)

    def gradients(a: jax.Array, b: jax.Array, d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(product, a, b)[1](d_out)

    with jax.set_mesh(mesh):
        out = jax.jit(product)(*operands)
        compiled = jax.jit(gradients).lower(*operands, d_out).compile()
        d_lhs, d_rhs = compiled(*operands, d_out)
    return _Ran(
        max_abs_error(out, plan.out, np.einsum(str(einsum), lhs, rhs)),
        max_abs_error(d_lhs, cotangent(plan.lhs), np.einsum(str(plan.lhs_gradient.einsum), weights, rhs)),
        max_abs_error(d_rhs, cotangent(plan.rhs), np.einsum(str(plan.rhs_gradient.einsum), lhs, weights)),
        emitted_by(compiled, case.mesh),
    )


WINDOW: tuple[EinsumSide, ...] = ("lhs", "rhs", "out")


def possible(plan: Contraction) -> list[EinsumSide]:
    """The transfers of `plan` that a ring can do."""
    ends: dict[EinsumSide, list[Collective]] = {
        "lhs": plan.lhs_steps[-1:],
        "rhs": plan.rhs_steps[-1:],
        "out": plan.out_steps[:1],
    }
    kinds: dict[EinsumSide, str] = {
        "lhs": "all_gather",
        "rhs": "all_gather",
        "out": "reduce_scatter",
    }
    return [w for w in WINDOW if ends[w] and ends[w][0].op == kinds[w]]


@pytest.mark.parametrize(("window", "lhs", "rhs", "out", "roles"), WINDOWS)
def test_product_and_gradients_are_the_dense_ones(
    window: EinsumSide, lhs: str, rhs: str, out: str, roles: dict[str, str | None]
) -> None:
    plan = planned(lhs, rhs, out, roles)
    ran = run(Case(MESH, plan, least_sizes(arrays_of(plan), MESH)), window)
    assert (ran.out, ran.d_lhs, ran.d_rhs) == (0, 0, 0)


def test_a_ring_of_one_device_is_the_plain_contraction() -> None:
    """Even where a gradient passes through a partial sum, as over Z here."""
    plan = planned("A[A_XYZ, B]", "B[A_YZ]", "C[A_XYZ, B]", {"X": "A", "Y": None, "Z": "B"})
    one = Mesh({"X": 1, "Y": 1, "Z": 1})
    ran = run(Case(one, plan, least_sizes(arrays_of(plan), one)), "lhs")
    assert (ran.out, ran.d_lhs, ran.d_rhs) == (0, 0, 0)


@pytest.mark.parametrize(
    ("window", "lhs", "rhs", "out", "step"),
    [
        ("lhs", "A[I_X, J_Y]", "B[J, K]", "C[I, K]", ("all_gather", "XY", "A[I_X, J_Y]", "A[I, J]")),
        ("lhs", "A[I_Y, J_X]", "B[J, K]", "C[I, K]", ("all_gather", "XY", "A[I_Y, J_X]", "A[I, J]")),
        ("out", "A[I, J_XY]", "B[J_XY, K]", "C[I_X, K_Y]",
         ("reduce_scatter", "YX", "C[I, K]{U_XY}", "C[I_X, K_Y]")),
    ],
)  # fmt: skip
def test_a_transfer_along_several_dimensions(
    window: EinsumSide, lhs: str, rhs: str, out: str, step: tuple[ReshardOp, str, str, str]
) -> None:
    """One step that a search may find; in a ring its blocks belong to places in both."""
    roles = dict.fromkeys("XY", None if window == "lhs" else "J")
    op, axes, operand, result = step
    path = (Collective(op, tuple(axes), parse_array(operand), parse_array(result)),)
    plan = replace(planned(lhs, rhs, out, roles), **{f"{window}_chosen": ChosenSteps(path)})
    ran = run(Case(MESH, plan, dict.fromkeys("IJK", 8)), window)
    assert (ran.out, ran.d_lhs, ran.d_rhs) == (0, 0, 0)


@settings(max_examples=10)
@given(cases(), st.data())
def test_any_contraction_and_window(case: Case, data: st.DataObject) -> None:
    windows = possible(case.plan)
    assume(windows)
    ran = run(case, data.draw(st.sampled_from(windows)))
    assert (ran.out, ran.d_lhs, ran.d_rhs) == (0, 0, 0)


@pytest.mark.parametrize(
    ("window", "lhs", "rhs", "out", "letter", "rings"),
    [
        # A block of the gathered operand goes round again, and the sum of its gradient.
        ("rhs", "x[B_X, D]", "w[D_X, F]", "y[B_X, F]", "B", 2),
        # The cotangent of the scattered product goes round once for both gradients.
        ("out", "h[B, F_X]", "w[F_X, D]", "y[B, D_X]", "F", 1),
        ("lhs", "y[B, D_X]", "w[D, F_X]", "h[B, F_X]", "F", 2),
    ],
)
def test_backward_transfers_run_in_steps_too(
    window: EinsumSide, lhs: str, rhs: str, out: str, letter: str, rings: int
) -> None:
    """FSDP's weight, and Megatron's row and column with sequence parallelism: permutes and nothing else."""
    ran = run(Case(MESH, planned(lhs, rhs, out, {"X": letter}), dict.fromkeys("BDF", 16)), window)
    assert {e.op for e in ran.emitted} == {"permute"}
    assert ran.sent(("X",)) == rings * (MESH.size("X") - 1)


def test_a_transfer_that_no_ring_can_do_is_refused() -> None:
    plan = planned("A[I_X, J]", "B[J, K]", "C[I_X, K]", {"X": "I"})
    with pytest.raises(AssertionError, match="no transfer of lhs runs in steps"):
        windowed_step(plan, "lhs")

"""Proof by execution: what devices compute is the dense product and gradient, and what XLA emits is
what the algebra derives.

Random einsums, shapes, meshes of up to 8 devices and 3 axes, shardings with several axes on a
dimension and partial sums, roles and wanted outputs, all in explicit mode. Values are small integers,
so equal means equal.
"""

import pytest
from hypothesis import example, given, settings
from tests.audit.proofs import (
    MESH,
    Case,
    cases,
    differing,
    planned,
    prove_forward,
    prove_gradients,
    prove_reshard,
    reshards,
)

from meshwright.notation.array import ShardedArray
from meshwright.notation.collective import Collective, ReshardOp, reshard, ring_bytes
from meshwright.notation.mesh import Mesh
from meshwright.notation.parse import parse_array
from meshwright.notation.resharding import cheapest_reshard

QUICK, NIGHTLY = 50, 600

# What XLA emits may be told apart only together: a sum that is sliced later claims no scatter's slice.
SLICED_LATER = Case(
    Mesh({"X": 2, "Y": 2}),
    planned("A[B]{U_Y}", "B[A_XY, B]", "C[A_Y]", {"X": "A", "Y": "B"}),
    {"A": 4, "B": 2},
)


@settings(max_examples=QUICK)
@given(cases())
@example(SLICED_LATER)
def test_the_product_is_dense_and_emits_what_was_derived(case: Case) -> None:
    prove_forward(case)


@settings(max_examples=QUICK)
@given(cases())
def test_the_gradients_are_dense_and_emit_what_was_derived(case: Case) -> None:
    prove_gradients(case)


@pytest.mark.slow
@settings(max_examples=NIGHTLY)
@given(cases())
def test_every_product_and_gradient(case: Case) -> None:
    prove_forward(case)
    prove_gradients(case)


SQUARE = Mesh({"X": 2, "Y": 2})
# Both axes change places: one is gathered, then the other is exchanged.
SWAPPED = SQUARE, parse_array("A[I_X, J_Y]"), parse_array("A[I_Y, J_X]")
# Blocks of one number are gathered twice: the second gather is of all that the first one made.
GATHERED_TWICE = SQUARE, parse_array("A[I_X, J_Y]"), parse_array("A[I, J_X]")


@settings(max_examples=QUICK // 2)
@given(reshards())
@example(SWAPPED)
@example(GATHERED_TWICE)
def test_a_reshard_keeps_the_array_and_emits_what_was_derived(
    case: tuple[Mesh, ShardedArray, ShardedArray],
) -> None:
    mesh, array, target = case
    assert differing(prove_reshard(mesh, reshard(array, target))) == []


@settings(max_examples=QUICK // 2)
@given(reshards())
def test_the_cheapest_reshard_keeps_the_array(case: tuple[Mesh, ShardedArray, ShardedArray]) -> None:
    mesh, array, target = case
    sizes = dict.fromkeys(array.dims, mesh.num_devices)
    steps = cheapest_reshard(
        array, target, mesh, sizes, lambda op, axes, num_bytes: ring_bytes(op, num_bytes, mesh.size(axes))
    )
    assert differing(prove_reshard(mesh, steps)) == []


@pytest.mark.parametrize(
    ("op", "axes", "array", "target"),
    [
        ("all_gather", "XYZ", "A[I_XY, J_Z]", "A[I, J]"),
        ("all_gather", "XY", "A[I_X, J_Y, K_Z]{U_W}", "A[I, J, K_Z]{U_W}"),
        ("reduce_scatter", "XZY", "A[I, J]{U_XYZ}", "A[I_XZ, J_Y]"),
        ("reduce_scatter", "YX", "A[I_Z, J, K]{U_WXY}", "A[I_ZY, J_X, K]{U_W}"),
        ("all_to_all", "XY", "A[I_XY, J, K]", "A[I, J_X, K_Y]"),
        ("all_to_all", "YX", "A[I_Y, J_X, K]", "A[I, J, K_YX]"),
        ("permute", "XY", "A[I_XY, J]", "A[I_YX, J]"),
        ("permute", "XY", "A[I_X, J_Y]", "A[I_Y, J_X]"),
    ],
)
def test_a_collective_on_several_dimensions_is_emitted_as_one(
    op: ReshardOp, axes: str, array: str, target: str
) -> None:
    """What a search finds cheapest, and a reshard of JAX would do in two steps or by gathering it all."""
    mesh = Mesh({"X": 2, "Y": 2, "Z": 2, "W": 1})
    (pair,) = prove_reshard(mesh, [Collective(op, tuple(axes), parse_array(array), parse_array(target))])
    assert pair.status == "match"


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "roles"),
    [
        ("x[B_X, D]", "w[D_X, F]", "y[B_X, F]", {"X": "B"}),  # FSDP: gathered, and scattered back
        ("x[B_X, D]", "w[D, F]", "y[B_X, F]", {"X": "B"}),  # data parallelism: the gradient is summed
        ("x[B, D]", "w[D, F_Y]", "h[B, F_Y]", {"Y": "F"}),  # Megatron's column: f
        ("h[B, F_Y]", "w[F_Y, D]", "y[B, D]", {"Y": "F"}),  # Megatron's row: g
        ("x[B_X, D]", "w[D_X, F_Y]", "h[B_X, F_Y]", {"X": "B", "Y": "F"}),  # FSDP and tensor
        ("x[B_X, D]{U_Y}", "w[D, F]{U_X}", "y[B, F_X]{U_Y}", {"X": "F", "Y": "D"}),  # partial sums in and out
    ],
)
def test_the_gradients_of_known_layouts(lhs: str, rhs: str, out: str, roles: dict[str, str | None]) -> None:
    plan = planned(lhs, rhs, out, roles)
    prove_gradients(Case(MESH, plan, dict.fromkeys("BDF", 16)))

"""The textbook's cases, and the roles that it would consider."""

import pytest

from meshwright.notation.einsum import Einsum
from meshwright.notation.parse import parse_array
from meshwright.notation.roles import axis_orders, case_of, role_choices

MATMUL = Einsum("IJ", "JK", "IK")
SIZES = {"I": 64, "J": 64, "K": 64, "B": 64, "N": 128}


@pytest.mark.parametrize(
    ("lhs", "rhs", "case"),
    [
        ("A[I_X, J]", "B[J, K]", 1),
        ("A[I, J]", "B[J, K_X]", 1),
        ("A[I, J]", "B[J, K]", 1),
        ("A[I, J_X]", "B[J, K]", 2),
        ("A[I, J]", "B[J_X, K]", 2),
        ("A[I, J_X]", "B[J_X, K]", 3),
        ("A[I_X, J]", "B[J, K_X]", 4),
        ("A[I, J_X]", "B[J, K_X]", 4),
    ],
)
def test_cases(lhs: str, rhs: str, case: int) -> None:
    assert case_of(MATMUL, parse_array(lhs), parse_array(rhs), "X") == case


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "roles"),
    [
        ("A[I_X, J]", "B[J, K]", "C[I_X, K]", {"I"}),  # in nobody's way
        ("A[I, J]", "B[J, K]", "C[I, K_X]", {"K"}),  # a slice of B is enough
        ("A[I_X, J]", "B[J, K]", None, {"I"}),
        ("A[I, J_X]", "B[J, K]", "C[I, K]", {"J", "I", None}),  # reduce, exchange, gather
        ("A[I, J_X]", "B[J_X, K]", "C[I, K_X]", {"J", "I", "K"}),
        ("A[I_X, J]", "B[J, K_X]", "C[I, K]", {"I", "K", None}),  # gather B, A or both
        ("A[I_X, J]", "B[J, K_X]", None, {"I", "K"}),
        ("A[I, J_X]", "B[J, K]", "C[I, K]{U_X}", {"J"}),  # only a contracted letter leaves a partial sum
        ("A[I, J]{U_X}", "B[J, K]", "C[I, K]", {"I", "J", None}),
        ("A[I, J]", "B[J, K]", "C[I, K]", {"I", "K", None}),  # idle: it may spread the work
    ],
)
def test_choices_of_a_matmul(lhs: str, rhs: str, out: str | None, roles: set) -> None:
    wanted = out and parse_array(out)
    found = role_choices(MATMUL, parse_array(lhs), parse_array(rhs), wanted or None, "X", SIZES)
    assert set(found) == roles and len(found) == len(roles)


def test_one_letter_stands_for_its_like() -> None:
    einsum = Einsum("INJ", "JK", "INK")
    arrays = parse_array("A[I, N, J_X]"), parse_array("B[J, K]"), parse_array("C[I, N, K]")
    assert set(role_choices(einsum, *arrays, "X", SIZES)) == {"J", "N", None}  # N is larger than I


def test_axes_keep_the_order_of_the_first_array_that_has_them() -> None:
    arrays = parse_array("B[J_YX, K]"), parse_array("A[I, J_XY]")
    assert axis_orders("IJ", arrays, ("X", "Y")) == {"I": ("X", "Y"), "J": ("Y", "X")}
